"""model.kind=cross_encoder: a score per pair of query and document (a reranker)."""

from embedtrain.config.kinds import Kind


class CrossEncoder(Kind):
    """A score per pair of query and document (a reranker)."""

    name = "cross_encoder"
    summary = "a score per pair of query and document (a reranker)"
