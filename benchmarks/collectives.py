"""Number of collectives of a training step, by the number of chunks per rank and the fraction of cached graphs."""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.comparison import make_step_context
from benchmarks.inputs import small_bert, train_data
from benchmarks.measure import markdown, require
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.optim import OptimConfig, ScheduleKind
from embedtrain.config.recipe import Strategy
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from embedtrain.training.step import train_step

RANKS, PAIRS, CHUNKS = 2, 8, (1, 2, 4, 8)
CACHED_FRACTIONS = {"all": 1.0, "half": 0.5, "none": 0.0}  # fraction of the chunks whose graphs are cached
TITLE = f"Collectives of a training step, six layers, {RANKS} ranks: all-gathers / reduce-scatters / all-reduces"
# The weights do not change, so every step of the table must give the same loss and gradient.
OPTIM = OptimConfig(lr=0.0, weight_decay=0.0, schedule=ScheduleKind.constant, warmup=0)
FSDP = "FSDP"
_NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
_KINDS = {"allgather": "AG", "all_gather": "AG", "reduce_scatter": "RS", "allreduce": "AR", "all_reduce": "AR"}
_NAMES = {"AG": "all-gathers", "RS": "reduce-scatters", "AR": "all-reduces"}

Counts = Counter[tuple[str, str]]  # by kind and calling module


@dataclass(frozen=True, slots=True)
class CountResult:
    """Results of rank 0: rows of the table, number of FSDP groups, and the collectives that FSDP does not issue."""

    rows: list[list[str]]
    groups: int
    outside_fsdp: list[str]


def measure() -> str:
    counted, _ = on_ranks(RANKS, _count)
    header = [
        "parallel.strategy",
        "parallel.reshard_after_forward",
        "graphs cached",
        *(f"{n} chunk{'s' * (n > 1)}" for n in CHUNKS),
    ]
    return "\n\n".join(
        [
            f"FSDP's own collectives, for {counted.groups} parameter groups (the layers, and the rest):",
            markdown(header, counted.rows),
            "Further collectives, by the module that issues them, in every row and column:",
            *counted.outside_fsdp,
        ]
    )


def _count(rank: int, folder: Path) -> CountResult:
    rows, results, groups, outside_fsdp = [], list[tuple[float, float]](), 0, dict[Strategy, Counts]()
    with world_of(RANKS, rank, folder / "store", min_gpus=RANKS) as world:
        for strategy, reshard in ((Strategy.fsdp, True), (Strategy.fsdp, False), (Strategy.ddp, None)):
            model = small_bert(world, strategy, reshard_after_forward=reshard)
            run, groups = make_step_context(model, world, OPTIM), _count_groups(model.encoder)
            batch = train_data(PAIRS, model.tokenizer).batch(0)
            for label, fraction in CACHED_FRACTIONS.items():
                cells = []
                for chunks in CHUNKS:
                    rank_batch = _split(batch, world, model, chunks, num_cached=int(fraction * chunks))
                    with CollectiveCounter() as counter:
                        report = train_step(run, rank_batch)
                    cells.append(" / ".join(str(counter.counts[kind, FSDP]) for kind in _NAMES))
                    outside = Counter({key: n for key, n in counter.counts.items() if key[1] != FSDP})
                    unchanged = outside_fsdp.setdefault(strategy, outside) == outside
                    require(
                        unchanged, f"collectives outside FSDP: {outside}, but {outside_fsdp[strategy]} in another step"
                    )
                    results.append((report.loss, report.grad_norm))
                    if reshard is False:
                        once_per_step = [counter.counts[kind, FSDP] for kind in ("AG", "RS")] == [groups, groups]
                        message = f"collectives: expected one per step and group ({groups}), counted {counter.counts}"
                        require(once_per_step, message)
                rows.append([strategy.value, "-" if reshard is None else str(reshard).lower(), label, *cells])
    for loss, norm in results:
        equal = abs(loss - results[0][0]) <= 1e-5 and abs(norm / results[0][1] - 1) <= 1e-4
        require(equal, f"collectives: loss and gradient norm depend on the chunks: {results}")
    return CountResult(rows, groups, [_describe(strategy, counts) for strategy, counts in outside_fsdp.items()])


def _describe(strategy: Strategy, counts: Counts) -> str:
    callers = {kind: ", ".join(f"{n} of {caller}" for (k, caller), n in counts.items() if k == kind) for kind in _NAMES}
    return f"{strategy.value}: " + "; ".join(f"{_NAMES[kind]}: {names}" for kind, names in callers.items())


def _count_groups(encoder: nn.Module) -> int:
    return sum(isinstance(module, FSDPModule) for module in encoder.modules())


def _split(batch: GlobalBatch, world: World, model: LoadedModel, chunks: int, *, num_cached: int) -> RankBatch:
    """The rank's texts in exactly `chunks` chunks."""
    for chunk_tokens in range(16384, 0, -16):
        rank_batch = make_rank_batch(
            batch, world.rank, world.size, model.tokenizer, ChunkOptions(chunk_tokens, pass_overhead_tokens=10**6)
        )
        if rank_batch.num_passes == chunks:
            return replace(rank_batch, num_cached_graphs=num_cached)
    raise AssertionError(f"collectives: no chunk size gives {chunks} chunks")


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of this rank, including those inside DTensor and FSDP."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches plain operations, which are counted
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(_NOT_COLLECTIVES):
            kind = next((kind for part, kind in _KINDS.items() if part in name), name)
            require(kind in _NAMES, f"collectives: {name} has no column")
            self.counts[kind, _caller(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


def _caller(frame: FrameType | None) -> str:
    """FSDP if it is on the stack, else the innermost embedtrain module other than distributed.collectives."""
    caller = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("torch.distributed.fsdp"):
            return FSDP
        if not caller and module.startswith("embedtrain.") and module != "embedtrain.distributed.collectives":
            caller = module.removeprefix("embedtrain.")
        frame = frame.f_back
    return caller
