"""A loss on any number of ranks against the plain computation in one process.

    check(ranks, config, batch, textbook)

`textbook` is written from the paper's formula: a function of a whole GlobalVectors, in one process, with
autograd, in float64. The loss of `config` is then run by real processes at 1, 2, 3 and 4 ranks, rows dealt
evenly, unevenly, and so that ranks have none; its value, its gradient at every vector and at every parameter
of its own must be the textbook's, in float64 to 1e-10 and in float32 to 1e-5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import LossConfig
from embedtrain.distributed.world import World
from embedtrain.losses.build import build_loss
from embedtrain.losses.types import BatchInfo, Guide

DIMENSION = 8


@dataclass(frozen=True, kw_only=True)
class GlobalVectors:
    """N rows with `sizes[i]` documents each, K documents in all, row after row; float64."""

    sizes: tuple[int, ...]
    queries: Tensor  # [N, D]
    documents: Tensor  # [K, D]
    query_keys: Tensor  # [N]
    document_keys: Tensor  # [K]
    document_ids: Tensor | None = None  # [K]
    scores: Tensor | None = None  # [K]
    labels: Tensor | None = None  # [N]
    guides: dict[str, Guide] = field(default_factory=dict)

    def documents_of(self, row: int) -> list[int]:
        """Where row `row`'s documents stand among all."""
        start = sum(self.sizes[:row])
        return list(range(start, start + self.sizes[row]))

    def of_rank(self, rows: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, BatchInfo]:
        """Queries, documents and what is known of them, for a rank that has these rows."""
        places = [place for row in rows for place in self.documents_of(row)]
        owners = [at for at, row in enumerate(rows) for _ in range(self.sizes[row])]

        def part(values: Tensor | None, of: Sequence[int]) -> Tensor | None:
            return None if values is None else values[torch.tensor(of, dtype=torch.int64)]

        batch_info = BatchInfo(
            owners=torch.tensor(owners, dtype=torch.int64),
            query_keys=part(self.query_keys, rows),
            document_keys=part(self.document_keys, places),
            document_ids=part(self.document_ids, places),
            scores=None if self.scores is None else part(self.scores, places).to(dtype),
            labels=part(self.labels, rows),
            guides={
                name: Guide(part(guide.queries, rows).to(dtype), part(guide.documents, places).to(dtype))
                for name, guide in self.guides.items()
            },
            seed=5,
        )
        return part(self.queries, rows).to(dtype), part(self.documents, places).to(dtype), batch_info


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
    """A global batch of random vectors, all texts different; row i has `sizes[i]` documents."""
    random = torch.Generator().manual_seed(seed)

    def make(count: int, width: int) -> Tensor:
        found = torch.randn(count, width, generator=random, dtype=torch.float64)
        return F.normalize(found, dim=1) if normalised else found

    num_queries, num_documents = len(sizes), sum(sizes)
    return GlobalVectors(
        sizes=tuple(sizes),
        queries=make(num_queries, dimension),
        documents=make(num_documents, dimension),
        query_keys=torch.arange(num_queries) + 1000,
        document_keys=torch.arange(num_documents) + 5000,
        scores=torch.rand(num_documents, generator=random, dtype=torch.float64) if scores else None,
        labels=torch.arange(num_queries) % classes if classes else None,
        guides={name: Guide(make(num_queries, dimension + 3), make(num_documents, dimension + 3)) for name in guides},
    )


def deals(num_rows: int) -> list[list[list[int]]]:
    """Ways to deal rows to ranks: 1 to 4 ranks, even, uneven, and with ranks that have none."""
    rows = list(range(num_rows))
    ways = [[rows[rank::size] for rank in range(size)] for size in (1, 2, 3, 4)]
    cut = max(1, num_rows // 3)
    ways += [[rows[:cut], rows[cut:]], [[], rows], [rows[:cut], [], rows[cut:]]]
    return [*ways, [[], rows[cut:], rows[:1], rows[1:cut]]]


def run(
    world: World, config: LossConfig, batch: GlobalVectors, deal: list[list[int]], dtype: torch.dtype, dimension: int
) -> dict[str, dict[str, Tensor] | float]:
    """On one rank: the share, its gradient at this rank's vectors, and at the loss's own parameters."""
    torch.manual_seed(0)
    loss = build_loss(config, dimension=dimension, guide_dimensions=_widths(batch), seed=0).to(dtype)
    rows = deal[world.rank]
    queries, documents, batch_info = batch.of_rank(rows, dtype)
    queries.requires_grad_(), documents.requires_grad_()
    output = loss(queries, documents, batch_info)
    output.local_loss.backward()
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


def _widths(batch: GlobalVectors) -> dict[str, int]:
    return {name: guide.documents.shape[1] for name, guide in batch.guides.items()}


# (whole batch, the loss's own parameters by name, float64) -> the loss
Textbook = Callable[[GlobalVectors, dict[str, Tensor]], Tensor]


def check(
    ranks: Callable[..., list],
    config: LossConfig,
    batch: GlobalVectors,
    textbook: Textbook,
    *,
    fp32: float = 1e-5,
    only: Sequence[int] | None = None,
) -> None:
    """See the file's docstring. `only`: which of `deals` are run; `fp32`: tolerance there."""
    dimension = batch.queries.shape[1]
    torch.manual_seed(0)
    own = build_loss(config, dimension=dimension, guide_dimensions=_widths(batch), seed=0).double()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in own.named_parameters()}
    whole = replace(
        batch, queries=batch.queries.clone().requires_grad_(), documents=batch.documents.clone().requires_grad_()
    )
    expected = textbook(whole, parameters)
    expected.backward()
    grads = {"queries": _grad(whole.queries), "documents": _grad(whole.documents)}
    ways = deals(len(batch.sizes))
    for number, deal in enumerate(ways):
        if only is not None and number not in only:
            continue
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, fp32)):
            answers = ranks(len(deal), run, config, batch, deal, dtype, dimension)
            told = f"{config}, deal {deal}, {dtype}"
            found = sum(answer["local_loss"] for answer in answers)
            assert abs(found - expected.item()) <= tolerance * max(1.0, abs(expected.item())), told
            queries, documents = torch.zeros_like(batch.queries), torch.zeros_like(batch.documents)
            for rows, answer in zip(deal, answers, strict=True):
                places = [place for row in rows for place in batch.documents_of(row)]
                queries[rows] += answer["queries"].double()
                documents[places] += answer["documents"].double()
            _close(queries, grads["queries"], tolerance, told)
            _close(documents, grads["documents"], tolerance, told)
            for name, parameter in parameters.items():
                summed = sum(answer["parameters"][name].double() for answer in answers)
                _close(summed, _grad(parameter), tolerance, f"{name}, {told}")


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _close(found: Tensor, expected: Tensor, tolerance: float, told: str) -> None:
    assert found.isfinite().all(), told
    error = (found - expected).norm() / max(expected.norm().item(), 1e-3)
    assert error <= tolerance, f"relative error {error:.2e}: {told}"
