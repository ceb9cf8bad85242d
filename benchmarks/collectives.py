"""How many collectives a training step costs, by the number of chunks a rank's share is cut into."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.inputs import small_bert, train_data
from benchmarks.measure import markdown, require
from benchmarks.ranks import on_ranks, world_of
from benchmarks.training import trainable
from embedtrain.config.schema import OptimConfig, ScheduleKind, Strategy
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.training.batches import Cutting, RankBatch, cut
from embedtrain.training.model import LoadedModel
from embedtrain.training.step import train_step

RANKS, PAIRS, CHUNKS = 2, 8, (1, 2, 4, 8)
TITLE = f"Collectives of a training step, six layers, {RANKS} ranks: all-gathers / reduce-scatters / all-reduces"
# The weights stay as they are, so that every step of the table must give the same loss and gradient.
OPTIM = OptimConfig(lr=0.0, weight_decay=0.0, schedule=ScheduleKind.constant, warmup=0)
_PLUMBING = ("wait_tensor", "_wrap_tensor_autograd")
_KINDS = {"allgather": "AG", "all_gather": "AG", "reduce_scatter": "RS", "allreduce": "AR", "all_reduce": "AR"}


def measure() -> str:
    counted, _ = on_ranks(RANKS, _count)
    header = ["parallel.strategy", "graphs", *(f"{n} chunk{'s' * (n > 1)}" for n in CHUNKS)]
    return markdown(header, counted)


def _count(rank: int, folder: Path) -> list[list[str]]:
    rows = []
    with world_of(RANKS, rank, folder / "store", most=RANKS) as world:
        batch = train_data(PAIRS).batch(0)
        results: list[tuple[float, float]] = []
        for strategy in (Strategy.fsdp, Strategy.ddp):
            model = small_bert(world, strategy)
            run = trainable(model, world, OPTIM)
            for fits in (True, False):
                cells = []
                for chunks in CHUNKS:
                    share = _in_chunks(batch, world, model, chunks, fits=fits)
                    with Collectives() as seen:
                        report = train_step(run, share)
                    cells.append(f"{seen.counts['AG']} / {seen.counts['RS']} / {seen.counts['AR']}")
                    results.append((report.loss, report.grad_norm))
                rows.append([strategy.value, "kept" if fits else "cached", *cells])
        for loss, norm in results:
            right = abs(loss - results[0][0]) <= 1e-5 and abs(norm / results[0][1] - 1) <= 1e-4
            require(right, f"collectives: loss and gradient norm depend on the chunks: {results}")
    return rows


def _in_chunks(batch: GlobalBatch, world: World, model: LoadedModel, chunks: int, *, fits: bool) -> RankBatch:
    """The rank's share in exactly so many chunks."""
    rows = batch.share(world.rank, world.size)
    ids = model.tokenizer.ids([row.query for row in rows] + [text for row in rows for text in row.documents])
    parts = tuple(model.tokenizer.chunk(ids, range(len(ids))[i::chunks]) for i in range(chunks))
    return replace(
        cut(batch, world.rank, world.size, model.tokenizer, Cutting(16384)), chunks=parts, kept=chunks if fits else 0
    )


class Collectives(TorchDispatchMode):
    """Counts the collectives that this rank takes part in, those inside DTensor and FSDP as well."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into plain operations, which come by here
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(_PLUMBING):
            self.counts[next((kind for part, kind in _KINDS.items() if part in name), name)] += 1
            require(set(self.counts) <= {"AG", "RS", "AR"}, f"collectives: {name} has no column")
        return func(*args, **(kwargs or {}))
