"""Options of the losses that distil a teacher's vectors, or the similarities of a batch by them."""

import math
from dataclasses import dataclass, field
from enum import Enum

from embedtrain.config.loss_choices import Implementation, LossDirection, Similarity
from embedtrain.config.losses import VECTOR_TEMPERATURE, LossConfig
from embedtrain.config.options import Effect, option
from embedtrain.config.validation import OptionChecks, written


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


@dataclass(kw_only=True)
class TeacherConfig(LossConfig):
    """Options of the losses with a teacher's vectors."""

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
    # the student's similarities are divided by it; default: 0.05
    temperature: float | None = option(None, above=0, hint="0.01 to 0.1 is usual")
    # the teacher's similarities are divided by it; default: as `temperature`
    teacher_temperature: float | None = option(None, above=0, hint="1 is usual")
    divergence: Divergence = Divergence.kl
    candidates: CandidateSet = CandidateSet.batch
    # The mean of one softmax each; a row's own pair is a candidate, a query or positive is none of itself.
    directions: list[LossDirection] = field(default_factory=lambda: [LossDirection.query_document])
    # Leave copies of the row's positive, and further positives of an equal query, out of both softmaxes.
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


def check_teacher_loss(loss: TeacherConfig, check: OptionChecks) -> None:
    """Reject options of a loss with a teacher's vectors that have no effect or no meaning together."""
    teachers, weights = loss.teachers, loss.teacher_weights
    if teachers is not None:
        check.require(loss.teacher is None, "teacher", "loss.teachers is set as well; keep one")
        check.require(
            len(teachers) > 1 and len(set(teachers)) == len(teachers) and all(teachers),
            "teachers",
            "must be two or more different models or directories of vectors; write teacher=PATH for one",
        )
    if weights is not None:
        check.require(
            teachers is not None and len(weights) == len(teachers) and all(0 < weight < math.inf for weight in weights),
            "teacher_weights",
            "must be a number above 0 for each of teachers",
        )
    check.require(
        loss.on_missing is OnMissing.stop or bool(loss.teacher_paths),
        "on_missing",
        "has no effect without a directory of vectors; write loss.teacher",
    )
    match loss:
        case DistillSimilaritiesConfig():
            _check_distill_similarities(loss, check)
        case DistillEmbeddingsConfig():
            check.require(
                not loss.project or loss.matryoshka_dims is None,
                "project",
                "a projection takes all dimensions; it cannot be combined with matryoshka_dims",
            )
            check.require(
                loss.teacher_map is None or not loss.project,
                "teacher_map",
                "project=true maps the model's vectors to the teacher's dimensions already; keep one",
            )
            check.require(
                loss.teacher_map is not TeacherMap.pca or loss.teacher is not None,
                "teacher_map",
                "needs one teacher, a directory of embedtrain vectors; write loss.teacher, or another map",
            )


def _check_distill_similarities(loss: DistillSimilaritiesConfig, check: OptionChecks) -> None:
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
