"""The loss of BGE-M3 against its formulas in float64, written out with loops, on one and on several ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from embedtrain.config.kind_settings import HybridWeights, M3Settings
from embedtrain.config.losses import Implementation, KDLossType, M3LossConfig
from embedtrain.distributed.world import World
from embedtrain.kinds.late_interaction import score as maxsim
from embedtrain.kinds.m3 import loss as m3
from embedtrain.kinds.m3 import score as lexical
from embedtrain.kinds.m3.score import M3Score
from embedtrain.losses.build import build_loss
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.types import Origin
from tests.losses.global_batch import distributions
from tests.losses.token_vectors import TokenBatch, token_batch

# The vector of a token has fewer dimensions than that of a text.
SETTINGS = M3Settings(dimension=6, token_dimension=4, weights=HybridWeights(0.7, 0.3, 1.2))
CASES = {
    "unified": M3LossConfig(temperature=0.5, self_distillation=False),
    "self-distillation": M3LossConfig(temperature=0.5),
    "later": M3LossConfig(temperature=0.5, self_distillation_start_step=3),
    "weights": M3LossConfig(temperature=0.2, loss_weights=[0.5, 2.0, 0.0, 1.5], mask_duplicates=False),
    "own documents": M3LossConfig(temperature=0.5, in_batch_negatives=False),
    "own documents, duplicates": M3LossConfig(temperature=0.5, in_batch_negatives=False, mask_duplicates=False),
    "teacher": M3LossConfig(temperature=0.5, kd_loss_type=KDLossType.m3_kd_loss, teacher_temperature=0.7),
    "teacher, duplicates": M3LossConfig(
        temperature=0.5, kd_loss_type=KDLossType.m3_kd_loss, mask_duplicates=False, self_distillation=False
    ),
    "kl": M3LossConfig(temperature=0.5, kd_loss_type=KDLossType.kl_div),
    "teacher of own documents": M3LossConfig(
        temperature=0.5, in_batch_negatives=False, kd_loss_type=KDLossType.m3_kd_loss
    ),
    "kl of own documents": M3LossConfig(temperature=0.5, in_batch_negatives=False, kd_loss_type=KDLossType.kl_div),
}
CASES |= {
    f"ring, {name}": replace(config, implementation=Implementation.ring)
    for name, config in CASES.items()
    if config.in_batch_negatives
}
CASES["plain"] = replace(CASES["self-distillation"], implementation=Implementation.plain)
STEP = 2


def m3_batch() -> TokenBatch:
    """Texts whose rows end with a lexical weight and an id (`with_ids`); each id has at most one weight above 0."""
    batch = token_batch(query_rows=(3, 2, 4, 2, 5), candidate_rows=(5, 2, 3, 7, 2, 5, 3, 9, 4))
    generator = torch.Generator().manual_seed(3)

    def rows(vectors: Tensor, sizes: tuple[int, ...]) -> Tensor:
        weights = torch.rand(len(vectors), generator=generator, dtype=torch.float64)
        ids = torch.randint(5, 12, (len(vectors),), generator=generator)
        for text in torch.arange(len(vectors)).split(list(sizes)):
            for index, row in enumerate(text):
                if index == 0 or ids[row] in ids[text[:index]]:
                    weights[row] = 0
        return torch.cat([vectors, weights.unsqueeze(1), ids.unsqueeze(1)], dim=1)

    keys = list(batch.document_keys)
    keys[5] = keys[3]  # a negative of query 2 equals its positive
    return replace(
        batch,
        document_keys=tuple(keys),
        queries=rows(batch.queries, batch.query_rows),
        candidates=rows(batch.candidates, batch.candidate_rows),
    )


def scores_of(batch: TokenBatch) -> list[Tensor]:
    """The dense, lexical and multi-vector scores [N, K]."""
    scores = []
    for query in batch.queries.split(batch.query_rows):
        scores.append([])
        for document in batch.candidates.split(batch.candidate_rows):
            shared = [q[-2] * d[-2] for q in query for d in document if q[-1] == d[-1]]
            multi = (query[1:, :4] @ document[1:, :4].T).amax(dim=1).mean()
            scores[-1].append(torch.stack([query[0, :6] @ document[0, :6], sum(shared, 0 * query[0, -2]), multi]))
        scores[-1] = torch.stack(scores[-1])
    return list(torch.stack(scores).unbind(dim=2))


def formula(config: M3LossConfig, batch: TokenBatch, step: int = STEP) -> Tensor:
    """FlagEmbedding's unified loss with self-distillation, over all documents that are no duplicates."""
    scores = [score / config.temperature for score in scores_of(batch)]
    hybrid = sum(weight * score for weight, score in zip(SETTINGS.weights, scores, strict=True))
    terms = []
    for row, first in enumerate(batch.first):
        equal = [r for r, key in enumerate(batch.query_keys) if key == batch.query_keys[row]]
        answers = {batch.document_keys[batch.first[r]] for r in equal}
        kept = [
            column
            for column, key in enumerate(batch.document_keys)
            if column == first or not (config.mask_duplicates and key in answers)
        ]
        own = [column for column in batch.documents_of([row]) if column in kept]
        if not config.in_batch_negatives:
            kept = own
        logs = [score[row, kept].log_softmax(dim=0) for score in (*scores, hybrid)]
        target = (torch.tensor(batch.labels, dtype=torch.float64)[own] / config.teacher_temperature).softmax(dim=0)
        losses = [_term(config.kd_loss_type, score[row], kept, own, target) for score in (*scores, hybrid)]
        loss = sum(weight * term for weight, term in zip(config.loss_weights, losses, strict=True)) / 4
        if config.self_distillation and step >= config.self_distillation_start_step:
            target = logs[3].detach().exp()
            distilled = sum(-w * target @ log for w, log in zip(config.loss_weights[:3], logs[:3], strict=True)) / 3
            loss = (loss + distilled) / 2
        terms.append(loss)
    return torch.stack(terms).mean()


def _term(kind: KDLossType, scores: Tensor, kept: list[int], own: list[int], target: Tensor) -> Tensor:
    """Of one kind of score of a query; `target` are the teacher's weights of its `own` documents."""
    if kind is KDLossType.m3_kd_loss:
        terms = [
            scores[[column for column in kept if column not in own[:k]]].logsumexp(dim=0) - scores[own[k]]
            for k in range(len(own))
        ]
        return target @ torch.stack(terms)
    entropy = scores[kept].logsumexp(dim=0) - scores[own[0]]
    return entropy - target @ scores[own].log_softmax(dim=0) if kind is KDLossType.kl_div else entropy


def with_ids(part: Part) -> Part:
    """The last column as ids, which have no gradient."""
    rows = part.values.detach()
    return Part(rows[:, :-1].clone().requires_grad_(), part.sizes, rows[:, -1].long())


def local(values: Tensor, sizes: tuple[int, ...], texts: list[int]) -> Tensor:
    return torch.cat([values[:0], *(values.split(list(sizes))[text] for text in texts)])


def run(
    world: World, batch: TokenBatch, rows_of_rank: list[list[int]], cells: int
) -> list[tuple[float, Tensor, Tensor]]:
    """Of each case: the local loss and its gradients at this rank's rows, in tiles of `cells` scores if not 0."""
    defaults = m3.TILE_CELLS, maxsim.BLOCK_CELLS_CPU
    results = []
    try:
        if cells:
            m3.TILE_CELLS = maxsim.BLOCK_CELLS_CPU = cells
        for config in CASES.values():
            loss = build_loss(config, dimension=6, seed=0, score=M3Score(SETTINGS)).double()
            *parts, info = batch.of_rank(world.rank, rows_of_rank, torch.float64)
            queries, documents = map(with_ids, parts)
            output = loss(Encoded((queries,)), Encoded((documents,)), replace(info, origin=Origin(batch=STEP)))
            output.local_loss.backward()
            torch.testing.assert_close(output.row_losses.sum(), output.local_loss.detach())
            grads = [
                torch.zeros_like(p.values) if p.values.grad is None else p.values.grad for p in (queries, documents)
            ]
            results.append((output.local_loss.item(), *grads))
    finally:
        m3.TILE_CELLS, maxsim.BLOCK_CELLS_CPU = defaults
    return results


@pytest.mark.quick("30")
@pytest.mark.parametrize("cells", [0, 30])
def test_formula_on_ranks(ranks, cells):
    batch = m3_batch()
    for number in (0, 1, 6):
        rows_of_rank = distributions(5)[number]
        answers = ranks(len(rows_of_rank), run, batch, rows_of_rank, cells)
        for config, *of_ranks in zip(CASES.values(), *answers, strict=True):
            leaves = [rows.clone().requires_grad_() for rows in (batch.queries, batch.candidates)]
            expected = formula(config, replace(batch, queries=leaves[0], candidates=leaves[1]))
            expected.backward()
            assert sum(answer[0] for answer in of_ranks) == pytest.approx(expected.item(), rel=1e-10)
            for rows, answer in zip(rows_of_rank, of_ranks, strict=True):
                query_grads = local(leaves[0].grad, batch.query_rows, rows)
                document_grads = local(leaves[1].grad, batch.candidate_rows, batch.documents_of(rows))
                torch.testing.assert_close(answer[1], query_grads[:, :-1], rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(answer[2], document_grads[:, :-1], rtol=1e-10, atol=1e-10)


def test_pairs_have_the_weighted_sum_of_scores():
    """The score of other losses, of each query's own documents."""
    batch = m3_batch()
    rows = [list(range(5))]
    *parts, info = batch.of_rank(0, rows, torch.float64)
    queries, documents = map(with_ids, parts)
    scores = M3Score(SETTINGS).pairs(Encoded((queries,)), Encoded((documents,)), info)
    hybrid = sum(weight * score for weight, score in zip(SETTINGS.weights, scores_of(batch), strict=True))
    expected = torch.stack([hybrid[owner, column] for column, owner in enumerate(info.owners)])
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-12)


def test_lexical_scores_of_texts_without_common_tokens_are_zero():
    weights, sizes = torch.tensor([[0.0], [2.0], [0.0], [3.0]]), np.array([2])
    first, second = (
        Part(values, sizes, torch.tensor(ids)) for values, ids in zip(weights.split(2), ([1, 7], [1, 8]), strict=True)
    )
    assert lexical.compare_lexical(first, second, torch.tensor([0])).tolist() == [0.0]
    tile = lexical.LexicalTile(first, second)
    assert tile.scores(torch.ones(1)).tolist() == [[0.0]]
