"""Which layout a training gets: of those that the recipe leaves open the fastest that fits, and one line why.

The same on every rank: a function of the recipe, the model's configuration, the number of ranks, and the memory of the
rank that has least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from embedtrain.config.recipe import ParallelConfig, Strategy
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.errors import ConfigError
from embedtrain.planning.memory import MemoryUse, encoding_memory, reduces_once_per_step, step_memory
from embedtrain.planning.model_costs import ModelSpec
from embedtrain.planning.traffic import Traffic, step_traffic
from embedtrain.planning.workload import ClusterSpec, StepWorkload

# A layout that is simpler is taken though another is faster by this share: figures are estimates.
_AS_FAST = 0.03
# Of a rank's memory, what weights may take that only encode; vectors and what is searched come beside them.
_ENCODING_SHARE = 0.5
# Bytes of all-gathers a step from which on it is worth a word that they could be saved.
_WORTH_SAYING = 5e8
_GIB, _GB = 2**30, 1e9


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout, and what it takes.

    Attributes:
        layout: how weights lie.
        memory: of one rank, at the moment when it takes most.
        traffic: what a step sends, and its seconds.
        fits: whether the memory is there.
        whole: whether whole gradients are kept between chunks.
    """

    layout: ParallelLayout
    memory: MemoryUse
    traffic: Traffic
    fits: bool
    whole: bool

    @property
    def name(self) -> str:
        """The layout in a few words."""
        return layout_name(self.layout)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """What is chosen.

    Attributes:
        layout: with its `reason`.
        whole: whether a rank holds whole gradients between the chunks of a step.
        best: what it takes; None where nothing is trained.
        next_best: the one that would be taken without it, if there is any.
    """

    layout: ParallelLayout
    whole: bool
    best: LayoutCandidate | None = None
    next_best: LayoutCandidate | None = None


def choose(
    parallel: ParallelConfig, machines: ClusterSpec, facts: ModelSpec, work: StepWorkload, *, measured: bool = False
) -> LayoutChoice:
    """The layout of a training.

    What the recipe sets is obeyed. Replicated weights are taken wherever they fit as they are: no forward pass waits
    for others then. Else the fastest of what fits, by `step_traffic`; if nothing does, what comes nearest.

    Args:
        parallel: the recipe's options.
        machines: the ranks; `memory` is that of the one that has least, so that all choose alike.
        facts: the model.
        work: what a step does.
        measured: whether activations are measured also where a bound on them fits, which is had at once.

    Raises:
        ConfigError: `parallel.shard_size` does not divide the number of ranks, or is set without hsdp.
    """
    layouts = list(_layouts(parallel, machines, facts))
    bounded = facts.bounded()
    if not measured and _candidate(layouts[0], parallel, machines, bounded, work).fits:
        told = "at most "
    else:
        bounded, told = facts, ""
    found = [_candidate(layout, parallel, machines, bounded, work) for layout in layouts]
    best, next_best = _best_two(found)
    reason = _reason(parallel, machines, best, found, told)
    advice = _better(parallel, machines, bounded, work, best)
    layout = replace(best.layout, reason=f"{reason}{advice}")
    return LayoutChoice(layout, best.whole, replace(best, layout=layout), next_best)


def choose_encoding_layout(parallel: ParallelConfig, machines: ClusterSpec, facts: ModelSpec) -> LayoutChoice:
    """The layout of a model that only encodes: replicated where that leaves half of the memory.

    Raises:
        ConfigError: as `choose`.
    """
    offload, reshard_after_forward = bool(parallel.cpu_offload), parallel.reshard_after_forward is not False
    open_ones = [
        ParallelLayout(
            strategy,
            *mesh_shape(strategy, parallel, machines.ranks, machines.per_node),
            "",
            reshard_after_forward,
            False,
            offload,
        )
        for strategy in _strategies(parallel, machines)
    ]
    sizes = [encoding_memory(facts.bounded(), layout, 0).total for layout in open_ones]
    fitting = [place for place, size in enumerate(sizes) if size <= _ENCODING_SHARE * machines.memory]
    layout = open_ones[fitting[0] if fitting else len(open_ones) - 1]
    weights = f"{_gib(sizes[0])} of weights, {_gib(machines.memory)} of memory a rank"
    if parallel.strategy is not Strategy.auto:
        why = f"asked for; {weights}"
    elif layout is open_ones[0]:
        why = f"it fits on every rank: {weights}"
    else:
        why = f"it is too large to replicate: {weights}"
    return LayoutChoice(replace(layout, reason=why), whole=False)


def layout_candidates(
    parallel: ParallelConfig, machines: ClusterSpec, facts: ModelSpec, work: StepWorkload
) -> list[LayoutCandidate]:
    """All layouts that the recipe leaves open, the simplest first.

    Raises:
        ConfigError: as `choose`.
    """
    return [_candidate(layout, parallel, machines, facts, work) for layout in _layouts(parallel, machines, facts)]


def mesh_shape(strategy: Strategy, parallel: ParallelConfig, ranks: int, per_node: int) -> tuple[int, int]:
    """Copies, and the parts that each is cut into.

    Raises:
        ConfigError: `parallel.shard_size` does not divide the number of ranks.
    """
    match strategy:
        case Strategy.fsdp:
            return 1, ranks
        case Strategy.hsdp:
            size = per_node if parallel.shard_size is None else parallel.shard_size
            if size < 1 or ranks % size:
                raise ConfigError(
                    f"parallel.shard_size={size} does not divide the {ranks} ranks: "
                    f"allowed are {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
                )
            return ranks // size, size
        case _:
            return ranks, 1


def layout_name(layout: ParallelLayout) -> str:
    """A layout in a few words."""
    words = [layout.strategy.value]
    if layout.strategy is Strategy.hsdp:
        words.append(f"{layout.replicate} x {layout.shard}")
    if layout.shard > 1:
        words.append("resharded" if layout.reshard_after_forward else "gathered once")
    words += ["activation checkpointing"] * layout.activation_checkpointing + ["cpu offload"] * layout.cpu_offload
    return ", ".join(words)


def _layouts(parallel: ParallelConfig, machines: ClusterSpec, facts: ModelSpec) -> Iterator[ParallelLayout]:
    """What is left open, the simplest first."""
    recompute = [False, True] if facts.can_recompute else [False]
    for offload in _open(parallel.cpu_offload, [False, True] if machines.gpu else [False]):
        for recomputes in _open(parallel.activation_checkpointing, recompute):
            for strategy in _strategies(parallel, machines):
                replicate, shard = mesh_shape(strategy, parallel, machines.ranks, machines.per_node)
                resharding = _open(parallel.reshard_after_forward, [False, True])
                for reshard_after_forward in resharding if shard > 1 else [parallel.reshard_after_forward is not False]:
                    yield ParallelLayout(
                        strategy,
                        replicate,
                        shard,
                        "",
                        reshard_after_forward=reshard_after_forward,
                        activation_checkpointing=recomputes,
                        cpu_offload=offload,
                    )


def _open(asked: bool | None, choices: list[bool]) -> list[bool]:
    return choices if asked is None else [asked]


def _strategies(parallel: ParallelConfig, machines: ClusterSpec) -> list[Strategy]:
    if parallel.shard_size is not None and parallel.strategy is not Strategy.hsdp:
        raise ConfigError(
            f"parallel.shard_size={parallel.shard_size} is only for parallel.strategy=hsdp, "
            f"not {parallel.strategy.value}"
        )
    if parallel.strategy is not Strategy.auto:
        return [parallel.strategy]
    open_ones = [Strategy.ddp]
    # Within one node hsdp is fsdp.
    if 1 < machines.per_node < machines.ranks and machines.ranks % machines.per_node == 0:
        open_ones.append(Strategy.hsdp)
    return [*open_ones, Strategy.fsdp] if machines.ranks > 1 else open_ones


def _candidate(
    layout: ParallelLayout, parallel: ParallelConfig, machines: ClusterSpec, facts: ModelSpec, work: StepWorkload
) -> LayoutCandidate:
    whole = reduces_once_per_step(parallel.gradient_reduction, layout, facts.trained, machines.memory)
    memory = step_memory(facts, layout, machines, work, whole=whole)
    traffic = step_traffic(facts, layout, machines, work, whole=whole)
    return LayoutCandidate(layout, memory, traffic, fits=memory.total <= machines.usable, whole=whole)


def _best_two(found: list[LayoutCandidate]) -> tuple[LayoutCandidate, LayoutCandidate | None]:
    best = _best(found)
    others = [one for one in found if one is not best]
    return best, _best(others) if others else None


def _best(found: list[LayoutCandidate]) -> LayoutCandidate:
    fitting = [one for one in found if one.fits]
    if not fitting:
        return min(found, key=lambda one: one.memory.total)
    plain = found[0]
    if plain.fits and plain.layout.shard == 1 and not plain.layout.activation_checkpointing:
        return plain
    fastest = min(one.traffic.step for one in fitting)
    return next(one for one in fitting if one.traffic.step <= (1 + _AS_FAST) * fastest)


def _reason(
    parallel: ParallelConfig, machines: ClusterSpec, best: LayoutCandidate, found: list[LayoutCandidate], told: str
) -> str:
    takes = f"{told}{_gib(best.memory.total)} of {_gib(machines.memory)} a rank"
    if not best.fits:
        asked = "asked for; " if parallel.strategy is not Strategy.auto else "nothing fits, this comes nearest: "
        return f"{asked}{takes}, of which {_gib(machines.usable)} may be planned with"
    if parallel.strategy is not Strategy.auto:
        return f"asked for; {takes}"
    if best.layout.shard == 1:
        sharded = [one for one in found if one.layout.strategy is Strategy.fsdp]
        gathers = min((one.traffic.gathers for one in sharded), default=0.0)
        more = f"; fsdp would add {gathers / _GB:.1f} GB of all-gathers a step" if gathers >= _WORTH_SAYING else ""
        return f"it fits on every rank: {takes}{more}"
    plain = found[0]
    return (
        f"{plain.layout.strategy.value} would take {_gib(plain.memory.total)}; the fastest of what fits: {takes}, "
        f"{best.traffic.gathers / _GB:.1f} GB of all-gathers a step"
    )


def _better(
    parallel: ParallelConfig, machines: ClusterSpec, facts: ModelSpec, work: StepWorkload, best: LayoutCandidate
) -> str:
    """Advice where what is asked for is clearly worse than what could be had."""
    if parallel.strategy not in (Strategy.fsdp, Strategy.hsdp) or best.layout.shard == 1:
        return ""
    plain = replace(parallel, strategy=Strategy.ddp, shard_size=None)
    ddp = _candidate(
        ParallelLayout(Strategy.ddp, machines.ranks, 1, "", cpu_offload=best.layout.cpu_offload),
        plain,
        machines,
        facts,
        work,
    )
    if not ddp.fits or best.traffic.gathers < _WORTH_SAYING:
        return ""
    saved = f"{best.traffic.gathers / _GB:.1f} GB of all-gathers a step"
    return f"; parallel.strategy=ddp would do, with {_gib(ddp.memory.total)}, and save {saved}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / 2**20:.0f} MiB"
