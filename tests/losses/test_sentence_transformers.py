"""Every class of sentence-transformers on several ranks against the class itself, in one process on the whole batch."""

import copy
import inspect
import random
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.sentence_transformer import losses
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from embedtrain.config.loss_checks import FUNCTION_ARGUMENTS, MATRYOSHKA
from embedtrain.config.losses import SentenceTransformersConfig
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, UNSUPPORTED_LOSSES
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.losses.build import build_loss
from embedtrain.losses.types import FROM_ROWS, Guide, Origin
from tests.losses.global_batch import DIMENSION, GlobalVectors, check, run, vectors
from tests.marks import slow_but

VERSION = tuple(int(part) for part in sentence_transformers.__version__.split(".")[:2])
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
ROWS = 6
SEED = 5  # as in `GlobalVectors.of_rank`
DISTANCES = losses.BatchHardTripletLossDistanceFunction
ALL_DIRECTIONS = ["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
FEW = (3, 5, 7)  # deals: four ranks; a rank without rows; the same of four, uneven


class PrecomputedVectors(nn.Module):
    """The only module of a SentenceTransformer whose inputs are vectors."""

    max_seq_length = 8

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))

    def get_embedding_dimension(self) -> int:
        return DIMENSION

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.key]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A class, its arguments in the recipe, and its Python arguments if they differ."""

    name: str
    documents: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    python: dict[str, Any] | None = None
    scores: str | None = None  # any, binary, classes
    labels: int = 0
    guide: bool = False
    teacher: int = 0  # dimensions of the rows' vectors
    all_deals: bool = False
    fp32: float = 1e-5

    @property
    def config(self) -> SentenceTransformersConfig:
        return SentenceTransformersConfig(
            class_name=self.name, arguments=self.arguments, guide="some/guide" if self.guide else None
        )

    @property
    def inner(self) -> str:
        return self.arguments["loss"]["class_name"] if self.name == MATRYOSHKA else self.name

    def batch(self) -> GlobalVectors:
        batch = vectors(
            (self.documents,) * ROWS,
            normalised=False,
            scores=self.scores is not None,
            classes=self.labels,
            guides=["some/guide"] if self.guide else [],
        )
        if self.scores in ("binary", "classes"):
            batch = replace(batch, scores=(torch.arange(len(batch.documents)) * 2 % 3).double())
        if self.scores == "binary":
            batch = replace(batch, scores=(batch.scores > 0).double())
        if self.teacher:
            other = vectors((self.documents,) * ROWS, seed=1, dimension=self.teacher)
            batch = replace(batch, guides={FROM_ROWS: Guide(other.queries, other.documents)})
        return batch

    def textbook(self, batch: GlobalVectors, parameters: dict[str, Tensor]) -> Tensor:
        """The class's own forward pass and gradient cache, with a model of precomputed vectors."""
        model = SentenceTransformer(modules=[PrecomputedVectors("vectors")], device="cpu")
        arguments = copy.deepcopy(self.arguments if self.python is None else self.python)
        if self.guide:
            guide = {"guide": SentenceTransformer(modules=[PrecomputedVectors("guide")], device="cpu")}
            holder = arguments["loss"].setdefault("arguments", {}) if self.name == MATRYOSHKA else arguments
            holder.update(guide)
        if self.name == MATRYOSHKA:
            inner = getattr(losses, self.inner)(model, **arguments["loss"].get("arguments", {}))
            arguments["loss"] = inner
        loss = getattr(losses, self.name)(model, **arguments).double()

        columns, guides = by_column(batch.queries, batch.documents), None
        labels = batch.labels
        if batch.guides:
            (guide,) = batch.guides.values()
            guides = by_column(guide.queries, guide.documents)
        if self.teacher:
            labels = torch.stack(guides, dim=1)
        elif batch.scores is not None:
            labels = batch.scores.view(ROWS, -1)
            if SENTENCE_TRANSFORMERS_LOSSES[self.inner].scores.value == "pairs" or self.scores == "classes":
                columns = [batch.queries.repeat_interleave(self.documents, 0), batch.documents]
                labels = batch.scores.long() if self.scores == "classes" else batch.scores
        features = [{"vectors": column} for column in columns]
        if self.guide:
            features = [{**feature, "guide": column} for feature, column in zip(features, guides, strict=True)]
        random.seed(SEED)
        own = {name.removeprefix("theirs."): parameter for name, parameter in parameters.items()}
        value = torch.func.functional_call(loss, own, (features, labels))
        return sum(value.values()) if isinstance(value, dict) else value


def by_column(queries: Tensor, documents: Tensor) -> list[Tensor]:
    return [queries, *documents.view(ROWS, -1, documents.shape[1]).unbind(1)] if len(documents) else [queries]


def matryoshka(name: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"loss": {"class_name": name, "arguments": arguments}, "matryoshka_dims": [3, 8, 5], **more}


PLAIN = [
    Case(name="MultipleNegativesRankingLoss", arguments={"scale": 10}),
    Case(name="MultipleNegativesSymmetricRankingLoss", arguments={"scale": 10}, documents=2),
    Case(name="CachedMultipleNegativesRankingLoss", arguments={"scale": 10, "mini_batch_size": 4}, documents=2),
    Case(name="CachedMultipleNegativesSymmetricRankingLoss", arguments={"scale": 10, "mini_batch_size": 4}),
    Case(name="MegaBatchMarginLoss", arguments={"mini_batch_size": 4}),
    Case(name="GISTEmbedLoss", arguments={"temperature": 0.1}, documents=2, guide=True),
    Case(name="CachedGISTEmbedLoss", arguments={"temperature": 0.1, "mini_batch_size": 4}, documents=3, guide=True),
    Case(name="GlobalOrthogonalRegularizationLoss", documents=2),
    Case(name="CoSENTLoss", scores="any"),
    Case(name="AnglELoss", scores="any", fp32=1e-4),
    Case(name="CosineSimilarityLoss", scores="any"),
    Case(name="ContrastiveLoss", scores="binary"),
    Case(name="OnlineContrastiveLoss", scores="binary"),
    Case(
        name="SoftmaxLoss",
        scores="classes",
        arguments={"num_labels": 3},
        python={"embedding_dimension": DIMENSION, "num_labels": 3},
    ),
    Case(name="TripletLoss", documents=2),
    Case(name="BatchAllTripletLoss", documents=0, labels=3),
    Case(name="BatchHardTripletLoss", documents=0, labels=3),
    Case(name="BatchHardSoftMarginTripletLoss", documents=0, labels=3),
    Case(name="BatchSemiHardTripletLoss", documents=0, labels=3),
    Case(name="DistillKLDivLoss", documents=3, scores="any"),
    Case(name="MarginMSELoss", documents=2, scores="any"),
    Case(name="MSELoss", teacher=DIMENSION),
    Case(name="EmbedDistillLoss", documents=2, teacher=DIMENSION + 3, arguments={"projection_dim": DIMENSION + 3}),
    Case(name="MatryoshkaLoss", arguments=matryoshka("MultipleNegativesRankingLoss", {"scale": 10})),
]

VARIANTS = [
    Case(
        name="MultipleNegativesRankingLoss",
        arguments={"scale": 10, "directions": ALL_DIRECTIONS, "hardness_mode": "all_negatives", "hardness_strength": 2},
        documents=3,
    ),
    Case(
        name="MultipleNegativesRankingLoss",
        arguments={
            "scale": 1,
            "similarity_fct": "dot_score",
            "directions": ALL_DIRECTIONS[::2],
            "partition_mode": "per_direction",
        },
        python={
            "scale": 1,
            "similarity_fct": util.dot_score,
            "directions": ALL_DIRECTIONS[::2],
            "partition_mode": "per_direction",
        },
        documents=2,
    ),
    Case(
        name="CachedMultipleNegativesRankingLoss",
        arguments={
            "similarity_fct": "euclidean_sim",
            "scale": 1,
            "hardness_mode": "hard_negatives",
            "hardness_strength": 1,
        },
        python={
            "similarity_fct": util.euclidean_sim,
            "scale": 1,
            "hardness_mode": "hard_negatives",
            "hardness_strength": 1,
        },
        documents=3,
    ),
    Case(name="MegaBatchMarginLoss", arguments={"use_mini_batched_version": False, "positive_margin": 0.9}),
    Case(
        name="GISTEmbedLoss",
        arguments={"temperature": 0.1, "margin_strategy": "relative", "margin": 0.1, "contrast_anchors": False},
        guide=True,
    ),
    Case(name="CachedGISTEmbedLoss", arguments={"temperature": 0.1, "contrast_positives": False}, guide=True),
    Case(name="GlobalOrthogonalRegularizationLoss", arguments={"aggregation": "sum", "mean_weight": None}, documents=0),
    Case(
        name="CoSENTLoss",
        arguments={"similarity_fct": "pairwise_dot_score", "scale": 2},
        python={"similarity_fct": util.pairwise_dot_score, "scale": 2},
        documents=2,
        scores="any",
    ),
    Case(name="AnglELoss", documents=3, fp32=1e-4),  # without scores: negatives count 0
    Case(
        name="ContrastiveLoss",
        arguments={"distance_metric": "EUCLIDEAN", "margin": 4, "size_average": False},
        python={"distance_metric": losses.SiameseDistanceMetric.EUCLIDEAN, "margin": 4, "size_average": False},
        documents=2,
        scores="binary",
    ),
    Case(
        name="OnlineContrastiveLoss",
        arguments={"distance_metric": "MANHATTAN", "margin": 9},
        python={"distance_metric": losses.SiameseDistanceMetric.MANHATTAN, "margin": 9},
        scores="binary",
    ),
    Case(
        name="SoftmaxLoss",
        arguments={"num_labels": 4, "embedding_dimension": DIMENSION, "concatenation_sent_multiplication": True},
        documents=2,
        scores="classes",
    ),
    Case(
        name="TripletLoss",
        arguments={"distance_metric": "COSINE", "triplet_margin": 0.5},
        python={"distance_metric": losses.TripletDistanceMetric.COSINE, "triplet_margin": 0.5},
        documents=2,
    ),
    *(
        Case(
            name=name,
            arguments={"distance_metric": "cosine_distance"},
            python={"distance_metric": DISTANCES.cosine_distance},
            documents=0,
            labels=2,
        )
        for name in SENTENCE_TRANSFORMERS_LOSSES
        if name.startswith("Batch")
    ),
    Case(
        name="DistillKLDivLoss",
        arguments={"similarity_fct": "pairwise_cos_sim", "temperature": 0.5, "teacher_temperature": 2},
        python={"similarity_fct": util.pairwise_cos_sim, "temperature": 0.5, "teacher_temperature": 2},
        documents=2,
        scores="any",
    ),
    Case(name="MarginMSELoss", documents=4, scores="any"),
    Case(name="MSELoss", documents=0, teacher=DIMENSION + 3, arguments={"projection_dim": DIMENSION + 3}),
    Case(name="EmbedDistillLoss", documents=0, teacher=DIMENSION),
    Case(name="EmbedDistillLoss", documents=1, teacher=DIMENSION, arguments={"distance_metric": "l2"}),
    Case(
        name="MatryoshkaLoss",
        arguments=matryoshka("CachedMultipleNegativesRankingLoss", {"scale": 10}, matryoshka_weights=[1, 2, 0.5]),
    ),
    Case(
        name="MatryoshkaLoss",
        arguments=matryoshka("MultipleNegativesRankingLoss", {"scale": 10}, n_dims_per_step=2),
        documents=2,
    ),
    Case(name="MatryoshkaLoss", arguments=matryoshka("CachedGISTEmbedLoss", {"temperature": 0.1}), guide=True),
    Case(name="MatryoshkaLoss", arguments=matryoshka("MegaBatchMarginLoss", {})),
    Case(name="MatryoshkaLoss", arguments=matryoshka("CoSENTLoss", {}), scores="any"),
    Case(name="MatryoshkaLoss", arguments=matryoshka("BatchHardTripletLoss", {}), documents=0, labels=3),
    Case(name="MatryoshkaLoss", arguments=matryoshka("MSELoss", {}), teacher=DIMENSION),
]


def skip_inexact_versions(case: Case) -> None:
    """Up to 6.1 its gradient cache sums in float32, and its MatryoshkaLoss does not truncate a teacher's vectors."""
    inner = f"{case.name} {case.inner}"
    if VERSION < (6, 2) and any(part in inner for part in ("Cached", "MegaBatch", "MatryoshkaLoss MSELoss")):
        pytest.skip("the reference is exact in float64 from sentence-transformers 6.2 on")
    if TORCH < (2, 13) and "CosineSimilarityLoss" in inner:  # it converts labels to float32
        pytest.skip("the backward pass of MSELoss accepts two types from torch 2.13 on")


def case_id(case: Case) -> str:
    return f"{case.name} {case.inner if case.inner != case.name else ''} {case.documents}"


# All classes are called by the same code; these differ in what they are called with.
QUICK = (
    "MultipleNegativesRankingLoss",
    "CachedGISTEmbedLoss",
    "SoftmaxLoss",
    "CoSENTLoss",
    "TripletLoss",
    "MatryoshkaLoss",
)


@pytest.mark.parametrize("case", slow_but([case for case in PLAIN if case.name in QUICK], PLAIN), ids=case_id)
def test_every_class(ranks, case):
    skip_inexact_versions(case)
    only = None if case.name == "MultipleNegativesRankingLoss" else FEW
    check(ranks, case.config, case.batch(), case.textbook, fp32=case.fp32, only=only)


@pytest.mark.slow
@pytest.mark.parametrize("case", VARIANTS, ids=case_id)
def test_arguments(ranks, case):
    skip_inexact_versions(case)
    check(ranks, case.config, case.batch(), case.textbook, fp32=case.fp32, only=FEW)


def test_every_class_is_tested():
    assert {case.name for case in PLAIN} == {*SENTENCE_TRANSFORMERS_LOSSES, MATRYOSHKA}


def test_tables_cover_the_installed_version():
    """New classes and arguments of a new version need a decision."""
    classes = {name for name in losses.__all__ if inspect.isclass(getattr(losses, name))}
    classes = {name for name in classes if issubclass(getattr(losses, name), nn.Module)}
    assert classes == {*SENTENCE_TRANSFORMERS_LOSSES, *UNSUPPORTED_LOSSES, MATRYOSHKA}
    for name in SENTENCE_TRANSFORMERS_LOSSES:
        parameters = inspect.signature(getattr(losses, name).__init__).parameters.values()
        functions = {parameter.name for parameter in parameters if inspect.isfunction(parameter.default)}
        assert functions - {"loss_fct"} == set(FUNCTION_ARGUMENTS.get(name, {})), name
        others = {parameter.name for parameter in parameters if isinstance(parameter.default, nn.Module)}
        assert others <= {"loss_fct", "cos_score_transformation"}, name


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name in FUNCTION_ARGUMENTS for argument in FUNCTION_ARGUMENTS[name]]
)
def test_every_function_that_can_be_named(name, argument):
    for option in FUNCTION_ARGUMENTS[name][argument]:
        loss = build(name, {argument: option}).theirs
        function = getattr(loss, argument)
        vectors = torch.eye(3)
        assert function(vectors).shape == (3, 3) if name.startswith("Batch") else len(function(vectors, vectors)) == 3


def build(name: str, arguments: dict[str, Any], guide: str | None = None, **widths: int) -> nn.Module:
    config = SentenceTransformersConfig(class_name=name, arguments=arguments, guide=guide)
    return build_loss(config, dimension=DIMENSION, guide_dimensions=widths, seed=0)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(name="SoftmaxLoss", arguments={"num_labels": 3}), ["theirs.classifier.weight", "theirs.classifier.bias"]),
        (Case(name="MSELoss", arguments={"projection_dim": 4}), ["theirs.projection.weight", "theirs.projection.bias"]),
        (Case(name="CachedGISTEmbedLoss", guide=True), []),
        (Case(name="MatryoshkaLoss", arguments=matryoshka("GISTEmbedLoss", {}), guide=True), []),
    ],
    ids=lambda case: case.name if isinstance(case, Case) else "",
)
def test_parameters(case, names):
    loss = build_loss(case.config, dimension=DIMENSION, seed=0)
    assert [name for name, _ in loss.named_parameters()] == list(loss.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "arguments", "pattern"),
    [
        ("MultipleNegativesRankingLoss", {"temperature": 1}, r"loss\.arguments\.temperature=1: .* it takes scale, "),
        ("MultipleNegativesRankingLoss", {"scale": "ten"}, r"loss\.arguments\.scale=ten: .* a number"),
        ("MultipleNegativesRankingLoss", {"scale": float("nan")}, r"loss\.arguments\.scale=nan"),
        (
            "MultipleNegativesRankingLoss",
            {"scale": -1},
            r"loss\.class_name=MultipleNegativesRankingLoss .*: Scale must be",
        ),
        (
            "MultipleNegativesRankingLoss",
            {"directions": "query_to_doc"},
            r"loss\.arguments\.directions=query_to_doc: .* list",
        ),
        ("MultipleNegativesRankingLoss", {"directions": ["doc_to_doc"]}, "'query_to_doc' direction is required"),
        (
            "MultipleNegativesRankingLoss",
            {"hardness_mode": "x"},
            r"hardness_mode=x: .* one of in_batch_negatives, .* or null",
        ),
        ("SoftmaxLoss", {}, r"loss\.arguments\.num_labels is missing: .* a whole number"),
        ("SoftmaxLoss", {"num_labels": 2.5}, r"num_labels=2\.5: .* a whole number"),
        ("SoftmaxLoss", {"num_labels": 2, "embedding_dimension": 9}, "embedding_dimension=9: .* have 8 dimensions"),
        ("ContrastiveLoss", {"size_average": 1}, "size_average=1: .* true or false"),
        ("EmbedDistillLoss", {"projection_dim": True}, "projection_dim=True: .* a whole number or null"),
        ("EmbedDistillLoss", {"projection_dim": -2}, r"loss\.class_name=EmbedDistillLoss"),
        ("EmbedDistillLoss", {"distance_metric": "COSINE"}, "distance_metric=COSINE: .* mse, l2, cosine"),
        ("MatryoshkaLoss", matryoshka("CoSENTLoss", {"margin": 1}), r"loss\.arguments\.loss\.arguments\.margin=1: "),
        ("MatryoshkaLoss", {**matryoshka("CoSENTLoss", {}), "matryoshka_dims": [9]}, "cannot exceed"),
        ("MatryoshkaLoss", matryoshka("CoSENTLoss", {}, matryoshka_weights=[1]), "same length"),
        ("TripletLos", {}, "did you mean TripletLoss"),
    ],
)
def test_rejected_arguments(name, arguments, pattern):
    with pytest.raises(ConfigError, match=pattern) as error:
        build(name, arguments)
    assert "\n" not in str(error.value)


def test_teacher_of_another_dimension():
    with pytest.raises(ConfigError, match=r"11 dimensions.* 8: set loss\.arguments\.projection_dim=11"):
        build("MSELoss", {}, **{FROM_ROWS: 11})


def rejection(world: World, config: SentenceTransformersConfig, batch: GlobalVectors, deal: list[list[int]]) -> str:
    loss = build_loss(config, dimension=DIMENSION, seed=0)
    try:
        loss(*batch.of_rank(deal[world.rank], torch.float32))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "batch", "parts"),
    [
        (Case(name="TripletLoss"), vectors((2, 2, 2, 3)), ["2 to 3", "data.train"]),
        (Case(name="TripletLoss"), vectors((1,) * 4), ["rows of 2 documents", "rows of 1"]),
        (
            Case(name="GISTEmbedLoss", guide=True),
            vectors((3,) * 4, guides=["some/guide"]),
            ["rows of 1 or 2 documents", "rows of 3"],
        ),
        (Case(name="DistillKLDivLoss"), vectors((1,) * 4, scores=True), ["rows of 2 or more documents", "rows of 1"]),
        (Case(name="BatchHardTripletLoss"), vectors((1,) * 4, classes=2), ["rows of 0 documents", "rows of 1"]),
        (Case(name="MarginMSELoss"), vectors((2,) * 4), ["scores"]),
        (Case(name="BatchAllTripletLoss"), vectors((0,) * 4), ["labels"]),
        (Case(name="MSELoss"), vectors((0,) * 4), ["vectors"]),
        (Case(name="MSELoss"), vectors((0,) * 4, guides=[FROM_ROWS]), ["11 dimensions"]),
        (
            Case(name="SoftmaxLoss", arguments={"num_labels": 2}),
            replace(vectors((1,) * 4), scores=torch.tensor([0.0, 1, 2, 0]).double()),
            ["score is 2", "loss.arguments.num_labels=2", "0 to 1"],
        ),
        (
            Case(name="DistillKLDivLoss"),
            replace(vectors((2,) * 4), scores=torch.full((8,), float("nan")).double()),
            ["teacher scores contain NaN"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_rejected_rows(ranks, case, batch, parts):
    """On all ranks, though only the first has the invalid row, and one has no rows."""
    for answer in ranks(3, rejection, case.config, batch, [[3, 2], [], [0, 1]]):
        assert answer.startswith(f"loss.class_name={case.name}")
        assert all(part in answer for part in parts), answer
        assert "\n" not in answer


def test_parts_are_logged(ranks):
    case = Case(name="GlobalOrthogonalRegularizationLoss")
    batch = case.batch()
    answers = ranks(3, run, case.config, batch, [[0, 1, 2], [], [3, 4, 5]], torch.float64, DIMENSION)
    parts = losses.GlobalOrthogonalRegularizationLoss(
        SentenceTransformer(modules=[PrecomputedVectors("vectors")], device="cpu")
    )([{"vectors": column} for column in by_column(batch.queries, batch.documents)])
    for name, part in parts.items():
        assert sum(answer["metrics"][name] for answer in answers) == pytest.approx(part.item(), rel=1e-12)
    assert sum(answer["local_loss"] for answer in answers) == pytest.approx(sum(parts.values()).item(), rel=1e-12)


def draws(world: World) -> list[float]:
    """Losses for several seeds, though the ranks' random states differ; these are restored."""
    case = Case(name="MatryoshkaLoss", arguments=matryoshka("CoSENTLoss", {}, n_dims_per_step=1), scores="any")
    loss = build_loss(case.config, dimension=DIMENSION, seed=0)
    queries, documents, batch_info = case.batch().of_rank([world.rank], torch.float64)
    random.seed(world.rank)
    torch.manual_seed(world.rank)
    values = [
        loss(queries, documents, replace(batch_info, origin=Origin(batch=seed))).local_loss.item() for seed in range(8)
    ]
    next_random, next_torch = random.random(), torch.rand(1).item()
    random.seed(world.rank)
    torch.manual_seed(world.rank)
    assert (next_random, next_torch) == (random.random(), torch.rand(1).item())
    return values


def test_random_dimensions_depend_only_on_the_seed(ranks):
    first, second = ranks(2, draws)
    assert first == second
    assert len(set(first)) > 1


def num_warnings(world: World) -> int:
    """Warnings of ContrastiveLoss about scores between 0 and 1."""
    loss = build_loss(SentenceTransformersConfig(class_name="ContrastiveLoss"), dimension=DIMENSION, seed=0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loss(*vectors((1,) * 4, scores=True).of_rank([world.rank], torch.float32))
    return len([warning for warning in warned if issubclass(warning.category, UserWarning)])


def test_only_rank_zero_warns(ranks):
    first, *remaining = ranks(3, num_warnings)
    assert first >= 1
    assert remaining == [0, 0]


def one_row(world: World) -> None:
    """The gradient of every class is finite for a global batch of one row."""
    for case in PLAIN:
        batch = case.batch()
        answer = run(world, case.config, batch, [[], [2]], torch.float32, DIMENSION)
        assert answer["queries"].isfinite().all(), case.name
        assert answer["documents"].isfinite().all(), case.name


def test_global_batch_of_one_row(ranks):
    ranks(2, one_row)
