"""Extra memory and time of our three InfoNCE implementations and of sentence-transformers' losses."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from benchmarks.measure import markdown, measure_call, require, unit
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.losses import Implementation, InfoNCEConfig, MatryoshkaConfig
from embedtrain.config.recipe import Precision
from embedtrain.distributed.world import World
from embedtrain.losses.build import build_loss
from embedtrain.losses.types import BatchInfo
from embedtrain.training.setup import use_tf32_products

TITLE = f"InfoNCE of fixed embeddings, forward and backward: extra MiB / {unit()}"
DIMS, MATRYOSHKA_DIMS, TEMPERATURE = 384, (384, 256, 128, 64, 32), 0.02
OURS = ("plain", "tiled", "ring")
THEIRS, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
MINI_BATCH = 512
# Score matrices held at the peak of plain and of theirs, as measured at 16,384 queries.
MATRICES = 4

Call = Callable[[Sequence[Tensor]], Tensor]  # returns the loss of leaf tensors and sets their gradients


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table; `queries` counts those of all ranks."""

    queries: int
    rounds: int
    negatives: int = 0
    ranks: int = 1
    matryoshka: bool = False
    tf32: bool = False  # products of our losses in TF32, as in bf16 runs
    implementations: Sequence[str] = (*OURS, THEIRS, CACHED)

    def name(self) -> str:
        """Queries x documents, and further properties."""
        suffix = (
            f", {self.ranks} ranks" * (self.ranks > 1)
            + f", {len(MATRYOSHKA_DIMS)} Matryoshka dims" * self.matryoshka
            + ", TF32" * self.tf32
        )
        return f"{self.queries:,} x {self.queries * (1 + self.negatives):,}{suffix}"

    def score_bytes(self) -> int:
        """Bytes of a rank's score matrix."""
        return 4 * self.queries * self.queries * (1 + self.negatives) // self.ranks


@dataclass(frozen=True, slots=True)
class Measured:
    """One call in a new process; `norms` are the gradient norms of queries and documents."""

    extra: float
    seconds: float
    loss: float
    norms: tuple[float, float]


def cases(part: str = "") -> list[Case]:
    """All cases of this machine; on a GPU, those of a million rows are a `part` of their own."""
    gpus = torch.cuda.device_count()
    if part == "million":
        return [Case(4**10, 1)]
    if gpus:
        sizes = [Case(4**n, 1 if n > 8 else 3) for n in (5, 6, 7, 8, 9)]
    else:
        sizes = [Case(1024, 5), Case(4096, 3), Case(16384, 2), Case(65536, 1, implementations=OURS)]
    ranks = [Case(16384, 1, negatives=3, ranks=2, implementations=OURS[1:])] if gpus != 1 else []
    return [*sizes, Case(4096, 3, negatives=3), *ranks, Case(4096, 3, matryoshka=True, implementations=(*OURS, THEIRS))]


def measure(part: str = "", *, small: bool = False) -> str:
    """Measure the cases of `part`; `small`: one of 256 rows."""
    header = ["queries x documents", *OURS, THEIRS, f"{CACHED}, mini_batch_size={MINI_BATCH}", "plain : tiled"]
    return markdown(header, [_row(case) for case in ([Case(256, 1)] if small else cases(part))])


def _row(case: Case) -> list[str]:
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    fits = MATRICES * case.score_bytes() < 0.8 * free
    names = [name for name in case.implementations if fits or name not in (OURS[0], THEIRS)]
    measured: dict[str, list[Measured]] = {name: [] for name in names}
    for round_number in range(case.rounds):  # each round starts with another implementation
        for position in range(len(names)):
            name = names[(position + round_number) % len(names)]
            measured[name].append(_measure_in_new_processes(case, name))
    compare(case, measured)
    cells = {OURS[0]: "-" if fits else f"- (needs {MATRICES * case.score_bytes() / 2**30:,.0f} GiB)"}
    for name, rounds in measured.items():
        cells[name] = f"{_median(rounds, 'extra'):,.0f} / {_median(rounds, 'seconds'):,.2f}"
    ratio = "-"
    if OURS[0] in measured:
        plain, tiled = measured["plain"], measured["tiled"]
        times = sorted(a.seconds / b.seconds for a, b in zip(plain, tiled, strict=True))
        memory = _median(plain, "extra") / _median(tiled, "extra")
        ratio = f"{memory:.1f} / {statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"
    return [case.name(), *(cells.get(name, "-") for name in (*OURS, THEIRS, CACHED)), ratio]


def _median(rounds: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(measured, name) for measured in rounds)


def compare(case: Case, measured: dict[str, list[Measured]], tolerance: float = 1e-4) -> None:
    """Raise WrongResult if losses or gradient norms differ."""
    first, *rest = [result for rounds in measured.values() for result in rounds]
    for result in rest:
        pairs = zip((result.loss, *result.norms), (first.loss, *first.norms), strict=True)
        require(all(abs(a / b - 1) <= tolerance for a, b in pairs), f"losses: {case.name()} differ: {measured}")


def _measure_in_new_processes(case: Case, implementation: str) -> Measured:
    """Return the maximum over ranks."""
    on_rank = partial(_on_rank, case=case, implementation=implementation)
    ranks = on_ranks(case.ranks, on_rank, preload="benchmarks.losses")
    norms = torch.tensor([rank.norms for rank in ranks]).norm(dim=0).tolist()
    loss = sum(rank.loss for rank in ranks)
    return Measured(max(rank.extra for rank in ranks), max(rank.seconds for rank in ranks), loss, tuple(norms))


def _on_rank(rank: int, folder: Path, case: Case, implementation: str) -> Measured:
    with world_of(case.ranks, rank, folder / "store", min_gpus=case.ranks) as world:
        return measure_here(case, implementation, world)


def measure_here(case: Case, implementation: str, world: World) -> Measured:
    """Measure one call in this process, after a warm-up."""
    _measure(case, implementation, _embeddings(256, case, world.rank, world.device))
    return _measure(case, implementation, _embeddings(case.queries // case.ranks, case, world.rank, world.device))


def _embeddings(queries: int, case: Case, rank: int, device: torch.device) -> list[Tensor]:
    """Queries, positives with a cosine of about 0.3 to them, and negatives with a cosine of about 0.1."""
    torch.manual_seed(rank)
    anchors = torch.randn(queries, DIMS, device=device)
    columns = [anchors + noise * torch.randn_like(anchors) for noise in (3.0, *[10.0] * case.negatives)]
    return [F.normalize(embeddings, dim=1) for embeddings in (anchors, *columns)]


def _measure(case: Case, implementation: str, embeddings: list[Tensor]) -> Measured:
    """Measure one call."""
    ours = implementation in OURS
    call = _ours(case, implementation) if ours else _theirs(case, implementation, embeddings[0].device)
    if ours:  # the documents of a query are adjacent
        embeddings[1:] = [torch.stack(embeddings[1:], dim=1).flatten(0, 1)]
    leaves = [tensor.requires_grad_() for tensor in embeddings]
    loss, extra, seconds = measure_call(lambda: call(leaves), embeddings[0].device)
    norms = [leaf.grad.double().norm() for leaf in leaves if leaf.grad is not None]
    return Measured(extra, seconds, loss.item(), (norms[0].item(), torch.stack(norms[1:]).norm().item()))


def _ours(case: Case, implementation: str) -> Call:
    options = InfoNCEConfig(
        temperature=TEMPERATURE,
        implementation=Implementation(implementation),
        matryoshka=MatryoshkaConfig(dims=list(MATRYOSHKA_DIMS) if case.matryoshka else None),
    )
    loss = build_loss(options, dimension=DIMS, seed=0)
    use_tf32_products(loss, Precision.bf16 if case.tf32 else Precision.fp32)

    def call(embeddings: Sequence[Tensor]) -> Tensor:
        queries, documents = (torch.arange(len(tensor), device=tensor.device) for tensor in embeddings)
        batch_info = BatchInfo(owners=documents // (1 + case.negatives), query_keys=queries, document_keys=documents)
        local_loss = loss(*embeddings, batch_info).local_loss
        local_loss.backward()
        return local_loss.detach()

    return call


class Identity(nn.Module):
    """Module of a SentenceTransformer whose inputs are embeddings already."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the input embeddings."""
        return {"sentence_embedding": features["embeddings"]}


def _theirs(case: Case, name: str, device: torch.device) -> Call:
    model = SentenceTransformer(modules=[Identity()], device=str(device))

    def call(embeddings: Sequence[Tensor]) -> Tensor:
        if name == CACHED:
            cached = CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=MINI_BATCH)
            return cached.calculate_loss([[tensor] for tensor in embeddings], with_backward=True)
        plain = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
        if case.matryoshka:
            features = [{"embeddings": tensor} for tensor in embeddings]
            loss = MatryoshkaLoss(model, plain, list(MATRYOSHKA_DIMS))(features, torch.empty(0))
        else:
            loss = plain.compute_loss_from_embeddings(list(embeddings), torch.empty(0))
        loss.backward()
        return loss.detach()

    return call
