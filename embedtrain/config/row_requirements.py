"""What a loss can require of training rows. The recipe defines it, so that bad rows are found when they are read.

Each dataclass of `config/losses.py` declares its own; those of the classes of sentence-transformers are listed here.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

from embedtrain.errors import ConfigError


class ScoreRequirement(str, Enum):
    """Which scores of documents a loss requires."""

    none = "none"
    pairs = "pairs"  # similarity of query and document; in rows without scores a positive counts 1 and a negative 0
    teacher = "teacher"  # a teacher's scores, or a class; without a default


@dataclass(frozen=True, kw_only=True)
class ScoreRange:
    """The scores that a loss accepts: from `low` to `high`, whole numbers only or any."""

    low: float = -math.inf
    high: float = math.inf
    integers: bool = False

    def __and__(self, other: "ScoreRange") -> "ScoreRange":
        """The scores that both accept."""
        return ScoreRange(
            low=max(self.low, other.low), high=min(self.high, other.high), integers=self.integers or other.integers
        )

    def __contains__(self, score: float) -> bool:
        return self.low <= score <= self.high and (not self.integers or float(score).is_integer())

    def __str__(self) -> str:
        return f"{'a whole number ' * self.integers}from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, kw_only=True)
class RowRequirements:
    """What a loss requires of every row."""

    documents: bool = True  # at least a positive; otherwise a row may be a single text
    negatives: bool = False  # at least one hard negative
    scores: ScoreRequirement = ScoreRequirement.none  # of every document
    range: ScoreRange = ScoreRange()  # of accepted scores
    label: bool = False  # the class of the row, a whole number
    vectors: bool = False  # a teacher's embedding of every text
    same_num_documents: bool = False  # in every row
    other_positives: bool = (
        False  # a step uses a row's other positives as well, which are documents with scores like any other
    )
    ranked: bool = False  # documents of at least two different scores
    positive_above: float | None = None  # documents with a higher score are the positives, at least one
    batch_negatives: int = 0  # documents of other rows that each row gets as negatives, with the score 0
    loss: str = "infonce"  # its name, for messages
    without_negatives: str = ""  # what to do about a row without negatives, for messages

    def __or__(self, other: "RowRequirements") -> "RowRequirements":
        """What two losses on the same rows require together."""
        strictest = max(self.scores, other.scores, key=list(ScoreRequirement).index)
        return RowRequirements(
            documents=self.documents or other.documents,
            negatives=self.negatives or other.negatives,
            scores=strictest,
            range=self.range & other.range,
            label=self.label or other.label,
            vectors=self.vectors or other.vectors,
            same_num_documents=self.same_num_documents or other.same_num_documents,
            other_positives=self.other_positives or other.other_positives,
            ranked=self.ranked or other.ranked,
            positive_above=other.positive_above if self.positive_above is None else self.positive_above,
            batch_negatives=max(self.batch_negatives, other.batch_negatives),
            without_negatives=self.without_negatives or other.without_negatives,
            loss=" + ".join(dict.fromkeys(name for name in (self.loss, other.loss) if name)),
        )


COSINE = ScoreRange(low=-1, high=1)
PAIR_WEIGHT = ScoreRange(low=0, high=1)  # of the attracting term; the repelling term has the rest
BINARY_LABEL = ScoreRange(low=0, high=1, integers=True)
_COLUMNS = RowRequirements(same_num_documents=True)
_PAIRS = RowRequirements(same_num_documents=True, scores=ScoreRequirement.pairs)
_TEACHER = RowRequirements(same_num_documents=True, negatives=True, scores=ScoreRequirement.teacher)
_CLASSES = RowRequirements(documents=False, label=True, same_num_documents=True)
_VECTORS = RowRequirements(documents=False, vectors=True, same_num_documents=True)

# The loss classes of sentence-transformers 6.0 to 6.2 that compute from embeddings.
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
    "CosineSimilarityLoss": replace(_PAIRS, range=COSINE),
    "ContrastiveLoss": replace(_PAIRS, range=PAIR_WEIGHT),
    "OnlineContrastiveLoss": replace(_PAIRS, range=BINARY_LABEL),
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
# The loss classes that need more than embeddings, and what they need.
UNSUPPORTED_LOSSES: dict[str, str] = {
    "AdaptiveLayerLoss": "the embeddings of inner layers, which loss.matryoshka.layers of any loss trains",
    "Matryoshka2dLoss": "the embeddings of inner layers, which loss.matryoshka.layers of any loss trains",
    "ContrastiveTensionLoss": "a second model that is trained as well",
    "ContrastiveTensionLossInBatchNegatives": "a second model that is trained as well",
    "DenoisingAutoEncoderLoss": "a decoder; without one, `delete_words` of a source denoises",
}


def with_batch_negatives(needs: RowRequirements, count: int) -> RowRequirements:
    """The same for rows that get `count` documents of other rows as further negatives, see `data.batch_negatives`.

    Raises a ConfigError if 0 is not the score of a negative for this loss.
    """
    option = f"data.batch_negatives={count}"
    if needs.scores is ScoreRequirement.teacher:
        raise ConfigError(
            f"{option}: loss={needs.loss} needs a teacher's score of every document, and documents of other rows have "
            "none for the query; leave it out, or choose a loss of labels, such as loss=softmax"
        )
    if needs.positive_above is not None and needs.positive_above < 0:
        raise ConfigError(
            f"{option}: documents of other rows have the label 0, which is above "
            f"loss.positive_above={needs.positive_above:g}; write positive_above=0 or more"
        )
    # A document of a label below 0 would count as less relevant than one of another row.
    labels = needs.range & ScoreRange(low=0) if needs.ranked else needs.range
    return replace(needs, negatives=False, range=labels, batch_negatives=count)
