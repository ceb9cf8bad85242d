"""Distillation of similarities equals its formulas in float64 on any number of ranks, plain, in tiles and in a ring."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from embedtrain.config.losses import (
    CandidateSet,
    DistillSimilaritiesConfig,
    Divergence,
    Implementation,
    LossDirection,
    MatryoshkaConfig,
    Similarity,
    SimilarityMSEConfig,
)
from embedtrain.distributed.world import World
from embedtrain.losses import distill_similarities
from embedtrain.losses.types import FROM_ROWS, Guide
from tests.losses.global_batch import Case, GlobalVectors, check, check_all, run, run_all, vectors

SIZES = (1, 3, 2, 1, 4, 2)
WAYS = [Implementation.plain, Implementation.tiled, Implementation.ring]
QD, DQ, QQ, DD = LossDirection


def with_teacher(sizes: tuple[int, ...] = SIZES, *, ids: bool | None = None) -> GlobalVectors:
    """Rows with a teacher's vectors of 11 dimensions; with `ids`, equal queries and duplicates of positives."""
    batch, other = vectors(sizes, normalised=False), vectors(sizes, seed=1, dimension=11, normalised=False)
    batch = replace(batch, guides={FROM_ROWS: Guide(other.queries.float().double(), other.documents.float().double())})
    if ids is None:
        return batch
    #       row 0, 1        , 2     , 3 , 4             , 5
    keys = [10, 20, 21, 10, 30, 10, 40, 50, 30, 51, 50, 60, 21]
    batch = replace(batch, query_keys=torch.tensor([1, 2, 1, 3, 4, 2]), document_keys=torch.tensor(keys))
    return replace(batch, document_ids=torch.arange(13) % 6) if ids else batch


def included(batch: GlobalVectors, config: DistillSimilaritiesConfig, direction: LossDirection, row: int) -> list[int]:
    """The candidates of a row, one by one."""
    num_rows = len(batch.sizes)
    own = batch.documents_of(row)
    positives = [batch.documents_of(other)[0] for other in range(num_rows)]
    keys = [keys for keys in (batch.document_keys, batch.document_ids) if keys is not None and config.mask_duplicates]

    def answers(query: int, document: int) -> bool:
        """Whether a document equals, by text or id, the positive of this query or of an equal one."""
        equal = [p for other, p in enumerate(positives) if batch.query_keys[other] == batch.query_keys[query]]
        return any(column[document] == column[p] for column in keys for p in equal)

    match direction:
        case LossDirection.query_document:
            if config.candidates is CandidateSet.row:
                return [d for d in own if d == own[0] or not answers(row, d)]
            return [d for d in range(sum(batch.sizes)) if d == own[0] or not answers(row, d)]
        case LossDirection.document_query:
            return [q for q in range(num_rows) if q == row or not answers(q, positives[row])]
        case LossDirection.query_query:
            of_query = [[p for o, p in enumerate(positives) if batch.query_keys[o] == key] for key in batch.query_keys]
            return [q for q in range(num_rows) if q != row and not any(answers(row, p) for p in of_query[q])]
        case _:
            return [d for d in range(sum(batch.sizes)) if d not in own and not answers(row, d)]


def cosines(a: Tensor, b: Tensor, similarity: Similarity = Similarity.cosine) -> Tensor:
    if similarity is Similarity.cosine:
        a, b = a / a.norm(), b / b.norm(dim=1, keepdim=True)
    return b @ a


def row_divergence(divergence: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    if divergence is Divergence.mse:
        return (student - teacher).square().mean()
    q, p = student.softmax(0), teacher.softmax(0)
    match divergence:
        case Divergence.kl:
            return (p * (p / q).log()).sum()
        case Divergence.reverse_kl:
            return (q * (q / p).log()).sum()
    m = (p + q) / 2
    return ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2


def distilled(config: DistillSimilaritiesConfig):
    student_temperature = config.temperature or 0.05
    temperatures = student_temperature, config.teacher_temperature or student_temperature
    if config.divergence is Divergence.mse:
        temperatures = 1.0, 1.0

    def of_dimension(batch: GlobalVectors, dimension: int | None) -> Tensor:
        guide = batch.guides[FROM_ROWS]
        queries, documents = (values[:, :dimension] for values in (batch.queries, batch.documents))
        total, count = batch.queries.sum() * 0, 0
        for row in range(len(batch.sizes)):
            count += config.candidates is CandidateSet.batch or batch.sizes[row] > 1
            for direction in config.directions:
                positive = batch.documents_of(row)[0]
                anchors = (queries[row], guide.queries[row])
                if direction in (DQ, DD):
                    anchors = (documents[positive], guide.documents[positive])
                columns = (queries, guide.queries) if direction in (DQ, QQ) else (documents, guide.documents)
                chosen = included(batch, config, direction, row)
                if chosen:
                    scores = (
                        cosines(anchors[0], columns[0][chosen], config.similarity or Similarity.cosine)
                        / temperatures[0],
                        cosines(anchors[1], columns[1][chosen]) / temperatures[1],
                    )
                    total = total + row_divergence(config.divergence, *scores) / len(config.directions)
        return total / max(1, count)

    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        return sum(of_dimension(batch, dimension) for dimension in config.matryoshka.dims or [None])

    return textbook


def cases(batch: GlobalVectors, *configs: DistillSimilaritiesConfig) -> list[Case]:
    return [Case(config, batch, distilled(config)) for config in configs]


WARM = {"temperature": 0.3, "teacher_temperature": 0.5}
VARIANTS = [
    DistillSimilaritiesConfig(**WARM),
    DistillSimilaritiesConfig(temperature=0.2, directions=[QD, DQ, QQ, DD]),
    DistillSimilaritiesConfig(**WARM, divergence=Divergence.reverse_kl, similarity=Similarity.dot),
    DistillSimilaritiesConfig(**WARM, divergence=Divergence.js, matryoshka=MatryoshkaConfig(dims=[8, 3])),
    DistillSimilaritiesConfig(divergence=Divergence.mse, directions=[DQ, QD]),
]
WITHIN_ROWS = [
    DistillSimilaritiesConfig(**WARM, candidates=CandidateSet.row),
    DistillSimilaritiesConfig(
        divergence=Divergence.js, candidates=CandidateSet.row, matryoshka=MatryoshkaConfig(dims=[4, 8])
    ),
]


def test_value_and_gradient(ranks):
    configs = [replace(config, implementation=way) for config in VARIANTS for way in WAYS]
    check_all(ranks, cases(with_teacher(), *configs, *WITHIN_ROWS), fp32=3e-5, only=[0, 2, 6])


@pytest.mark.parametrize("ids", [pytest.param(False, marks=pytest.mark.slow), True], ids=["texts", "ids"])
def test_a_masked_candidate_is_in_no_softmax(ranks, ids):
    batch = with_teacher(ids=ids)
    everywhere = DistillSimilaritiesConfig(**WARM, directions=[QD, DQ, QQ, DD])
    assert any(len(included(batch, everywhere, QD, row)) < 13 for row in range(6))
    configs = [replace(everywhere, implementation=way) for way in WAYS]
    configs += [replace(everywhere, mask_duplicates=False), WITHIN_ROWS[0]]
    check_all(ranks, cases(batch, *configs), fp32=3e-5, only=[2])


def in_tiles(world: World, configs, batch: GlobalVectors, rows_of_rank: list[list[int]]) -> list[list[dict]]:
    """All rows in one tile, and one row per tile."""
    results = []
    for cells in (distill_similarities.TILE_CELLS, 1):
        distill_similarities.TILE_CELLS = cells
        results.append([run(world, config, batch, rows_of_rank, torch.float64, 8) for config in configs])
    return results


@pytest.mark.slow
def test_tiles_of_one_row(ranks):
    configs = [
        DistillSimilaritiesConfig(**WARM, divergence=Divergence.js, implementation=way)
        for way in (Implementation.tiled, Implementation.ring)
    ]
    for of_rank in ranks(2, in_tiles, configs, with_teacher(ids=True), [[0, 1, 2, 3], [4, 5]]):
        for whole, cut in zip(*of_rank, strict=True):
            torch.testing.assert_close(cut["documents"], whole["documents"])
            torch.testing.assert_close(cut["queries"], whole["queries"])
            assert cut["local_loss"] == pytest.approx(whole["local_loss"])
            assert cut["metrics"] == pytest.approx(whole["metrics"])


def test_large_differences_and_rows_without_candidates(ranks):
    """Scores of thousands give neither overflow nor NaN; equal rows have no other query to be compared with."""
    batch = with_teacher()
    large = replace(batch, queries=1e3 * batch.queries, documents=1e3 * batch.documents)
    equal = replace(
        batch,
        query_keys=torch.ones(6, dtype=torch.int64),
        document_keys=torch.ones(13, dtype=torch.int64),
    )
    variants = [replace(config, similarity=Similarity.dot) for config in VARIANTS]
    sent = [(replace(config, implementation=way), large) for config in variants for way in WAYS]
    for answers in ranks(2, run_all, sent, [[0, 1, 2], [3, 4, 5]], torch.float32):
        for answer in answers:
            assert math.isfinite(answer["local_loss"])
            assert answer["queries"].isfinite().all()
    configs = [DistillSimilaritiesConfig(**WARM, directions=[QQ, QD], implementation=way) for way in WAYS]
    check_all(ranks, cases(equal, *configs), fp32=3e-5, only=[5])


def test_agreement(ranks):
    """A teacher whose documents are those of the next row agrees with no query; the same vectors agree with all."""
    batch = vectors((1, 1, 1))
    batch = replace(batch, documents=batch.queries)
    same = replace(batch, guides={FROM_ROWS: Guide(batch.queries, batch.documents)})
    shifted = replace(batch, guides={FROM_ROWS: Guide(batch.queries, batch.documents.roll(1, 0))})
    sent = [(DistillSimilaritiesConfig(implementation=way), case) for case in (same, shifted) for way in WAYS]
    answers = ranks(2, run_all, sent, [[0, 1], [2]], torch.float64)
    for (config, case), *of_ranks in zip(sent, *answers, strict=True):
        agreement = sum(answer["metrics"]["agreement"] for answer in of_ranks)
        assert agreement == pytest.approx(float(case is same)), config
        if case is same:
            assert sum(answer["local_loss"] for answer in of_ranks) == pytest.approx(0, abs=1e-12)


def all_pairs(config: SimilarityMSEConfig):
    def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
        guide, total = batch.guides[FROM_ROWS], 0.0
        for dimension in config.matryoshka.dims or [8]:
            student = torch.cat([batch.queries, batch.documents])[:, :dimension]
            teacher = torch.cat([guide.queries, guide.documents])
            terms = []
            for i in range(len(student)):
                others = [j for j in range(len(student)) if j != i]
                terms.append(cosines(student[i], student[others]) - cosines(teacher[i], teacher[others]))
            total = total + torch.cat(terms).square().mean()
        return total

    return textbook


def test_similarity_mse(ranks):
    configs = SimilarityMSEConfig(), SimilarityMSEConfig(matryoshka=MatryoshkaConfig(dims=[4, 8]))
    check_all(ranks, [Case(config, with_teacher(), all_pairs(config)) for config in configs], only=[0, 2, 6])
    check(ranks, configs[0], with_teacher((0, 0, 0)), all_pairs(configs[0]), only=[5])
