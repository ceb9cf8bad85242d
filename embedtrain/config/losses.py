"""Options of `loss`: one dataclass per loss. The comment of a field is its documentation."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.code import code_option
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.loss_choices import (
    Distance,
    Hardness,
    Implementation,
    KDLossType,
    LayerWeighting,
    LossDirection,
    MarginKind,
    MatryoshkaWeighting,
    PartitionMode,
    PrecisionSides,
    Reduction,
    Similarity,
    TripletMining,
)
from embedtrain.config.options import Effect, option

# Of similarities of vectors, which differ by at most 2.
VECTOR_TEMPERATURE = 0.05
# Default bounds of a trained temperature: of similarities of vectors, and of sums of them over the tokens of a query.
VECTOR_TEMPERATURE_BOUNDS = (0.01, 1.0)
TOKEN_TEMPERATURE_BOUNDS = (0.01, 32.0)


@dataclass(kw_only=True)
class LossConfig:
    """Options of every loss."""

    name: str = "infonce"  # set by `loss=NAME`
    weight: float = option(1.0, above=0, hint="leave the loss out instead")  # factor of this loss within loss=combined
    matryoshka_dims: list[int] | None = None  # also train on the first n dimensions, for each n (Kusupati et al., 2022)
    matryoshka_weights: list[float] | None = None  # of each of `matryoshka_dims`; default: by `matryoshka_weighting`
    matryoshka_weighting: MatryoshkaWeighting = MatryoshkaWeighting.uniform
    # Train on so many of `matryoshka_dims` in each batch: the largest, and others that `seed` draws; default: on all.
    matryoshka_per_step: int | None = None
    # Also train on quantised vectors, as [float,int8,binary], at each of `matryoshka_dims`; default: float alone.
    precisions: list[VectorPrecision] | None = None
    precision_weights: list[float] | None = None  # of each of `precisions`; default: 1 each
    # Train on so many of `precisions` in each batch: the most precise, and others that `seed` draws; default: on all.
    precisions_per_step: int | None = None
    precision_warmup: float = 0.0  # share of the run over which the weights of quantised losses rise linearly from 0
    precision_sides: PrecisionSides = PrecisionSides.both
    # Also train the vectors after these numbers of layers, such as [3,6] of 12: those of a model of only these layers.
    matryoshka_layers: list[int] | None = None
    layers_per_step: int | None = None  # so many of `matryoshka_layers` in each batch, drawn by `seed`; default: all
    layer_weights: list[float] | None = None  # of each of `matryoshka_layers`; default: by `layer_weighting`
    layer_weighting: LayerWeighting = LayerWeighting.uniform
    layer_kl: float = 0.0  # weight of the KL divergence of their similarities from those of the last layer


@dataclass(kw_only=True)
class InfoNCEConfig(LossConfig):
    """Softmax over the documents of the whole global batch (van den Oord et al., 2018)."""

    name: str = "infonce"
    # Scores are divided by it; default: 0.05 for similarities of vectors and MeanMaxSim, 1 for MaxSim.
    temperature: float | None = option(None, above=0, hint="0.01 to 0.1 is usual")
    learn_temperature: bool = False  # start from `temperature` and train it (Radford et al., 2021)
    # Of a trained temperature; default: [0.01,1] for similarities of vectors, [0.01,32] for MaxSim and MeanMaxSim.
    temperature_bounds: list[float] | None = None
    # Of vectors; default: the model's. Late interaction: model.late_interaction.similarity.
    similarity: Similarity | None = None
    directions: list[LossDirection] = field(default_factory=lambda: [LossDirection.query_document])
    partition_mode: PartitionMode = PartitionMode.joint
    in_batch_negatives: bool = True  # false: a query's own hard negatives only
    margin: float = option(0.0, at_least=0)  # subtracted from the positive's similarity (Yang et al., 2019)
    mask_duplicates: bool = True  # exclude documents that equal a positive of the query or of an equal query
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
    mask_duplicates: bool = True  # exclude documents that equal a positive of the query or of an equal query
    implementation: Implementation = Implementation.auto


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
    mask_duplicates: bool = True  # exclude documents that equal a positive of the query or of an equal query
    implementation: Implementation = Implementation.auto


@dataclass(kw_only=True)
class SigLIPConfig(LossConfig):
    """A sigmoid for every pair of a query and a document of the global batch (Zhai et al., 2023)."""

    name: str = "siglip"
    temperature: float = option(0.1, above=0, hint="0.01 to 0.1 is usual")  # similarities are divided by it
    # added to the scaled similarities: most pairs do not match
    bias: float = option(-10.0, finite=True, hint="-10 is usual")
    learn_temperature: bool = True  # start from `temperature` and train it
    learn_bias: bool = True  # start from `bias` and train it
    temperature_bounds: list[float] = field(default_factory=lambda: [0.01, 1.0])  # of a trained temperature
    similarity: Similarity | None = None  # default: the model's
    mask_duplicates: bool = True  # exclude documents that equal a positive of the query or of an equal query
    implementation: Implementation = Implementation.auto


@dataclass(kw_only=True)
class CoSENTConfig(LossConfig):
    """Ranks scored pairs by their scores, over the whole global batch (Su, 2022)."""

    name: str = "cosent"
    temperature: float = option(0.05, above=0, hint="0.01 to 0.1 is usual")  # similarities are divided by it


@dataclass(kw_only=True)
class AnglEConfig(LossConfig):
    """CoSENT with the angle between complex vectors (Li and Li, 2024)."""

    name: str = "angle"
    temperature: float = option(0.05, above=0, hint="0.01 to 0.1 is usual")  # similarities are divided by it


@dataclass(kw_only=True)
class CosineMSEConfig(LossConfig):
    """Squared difference of cosine similarity and score from -1 to 1 (Reimers and Gurevych, 2019)."""

    name: str = "cosine_mse"


@dataclass(kw_only=True)
class ContrastiveConfig(LossConfig):
    """Pairs labelled 1 pulled together, pairs labelled 0 pushed `margin` apart (Hadsell et al., 2006)."""

    name: str = "contrastive"
    margin: float = option(0.5, above=0)  # distance that pairs labelled 0 are pushed to
    distance: Distance | None = None  # default: the model's


@dataclass(kw_only=True)
class OnlineContrastiveConfig(LossConfig):
    """The contrastive loss of only the hard pairs of the global batch, as in sentence-transformers."""

    name: str = "online_contrastive"
    margin: float = option(0.5, above=0)  # distance that pairs labelled 0 are pushed to
    distance: Distance | None = None  # default: the model's
    reduction: Reduction = Reduction.sum  # sum, as in sentence-transformers; mean: over all pairs of the batch


@dataclass(kw_only=True)
class TripletConfig(LossConfig):
    """Pushes negatives farther than the positive by a margin (Schroff et al., 2015)."""

    name: str = "triplet"
    margin: float = option(0.3, above=0)  # minimal difference of the distances of negative and positive
    distance: Distance | None = None  # default: the model's


@dataclass(kw_only=True)
class BatchTripletConfig(LossConfig):
    """Triplets mined in the global batch by the rows' class labels (Hermans et al., 2017)."""

    name: str = "batch_triplet"
    mining: TripletMining = TripletMining.hard
    margin: float = option(0.3, above=0)  # minimal difference of the distances of negative and positive
    distance: Distance | None = None  # default: the model's


@dataclass(kw_only=True)
class DistillScoresConfig(LossConfig):
    """KL divergence of a row's softmax from the teacher's (Hinton et al., 2015; Lin et al., 2021)."""

    name: str = "distill_scores"
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
    similarity: Similarity = Similarity.dot


@dataclass(kw_only=True)
class OrthogonalConfig(LossConfig):
    """Global orthogonal regularisation: spreads unrelated vectors on the sphere (Zhang et al., 2017)."""

    name: str = "orthogonal"
    mean_weight: float = option(1.0, at_least=0)  # of the squared mean of their similarities
    second_moment_weight: float = option(1.0, at_least=0)  # of the mean of squared similarities beyond 1 / dimensions
    aggregation: Reduction = Reduction.mean  # over queries, positives, first negatives, ...


@dataclass(kw_only=True)
class CombinedConfig(LossConfig):
    """A weighted sum of losses."""

    name: str = "combined"
    losses: list[Any] = field(default_factory=list)  # mappings with `name`, `weight` and that loss's options


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
