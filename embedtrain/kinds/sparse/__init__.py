"""model.kind=sparse: a weight per word of the vocabulary (SPLADE)."""

from embedtrain.config.kinds import Kind


class Sparse(Kind):
    """A weight per word of the vocabulary (SPLADE)."""

    name = "sparse"
    summary = "a weight per word of the vocabulary (SPLADE)"
