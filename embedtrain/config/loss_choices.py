"""What the options of losses choose between."""

from enum import Enum


class Similarity(str, Enum):
    """Similarity of two vectors; cosine and dot are equal for models with `model.normalize`."""

    cosine = "cosine"
    dot = "dot"


class VectorSimilarity(str, Enum):
    """How a model compares the vectors of two texts, as sentence-transformers names it.

    `euclidean` and `manhattan` are distances, less than 0.
    """

    cosine = "cosine"
    dot = "dot"
    euclidean = "euclidean"
    manhattan = "manhattan"


class Distance(str, Enum):
    """Distance of two vectors; cosine is 1 - cosine similarity."""

    cosine = "cosine"
    euclidean = "euclidean"
    manhattan = "manhattan"


class LossDirection(str, Enum):
    """The anchor and the candidates of a row's softmax."""

    query_document = "query_document"  # the query against all documents
    document_query = "document_query"  # its positive against all queries
    query_query = "query_query"  # the query against all other queries
    document_document = "document_document"  # its positive against all other rows' documents


class PartitionMode(str, Enum):
    """With several directions: one softmax over all of them, or the mean of one softmax each."""

    joint = "joint"
    separate = "separate"


class Hardness(str, Enum):
    """Which negatives are weighted by their similarity."""

    none = "none"
    in_batch = "in_batch"  # other rows' documents
    hard = "hard"  # a row's own hard negatives
    all = "all"


class Implementation(str, Enum):
    """How a softmax over the batch is computed; the results are the same.

    `plain` holds the matrix of scores, `tiled` a few rows of it at a time, `ring` also only one rank's candidates at a
    time. `auto` chooses by size.
    """

    auto = "auto"
    plain = "plain"
    tiled = "tiled"
    ring = "ring"


class MarginKind(str, Enum):
    """A margin below a score s: s - margin, or s - |s| * margin."""

    absolute = "absolute"
    relative = "relative"


class TripletMining(str, Enum):
    """The triplets of a batch to train on (Hermans et al., 2017; semi-hard: Schroff et al., 2015)."""

    all = "all"  # every triplet that violates the margin
    hard = "hard"  # each anchor's farthest positive and nearest negative
    hard_soft_margin = "hard_soft_margin"  # the same, softplus instead of a margin
    semi_hard = "semi_hard"  # the nearest negative farther than each positive


class Reduction(str, Enum):
    """Reduction over the terms of a batch."""

    mean = "mean"
    sum = "sum"


class KDLossType(str, Enum):
    """How a teacher's scores of a query's own documents train each score of BGE-M3, as FlagEmbedding names it.

    With t the softmax of the teacher's scores: `kl_div` adds to the cross entropy of the positive that of t and the
    softmax over the query's own documents. `m3_kd_loss` replaces it by the sum over these documents k of t_k times the
    cross entropy of k in the softmax over all documents but the query's own ones before k.
    """

    none = "none"
    kl_div = "kl_div"
    m3_kd_loss = "m3_kd_loss"


class MatryoshkaWeighting(str, Enum):
    """Weights of `dims`."""

    uniform = "uniform"  # 1 each
    sqrt = "sqrt"  # sqrt(dimensions / largest) / k for the k-th largest, as F2LLM-v2


class PrecisionSides(str, Enum):
    """The vectors that quantised losses quantise; the others stay float, as in a search with float queries."""

    both = "both"
    documents = "documents"


class LayerWeighting(str, Enum):
    """Weights of `layers`, for the vectors after l layers."""

    uniform = "uniform"  # 1 each
    log = "log"  # 1 / (1 + ln l) (Li et al., 2024)
    linear = "linear"  # 1 / l
