"""How many collectives a training step costs, by the number of chunks a rank's share is cut into and what is kept."""

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

from benchmarks.inputs import small_bert, train_data
from benchmarks.measure import markdown, require
from benchmarks.ranks import on_ranks, world_of
from benchmarks.sides import trainable
from embedtrain.config.recipe import OptimConfig, ScheduleKind, Strategy
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.loading.load import LoadedModel
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from embedtrain.training.step import train_step

RANKS, PAIRS, CHUNKS = 2, 8, (1, 2, 4, 8)
KEPT = {"all": 1.0, "half": 0.5, "none": 0.0}  # share of the chunks whose graphs are kept
TITLE = f"Collectives of a training step, six layers, {RANKS} ranks: all-gathers / reduce-scatters / all-reduces"
# The weights stay as they are, so that every step of the table must give the same loss and gradient.
OPTIM = OptimConfig(lr=0.0, weight_decay=0.0, schedule=ScheduleKind.constant, warmup=0)
FSDP = "FSDP"
_PLUMBING = ("wait_tensor", "_wrap_tensor_autograd")
_KINDS = {"allgather": "AG", "all_gather": "AG", "reduce_scatter": "RS", "allreduce": "AR", "all_reduce": "AR"}
_NAMES = {"AG": "all-gathers", "RS": "reduce-scatters", "AR": "all-reduces"}

Counts = Counter[tuple[str, str]]  # by kind, and by who asked for it


@dataclass(frozen=True, slots=True)
class Counted:
    """What rank 0 saw: the table's rows, how many FSDP groups there are, and what is counted besides FSDP's."""

    rows: list[list[str]]
    groups: int
    besides: list[str]


def measure() -> str:
    counted, _ = on_ranks(RANKS, _count)
    header = [
        "parallel.strategy",
        "parallel.reshard_after_forward",
        "graphs kept",
        *(f"{n} chunk{'s' * (n > 1)}" for n in CHUNKS),
    ]
    return "\n\n".join(
        [
            f"FSDP's own, of {counted.groups} groups of weights (the layers, and the rest):",
            markdown(header, counted.rows),
            "Beside these, by the module that asks, as many in every row and column:",
            *counted.besides,
        ]
    )


def _count(rank: int, folder: Path) -> Counted:
    rows, results, groups, besides = [], list[tuple[float, float]](), 0, dict[Strategy, Counts]()
    with world_of(RANKS, rank, folder / "store", most=RANKS) as world:
        for strategy, reshard in ((Strategy.fsdp, True), (Strategy.fsdp, False), (Strategy.ddp, None)):
            model = small_bert(world, strategy, reshard_after_forward=reshard)
            run, groups = trainable(model, world, OPTIM), _groups(model.encoder)
            batch = train_data(PAIRS, model.tokenizer).batch(0)
            for kept, share in KEPT.items():
                cells = []
                for chunks in CHUNKS:
                    part = _in_chunks(batch, world, model, chunks, kept=int(share * chunks))
                    with Collectives() as seen:
                        report = train_step(run, part)
                    cells.append(" / ".join(str(seen.counts[kind, FSDP]) for kind in _NAMES))
                    others = Counter({key: n for key, n in seen.counts.items() if key[1] != FSDP})
                    as_ever = besides.setdefault(strategy, others) == others
                    require(as_ever, f"collectives: {others} beside FSDP's, and {besides[strategy]} in another step")
                    results.append((report.loss, report.grad_norm))
                    if reshard is False:
                        once = [seen.counts[kind, FSDP] for kind in ("AG", "RS")] == [groups, groups]
                        require(once, f"collectives: {groups} groups travel once a step, but {seen.counts} was seen")
                rows.append([strategy.value, "-" if reshard is None else str(reshard).lower(), kept, *cells])
    for loss, norm in results:
        right = abs(loss - results[0][0]) <= 1e-5 and abs(norm / results[0][1] - 1) <= 1e-4
        require(right, f"collectives: loss and gradient norm depend on the chunks: {results}")
    return Counted(rows, groups, [_told(strategy, others) for strategy, others in besides.items()])


def _told(strategy: Strategy, counts: Counts) -> str:
    kinds = {kind: ", ".join(f"{n} of {who}" for (of, who), n in counts.items() if of == kind) for kind in _NAMES}
    return f"{strategy.value}: " + "; ".join(f"{_NAMES[kind]}: {told}" for kind, told in kinds.items())


def _groups(encoder: nn.Module) -> int:
    return sum(isinstance(part, FSDPModule) for part in encoder.modules())


def _in_chunks(batch: GlobalBatch, world: World, model: LoadedModel, chunks: int, *, kept: int) -> RankBatch:
    """The rank's texts in exactly so many chunks."""
    for chunk_tokens in range(16384, 0, -16):
        part = make_rank_batch(
            batch, world.rank, world.size, model.tokenizer, ChunkOptions(chunk_tokens, pass_overhead_tokens=10**6)
        )
        if part.num_passes == chunks:
            return replace(part, num_cached_graphs=kept)
    raise AssertionError(f"collectives: no chunk size gives {chunks} chunks")


class Collectives(TorchDispatchMode):
    """Counts the collectives that this rank takes part in, those inside DTensor and FSDP as well."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into plain operations, which come by here
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(_PLUMBING):
            kind = next((kind for part, kind in _KINDS.items() if part in name), name)
            require(kind in _NAMES, f"collectives: {name} has no column")
            self.counts[kind, _asked_by(sys._getframe(1))] += 1
        return func(*args, **(kwargs or {}))


def _asked_by(frame: FrameType | None) -> str:
    """FSDP where it is in the midst of something, else the nearest function of ours that is no wrapper."""
    ours = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("torch.distributed.fsdp"):
            return FSDP
        if not ours and module.startswith("embedtrain.") and module != "embedtrain.distributed.collectives":
            ours = f"{module.removeprefix('embedtrain.')}"
        frame = frame.f_back
    return ours
