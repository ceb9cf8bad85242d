"""Extra memory and time of InfoNCE three ways, beside sentence-transformers' losses on the same vectors."""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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

from benchmarks.measure import markdown, require, unit
from benchmarks.ranks import world_of
from embedtrain.config.losses import Implementation, InfoNCEConfig
from embedtrain.losses.build import build_loss
from embedtrain.losses.types import BatchInfo

TITLE = f"InfoNCE of given vectors, forward and backward: extra MiB / {unit()}"
DIMS, SHORTER, TEMPERATURE = 384, (384, 256, 128, 64, 32), 0.02
WAYS = ("plain", "tiled", "ring")
THEIRS, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
MINI_BATCH = 512
# So many matrices of scores are held at the peak of plain, and of theirs as much: what is measured at 16,384.
MATRICES = 4

Call = Callable[[Sequence[Tensor]], Tensor]  # the loss of leaves, which have their gradients then


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table; `queries` and their documents are of all ranks."""

    queries: int
    rounds: int
    negatives: int = 0
    ranks: int = 1
    matryoshka: bool = False
    sides: Sequence[str] = (*WAYS, THEIRS, CACHED)

    def name(self) -> str:
        """Queries x documents, and what else is special."""
        more = f", {self.ranks} ranks" * (self.ranks > 1) + f", {len(SHORTER)} Matryoshka dims" * self.matryoshka
        return f"{self.queries:,} x {self.queries * (1 + self.negatives):,}{more}"

    def matrix(self) -> int:
        """Bytes of a rank's scores."""
        return 4 * self.queries * self.queries * (1 + self.negatives) // self.ranks


@dataclass(frozen=True, slots=True)
class Measured:
    """One call in a process of its own; `norms` of the gradients of queries and of documents."""

    extra: float
    seconds: float
    loss: float
    norms: tuple[float, float]


def cases() -> list[Case]:
    gpus = torch.cuda.device_count()
    if gpus:
        sizes = [Case(4**n, 3) for n in (5, 6, 7, 8, 9, 10)]
    else:
        sizes = [Case(1024, 5), Case(4096, 3), Case(16384, 2), Case(65536, 1, sides=WAYS)]
    ranks = [Case(16384, 1, negatives=3, ranks=2, sides=WAYS[1:])] if gpus != 1 else []
    return [*sizes, Case(4096, 3, negatives=3), *ranks, Case(4096, 3, matryoshka=True, sides=(*WAYS, THEIRS))]


def measure() -> str:
    header = ["queries x documents", *WAYS, THEIRS, f"{CACHED}, mini_batch_size={MINI_BATCH}", "plain : tiled"]
    return markdown(header, [_row(case) for case in cases()])


def _row(case: Case) -> list[str]:
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    fits = MATRICES * case.matrix() < 0.8 * free
    sides = [side for side in case.sides if fits or side not in (WAYS[0], THEIRS)]
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for number in range(case.rounds):  # who goes first in turns
        for turn in range(len(sides)):
            side = sides[(turn + number) % len(sides)]
            found[side].append(_in_fresh_processes(case, side))
    _compare(case, found)
    cells = {WAYS[0]: "-" if fits else f"- (needs {MATRICES * case.matrix() / 2**30:,.0f} GiB)"}
    for side, rounds in found.items():
        cells[side] = f"{_median(rounds, 'extra'):,.0f} / {_median(rounds, 'seconds'):,.2f}"
    ratio = "-"
    if WAYS[0] in found:
        plain, tiled = found["plain"], found["tiled"]
        times = sorted(a.seconds / b.seconds for a, b in zip(plain, tiled, strict=True))
        memory = _median(plain, "extra") / _median(tiled, "extra")
        ratio = f"{memory:.1f} / {statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"
    return [case.name(), *(cells.get(side, "-") for side in (*WAYS, THEIRS, CACHED)), ratio]


def _median(rounds: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(one, name) for one in rounds)


def _compare(case: Case, found: dict[str, list[Measured]]) -> None:
    every = [one for rounds in found.values() for one in rounds]
    for one in every:
        pairs = zip((one.loss, *one.norms), (every[0].loss, *every[0].norms), strict=True)
        require(all(abs(a / b - 1) <= 1e-4 for a, b in pairs), f"losses: {case.name()} differ: {found}")


def _in_fresh_processes(case: Case, side: str) -> Measured:
    """Forked from a server that has imported everything and computed nothing; of several ranks the most."""
    fork = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")  # CUDA cannot be forked
    fork.set_forkserver_preload(["benchmarks.losses"])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(case.ranks, mp_context=fork) as pool:
        calls = [pool.submit(_on_rank, rank, Path(folder), case, side) for rank in range(case.ranks)]
        ranks = [call.result() for call in calls]
    norms = torch.tensor([one.norms for one in ranks]).norm(dim=0).tolist()
    loss = sum(one.loss for one in ranks)
    return Measured(max(one.extra for one in ranks), max(one.seconds for one in ranks), loss, tuple(norms))


def _on_rank(rank: int, folder: Path, case: Case, side: str) -> Measured:
    torch.set_num_threads(1)
    with world_of(case.ranks, rank, folder / "store", most=case.ranks) as world:
        _measure(case, side, _vectors(256, case, rank, world.device))  # what starts but once
        return _measure(case, side, _vectors(case.queries // case.ranks, case, rank, world.device))


def _vectors(queries: int, case: Case, rank: int, device: torch.device) -> list[Tensor]:
    """Queries, their positives at a cosine of about 0.3, and columns of negatives at one of about 0.1."""
    torch.manual_seed(rank)
    anchors = torch.randn(queries, DIMS, device=device)
    columns = [anchors + away * torch.randn_like(anchors) for away in (3.0, *[10.0] * case.negatives)]
    return [F.normalize(vectors, dim=1) for vectors in (anchors, *columns)]


def _measure(case: Case, side: str, vectors: list[Tensor]) -> Measured:
    """Extra memory: allocated on a GPU, resident on a CPU (VmHWM, which Linux lets one reset)."""
    call = _ours(case, side) if side in WAYS else _theirs(case, side, vectors[0].device)
    if side in WAYS:  # a query's documents lie together
        vectors[1:] = [torch.stack(vectors[1:], dim=1).flatten(0, 1)]
    leaves = [one.requires_grad_() for one in vectors]
    if vectors[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        loss = call(leaves)
        ended.record()
        torch.cuda.synchronize()
        seconds, extra = began.elapsed_time(ended) / 1000, torch.cuda.max_memory_allocated() - before
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before, start = _resident("VmRSS"), time.process_time()
        loss = call(leaves)
        seconds, extra = time.process_time() - start, _resident("VmHWM") - before
    norms = [one.grad.double().norm() for one in leaves if one.grad is not None]
    return Measured(extra / 2**20, seconds, loss.item(), (norms[0].item(), torch.stack(norms[1:]).norm().item()))


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _ours(case: Case, side: str) -> Call:
    options = InfoNCEConfig(
        temperature=TEMPERATURE,
        implementation=Implementation(side),
        matryoshka_dims=list(SHORTER) if case.matryoshka else None,
    )
    loss = build_loss(options, dimension=DIMS, seed=0)

    def call(vectors: Sequence[Tensor]) -> Tensor:
        queries, documents = (torch.arange(len(one), device=one.device) for one in vectors)
        batch_info = BatchInfo(owners=documents // (1 + case.negatives), query_keys=queries, document_keys=documents)
        local_loss = loss(*vectors, batch_info).local_loss
        local_loss.backward()
        return local_loss.detach()

    return call


class Given(nn.Module):
    """Stands in for a SentenceTransformer: its texts are vectors already."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a model gives."""
        return {"sentence_embedding": features["vectors"]}


def _theirs(case: Case, side: str, device: torch.device) -> Call:
    model = SentenceTransformer(modules=[Given()], device=str(device))

    def call(vectors: Sequence[Tensor]) -> Tensor:
        if side == CACHED:
            cached = CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=MINI_BATCH)
            return cached.calculate_loss([[one] for one in vectors], with_backward=True)
        plain = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
        if case.matryoshka:
            features = [{"vectors": one} for one in vectors]
            loss = MatryoshkaLoss(model, plain, list(SHORTER))(features, torch.empty(0))
        else:
            loss = plain.compute_loss_from_embeddings(list(vectors), torch.empty(0))
        loss.backward()
        return loss.detach()

    return call
