"""What a loss asks of the rows it is trained on: known from the recipe, so bad rows are found when they are read."""

import math
from dataclasses import dataclass, replace
from enum import Enum

from embedtrain.config.losses import (
    AnglEConfig,
    BatchTripletConfig,
    CombinedConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CosineMSEConfig,
    DistillEmbeddingsConfig,
    DistillScoresConfig,
    LossConfig,
    MarginMSEConfig,
    OnlineContrastiveConfig,
    OrthogonalConfig,
    SentenceTransformersConfig,
    TripletConfig,
)


class ScoreRequirement(str, Enum):
    """What scores a loss wants of a row's documents."""

    none = "none"
    pairs = "pairs"  # how alike query and document are; where rows have none, a positive counts 1 and a negative 0
    teacher = "teacher"  # a teacher's, or a class; nothing stands in for them


@dataclass(frozen=True, kw_only=True)
class ScoreRange:
    """What scores a loss can use: from `low` to `high`, whole numbers alone or any."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False

    def __and__(self, other: "ScoreRange") -> "ScoreRange":
        """What both can use."""
        return ScoreRange(
            low=max(self.low, other.low), high=min(self.high, other.high), whole=self.whole or other.whole
        )

    def __contains__(self, score: float) -> bool:
        return self.low <= score <= self.high and (not self.whole or float(score).is_integer())

    def __str__(self) -> str:
        """In words."""
        return f"{'a whole number ' * self.whole}from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, kw_only=True)
class RowRequirements:
    """What a loss asks of every row.

    Attributes:
        documents: a positive at least; else a row may be one text alone.
        negatives: a hard negative at least.
        scores: a score for every document.
        range: what scores it can use.
        label: the row's class, a whole number.
        vectors: a teacher's vector for every text.
        same_num_documents: as many documents in every row.
        loss: the loss's name, for sentences to the user.
    """

    documents: bool = True
    negatives: bool = False
    scores: ScoreRequirement = ScoreRequirement.none
    range: ScoreRange = ScoreRange()
    label: bool = False
    vectors: bool = False
    same_num_documents: bool = False
    loss: str = "infonce"

    def __or__(self, other: "RowRequirements") -> "RowRequirements":
        """What two losses on the same rows ask together."""
        strictest = max(self.scores, other.scores, key=list(ScoreRequirement).index)
        return RowRequirements(
            documents=self.documents or other.documents,
            negatives=self.negatives or other.negatives,
            scores=strictest,
            range=self.range & other.range,
            label=self.label or other.label,
            vectors=self.vectors or other.vectors,
            same_num_documents=self.same_num_documents or other.same_num_documents,
            loss=" + ".join(dict.fromkeys(name for name in (self.loss, other.loss) if name)),
        )


# Compared with a cosine; the weight of pulling together, 1 minus it that of pushing apart; one or the other.
_COSINE, _SHARE, _EITHER = ScoreRange(low=-1, high=1), ScoreRange(low=0, high=1), ScoreRange(low=0, high=1, whole=True)
_COLUMNS = RowRequirements(same_num_documents=True)
_PAIRS = RowRequirements(same_num_documents=True, scores=ScoreRequirement.pairs)
_TEACHER = RowRequirements(same_num_documents=True, negatives=True, scores=ScoreRequirement.teacher)
_CLASSES = RowRequirements(documents=False, label=True, same_num_documents=True)
_VECTORS = RowRequirements(documents=False, vectors=True, same_num_documents=True)

# The classes of sentence-transformers 6.0 to 6.2 that compute from embeddings.
SENTENCE_TRANSFORMERS_LOSSES: dict[str, RowRequirements] = {
    "MultipleNegativesRankingLoss": _COLUMNS,
    "MultipleNegativesSymmetricRankingLoss": _COLUMNS,
    "CachedMultipleNegativesRankingLoss": _COLUMNS,
    "CachedMultipleNegativesSymmetricRankingLoss": _COLUMNS,
    "MegaBatchMarginLoss": _COLUMNS,
    "GISTEmbedLoss": _COLUMNS,
    "CachedGISTEmbedLoss": _COLUMNS,
    "GlobalOrthogonalRegularizationLoss": replace(_COLUMNS, documents=False),
    "CoSENTLoss": _PAIRS,
    "AnglELoss": _PAIRS,
    "CosineSimilarityLoss": replace(_PAIRS, range=_COSINE),
    "ContrastiveLoss": replace(_PAIRS, range=_SHARE),
    "OnlineContrastiveLoss": replace(_PAIRS, range=_EITHER),
    "SoftmaxLoss": RowRequirements(same_num_documents=True, scores=ScoreRequirement.teacher),
    "TripletLoss": replace(_COLUMNS, negatives=True),
    "BatchAllTripletLoss": _CLASSES,
    "BatchHardTripletLoss": _CLASSES,
    "BatchHardSoftMarginTripletLoss": _CLASSES,
    "BatchSemiHardTripletLoss": _CLASSES,
    "DistillKLDivLoss": _TEACHER,
    "MarginMSELoss": _TEACHER,
    "MSELoss": _VECTORS,
    "EmbedDistillLoss": _VECTORS,
}
# Those that need more than embeddings, and what.
UNSUPPORTED_LOSSES: dict[str, str] = {
    "AdaptiveLayerLoss": "the vectors of inner layers",
    "Matryoshka2dLoss": "the vectors of inner layers",
    "ContrastiveTensionLoss": "a second copy of the model that is trained too",
    "ContrastiveTensionLossInBatchNegatives": "a second copy of the model that is trained too",
    "DenoisingAutoEncoderLoss": "a decoder",
}


def row_requirements(loss: LossConfig) -> RowRequirements:
    """What `loss` asks of every row. `check_loss` must have passed it."""
    match loss:
        case CombinedConfig(losses=parts):
            together = RowRequirements(documents=False, loss="")
            for part in parts:
                together |= row_requirements(part)
            return together
        case SentenceTransformersConfig(class_name=name, arguments=arguments):
            if name == "MatryoshkaLoss":
                name = arguments["loss"]["class_name"]
            needs = replace(SENTENCE_TRANSFORMERS_LOSSES[name], loss=name)
            if name == "SoftmaxLoss" and isinstance(arguments.get("num_labels"), int):
                return replace(needs, range=ScoreRange(low=0, high=arguments["num_labels"] - 1, whole=True))
            return needs
        case CoSENTConfig() | AnglEConfig():
            return RowRequirements(scores=ScoreRequirement.pairs, loss=loss.name)
        case CosineMSEConfig():
            return RowRequirements(scores=ScoreRequirement.pairs, range=_COSINE, loss=loss.name)
        case ContrastiveConfig():
            return RowRequirements(scores=ScoreRequirement.pairs, range=_SHARE, loss=loss.name)
        case OnlineContrastiveConfig():
            return RowRequirements(scores=ScoreRequirement.pairs, range=_EITHER, loss=loss.name)
        case TripletConfig():
            return RowRequirements(negatives=True, loss=loss.name)
        case BatchTripletConfig():
            return RowRequirements(documents=False, label=True, loss=loss.name)
        case DistillScoresConfig() | MarginMSEConfig():
            return RowRequirements(negatives=True, scores=ScoreRequirement.teacher, loss=loss.name)
        case DistillEmbeddingsConfig(teacher=teacher):
            return RowRequirements(documents=False, vectors=teacher is None, loss=loss.name)
        case OrthogonalConfig():
            return RowRequirements(documents=False, loss=loss.name)
        case _:
            return RowRequirements(loss=loss.name)
