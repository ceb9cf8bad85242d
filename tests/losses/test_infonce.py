"""InfoNCE against its textbook form, whatever its options: value and gradient on any number of ranks, three ways."""

import math
from dataclasses import replace

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import GISTEmbedLoss, MultipleNegativesRankingLoss
from torch import Tensor, nn

from embedtrain.config.losses import (
    Hardness,
    Implementation,
    InfoNCEConfig,
    LossDirection,
    MarginKind,
    PartitionMode,
    Similarity,
)
from embedtrain.distributed.world import World
from embedtrain.losses import scores, softmax
from embedtrain.losses.build import build_loss
from embedtrain.losses.infonce import InfoNCE, choose_implementation
from embedtrain.losses.scores import Counts
from embedtrain.losses.sentence_transformers_classes import PlaceholderModel, placeholder_tokenizer
from embedtrain.losses.types import BatchInfo, Guide
from tests.losses.global_batch import GlobalVectors, check, vectors

TEMPERATURE = 0.1
ALL_SIDES = list(LossDirection)
WAYS = [Implementation.plain, Implementation.tiled, Implementation.ring]


def config(**options) -> InfoNCEConfig:
    return InfoNCEConfig(**({"temperature": TEMPERATURE} | options))


def textbook(options: InfoNCEConfig):
    """-log softmax at the positive, row by row and candidate by candidate."""

    def compare(a: Tensor, b: Tensor) -> Tensor:
        return a @ b if options.similarity is Similarity.dot else a @ b / (a.norm() * b.norm())

    def loss(batch: GlobalVectors, own: dict[str, Tensor]) -> Tensor:
        scale = own["temperature.log_scale"].exp()[0] if own else 1.0 / options.temperature
        answers = [batch.documents_of(row)[0] for row in range(len(batch.sizes))]
        owner = [row for row, size in enumerate(batch.sizes) for _ in range(size)]
        guide = batch.guides.get(options.guide)
        equal = [batch.document_keys] + ([] if batch.document_ids is None else [batch.document_ids])

        def same(a: int, b: int) -> bool:
            return any(bool(keys[a] == keys[b]) for keys in equal)

        def answers_query(document: int, row: int) -> bool:
            alike = [other for other in range(len(answers)) if batch.query_keys[other] == batch.query_keys[row]]
            return any(same(document, answers[other]) for other in alike)

        def candidates(side: LossDirection, row: int) -> list[tuple[Tensor, Tensor, float, float]]:
            """(anchor, candidate, the guide's similarity of them, strength of its hardness)."""
            found = []
            by_document = side in (LossDirection.query_document, LossDirection.document_document)
            for j in range(len(owner) if by_document else len(answers)):
                own_row = owner[j] == row if by_document else j == row
                is_self = {
                    LossDirection.query_document: j == answers[row],
                    # GTE's joint softmax has the positive pair on this side as well.
                    LossDirection.document_query: j == row and options.partition_mode is PartitionMode.separate,
                    LossDirection.query_query: j == row,
                    LossDirection.document_document: own_row,
                }[side]
                duplicate = {
                    LossDirection.query_document: lambda j=j: answers_query(j, row),
                    LossDirection.document_document: lambda j=j: answers_query(j, row),
                    LossDirection.query_query: lambda j=j: answers_query(answers[j], row),
                    LossDirection.document_query: lambda j=j: j != row and answers_query(answers[row], j),
                }[side]()
                if is_self or (options.mask_duplicates and duplicate):
                    continue
                if not options.in_batch_negatives and not own_row:
                    continue
                hard = {
                    Hardness.none: False,
                    Hardness.in_batch: not own_row,
                    Hardness.hard: own_row,
                    Hardness.all: True,
                }[options.hardness] and side is LossDirection.query_document
                of_query = side in (LossDirection.query_document, LossDirection.query_query)
                anchor = batch.queries[row] if of_query else batch.documents[answers[row]]
                column = batch.documents[j] if by_document else batch.queries[j]
                itself = side is LossDirection.document_query and j == row
                if guide is not None and not itself:
                    unit = torch.nn.functional.normalize
                    g, d = unit(guide.queries, dim=1), unit(guide.documents, dim=1)
                    best = g[row] @ d[answers[row]]
                    slack = options.guide_margin * (
                        best.abs() if options.guide_margin_kind is MarginKind.relative else 1.0
                    )
                    if (g[row] if of_query else d[answers[row]]) @ (d[j] if by_document else g[j]) > best - slack:
                        continue
                similarity = compare(anchor, column)
                right = compare(batch.queries[row], batch.documents[answers[row]])
                if (
                    options.false_negative_margin is not None
                    and not itself
                    and similarity > right + options.false_negative_margin
                ):
                    continue
                found.append(similarity * scale + hard * options.hardness_strength * similarity.detach())
            return found

        total = batch.queries.new_zeros(())
        for row in range(len(answers)):
            right = (compare(batch.queries[row], batch.documents[answers[row]]) - options.margin) * scale
            scored = [candidates(side, row) for side in options.directions]
            if options.partition_mode is PartitionMode.joint:
                scored = [[one for side in scored for one in side]]
            for part in scored:
                total = total - torch.log_softmax(torch.stack([right, *part]), dim=0)[0] / len(scored)
        return total / len(answers)

    return loss


SIZES = (1, 3, 2, 1, 4, 2, 1)


def duplicates() -> GlobalVectors:
    """Equal queries, equal documents, an answer that is somebody's hard negative; equal texts have equal vectors."""
    batch = vectors(SIZES)
    queries, documents = batch.queries.clone(), batch.documents.clone()
    query_keys, document_keys = batch.query_keys.clone(), batch.document_keys.clone()
    for a, b in ((0, 4), (0, 5), (2, 3)):
        queries[b], query_keys[b] = queries[a], query_keys[a]
    # Row 0 has document 0; row 1: 1 2 3; row 2: 4 5; row 3: 6; row 4: 7 8 9 10; row 5: 11 12; row 6: 13.
    for a, b in ((0, 2), (0, 13), (7, 5), (8, 9), (4, 12)):
        documents[b], document_keys[b] = documents[a], document_keys[a]
    return replace(batch, queries=queries, documents=documents, query_keys=query_keys, document_keys=document_keys)


def with_ids() -> GlobalVectors:
    """Documents 1 and 6, 4 and 8 are the same by id but not by text."""
    batch = vectors(SIZES)
    ids = batch.document_keys + 100
    ids[6], ids[8] = ids[1], ids[4]
    return replace(batch, document_ids=ids)


PROBLEMS = {
    "plain": ((1,) * 7, {}),
    "hard negatives": (SIZES, {}),
    "soft": (SIZES, {"temperature": 5.0}),
    "dot": (vectors(SIZES, normalised=False), {"similarity": Similarity.dot, "temperature": 2.0}),
    "cosine of any vectors": (vectors(SIZES, normalised=False), {}),
    "duplicates": (duplicates(), {}),
    "duplicates, not masked": (duplicates(), {"mask_duplicates": False}),
    "duplicates, all sides": (duplicates(), {"directions": ALL_SIDES}),
    "ids": (with_ids(), {"directions": ALL_SIDES}),
    "symmetric": (
        SIZES,
        {
            "directions": [LossDirection.query_document, LossDirection.document_query],
            "partition_mode": PartitionMode.separate,
        },
    ),
    "all sides": (SIZES, {"directions": ALL_SIDES, "mask_duplicates": False}),
    "margin": (SIZES, {"margin": 0.2}),
    "drop above": (SIZES, {"false_negative_margin": 0.1, "directions": ALL_SIDES}),
    "drop below the positive": (SIZES, {"false_negative_margin": -0.3}),
    "guide": (vectors(SIZES, guides=["big"]), {"guide": "big", "directions": ALL_SIDES}),
    "guide, margin": (vectors(SIZES, guides=["big"]), {"guide": "big", "guide_margin": 0.2}),
    "guide, relative margin": (
        vectors(SIZES, guides=["big"]),
        {"guide": "big", "guide_margin": 0.3, "guide_margin_kind": MarginKind.relative, "directions": ALL_SIDES},
    ),
    "hardness of in-batch negatives": (SIZES, {"hardness": Hardness.in_batch, "hardness_strength": 3.0}),
    "hardness of hard negatives": (SIZES, {"hardness": Hardness.hard, "hardness_strength": 3.0}),
    "hardness of all": (
        SIZES,
        {"hardness": Hardness.all, "hardness_strength": 3.0, "directions": ALL_SIDES, "false_negative_margin": 0.2},
    ),
    "trained temperature": (
        SIZES,
        {"learn_temperature": True, "margin": 0.1, "directions": ALL_SIDES, "hardness": Hardness.all}
        | {"hardness_strength": 2.0},
    ),
    "trained temperature, separate": (
        SIZES,
        {
            "learn_temperature": True,
            "margin": 0.1,
            "directions": ALL_SIDES[:2],
            "partition_mode": PartitionMode.separate,
        },
    ),
    "no negatives at all": ((1,), {}),
    "one row": ((3,), {}),
    "fewer rows than ranks": ((2, 1), {}),
    "all drop out": (SIZES, {"false_negative_margin": -2.5}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_textbook(ranks, name, way):
    sizes, options = PROBLEMS[name]
    batch = sizes if isinstance(sizes, GlobalVectors) else vectors(sizes)
    chosen = config(implementation=way, **options)
    # What ranks can do differently shows in the even deal over 3, the uneven one over 2, and with empty ranks.
    check(ranks, chosen, batch, textbook(chosen), only=[0, 2, 4, 7])


@pytest.mark.parametrize("way", WAYS)
def test_every_deal(ranks, way):
    chosen = config(implementation=way, directions=ALL_SIDES, learn_temperature=True)
    check(ranks, chosen, duplicates(), textbook(chosen))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin": 0.2},
        {"false_negative_margin": 0.1},
        {"hardness": Hardness.hard, "hardness_strength": 3.0},
        {"guide": "big"},
    ],
)
def test_own_negatives_alone(ranks, options):
    chosen = config(in_batch_negatives=False, learn_temperature=True, **options)
    check(ranks, chosen, vectors(SIZES, guides=["big"]), textbook(chosen), only=[0, 2, 4, 7])


def tiles_of_a_few_rows(world: World, way: Implementation) -> None:
    """With tiles of 2 rows, and more rows than tiles, nothing changes."""
    torch.manual_seed(world.rank)
    batch_info, least, cells = _random_input(9), softmax.MIN_TILE_ROWS, softmax.TILE_CELLS
    answers = []
    for height in (64, 2):
        softmax.MIN_TILE_ROWS, softmax.TILE_CELLS = height, 1
        torch.manual_seed(7 + world.rank)
        queries, documents = (torch.randn(9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        loss = InfoNCE(config(implementation=way, directions=ALL_SIDES))
        output = loss(queries, documents, batch_info)
        output.local_loss.backward()
        answers.append((output.local_loss.detach(), queries.grad, documents.grad))
    softmax.MIN_TILE_ROWS, softmax.TILE_CELLS = least, cells
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-12, atol=1e-14)


def _random_input(rows: int) -> BatchInfo:
    return BatchInfo(
        owners=torch.arange(rows), query_keys=torch.randint(2**40, (rows,)), document_keys=torch.randint(2**40, (rows,))
    )


@pytest.mark.parametrize("way", [Implementation.tiled, Implementation.ring])
def test_height_of_tiles(ranks, way):
    ranks(2, tiles_of_a_few_rows, way)


def lists_and_masks(world: World, way: Implementation) -> None:
    """What is no negative is listed where it is little, and masked where it is much: the same."""
    batch, rows = duplicates(), list(range(world.rank, len(SIZES), world.size))
    local_batch, listed = batch.of_rank(rows, torch.float64), scores.MAX_LISTED
    answers = []
    for at_most in (listed, 1e9, -1e9):
        scores.MAX_LISTED = at_most
        queries, documents = (vectors_.clone().requires_grad_() for vectors_ in local_batch[:2])
        output = InfoNCE(config(implementation=way, directions=ALL_SIDES))(queries, documents, local_batch[2])
        output.local_loss.backward()
        answers.append((output.local_loss.detach(), queries.grad, documents.grad))
    scores.MAX_LISTED = listed
    for other in answers[1:]:
        torch.testing.assert_close(answers[0], other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_lists_and_masks_of_no_negatives(ranks, way):
    ranks(2, lists_and_masks, way)


def equal_vectors(world: World, way: Implementation, options: dict, dtype: torch.dtype) -> tuple[float, float]:
    """Texts that differ, but not to the model (their letters' case): documents 2 i and 2 i + 1 have one vector."""
    torch.manual_seed(0)
    pairs = torch.nn.functional.normalize(torch.randn(6, 384, dtype=dtype), dim=1).repeat_interleave(2, dim=0)
    mine = slice(world.rank, None, world.size)
    rows = pairs[mine].clone().requires_grad_()
    batch_info = BatchInfo(
        owners=torch.arange(len(rows)),
        query_keys=torch.arange(12)[mine],
        document_keys=torch.arange(12)[mine],
        guides={"big": Guide(pairs[mine].float(), pairs[mine].float())} if "guide" in options else {},
    )
    loss = InfoNCE(InfoNCEConfig(temperature=0.05, implementation=way, **options))
    output = loss(rows, pairs[mine], batch_info)
    return output.local_loss.item(), output.metrics["accuracy"].item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"false_negative_margin": 0.0}, {"guide": "big"}])
def test_equal_similarities_are_not_judged_by_rounding_errors(ranks, way, options):
    """A document as similar as the positive is not above it: it stays, and the loss is log 2 on any number of ranks."""
    for size in (1, 2, 3):
        for dtype in (torch.float32, torch.float64):
            found = ranks(size, equal_vectors, way, options, dtype)
            assert sum(local_loss for local_loss, _ in found) == pytest.approx(math.log(2), rel=1e-4)
            assert sum(right for _, right in found) == 0, "a positive that is equalled does not beat"


def equal_queries_apart(world: World) -> float:
    """Two rows of one query; the hard negative of the first is the second one's positive."""
    torch.manual_seed(0)
    queries, documents = torch.randn(2, 8)[[0, 0]], torch.randn(3, 8)
    rows = [[0, 1], [2]]  # documents of the rows
    mine = list(range(world.rank, 2, world.size))
    batch_info = BatchInfo(
        owners=torch.tensor([at for at, row in enumerate(mine) for _ in rows[row]], dtype=torch.int64),
        query_keys=torch.tensor([7 for _ in mine], dtype=torch.int64),
        document_keys=torch.tensor([[10, 11, 11][k] for row in mine for k in rows[row]], dtype=torch.int64),
    )
    places = [k for row in mine for k in rows[row]]
    return InfoNCE(config(in_batch_negatives=False))(queries[mine], documents[places], batch_info).local_loss.item()


def test_without_in_batch_negatives_an_equal_querys_answer_is_no_negative_either(ranks):
    for size in (1, 2):
        assert sum(ranks(size, equal_queries_apart)) == 0.0


def small_losses(world: World, way: Implementation) -> None:
    """At a loss of 1e-7 and less logsumexp(all) - positive is a multiple of fp32's rounding, or zero."""
    for gap in (5.0, 10.0, 17.0, 25.0):
        queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        documents = torch.tensor([[gap, 0.0], [0.0, gap]])
        batch_info = BatchInfo(
            owners=torch.tensor([0, 1]), query_keys=torch.tensor([1, 2]), document_keys=torch.tensor([1, 2])
        )
        options = InfoNCEConfig(temperature=1.0, similarity=Similarity.dot, implementation=way)
        output = InfoNCE(options)(queries, documents, batch_info)
        output.local_loss.backward()
        exact = torch.tensor(-gap, dtype=torch.float64).exp()
        assert output.local_loss.item() == pytest.approx(torch.log1p(exact).item(), rel=1e-5)
        slope = (exact / (1 + exact)).item() * gap / 2
        assert queries.grad[0].tolist() == pytest.approx([-slope, slope], rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_small_losses_are_exact(ranks, way):
    ranks(1, small_losses, way)


def accuracy(world: World, way: Implementation) -> float:
    queries = torch.eye(4)[world.rank :: world.size]
    documents = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0], [0, 0.9, 0, 0.1]])[
        world.rank :: world.size
    ]
    batch_info = BatchInfo(
        owners=torch.arange(len(queries)),
        query_keys=torch.arange(4)[world.rank :: world.size],
        document_keys=torch.tensor([0, 1, 2, 3])[world.rank :: world.size],
    )
    options = config(implementation=way, mask_duplicates=False)
    return InfoNCE(options)(queries, documents, batch_info).metrics["accuracy"].item()


@pytest.mark.parametrize("way", WAYS)
def test_accuracy_counts_ties_as_beaten(ranks, way):
    """Row 0 is right, row 1 beaten, row 2 has a negative that scores as high, row 3 is right."""
    for size in (1, 3):
        assert sum(ranks(size, accuracy, way)) == pytest.approx(0.5)


def bounded(world: World) -> None:
    """A temperature that an optimiser pushed out of its bounds is used at the bound, and can come back."""
    options = InfoNCEConfig(temperature=0.05, learn_temperature=True, temperature_bounds=[0.02, 0.1])
    loss = InfoNCE(options)
    for pushed, at in ((9.0, 0.02), (-9.0, 0.1)):
        with torch.no_grad():
            loss.temperature.log_scale.fill_(pushed)
        output = loss(torch.randn(6, 8), torch.randn(6, 8), _random_input(6))
        output.local_loss.backward()
        assert output.metrics["temperature"].item() == pytest.approx(at, rel=1e-5)
        assert loss.temperature.log_scale.grad.abs() > 0
        loss.zero_grad()


def test_bounds_of_the_temperature(ranks):
    ranks(1, bounded)


class Given(nn.Module):
    """Stands in for a SentenceTransformer: its texts are vectors already."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


THEIRS = [
    ({}, {}),
    (
        {"directions": ALL_SIDES, "mask_duplicates": False},
        {"directions": ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc")},
    ),
    (
        {
            "directions": [LossDirection.query_document, LossDirection.document_query],
            "partition_mode": PartitionMode.separate,
        },
        {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    ),
    *(
        ({"hardness": ours, "hardness_strength": 4.0}, {"hardness_mode": name, "hardness_strength": 4.0})
        for ours, name in (
            (Hardness.in_batch, "in_batch_negatives"),
            (Hardness.hard, "hard_negatives"),
            (Hardness.all, "all_negatives"),
        )
    ),
]


def theirs(world: World, ours: dict, options: dict) -> None:
    torch.manual_seed(0)
    columns = [torch.nn.functional.normalize(torch.randn(6, 8), dim=1) for _ in range(3)]
    model = SentenceTransformer(modules=[Given()], device="cpu")
    expected = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, **options)(
        [{"vectors": column} for column in columns], labels=torch.empty(0)
    )
    documents = torch.stack(columns[1:], dim=1).flatten(0, 1)
    batch_info = BatchInfo(
        owners=torch.arange(6).repeat_interleave(2), query_keys=torch.arange(6), document_keys=torch.arange(12)
    )
    output = InfoNCE(config(**ours))(columns[0], documents, batch_info)
    assert output.local_loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("ours", "options"), THEIRS)
def test_as_sentence_transformers(ranks, ours, options):
    ranks(1, theirs, ours, options)


def gist(world: World, margin: float, kind: str) -> None:
    torch.manual_seed(0)
    (queries, documents), (seen, others) = (torch.randn(2, 9, width) for width in (8, 5))
    tokenizer = placeholder_tokenizer()
    model, guide = PlaceholderModel("vectors", 8, tokenizer), PlaceholderModel("guide", 5, tokenizer)
    features = [{"vectors": queries, "guide": seen}, {"vectors": documents, "guide": others}]
    theirs_ = GISTEmbedLoss(model, guide, temperature=TEMPERATURE, margin_strategy=kind, margin=margin)
    batch_info = replace(_random_input(9), guides={"big": Guide(seen, others)})
    ours = InfoNCE(
        config(
            directions=[LossDirection.query_document, LossDirection.query_query, LossDirection.document_document],
            guide="big",
            guide_margin=margin,
            guide_margin_kind=MarginKind(kind),
            mask_duplicates=False,
        )
    )
    found = ours(queries, documents, batch_info).local_loss.item()
    assert found == pytest.approx(theirs_(features, torch.empty(0)).item(), rel=1e-5)


@pytest.mark.parametrize(("margin", "kind"), [(0.0, "absolute"), (0.3, "absolute"), (0.2, "relative")])
def test_as_gist_embed(ranks, margin, kind):
    """Without in-batch hard negatives; with some, `document_document` compares with those too, theirs does not."""
    ranks(1, gist, margin, kind)


@pytest.mark.parametrize(
    ("queries", "documents", "expected"),
    [
        ([256] * 8, [512] * 8, Implementation.plain),
        ([4096] * 8, [4096] * 8, Implementation.tiled),
        ([65536] * 8, [65536] * 8, Implementation.ring),
        ([2**20], [2**20], Implementation.tiled),  # a single rank has no ring
    ],
)
def test_implementation_is_chosen_by_size(queries, documents, expected):
    like = torch.empty(0, 1024)
    assert choose_implementation(InfoNCEConfig(), Counts(queries, documents), like) is expected
    forced = InfoNCEConfig(implementation=Implementation.ring)
    assert choose_implementation(forced, Counts(queries, documents), like) is Implementation.ring


def test_choosing():
    loss = build_loss(InfoNCEConfig(temperature=0.3, mask_duplicates=False), dimension=8, seed=0)
    assert isinstance(loss, InfoNCE)
    assert not list(loss.parameters())
