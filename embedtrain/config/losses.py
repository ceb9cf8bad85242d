"""Options of `loss`, their choices, and the registry: one dataclass per loss. The comment of a field documents it."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

from embedtrain.config.code import code_option
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.options import Effect, option
from embedtrain.config.row_requirements import (
    BINARY_LABEL,
    COSINE,
    PAIR_WEIGHT,
    SENTENCE_TRANSFORMERS_LOSSES,
    RowRequirements,
    ScoreRange,
    ScoreRequirement,
)

# Of similarities of vectors, which differ by at most 2.
VECTOR_TEMPERATURE = 0.05
# Default bounds of a trained temperature: of similarities of vectors, and of sums of them over the tokens of a query.
VECTOR_TEMPERATURE_BOUNDS = (0.01, 1.0)
SIGLIP_TEMPERATURE, SIGLIP_BIAS = 0.1, -10.0
TOKEN_TEMPERATURE_BOUNDS = (0.01, 32.0)


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


class MeanOver(str, Enum):
    """What a loss of pairs of documents is a mean over."""

    queries = "queries"  # the mean over each query's pairs, then over queries: long lists weigh as much as short ones
    pairs = "pairs"  # over all pairs of the global batch


class LambdaWeighting(str, Enum):
    """The weight of a pair of documents in LambdaLoss (Wang et al., 2018)."""

    lambdarank = "lambdarank"
    ndcg_loss2 = "ndcg_loss2"
    ndcg_loss2pp = "ndcg_loss2pp"


class EmbeddingDistance(str, Enum):
    """Distance of a vector from the teacher's."""

    cosine = "cosine"
    mse = "mse"
    l2 = "l2"


class TeacherMap(str, Enum):
    """How a teacher's vectors get the dimensions of the model, without training."""

    truncate = "truncate"  # its first dimensions: Matryoshka teachers
    orthogonal = "orthogonal"  # a random orthogonal projection, which `seed` draws
    pca = "pca"  # the principal components, without subtracting the mean, of a directory of `embedtrain vectors`


class Divergence(str, Enum):
    """How a row of the student's similarities differs from the teacher's; p is the teacher's softmax, q the student's.

    `mse` compares the similarities themselves.
    """

    kl = "kl"  # KL(p || q)
    reverse_kl = "reverse_kl"  # KL(q || p)
    js = "js"  # Jensen-Shannon: the mean of both from (p + q) / 2
    mse = "mse"  # the mean over the candidates of the squared difference


class CandidateSet(str, Enum):
    """The documents that a query is compared with."""

    batch = "batch"  # those of the whole global batch
    row = "row"  # the row's own


class OnMissing(Enum):  # no str, which has an `encode` of its own
    """What happens to texts of the training data of which a directory of vectors has none."""

    stop = "stop"  # the run stops before its first step
    encode = "encode"  # the model that wrote the directory encodes them at the start, on all ranks


# What several losses require of every row.
_TEACHER_SCORES = RowRequirements(negatives=True, scores=ScoreRequirement.teacher)
_RANKED = RowRequirements(scores=ScoreRequirement.pairs, other_positives=True, ranked=True)


@dataclass(kw_only=True)
class MatryoshkaConfig:
    """What a loss is trained on besides whole vectors: first dimensions, precisions, and vectors of inner layers.

    The section is part of a loss and does not stand beside it: a part of loss=combined, and the loss of a source, may
    have dimensions and layers of their own.
    """

    dims: list[int] | None = None  # also train on the first n dimensions, for each n (Kusupati et al., 2022)
    dim_weights: list[float] | None = None  # of each of `dims`; default: by `dim_weighting`
    dim_weighting: MatryoshkaWeighting = MatryoshkaWeighting.uniform
    # Train on so many of `dims` in each batch: the largest, and others that `seed` draws; default: on all.
    dims_per_step: int | None = None
    # Also train on quantised vectors, as [float,int8,binary], at each of `dims`; default: float alone.
    precisions: list[VectorPrecision] | None = None
    precision_weights: list[float] | None = None  # of each of `precisions`; default: 1 each
    # Train on so many of `precisions` in each batch: the most precise, and others that `seed` draws; default: on all.
    precisions_per_step: int | None = None
    # share of the run over which the weights of quantised losses rise linearly from 0
    precision_warmup: float = option(0.0, within=(0, 1), hint="it is a share of the run")
    precision_sides: PrecisionSides = PrecisionSides.both
    # Also train the vectors after these numbers of layers, such as [3,6] of 12: those of a model of only these layers.
    layers: list[int] | None = None
    layers_per_step: int | None = None  # so many of `layers` in each batch, drawn by `seed`; default: all
    layer_weights: list[float] | None = None  # of each of `layers`; default: by `layer_weighting`
    layer_weighting: LayerWeighting = LayerWeighting.uniform
    # weight of the KL divergence of their similarities from those of the last layer
    layer_kl: float = option(0.0, at_least=0)


@dataclass(kw_only=True)
class LossConfig:
    """Options of every loss."""

    name: str = "infonce"  # set by `loss=NAME`
    weight: float = option(1.0, above=0, hint="leave the loss out instead")  # factor of this loss within loss=combined
    matryoshka: MatryoshkaConfig = field(default_factory=MatryoshkaConfig)
    rows: ClassVar[RowRequirements] = RowRequirements()  # of every row, whatever the options are

    @property
    def row_requirements(self) -> RowRequirements:
        """What the loss, which `check_loss` has accepted, requires of every row."""
        return replace(self.rows, loss=self.name)


@dataclass(kw_only=True)
class InfoNCEConfig(LossConfig):
    """Softmax over the documents of the whole global batch (van den Oord et al., 2018)."""

    name: str = "infonce"
    # Scores are divided by it; default: 0.05 for similarities of vectors and MeanMaxSim, 1 for MaxSim and words, and
    # that of the model's files for texts and pictures.
    temperature: float | None = option(None, above=0, hint="0.01 to 0.1 is usual")
    learn_temperature: bool = False  # start from `temperature` and train it (Radford et al., 2021)
    # Of a trained temperature; default: [0.01,1] for similarities of vectors, [0.01,32] for MaxSim and MeanMaxSim,
    # [0.001,1] for texts and pictures.
    temperature_bounds: list[float] | None = None
    # Of vectors; default: the model's. Late interaction: model.similarity.
    similarity: Similarity | None = None
    directions: list[LossDirection] = field(default_factory=lambda: [LossDirection.query_document])
    partition_mode: PartitionMode = PartitionMode.joint
    in_batch_negatives: bool = True  # false: a query's own hard negatives only
    margin: float = option(0.0, at_least=0)  # subtracted from the positive's similarity (Yang et al., 2019)
    mask_duplicates: bool = True  # exclude documents that any row of the data has as a positive of the query
    # exclude negatives more similar than the positive by this margin (may be negative)
    false_negative_margin: float | None = option(None, finite=True)
    # A model directory, Hub id (ID@REVISION) or directory of `embedtrain vectors`; excludes negatives that it finds
    # closer than the positive (GISTEmbed).
    guide: str | None = option(None, is_input=True)
    # exclude negatives from this margin below the positive's similarity on
    guide_margin: float = option(0.0, finite=True)
    guide_margin_kind: MarginKind = MarginKind.absolute
    hardness: Hardness = Hardness.none  # negatives weighted by exp(hardness_strength * similarity) (Lan et al., 2025)
    hardness_strength: float = option(0.0, at_least=0)  # 0: none
    # Rows are weighted by (1 - p)^focal, p the positive's probability, without gradient (Lin et al., 2017); KaLM: 0.5.
    focal: float = option(0.0, at_least=0)
    # Synthetic negatives of each row (KaLM-Embedding-V2): so many mixtures of two of its own hard negatives.
    mixed_pairs: int = option(0, at_least=0)
    # Also the mixture of all hard negatives of the row, weighted by the softmax of their scores.
    mixed_list: bool = False
    implementation: Implementation = option(Implementation.auto, resume=Effect.changes_rounding)

    @property
    def mixes_negatives(self) -> bool:
        """Whether rows have synthetic negatives."""
        return self.mixed_pairs > 0 or self.mixed_list

    @property
    def row_requirements(self) -> RowRequirements:
        """Mixtures need hard negatives."""
        if self.mixes_negatives:
            return RowRequirements(negatives=True, loss="infonce with mixed negatives")
        return super().row_requirements


@dataclass(kw_only=True)
class XTRConfig(LossConfig):
    """Softmax over all documents, scored by the tokens that each token of the query retrieves (Lee et al., 2023)."""

    name: str = "xtr"
    # tokens that each token of a query retrieves, among those of all documents of the global batch
    top_k: int = option(256, at_least=1)
    # scores, which are means of similarities, are divided by it
    temperature: float = option(0.05, above=0, hint="0.01 to 0.1 is usual")
    learn_temperature: bool = False  # start from `temperature` and train it
    temperature_bounds: list[float] = field(default_factory=lambda: [0.01, 1.0])  # of a trained temperature
    mask_duplicates: bool = True  # exclude documents that any row of the data has as a positive of the query
    implementation: Implementation = option(Implementation.auto, resume=Effect.changes_rounding)


@dataclass(kw_only=True)
class M3LossConfig(LossConfig):
    """The dense, lexical and multi-vector scores of BGE-M3 and their sum, each in a softmax over all documents.

    With self-distillation, the softmax of the sum is the target of the three others (Chen et al., 2024).
    """

    name: str = "m3"
    temperature: float = option(0.02, above=0, hint="0.01 to 0.1 is usual")  # scores are divided by it
    # Weights of the cross entropies of the dense, lexical and multi-vector scores and of their sum, before a mean of 4.
    loss_weights: list[float] = field(default_factory=lambda: [1.0, 0.1, 1.0, 1.0])
    self_distillation: bool = True  # the softmax of the sum of scores is a target of the three scores as well
    # the batch, counted from 0, that self-distillation begins with
    self_distillation_start_step: int = option(0, at_least=0)
    in_batch_negatives: bool = True  # false: a query's own hard negatives only
    kd_loss_type: KDLossType = KDLossType.none  # of a teacher's scores, which all documents of the rows then need
    teacher_temperature: float = option(1.0, above=0, hint="1 is usual")  # the teacher's scores are divided by it
    mask_duplicates: bool = True  # exclude documents that any row of the data has as a positive of the query
    implementation: Implementation = option(Implementation.auto, resume=Effect.changes_rounding)

    @property
    def row_requirements(self) -> RowRequirements:
        """A teacher's scores for distillation."""
        return replace(self.rows if self.kd_loss_type is KDLossType.none else _TEACHER_SCORES, loss=self.name)


@dataclass(kw_only=True)
class SigLIPConfig(LossConfig):
    """A sigmoid for every pair of a query and a document of the global batch (Zhai et al., 2023)."""

    name: str = "siglip"
    # Similarities are divided by it; default: 0.1, of a model of texts and pictures that of its files.
    temperature: float | None = option(None, above=0, hint="0.01 to 0.1 is usual")
    # Added to the scaled similarities, because most pairs do not match; default: -10, or that of such files.
    bias: float | None = option(None, finite=True, hint="-10 is usual")
    learn_temperature: bool = True  # start from `temperature` and train it
    learn_bias: bool = True  # start from `bias` and train it
    # Of a trained temperature; default: [0.01,1], of a model of texts and pictures [0.001,1].
    temperature_bounds: list[float] | None = None
    similarity: Similarity | None = None  # default: the model's
    mask_duplicates: bool = True  # exclude documents that any row of the data has as a positive of the query
    implementation: Implementation = option(Implementation.auto, resume=Effect.changes_rounding)


@dataclass(kw_only=True)
class CoSENTConfig(LossConfig):
    """Ranks scored pairs by their scores, over the whole global batch (Su, 2022)."""

    name: str = "cosent"
    rows: ClassVar[RowRequirements] = RowRequirements(scores=ScoreRequirement.pairs)
    temperature: float = option(0.05, above=0, hint="0.01 to 0.1 is usual")  # similarities are divided by it


@dataclass(kw_only=True)
class AnglEConfig(LossConfig):
    """CoSENT with the angle between complex vectors (Li and Li, 2024)."""

    name: str = "angle"
    rows: ClassVar[RowRequirements] = RowRequirements(scores=ScoreRequirement.pairs)
    temperature: float = option(0.05, above=0, hint="0.01 to 0.1 is usual")  # similarities are divided by it


@dataclass(kw_only=True)
class CosineMSEConfig(LossConfig):
    """Squared difference of cosine similarity and score from -1 to 1 (Reimers and Gurevych, 2019)."""

    name: str = "cosine_mse"
    rows: ClassVar[RowRequirements] = RowRequirements(scores=ScoreRequirement.pairs, range=COSINE)


@dataclass(kw_only=True)
class ContrastiveConfig(LossConfig):
    """Pairs labelled 1 pulled together, pairs labelled 0 pushed `margin` apart (Hadsell et al., 2006)."""

    name: str = "contrastive"
    rows: ClassVar[RowRequirements] = RowRequirements(scores=ScoreRequirement.pairs, range=PAIR_WEIGHT)
    margin: float = option(0.5, above=0)  # distance that pairs labelled 0 are pushed to
    distance: Distance | None = None  # default: the model's


@dataclass(kw_only=True)
class OnlineContrastiveConfig(LossConfig):
    """The contrastive loss of only the hard pairs of the global batch, as in sentence-transformers."""

    name: str = "online_contrastive"
    rows: ClassVar[RowRequirements] = RowRequirements(scores=ScoreRequirement.pairs, range=BINARY_LABEL)
    margin: float = option(0.5, above=0)  # distance that pairs labelled 0 are pushed to
    distance: Distance | None = None  # default: the model's
    reduction: Reduction = Reduction.sum  # sum, as in sentence-transformers; mean: over all pairs of the batch


@dataclass(kw_only=True)
class TripletConfig(LossConfig):
    """Pushes negatives farther than the positive by a margin (Schroff et al., 2015)."""

    name: str = "triplet"
    rows: ClassVar[RowRequirements] = RowRequirements(negatives=True)
    margin: float = option(0.3, above=0)  # minimal difference of the distances of negative and positive
    distance: Distance | None = None  # default: the model's


@dataclass(kw_only=True)
class BatchTripletConfig(LossConfig):
    """Triplets mined in the global batch by the rows' class labels (Hermans et al., 2017)."""

    name: str = "batch_triplet"
    rows: ClassVar[RowRequirements] = RowRequirements(documents=False, label=True)
    mining: TripletMining = TripletMining.hard
    margin: float = option(0.3, above=0)  # minimal difference of the distances of negative and positive
    distance: Distance | None = None  # default: the model's


@dataclass(kw_only=True)
class DistillScoresConfig(LossConfig):
    """KL divergence of a row's softmax from the teacher's (Hinton et al., 2015; Lin et al., 2021)."""

    name: str = "distill_scores"
    rows: ClassVar[RowRequirements] = _TEACHER_SCORES
    # The student's scores are divided by it; default: 0.05 for similarities of vectors and MeanMaxSim, 1 for MaxSim,
    # for a cross-encoder's logits and with `normalize_scores`.
    temperature: float | None = option(None, above=0, hint="0.01 to 0.1 is usual")
    teacher_temperature: float = option(1.0, above=0, hint="1 is usual")  # the teacher's scores are divided by it
    similarity: Similarity | None = None  # default: the model's
    times_squared_temperature: bool = False  # as in Hinton et al. and sentence-transformers, for equal temperatures
    normalize_scores: bool = False  # map the student's scores of each query to 0 to 1, as PyLate does


@dataclass(kw_only=True)
class MarginMSEConfig(LossConfig):
    """Squared difference of the student's and the teacher's margins (Hofstätter et al., 2020).

    Similarities of normalised vectors differ by at most 2: `score_scale` of a source scales the teacher's margins.
    """

    name: str = "margin_mse"
    rows: ClassVar[RowRequirements] = _TEACHER_SCORES
    similarity: Similarity = Similarity.dot


@dataclass(kw_only=True)
class OrthogonalConfig(LossConfig):
    """Global orthogonal regularisation: spreads unrelated vectors on the sphere (Zhang et al., 2017)."""

    name: str = "orthogonal"
    rows: ClassVar[RowRequirements] = RowRequirements(documents=False)
    mean_weight: float = option(1.0, at_least=0)  # of the squared mean of their similarities
    second_moment_weight: float = option(1.0, at_least=0)  # of the mean of squared similarities beyond 1 / dimensions
    aggregation: Reduction = Reduction.mean  # over queries, positives, first negatives, ...


@dataclass(kw_only=True)
class CombinedConfig(LossConfig):
    """A weighted sum of losses."""

    name: str = "combined"
    losses: list[Any] = field(default_factory=list)  # mappings with `name`, `weight` and that loss's options

    @property
    def row_requirements(self) -> RowRequirements:
        """Those of its parts together."""
        combined = RowRequirements(documents=False, loss="")
        for part in self.losses:
            combined |= part.row_requirements
        return combined


@dataclass(kw_only=True)
class SentenceTransformersConfig(LossConfig):
    """A loss class of sentence-transformers, computed over the whole global batch on every rank."""

    name: str = "sentence_transformers"
    class_name: str = ""  # such as MultipleNegativesRankingLoss
    arguments: Any = None  # a mapping of its constructor's arguments except `model`
    # a model directory or Hub id (ID@REVISION), for the classes with a guide
    guide: str | None = option(None, is_input=True)

    def __post_init__(self) -> None:
        """A default of {} would reject new keys on the command line."""
        if self.arguments is None:
            self.arguments = {}

    @property
    def row_requirements(self) -> RowRequirements:
        """Those of the class, or of the one that MatryoshkaLoss wraps."""
        name = self.arguments["loss"]["class_name"] if self.class_name == "MatryoshkaLoss" else self.class_name
        requirements = replace(SENTENCE_TRANSFORMERS_LOSSES[name], loss=name)
        if name == "SoftmaxLoss" and isinstance(self.arguments.get("num_labels"), int):
            return replace(requirements, range=ScoreRange(low=0, high=self.arguments["num_labels"] - 1, integers=True))
        return requirements


@dataclass(kw_only=True)
class CustomConfig(LossConfig):
    """A class of your own, named on the command line or in Python, never in a file: [details](../custom-losses.md)."""

    name: str = "custom"
    path: str = code_option("")  # module:Class, a subclass of embedtrain.losses.types.Loss
    kwargs: Any = None  # a mapping of its constructor's arguments
    negatives: bool = False  # requires at least one hard negative in every row
    scores: bool = False  # requires a score of every document
    label: bool = False  # requires a class, a whole number, in every row, which may be a single text

    def __post_init__(self) -> None:
        """A default of {} would reject new keys on the command line."""
        if self.kwargs is None:
            self.kwargs = {}

    @property
    def row_requirements(self) -> RowRequirements:
        """What the options say."""
        return RowRequirements(
            documents=not self.label,
            negatives=self.negatives,
            scores=ScoreRequirement.teacher if self.scores else ScoreRequirement.none,
            label=self.label,
            loss=self.path,
        )


@dataclass(kw_only=True)
class ListConfig(LossConfig):
    """Options of the losses of each query's own documents."""

    # Scores are divided by it: 1 for the logits of a cross-encoder, 0.02 to 0.1 for cosines.
    temperature: float = option(1.0, above=0, hint="1 is usual")
    # Of a dense model, by default its own; a cross-encoder's scores are taken as they are.
    similarity: Similarity | None = None


@dataclass(kw_only=True)
class BCEConfig(ListConfig):
    """Binary cross entropy of single pairs of query and document, labelled from 0 to 1."""

    name: str = "bce"
    rows: ClassVar[RowRequirements] = RowRequirements(
        scores=ScoreRequirement.pairs, range=PAIR_WEIGHT, other_positives=True
    )
    # factor of the positives' part of the loss
    pos_weight: float = option(1.0, above=0, hint="1 weighs positives and negatives alike")


@dataclass(kw_only=True)
class SoftmaxConfig(ListConfig):
    """Softmax over a query's own documents, without those of other queries (Gao et al., 2021)."""

    name: str = "softmax"
    rows: ClassVar[RowRequirements] = RowRequirements(negatives=True)
    # A document with a higher label is a positive, and a row must have one; null: the first document of a row is.
    positive_above: float | None = option(None, finite=True)

    @property
    def row_requirements(self) -> RowRequirements:
        """With `positive_above` labels of all documents, of which positives are those above it."""
        if self.positive_above is None:
            return super().row_requirements
        return replace(
            super().row_requirements,
            scores=ScoreRequirement.pairs,
            other_positives=True,
            positive_above=self.positive_above,
        )


@dataclass(kw_only=True)
class ListNetConfig(ListConfig):
    """Cross entropy of the softmax of labels and that of scores (Cao et al., 2007)."""

    name: str = "listnet"
    rows: ClassVar[RowRequirements] = _RANKED


@dataclass(kw_only=True)
class RankNetConfig(ListConfig):
    """Logistic loss of each query's pairs of documents with different labels (Burges et al., 2005)."""

    name: str = "ranknet"
    rows: ClassVar[RowRequirements] = _RANKED
    mean_over: MeanOver = MeanOver.queries


@dataclass(kw_only=True)
class LambdaLossConfig(ListConfig):
    """RankNet's pairs weighted by their effect on nDCG (Wang et al., 2018)."""

    name: str = "lambdaloss"
    # The gain of nDCG is 2^grade - 1.
    rows: ClassVar[RowRequirements] = replace(_RANKED, range=ScoreRange(low=0, high=32))
    weighting: LambdaWeighting = LambdaWeighting.ndcg_loss2pp
    mu: float = option(10.0, at_least=0)  # of ndcg_loss2pp: factor of ndcg_loss2 beside lambdarank
    # only pairs with a document among the first k by score, for nDCG@k; null: all pairs
    top_k: int | None = option(None, at_least=1, hint="null for all pairs")
    mean_over: MeanOver = MeanOver.queries


@dataclass(kw_only=True)
class PListMLEConfig(ListConfig):
    """Likelihood of the documents' order by label (Lan et al., 2014)."""

    name: str = "plistmle"
    rows: ClassVar[RowRequirements] = _RANKED
    position_weights: bool = True  # weigh the first positions higher; false: ListMLE (Xia et al., 2008)


@dataclass(kw_only=True)
class ADRMSEConfig(ListConfig):
    """Squared difference of a document's rank by label and its approximate rank by score (Schlatt et al., 2024)."""

    name: str = "adr_mse"
    rows: ClassVar[RowRequirements] = _RANKED


@dataclass(kw_only=True)
class MSEConfig(LossConfig):
    """Squared difference of a pair's score and the teacher's."""

    name: str = "mse"
    rows: ClassVar[RowRequirements] = RowRequirements(scores=ScoreRequirement.teacher, other_positives=True)
    similarity: Similarity = Similarity.dot  # of a dense model; a cross-encoder's scores are taken as they are


@dataclass(kw_only=True)
class TeacherConfig(LossConfig):
    """Options of the losses with a teacher's vectors."""

    rows: ClassVar[RowRequirements] = RowRequirements(documents=False)
    # A model directory, Hub id (ID@REVISION) or directory of `embedtrain vectors`; default: the vectors in the rows.
    teacher: str | None = option(None, is_input=True)
    # Several of them in place of `teacher`: similarities are the mean of those by each, such as cosines.
    teachers: list[str] | None = option(None, is_input=True)
    teacher_weights: list[float] | None = None  # of each of `teachers` in the mean; default: 1 each
    on_missing: OnMissing = OnMissing.stop  # of teachers that are directories of `embedtrain vectors`

    @property
    def teacher_paths(self) -> list[str]:
        """Their paths; none if the rows have the vectors."""
        return self.teachers or ([] if self.teacher is None else [self.teacher])

    @property
    def row_requirements(self) -> RowRequirements:
        """Vectors in the rows, without a teacher's path."""
        return replace(super().row_requirements, vectors=not self.teacher_paths)


@dataclass(kw_only=True)
class DistillEmbeddingsConfig(TeacherConfig):
    """Distance of vectors from a teacher's (Kim et al., 2023)."""

    name: str = "distill_embeddings"
    distance: EmbeddingDistance = EmbeddingDistance.cosine
    project: bool = False  # train a projection onto the teacher's dimensions
    teacher_map: TeacherMap | None = None  # in place of `project`: map the teacher's vectors to the model's dimensions


@dataclass(kw_only=True)
class DistillSimilaritiesConfig(TeacherConfig):
    """Divergence of each query's softmax over the documents of the global batch from a teacher's."""

    name: str = "distill_similarities"
    rows: ClassVar[RowRequirements] = RowRequirements()
    # the student's similarities are divided by it; default: 0.05
    temperature: float | None = option(None, above=0, hint="0.01 to 0.1 is usual")
    # the teacher's similarities are divided by it; default: as `temperature`
    teacher_temperature: float | None = option(None, above=0, hint="1 is usual")
    divergence: Divergence = Divergence.kl
    candidates: CandidateSet = CandidateSet.batch
    # The mean of one softmax each; a row's own pair is a candidate, a query or positive is none of itself.
    directions: list[LossDirection] = field(default_factory=lambda: [LossDirection.query_document])
    # Leave copies of the row's positive, and positives that other rows have of its query, out of both softmaxes.
    mask_duplicates: bool = True
    similarity: Similarity | None = None  # of the student, by default the model's; the teacher's is its own
    implementation: Implementation = option(Implementation.auto, resume=Effect.changes_rounding)

    @property
    def temperatures(self) -> tuple[float, float]:
        """The student's and the teacher's; 1 for `mse`, which compares similarities."""
        if self.divergence is Divergence.mse:
            return 1.0, 1.0
        student = VECTOR_TEMPERATURE if self.temperature is None else self.temperature
        return student, student if self.teacher_temperature is None else self.teacher_temperature


@dataclass(kw_only=True)
class SimilarityMSEConfig(TeacherConfig):
    """Mean squared difference of all cosines between the texts of the global batch from a teacher's (Jasper, 2024)."""

    name: str = "similarity_mse"


LOSSES: dict[str, type[LossConfig]] = {
    kind.name: kind
    for kind in (
        InfoNCEConfig,
        XTRConfig,
        M3LossConfig,
        SigLIPConfig,
        CoSENTConfig,
        AnglEConfig,
        CosineMSEConfig,
        ContrastiveConfig,
        OnlineContrastiveConfig,
        TripletConfig,
        BatchTripletConfig,
        DistillScoresConfig,
        MarginMSEConfig,
        BCEConfig,
        SoftmaxConfig,
        ListNetConfig,
        RankNetConfig,
        LambdaLossConfig,
        PListMLEConfig,
        ADRMSEConfig,
        MSEConfig,
        DistillEmbeddingsConfig,
        DistillSimilaritiesConfig,
        SimilarityMSEConfig,
        OrthogonalConfig,
        CombinedConfig,
        SentenceTransformersConfig,
        CustomConfig,
    )
}

# The losses that are functions of the scores of a query's own documents, and fit every kind of model.
SCORE_LOSSES = (
    "bce",
    "softmax",
    "listnet",
    "ranknet",
    "lambdaloss",
    "plistmle",
    "adr_mse",
    "mse",
    "distill_scores",
    "margin_mse",
)
