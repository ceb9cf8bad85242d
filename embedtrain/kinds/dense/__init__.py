"""model.kind=dense: a vector per text."""

from embedtrain.config.kinds import Kind


class Dense(Kind):
    """A vector per text."""

    name = "dense"
    summary = "a vector per text"
