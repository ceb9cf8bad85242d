"""Compares a loss on any number of ranks with a plain computation in one process.

    check(ranks, config, batch, textbook)

`textbook` implements the paper's formula: a function of a GlobalVectors in one process, with autograd, in float64. The
loss of `config` runs in real processes at 1, 2, 3 and 4 ranks, with rows distributed evenly, unevenly, and with ranks
without rows. Its value and its gradients at every vector and every parameter of the loss must equal the textbook's, to
1e-10 in float64 and to 1e-5 in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import LossConfig
from embedtrain.distributed.world import World
from embedtrain.losses import similarity
from embedtrain.losses.build import build_loss
from embedtrain.losses.score import PairScore
from embedtrain.losses.types import BatchInfo, Guide, Loss, Origin

DIMENSION = 8


@dataclass(frozen=True, kw_only=True)
class GlobalVectors:
    """N rows with `sizes[i]` documents each, K documents in total, row by row; float64."""

    sizes: tuple[int, ...]
    queries: Tensor  # [N, D]; [0, 1] of a cross-encoder
    documents: Tensor  # [K, D]; [K, 1] of a cross-encoder, which are its scores
    query_keys: Tensor  # [N]
    document_keys: Tensor  # [K]
    document_ids: Tensor | None = None  # [K]
    scores: Tensor | None = None  # [K]
    labels: Tensor | None = None  # [N]
    guides: dict[str, Guide] = field(default_factory=dict)
    known_answers: tuple[tuple[int, int], ...] = ()  # keys of a query and of a document that answers it

    def documents_of(self, row: int) -> list[int]:
        """Indices of the documents of row `row`."""
        start = sum(self.sizes[:row])
        return list(range(start, start + self.sizes[row]))

    def of_rank(self, rows: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, BatchInfo]:
        """Queries, documents and their BatchInfo for a rank with these rows."""
        indices = [index for row in rows for index in self.documents_of(row)]
        owners = [position for position, row in enumerate(rows) for _ in range(self.sizes[row])]

        def take(values: Tensor | None, selected: Sequence[int]) -> Tensor | None:
            return None if values is None else values[torch.tensor(selected, dtype=torch.int64)]

        batch_info = BatchInfo(
            owners=torch.tensor(owners, dtype=torch.int64),
            query_keys=take(self.query_keys, rows),
            document_keys=take(self.document_keys, indices),
            document_ids=take(self.document_ids, indices),
            scores=None if self.scores is None else take(self.scores, indices).to(dtype),
            labels=take(self.labels, rows),
            guides={
                name: Guide(take(guide.queries, rows).to(dtype), take(guide.documents, indices).to(dtype))
                for name, guide in self.guides.items()
            },
            origin=Origin(batch=5),
        )
        queries = take(self.queries, rows) if len(self.queries) else self.queries.clone()
        return queries.to(dtype), take(self.documents, indices).to(dtype), batch_info


def complete(batch: GlobalVectors, batch_info: BatchInfo) -> BatchInfo:
    """With the rows of all ranks and the known answers, which the trainer reads in the data. A collective."""
    batch_info = batch_info.complete()
    known = np.array(batch.known_answers, dtype=np.int64).reshape(-1, 2)
    return replace(batch_info, global_rows=replace(batch_info.rows, known_answers=known))


def vectors(
    sizes: Sequence[int],
    *,
    seed: int = 0,
    dimension: int = DIMENSION,
    normalised: bool = True,
    scores: bool = False,
    classes: int = 0,
    guides: Sequence[str] = (),
) -> GlobalVectors:
    """A global batch of random vectors of distinct texts; row i has `sizes[i]` documents."""
    generator = torch.Generator().manual_seed(seed)

    def make(count: int, width: int) -> Tensor:
        values = torch.randn(count, width, generator=generator, dtype=torch.float64)
        return F.normalize(values, dim=1) if normalised else values

    num_queries, num_documents = len(sizes), sum(sizes)
    return GlobalVectors(
        sizes=tuple(sizes),
        queries=make(num_queries, dimension),
        documents=make(num_documents, dimension),
        query_keys=torch.arange(num_queries) + 1000,
        document_keys=torch.arange(num_documents) + 5000,
        scores=torch.rand(num_documents, generator=generator, dtype=torch.float64) if scores else None,
        labels=torch.arange(num_queries) % classes if classes else None,
        guides={name: Guide(make(num_queries, dimension + 3), make(num_documents, dimension + 3)) for name in guides},
    )


def scored_pairs(sizes: Sequence[int], *, grades: int = 4, seed: int = 0) -> GlobalVectors:
    """A global batch of a cross-encoder: random scores, and labels from 0 to `grades` - 1, several of them equal."""
    batch = vectors(sizes, seed=seed, dimension=1, normalised=False)
    labels = torch.randint(grades, (sum(sizes),), generator=torch.Generator().manual_seed(seed)).double()
    return replace(batch, queries=torch.empty(0, 1, dtype=torch.float64), scores=labels)


def distributions(num_rows: int) -> list[list[list[int]]]:
    """Rows of each rank: on 1 to 4 ranks, evenly, unevenly, and with ranks without rows."""
    rows = list(range(num_rows))
    cases = [[rows[rank::size] for rank in range(size)] for size in (1, 2, 3, 4)]
    cut = max(1, num_rows // 3)
    cases += [[rows[:cut], rows[cut:]], [[], rows], [rows[:cut], [], rows[cut:]]]
    return [*cases, [[], rows[cut:], rows[:1], rows[1:cut]]]


def run(
    world: World,
    config: LossConfig,
    batch: GlobalVectors,
    rows_of_rank: list[list[int]],
    dtype: torch.dtype,
    dimension: int,
) -> dict[str, dict[str, Tensor] | float]:
    """On one rank: the local loss, its gradients at this rank's vectors and at the loss's parameters, and metrics."""
    torch.manual_seed(0)
    loss = _build(config, batch, dimension).to(dtype)
    rows = rows_of_rank[world.rank]
    queries, documents, batch_info = batch.of_rank(rows, dtype)
    queries.requires_grad_(), documents.requires_grad_()
    output = loss(queries, documents, complete(batch, batch_info))
    output.local_loss.backward()
    if output.row_losses is not None:  # of the rows that this distribution gives to the rank, down to one
        assert output.row_losses.shape == (len(rows),)
        assert not output.row_losses.requires_grad
        torch.testing.assert_close(output.row_losses.sum(), output.local_loss.detach())
    zero = torch.zeros
    return {
        "local_loss": output.local_loss.item(),
        "metrics": {name: value.item() for name, value in output.metrics.items()},
        "queries": zero(queries.shape, dtype=dtype) if queries.grad is None else queries.grad,
        "documents": zero(documents.shape, dtype=dtype) if documents.grad is None else documents.grad,
        "parameters": {
            name: zero(p.shape, dtype=dtype) if p.grad is None else p.grad for name, p in loss.named_parameters()
        },
    }


def run_in_chunks(
    world: World, config: LossConfig, batch: GlobalVectors, rows_of_rank: list[list[int]]
) -> list[dict[str, dict[str, Tensor] | float]]:
    """`run` with all of a rank's rows in one chunk, and with one row per chunk."""
    default = similarity.MAX_CHUNK_BYTES
    try:
        results = []
        for size in (default, 1):
            similarity.MAX_CHUNK_BYTES = size
            results.append(run(world, config, batch, rows_of_rank, torch.float64, batch.queries.shape[1]))
        return results
    finally:
        similarity.MAX_CHUNK_BYTES = default


def run_under_autocast(world: World, config: LossConfig, batch: GlobalVectors) -> list[float]:
    """The loss within and without autocast to bf16."""
    arguments = (config, batch, [list(range(len(batch.sizes)))], torch.float32, batch.queries.shape[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(world, *arguments)
    return [inside["local_loss"], run(world, *arguments)["local_loss"]]


def _build(config: LossConfig, batch: GlobalVectors, dimension: int) -> Loss:
    guides, score = _guide_dimensions(batch), None if len(batch.queries) else PairScore()
    return build_loss(config, dimension=dimension, guide_dimensions=guides, seed=0, score=score)


def _guide_dimensions(batch: GlobalVectors) -> dict[str, int]:
    return {name: guide.documents.shape[1] for name, guide in batch.guides.items()}


# (global batch, parameters of the loss by name, float64) -> the loss
Textbook = Callable[[GlobalVectors, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Case:
    """A loss, a global batch, and the formula of the loss."""

    config: LossConfig
    batch: GlobalVectors
    textbook: Textbook

    def expected(self) -> tuple[float, Tensor, Tensor, dict[str, Tensor]]:
        """The loss, and its gradients at queries, documents and the loss's parameters, in one process."""
        batch = replace(
            self.batch,
            queries=self.batch.queries.clone().requires_grad_(),
            documents=self.batch.documents.clone().requires_grad_(),
        )
        torch.manual_seed(0)
        loss = _build(self.config, batch, batch.queries.shape[1]).double()
        parameters = {name: p.detach().clone().requires_grad_() for name, p in loss.named_parameters()}
        value = self.textbook(batch, parameters)
        value.backward()
        grads = {name: _grad(parameter) for name, parameter in parameters.items()}
        return value.item(), _grad(batch.queries), _grad(batch.documents), grads


def run_all(
    world: World, cases: Sequence[tuple[LossConfig, GlobalVectors]], rows_of_rank: list[list[int]], dtype: torch.dtype
) -> list[dict[str, dict[str, Tensor] | float]]:
    """`run` of each case."""
    return [run(world, config, batch, rows_of_rank, dtype, batch.queries.shape[1]) for config, batch in cases]


def check(
    ranks: Callable[..., list],
    config: LossConfig,
    batch: GlobalVectors,
    textbook: Textbook,
    *,
    fp32: float = 1e-5,
    only: Sequence[int] | None = None,
) -> None:
    """See the module's docstring. `only`: indices of the `distributions` to run; `fp32`: the tolerance in float32."""
    check_all(ranks, [Case(config, batch, textbook)], fp32=fp32, only=only)


def check_all(
    ranks: Callable[..., list], cases: Sequence[Case], *, fp32: float = 1e-5, only: Sequence[int] | None = None
) -> None:
    """`check` of cases with the same number of rows, one after another in the same processes."""
    expected = [case.expected() for case in cases]
    sent = [(case.config, case.batch) for case in cases]
    for number, rows_of_rank in enumerate(distributions(len(cases[0].batch.sizes))):
        if only is not None and number not in only:
            continue
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, fp32)):
            answers = ranks(len(rows_of_rank), run_all, sent, rows_of_rank, dtype)
            for case, right, *of_ranks in zip(cases, expected, *answers, strict=True):
                _agree(case, right, of_ranks, rows_of_rank, tolerance, f"{case.config}, rows {rows_of_rank}, {dtype}")


def _agree(
    case: Case,
    expected: tuple[float, Tensor, Tensor, dict[str, Tensor]],
    answers: Sequence[dict],
    rows_of_rank: list[list[int]],
    tolerance: float,
    text: str,
) -> None:
    value, query_grads, document_grads, parameter_grads = expected
    batch = case.batch
    total = sum(answer["local_loss"] for answer in answers)
    assert abs(total - value) <= tolerance * max(1.0, abs(value)), text
    queries, documents = torch.zeros_like(batch.queries), torch.zeros_like(batch.documents)
    for rows, answer in zip(rows_of_rank, answers, strict=True):
        indices = [index for row in rows for index in batch.documents_of(row)]
        if len(queries):
            queries[rows] += answer["queries"].double()
        documents[indices] += answer["documents"].double()
    _close(queries, query_grads, tolerance, text)
    _close(documents, document_grads, tolerance, text)
    for name, grad in parameter_grads.items():
        summed = sum(answer["parameters"][name].double() for answer in answers)
        _close(summed, grad, tolerance, f"{name}, {text}")


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _close(actual: Tensor, expected: Tensor, tolerance: float, case: str) -> None:
    assert actual.isfinite().all(), case
    error = (actual - expected).norm() / max(expected.norm().item(), 1e-3)
    assert error <= tolerance, f"relative error {error:.2e}: {case}"
