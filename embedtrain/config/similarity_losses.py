"""Options of the losses that compare the similarities within a batch with a teacher's."""

from dataclasses import dataclass, field
from enum import Enum

from embedtrain.config.losses import VECTOR_TEMPERATURE, Implementation, LossConfig, LossDirection, Similarity
from embedtrain.config.validation import OptionChecks, written


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


@dataclass(kw_only=True)
class DistillSimilaritiesConfig(LossConfig):
    """Divergence of each query's softmax over the documents of the global batch from a teacher's."""

    name: str = "distill_similarities"
    teacher: str | None = None  # a model directory or Hub id (ID@REVISION); default: the vectors in the rows
    temperature: float | None = None  # the student's similarities are divided by it; default: 0.02
    teacher_temperature: float | None = None  # the teacher's cosines are divided by it; default: as `temperature`
    divergence: Divergence = Divergence.kl
    candidates: CandidateSet = CandidateSet.batch
    # The mean of one softmax each; a row's own pair is a candidate, a query or positive is none of itself.
    directions: list[LossDirection] = field(default_factory=lambda: [LossDirection.query_document])
    # Leave copies of the row's positive, and further positives of an equal query, out of both softmaxes.
    mask_duplicates: bool = True
    similarity: Similarity = Similarity.cosine  # of the student; the teacher's is the cosine
    implementation: Implementation = Implementation.auto

    @property
    def temperatures(self) -> tuple[float, float]:
        """The student's and the teacher's; 1 for `mse`, which compares similarities."""
        if self.divergence is Divergence.mse:
            return 1.0, 1.0
        student = VECTOR_TEMPERATURE if self.temperature is None else self.temperature
        return student, student if self.teacher_temperature is None else self.teacher_temperature


@dataclass(kw_only=True)
class SimilarityMSEConfig(LossConfig):
    """Mean squared difference of all cosines between the texts of the global batch from a teacher's (Jasper, 2024)."""

    name: str = "similarity_mse"
    teacher: str | None = None  # a model directory or Hub id (ID@REVISION); default: the vectors in the rows


def check_similarity_loss(loss: DistillSimilaritiesConfig, check: OptionChecks) -> None:
    """Reject options that have no effect or no meaning together."""
    directions = loss.directions
    check.require(
        bool(directions) and len(set(directions)) == len(directions),
        "directions",
        f"must be one or more of {', '.join(LossDirection)}, each once",
    )
    if loss.candidates is CandidateSet.row:
        check.require(
            directions == [LossDirection.query_document],
            "directions",
            "must be [query_document] with candidates=row",
        )
        check.require(
            loss.implementation is Implementation.auto,
            "implementation",
            "has no effect with candidates=row, which has no matrix of scores; leave it out",
        )
    for name in ("temperature", "teacher_temperature"):
        check.require(
            loss.divergence is not Divergence.mse or getattr(loss, name) is None,
            name,
            f"has no effect with divergence={written(Divergence.mse)}, which has no softmax; leave it out",
        )
