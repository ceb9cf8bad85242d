"""model.kind=late_interaction: a vector per token of a text (ColBERT)."""

from embedtrain.config.kinds import Kind


class LateInteraction(Kind):
    """A vector per token of a text (ColBERT)."""

    name = "late_interaction"
    summary = "a vector per token of a text (ColBERT)"
