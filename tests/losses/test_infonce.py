"""InfoNCE equals its textbook form: value and gradient, for all options, implementations and numbers of ranks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import GISTEmbedLoss, MultipleNegativesRankingLoss
from torch import Tensor

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
from embedtrain.losses import excluded, softmax
from embedtrain.losses.build import build_loss
from embedtrain.losses.excluded import Exclusion, no_negatives_warning
from embedtrain.losses.infonce import InfoNCE, choose_implementation
from embedtrain.losses.sentence_transformers import PlaceholderModel, placeholder_tokenizer
from embedtrain.losses.types import BatchInfo, Counts, GlobalRows, Guide, Sizes
from tests.losses.global_batch import Case, GlobalVectors, check, check_all, complete, vectors
from tests.losses.reference_loss import PrecomputedVectors
from tests.marks import slow_but

TEMPERATURE = 0.1
ALL_DIRECTIONS = list(LossDirection)
IMPLEMENTATIONS = [Implementation.plain, Implementation.tiled, Implementation.ring]


def config(**options) -> InfoNCEConfig:
    return InfoNCEConfig(**({"temperature": TEMPERATURE} | options))


def textbook(options: InfoNCEConfig):
    """-log softmax at the positive, row by row and candidate by candidate."""

    def similarity_of(a: Tensor, b: Tensor) -> Tensor:
        return a @ b if options.similarity is Similarity.dot else a @ b / (a.norm() * b.norm())

    def loss(batch: GlobalVectors, own: dict[str, Tensor]) -> Tensor:
        scale = own["temperature.log_scale"].exp()[0] if own else 1.0 / options.temperature
        answers = [batch.documents_of(row)[0] for row in range(len(batch.sizes))]
        owner = [row for row, size in enumerate(batch.sizes) for _ in range(size)]
        guide = batch.guides.get(options.guide)
        equal = [batch.document_keys] + ([] if batch.document_ids is None else [batch.document_ids])

        def same(a: int, b: int) -> bool:
            return any(bool(keys[a] == keys[b]) for keys in equal)

        def answers_of(row: int) -> list[int]:
            alike = [answers[other] for other, key in enumerate(batch.query_keys) if key == batch.query_keys[row]]
            known = {answer for query, answer in batch.known_answers if query == batch.query_keys[row]}
            return [*alike, *(number for number, key in enumerate(batch.document_keys.tolist()) if key in known)]

        def answers_query(document: int, row: int) -> bool:
            return any(same(document, answer) for answer in answers_of(row))

        def negatives(direction: LossDirection, row: int) -> list[Tensor]:
            """The scores of the negatives of a row."""
            scores = []
            by_document = direction in (LossDirection.query_document, LossDirection.document_document)
            for j in range(len(owner) if by_document else len(answers)):
                own_row = owner[j] == row if by_document else j == row
                is_self = {
                    LossDirection.query_document: j == answers[row],
                    # GTE's joint softmax has the positive pair in this direction as well.
                    LossDirection.document_query: j == row and options.partition_mode is PartitionMode.separate,
                    LossDirection.query_query: j == row,
                    LossDirection.document_document: own_row,
                }[direction]
                duplicate = {
                    LossDirection.query_document: lambda j=j: answers_query(j, row),
                    LossDirection.document_document: lambda j=j: answers_query(j, row),
                    LossDirection.query_query: lambda j=j: any(answers_query(answer, row) for answer in answers_of(j)),
                    LossDirection.document_query: lambda j=j: j != row and answers_query(answers[row], j),
                }[direction]()
                if is_self or (options.mask_duplicates and duplicate):
                    continue
                if not options.in_batch_negatives and not own_row:
                    continue
                hard = {
                    Hardness.none: False,
                    Hardness.in_batch: not own_row,
                    Hardness.hard: own_row,
                    Hardness.all: True,
                }[options.hardness] and direction is LossDirection.query_document
                of_query = direction in (LossDirection.query_document, LossDirection.query_query)
                anchor = batch.queries[row] if of_query else batch.documents[answers[row]]
                column = batch.documents[j] if by_document else batch.queries[j]
                itself = direction is LossDirection.document_query and j == row
                if guide is not None and not itself:
                    unit = torch.nn.functional.normalize
                    g, d = unit(guide.queries, dim=1), unit(guide.documents, dim=1)
                    best = g[row] @ d[answers[row]]
                    slack = options.guide_margin * (
                        best.abs() if options.guide_margin_kind is MarginKind.relative else 1.0
                    )
                    if (g[row] if of_query else d[answers[row]]) @ (d[j] if by_document else g[j]) > best - slack:
                        continue
                similarity = similarity_of(anchor, column)
                right = similarity_of(batch.queries[row], batch.documents[answers[row]])
                if (
                    options.false_negative_margin is not None
                    and not itself
                    and similarity > right + options.false_negative_margin
                ):
                    continue
                scores.append(similarity * scale + hard * options.hardness_strength * similarity.detach())
            return scores

        total = batch.queries.new_zeros(())
        for row in range(len(answers)):
            right = (similarity_of(batch.queries[row], batch.documents[answers[row]]) - options.margin) * scale
            scored = [negatives(direction, row) for direction in options.directions]
            if options.partition_mode is PartitionMode.joint:
                scored = [[score for scores in scored for score in scores]]
            for part in scored:
                log_p = torch.log_softmax(torch.stack([right, *part]), dim=0)[0]
                total = total - (1 - log_p.detach().exp()) ** options.focal * log_p / len(scored)
        return total / len(answers)

    return loss


SIZES = (1, 3, 2, 1, 4, 2, 1)


def duplicates() -> GlobalVectors:
    """Equal queries, equal documents, positives that are hard negatives elsewhere; equal texts have equal vectors."""
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
    """Documents 1 and 6, and 4 and 8, have the same id but different texts."""
    batch = vectors(SIZES)
    ids = batch.document_keys + 100
    ids[6], ids[8] = ids[1], ids[4]
    return replace(batch, document_ids=ids)


def known_answers() -> GlobalVectors:
    """Also with answers from elsewhere in the data: own and other documents, two queries that share one, no others."""
    query, document = 1000, 5000
    known = ((query + 1, 2), (query + 1, 6), (query + 6, 6), (query + 6, 9), (query, 11), (query + 3, 4))
    pairs = tuple((key, document + number) for key, number in known)
    return replace(duplicates(), known_answers=(*pairs, (77, document), (query, 99)))


PROBLEMS = {
    "plain": ((1,) * 7, {}),
    "hard negatives": (SIZES, {}),
    "soft": (SIZES, {"temperature": 5.0}),
    "dot": (vectors(SIZES, normalised=False), {"similarity": Similarity.dot, "temperature": 2.0}),
    "cosine of any vectors": (vectors(SIZES, normalised=False), {}),
    "duplicates": (duplicates(), {}),
    "duplicates, not masked": (duplicates(), {"mask_duplicates": False}),
    "duplicates, all directions": (duplicates(), {"directions": ALL_DIRECTIONS}),
    "known answers": (known_answers(), {"directions": ALL_DIRECTIONS}),
    "known answers, not masked": (known_answers(), {"mask_duplicates": False}),
    "ids": (with_ids(), {"directions": ALL_DIRECTIONS}),
    "symmetric": (
        SIZES,
        {
            "directions": [LossDirection.query_document, LossDirection.document_query],
            "partition_mode": PartitionMode.separate,
        },
    ),
    "all directions": (SIZES, {"directions": ALL_DIRECTIONS, "mask_duplicates": False}),
    "margin": (SIZES, {"margin": 0.2}),
    "false negative margin": (SIZES, {"false_negative_margin": 0.1, "directions": ALL_DIRECTIONS}),
    "negative false negative margin": (SIZES, {"false_negative_margin": -0.3}),
    "guide": (vectors(SIZES, guides=["big"]), {"guide": "big", "directions": ALL_DIRECTIONS}),
    "guide, margin": (vectors(SIZES, guides=["big"]), {"guide": "big", "guide_margin": 0.2}),
    "guide, relative margin": (
        vectors(SIZES, guides=["big"]),
        {"guide": "big", "guide_margin": 0.3, "guide_margin_kind": MarginKind.relative, "directions": ALL_DIRECTIONS},
    ),
    "hardness of in-batch negatives": (SIZES, {"hardness": Hardness.in_batch, "hardness_strength": 3.0}),
    "hardness of hard negatives": (SIZES, {"hardness": Hardness.hard, "hardness_strength": 3.0}),
    "hardness of all": (
        SIZES,
        {
            "hardness": Hardness.all,
            "hardness_strength": 3.0,
            "directions": ALL_DIRECTIONS,
            "false_negative_margin": 0.2,
        },
    ),
    "focal": (
        SIZES,
        {"focal": 0.5, "temperature": 1.0, "directions": ALL_DIRECTIONS[:2], "learn_temperature": True}
        | {"partition_mode": PartitionMode.separate},
    ),
    "trained temperature": (
        SIZES,
        {"learn_temperature": True, "margin": 0.1, "directions": ALL_DIRECTIONS, "hardness": Hardness.all}
        | {"hardness_strength": 2.0},
    ),
    "trained temperature, separate": (
        SIZES,
        {
            "learn_temperature": True,
            "margin": 0.1,
            "directions": ALL_DIRECTIONS[:2],
            "partition_mode": PartitionMode.separate,
        },
    ),
    "no negatives": ((1,), {}),
    "one row": ((3,), {}),
    "fewer rows than ranks": ((2, 1), {}),
    "all negatives excluded": (SIZES, {"false_negative_margin": -2.5}),
}


# The others change one option of these.
QUICK = (
    *("hard negatives", "dot", "known answers", "ids", "symmetric", "guide, relative margin"),
    *("hardness of all", "focal", "trained temperature", "fewer rows than ranks", "all negatives excluded"),
)


@pytest.mark.parametrize("name", slow_but(QUICK, PROBLEMS))
def test_textbook(ranks, name):
    sizes, options = PROBLEMS[name]
    batch = sizes if isinstance(sizes, GlobalVectors) else vectors(sizes)
    implementations = [config(implementation=implementation, **options) for implementation in IMPLEMENTATIONS]
    # Even on 1 and 3 ranks, uneven on 2, and with empty ranks.
    check_all(ranks, [Case(chosen, batch, textbook(chosen)) for chosen in implementations], only=[0, 2, 4, 7])


@pytest.mark.quick("ring", "plain")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_distribution_of_rows(ranks, implementation):
    chosen = config(implementation=implementation, directions=ALL_DIRECTIONS, learn_temperature=True)
    check(ranks, chosen, known_answers(), textbook(chosen))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"margin": 0.2},
        {"false_negative_margin": 0.1},
        {"hardness": Hardness.hard, "hardness_strength": 3.0, "focal": 2.0},
        {"guide": "big"},
    ],
)
def test_only_own_negatives(ranks, options):
    chosen = config(in_batch_negatives=False, learn_temperature=True, **options)
    check(ranks, chosen, vectors(SIZES, guides=["big"]), textbook(chosen), only=[0, 2, 4, 7])


def tiles_of_a_few_rows(world: World, implementation: Implementation) -> None:
    """Tiles of 2 rows give the same result as one tile."""
    torch.manual_seed(world.rank)
    batch_info, min_rows, cells = _random_input(9), softmax.MIN_TILE_ROWS, softmax.TILE_CELLS
    answers = []
    for height in (64, 2):
        softmax.MIN_TILE_ROWS, softmax.TILE_CELLS = height, 1
        torch.manual_seed(7 + world.rank)
        queries, documents = (torch.randn(9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        loss = InfoNCE(config(implementation=implementation, directions=ALL_DIRECTIONS))
        output = loss(queries, documents, batch_info)
        output.local_loss.backward()
        answers.append((output.local_loss.detach(), queries.grad, documents.grad))
    softmax.MIN_TILE_ROWS, softmax.TILE_CELLS = min_rows, cells
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-12, atol=1e-14)


def _random_input(rows: int) -> BatchInfo:
    return BatchInfo(
        owners=torch.arange(rows), query_keys=torch.randint(2**40, (rows,)), document_keys=torch.randint(2**40, (rows,))
    )


@pytest.mark.parametrize("implementation", [Implementation.tiled, Implementation.ring])
def test_height_of_tiles(ranks, implementation):
    ranks(2, tiles_of_a_few_rows, implementation)


def lists_and_masks(world: World, implementation: Implementation) -> None:
    """Listing and masking excluded candidates give the same result."""
    batch, rows = known_answers(), list(range(world.rank, len(SIZES), world.size))
    local_batch, default = batch.of_rank(rows, torch.float64), excluded.MAX_LISTED
    answers = []
    for limit in (default, 1e9, -1e9):
        excluded.MAX_LISTED = limit
        queries, documents = (vectors_.clone().requires_grad_() for vectors_ in local_batch[:2])
        output = InfoNCE(config(implementation=implementation, directions=ALL_DIRECTIONS))(
            queries, documents, complete(batch, local_batch[2])
        )
        output.local_loss.backward()
        answers.append((output.local_loss.detach(), queries.grad, documents.grad))
    excluded.MAX_LISTED = default
    for answer in answers[1:]:
        torch.testing.assert_close(answers[0], answer, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_listed_and_masked_candidates(ranks, implementation):
    ranks(2, lists_and_masks, implementation)


def equal_vectors(
    world: World, implementation: Implementation, options: dict, dtype: torch.dtype
) -> tuple[float, float]:
    """Different texts with equal vectors (such as different case): documents 2 i and 2 i + 1."""
    torch.manual_seed(0)
    pairs = torch.nn.functional.normalize(torch.randn(6, 384, dtype=dtype), dim=1).repeat_interleave(2, dim=0)
    local = slice(world.rank, None, world.size)
    rows = pairs[local].clone().requires_grad_()
    batch_info = BatchInfo(
        owners=torch.arange(len(rows)),
        query_keys=torch.arange(12)[local],
        document_keys=torch.arange(12)[local],
        guides={"big": Guide(pairs[local].float(), pairs[local].float())} if "guide" in options else {},
    )
    loss = InfoNCE(InfoNCEConfig(temperature=0.05, implementation=implementation, **options))
    output = loss(rows, pairs[local], batch_info)
    return output.local_loss.item(), output.metrics["accuracy"].item()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{"false_negative_margin": 0.0}, {"guide": "big"}])
def test_equal_similarities_do_not_depend_on_rounding(ranks, implementation, options):
    """A document as similar as the positive is not excluded: the loss is log 2 on any number of ranks."""
    for size in (1, 2, 3):
        for dtype in (torch.float32, torch.float64):
            answers = ranks(size, equal_vectors, implementation, options, dtype)
            assert sum(local_loss for local_loss, _ in answers) == pytest.approx(math.log(2), rel=1e-4)
            assert sum(accuracy for _, accuracy in answers) == 0, "a tie is not correct"


def equal_queries_on_two_rows(world: World) -> float:
    """Two rows with the same query; the hard negative of the first is the positive of the second."""
    torch.manual_seed(0)
    queries, documents = torch.randn(2, 8)[[0, 0]], torch.randn(3, 8)
    rows = [[0, 1], [2]]  # documents of the rows
    rank_batch = list(range(world.rank, 2, world.size))
    batch_info = BatchInfo(
        owners=torch.tensor([at for at, row in enumerate(rank_batch) for _ in rows[row]], dtype=torch.int64),
        query_keys=torch.tensor([7 for _ in rank_batch], dtype=torch.int64),
        document_keys=torch.tensor([[10, 11, 11][k] for row in rank_batch for k in rows[row]], dtype=torch.int64),
    )
    indices = [k for row in rank_batch for k in rows[row]]
    return InfoNCE(config(in_batch_negatives=False))(
        queries[rank_batch], documents[indices], batch_info
    ).local_loss.item()


def test_own_negatives_exclude_positives_of_equal_queries(ranks):
    for size in (1, 2):
        assert sum(ranks(size, equal_queries_on_two_rows)) == 0.0


def small_losses(world: World, implementation: Implementation) -> None:
    """For losses below 1e-7, logsumexp(all) - positive would be a multiple of fp32's rounding, or zero."""
    for gap in (5.0, 10.0, 17.0, 25.0):
        queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        documents = torch.tensor([[gap, 0.0], [0.0, gap]])
        batch_info = BatchInfo(
            owners=torch.tensor([0, 1]), query_keys=torch.tensor([1, 2]), document_keys=torch.tensor([1, 2])
        )
        options = InfoNCEConfig(temperature=1.0, similarity=Similarity.dot, implementation=implementation)
        output = InfoNCE(options)(queries, documents, batch_info)
        output.local_loss.backward()
        exact = torch.tensor(-gap, dtype=torch.float64).exp()
        assert output.local_loss.item() == pytest.approx(torch.log1p(exact).item(), rel=1e-5)
        grad = (exact / (1 + exact)).item() * gap / 2
        assert queries.grad[0].tolist() == pytest.approx([-grad, grad], rel=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_small_losses_are_exact(ranks, implementation):
    ranks(1, small_losses, implementation)


def accuracy(world: World, implementation: Implementation) -> float:
    queries = torch.eye(4)[world.rank :: world.size]
    documents = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0], [0, 0.9, 0, 0.1]])[
        world.rank :: world.size
    ]
    batch_info = BatchInfo(
        owners=torch.arange(len(queries)),
        query_keys=torch.arange(4)[world.rank :: world.size],
        document_keys=torch.tensor([0, 1, 2, 3])[world.rank :: world.size],
    )
    options = config(implementation=implementation, mask_duplicates=False)
    return InfoNCE(options)(queries, documents, batch_info).metrics["accuracy"].item()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_accuracy_counts_ties_as_wrong(ranks, implementation):
    """Rows 0 and 3 are correct, row 1 is not, and row 2 has a negative with the positive's score."""
    for size in (1, 3):
        assert sum(ranks(size, accuracy, implementation)) == pytest.approx(0.5)


def bounded(world: World) -> None:
    """A temperature out of its bounds is clamped to the bound and still has a gradient."""
    options = InfoNCEConfig(temperature=0.05, learn_temperature=True, temperature_bounds=[0.02, 0.1])
    loss = InfoNCE(options)
    for log_scale, expected in ((9.0, 0.02), (-9.0, 0.1)):
        with torch.no_grad():
            loss.temperature.log_scale.fill_(log_scale)
        output = loss(torch.randn(6, 8), torch.randn(6, 8), _random_input(6))
        output.local_loss.backward()
        assert output.metrics["temperature"].item() == pytest.approx(expected, rel=1e-5)
        assert loss.temperature.log_scale.grad.abs() > 0
        loss.zero_grad()


def test_bounds_of_the_temperature(ranks):
    ranks(1, bounded)


SENTENCE_TRANSFORMERS = [
    ({}, {}),
    (
        {"directions": ALL_DIRECTIONS, "mask_duplicates": False},
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


def compare_with_sentence_transformers(world: World, ours: dict, options: dict) -> None:
    torch.manual_seed(0)
    columns = [torch.nn.functional.normalize(torch.randn(6, 8), dim=1) for _ in range(3)]
    model = SentenceTransformer(modules=[PrecomputedVectors()], device="cpu")
    expected = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, **options)(
        [{"vectors": column} for column in columns], labels=torch.empty(0)
    )
    documents = torch.stack(columns[1:], dim=1).flatten(0, 1)
    batch_info = BatchInfo(
        owners=torch.arange(6).repeat_interleave(2), query_keys=torch.arange(6), document_keys=torch.arange(12)
    )
    output = InfoNCE(config(**ours))(columns[0], documents, batch_info)
    assert output.local_loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("ours", "options"), SENTENCE_TRANSFORMERS)
def test_equals_sentence_transformers(ranks, ours, options):
    ranks(1, compare_with_sentence_transformers, ours, options)


def gist(world: World, margin: float, kind: str) -> None:
    torch.manual_seed(0)
    (queries, documents), (guide_queries, guide_documents) = (torch.randn(2, 9, width) for width in (8, 5))
    tokenizer = placeholder_tokenizer()
    model, guide = PlaceholderModel("vectors", 8, tokenizer), PlaceholderModel("guide", 5, tokenizer)
    features = [{"vectors": queries, "guide": guide_queries}, {"vectors": documents, "guide": guide_documents}]
    reference = GISTEmbedLoss(model, guide, temperature=TEMPERATURE, margin_strategy=kind, margin=margin)
    batch_info = replace(_random_input(9), guides={"big": Guide(guide_queries, guide_documents)})
    ours = InfoNCE(
        config(
            directions=[LossDirection.query_document, LossDirection.query_query, LossDirection.document_document],
            guide="big",
            guide_margin=margin,
            guide_margin_kind=MarginKind(kind),
            mask_duplicates=False,
        )
    )
    value = ours(queries, documents, batch_info).local_loss.item()
    assert value == pytest.approx(reference(features, torch.empty(0)).item(), rel=1e-5)


@pytest.mark.parametrize(("margin", "kind"), [(0.0, "absolute"), (0.3, "absolute"), (0.2, "relative")])
def test_equals_gist_embed(ranks, margin, kind):
    """Without hard negatives: `document_document` compares with them, GISTEmbedLoss does not."""
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
    like = 1024, torch.float32
    assert choose_implementation(InfoNCEConfig(), Counts(queries, documents), *like) is expected
    forced = InfoNCEConfig(implementation=Implementation.ring)
    assert choose_implementation(forced, Counts(queries, documents), *like) is Implementation.ring


def test_pages_travel_although_their_scores_are_few():
    """Documents of 1,030 rows are 4 GiB on 64 ranks, and a rank has 34 MB of scores of the rows of its queries."""
    counts, pages = Counts([64] * 64, [64] * 64), Sizes(np.full(4096, 30), np.full(4096, 1030))
    assert choose_implementation(InfoNCEConfig(), counts, 128, torch.float32, pages) is Implementation.ring
    short = Sizes(np.full(4096, 30), np.full(4096, 180))
    assert choose_implementation(InfoNCEConfig(), counts, 128, torch.float32, short) is Implementation.plain


def test_fixed_temperature_has_no_parameters():
    loss = build_loss(InfoNCEConfig(temperature=0.3, mask_duplicates=False), dimension=8, seed=0)
    assert isinstance(loss, InfoNCE)
    assert not list(loss.parameters())


def global_rows(*rows: tuple[int, list[int]]) -> GlobalRows:
    """Rows of one rank: the key of the query, and those of its documents, the positive first."""
    return GlobalRows(
        rank=0,
        num_rows=[len(rows)],
        num_documents=np.array([len(documents) for _, documents in rows]),
        query_keys=np.array([query for query, _ in rows]),
        document_keys=np.array([key for _, documents in rows for key in documents]),
    )


IN_BATCH = Exclusion(directions=(LossDirection.query_document,), duplicates=True)


@pytest.mark.parametrize(
    ("rows", "in_batch", "own"),
    [
        ([(1, [7])], False, False),
        ([(1, [7]), (1, [7])], False, False),
        ([(1, [7]), (2, [7])], False, False),
        ([(1, [7]), (1, [8])], False, False),  # both answer the query
        ([(1, [7, 8]), (1, [8, 7])], False, False),
        ([(1, [7]), (2, [8])], True, False),
        ([(1, [7, 9])], True, True),
        ([(1, [7]), (1, [8]), (2, [7])], True, False),  # 8 is a negative of the query 2
    ],
)
def test_a_batch_without_negatives_is_noticed(rows, in_batch, own):
    batch, alone = global_rows(*rows), replace(IN_BATCH, directions=())
    warning = no_negatives_warning([IN_BATCH, "something else"], batch)
    assert (warning is None) == in_batch
    assert (no_negatives_warning([alone], batch) is None) == own
    assert (no_negatives_warning([alone, IN_BATCH], batch) is None) == (own or in_batch)
    assert no_negatives_warning(["something else"], batch) is None  # a loss of pairs
    texts = sum(len(documents) for _, documents in rows)
    assert (no_negatives_warning([replace(IN_BATCH, duplicates=False)], batch) is None) == (texts > 1)
    if warning is not None:
        assert warning.startswith("no query of this batch has a negative (") and "train.global_batch_size" in warning
