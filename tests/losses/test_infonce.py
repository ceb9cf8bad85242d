"""InfoNCE against the textbook in float64: value, gradient, masks, small losses, on any number of ranks."""

from dataclasses import dataclass

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

from embedtrain.config.schema import InfoNCEConfig, LossConfig
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.losses.choose import choose_loss
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.types import LossInput

TEMPERATURE = 0.1


@dataclass(frozen=True)
class Problem:
    """A global batch by key: row i has query `queries[i]` and documents `documents[i]`, the positive first."""

    queries: list[int]
    documents: list[list[int]]
    mask: bool = True
    temperature: float = TEMPERATURE

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Vectors [N, 8] and [K, 8]: one for each key, so that equal texts have equal vectors."""
        flat = [key for row in self.documents for key in row]

        def make(keys: list[int], salt: int) -> Tensor:
            rows = [torch.randn(8, generator=torch.Generator().manual_seed(salt + key)) for key in keys]
            return torch.nn.functional.normalize(torch.stack(rows), dim=1)

        return make(self.queries, 1000), make(flat, 2000)


PROBLEMS = {
    "plain": Problem([1, 2, 3, 4, 5], [[1], [2], [3], [4], [5]]),
    # Nobody gets half of the probability here, and yet some positives score highest.
    "soft": Problem([1, 2, 3, 4, 5], [[1], [2], [3], [4], [5]], temperature=5.0),
    "hard negatives": Problem([1, 2, 3, 4, 5], [[1, 11, 12], [2], [3, 13], [4, 14, 15, 16], [5]]),
    "equal documents": Problem([1, 2, 3, 4], [[1, 9], [2, 1], [1, 8], [4, 9]]),
    "equal documents, no mask": Problem([1, 2, 3, 4], [[1, 9], [2, 1], [1, 8], [4, 9]], mask=False),
    "equal queries": Problem([1, 1, 2, 1], [[1, 7], [2], [3, 2], [4, 1]]),
    "equal queries, no mask": Problem([1, 1, 2, 1], [[1, 7], [2], [3, 2], [4, 1]], mask=False),
    "an answer as somebody's hard negative": Problem([1, 1, 2], [[1], [2], [3, 2, 1]]),
    "fewer rows than ranks": Problem([1, 2], [[1, 5], [2]]),
    "one row": Problem([1], [[1, 2, 3]]),
    "one row without negatives": Problem([1], [[1]]),
    "all equal": Problem([1, 1, 1], [[1], [1], [1]]),
    "a lone row beside others": Problem([1, 1, 2], [[1], [1], [2]]),
}


def textbook(problem: Problem, queries: Tensor, documents: Tensor) -> tuple[Tensor, float]:
    """-log softmax at the positive, row by row; and the share of rows whose positive beats every negative."""
    flat = [key for row in problem.documents for key in row]
    starts = [sum(len(row) for row in problem.documents[:i]) for i in range(len(problem.documents))]
    total, right = queries.new_zeros(()), 0
    for i, query in enumerate(problem.queries):
        answers = {row[0] for q, row in zip(problem.queries, problem.documents, strict=True) if q == query}
        kept = [j for j, key in enumerate(flat) if j == starts[i] or not (problem.mask and key in answers)]
        scores = documents[kept] @ queries[i] / problem.temperature
        positive = kept.index(starts[i])
        total = total - torch.log_softmax(scores, dim=0)[positive]
        right += bool((scores > scores[positive]).sum() == 0 and (scores == scores[positive]).sum() == 1)
    return total / len(problem.queries), right / len(problem.queries)


def share(world: World, problem: Problem) -> tuple[list[int], list[int]]:
    """Rows of this rank (every W-th, as batches are shared) and where their documents stand among all."""
    rows = list(range(world.rank, len(problem.queries), world.size))
    starts = [sum(len(row) for row in problem.documents[:i]) for i in range(len(problem.documents))]
    return rows, [starts[i] + j for i in rows for j in range(len(problem.documents[i]))]


def as_in_the_textbook(world: World) -> None:
    for name, problem in PROBLEMS.items():
        queries, documents = problem.vectors()
        wide_q, wide_d = queries.double().requires_grad_(), documents.double().requires_grad_()
        expected, right = textbook(problem, wide_q, wide_d)
        expected.backward()

        rows, places = share(world, problem)
        mine_q, mine_d = queries[rows].requires_grad_(), documents[places].requires_grad_()
        keys = [problem.documents[i] for i in rows]
        starts = [sum(len(row) for row in keys[:i]) for i in range(len(keys))]
        known = LossInput(
            torch.tensor(starts, dtype=torch.int64),
            torch.tensor([problem.queries[i] for i in rows], dtype=torch.int64),
            torch.tensor([key for row in keys for key in row], dtype=torch.int64),
        )
        output = InfoNCE(InfoNCEConfig(temperature=problem.temperature, mask_duplicates=problem.mask))(
            mine_q, mine_d, known
        )
        output.share.backward()
        loss = sum(world.gather(output.share.item()))
        accuracy = sum(world.gather(output.shares["accuracy"].item()))
        assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-7), name
        assert accuracy == pytest.approx(right), name
        for found, grad in ((mine_q.grad, wide_q.grad[rows]), (mine_d.grad, wide_d.grad[places])):
            assert found.isfinite().all(), name
            torch.testing.assert_close(found.double(), grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_value_gradient_and_accuracy(ranks, world_size):
    ranks(world_size, as_in_the_textbook)


def small_losses(world: World) -> None:
    """At a loss of 1e-7 and less logsumexp(all) - positive is a multiple of fp32's rounding, or zero."""
    for gap in (5.0, 10.0, 17.0, 25.0):
        queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        documents = torch.tensor([[gap, 0.0], [0.0, gap]])
        known = LossInput(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([1, 2]))
        output = InfoNCE(InfoNCEConfig(temperature=1.0))(queries, documents, known)
        output.share.backward()
        exact = torch.tensor(-gap, dtype=torch.float64).exp()
        assert output.share.item() == pytest.approx(torch.log1p(exact).item(), rel=1e-5)
        slope = (exact / (1 + exact)).item() * gap / 2
        assert queries.grad[0].tolist() == pytest.approx([-slope, slope], rel=1e-4)


def test_small_losses_are_exact(ranks):
    ranks(1, small_losses)


class Given(nn.Module):
    """Stands in for a SentenceTransformer: its texts are vectors already."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}


def theirs(world: World) -> None:
    torch.manual_seed(0)
    columns = [torch.nn.functional.normalize(torch.randn(6, 8), dim=1) for _ in range(3)]
    model = SentenceTransformer(modules=[Given()], device="cpu")
    expected = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)(
        [{"vectors": column} for column in columns], labels=torch.empty(0)
    )
    documents = torch.stack(columns[1:], dim=1).flatten(0, 1)
    known = LossInput(torch.arange(6) * 2, torch.arange(6), torch.arange(12))
    output = InfoNCE(InfoNCEConfig(temperature=TEMPERATURE))(columns[0], documents, known)
    assert output.share.item() == pytest.approx(expected.item(), rel=1e-5)


def test_as_sentence_transformers_in_the_plain_case(ranks):
    ranks(1, theirs)


def test_choosing():
    loss = choose_loss(InfoNCEConfig(temperature=0.3, mask_duplicates=False))
    assert isinstance(loss, InfoNCE)
    assert (loss.temperature, loss.mask_duplicates) == (0.3, False)
    with pytest.raises(ConfigError, match=r"loss\.name=nothing"):
        choose_loss(LossConfig(name="nothing"))
