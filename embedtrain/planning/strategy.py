"""Choice of the parallel layout: the fastest that fits among those that the recipe allows, with a one-line reason.

The choice is the same on every rank: it depends on the recipe, the model's configuration, the number of ranks, and the
memory of the rank with the least memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embedtrain.config.optim import MAX_BETA2_OF_BF16, StateDtype
from embedtrain.config.recipe import SELECTIVE, ParallelConfig, Strategy
from embedtrain.distributed.block_compute import not_selective
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.errors import ConfigError
from embedtrain.planning.memory import (
    ClusterSpec,
    HostMemory,
    MemoryUse,
    StepWorkload,
    encoding_memory,
    fit_activation_tokens,
    host_memory,
    reduces_once_per_step,
    step_memory,
)
from embedtrain.planning.model_costs import ModelSpec
from embedtrain.planning.traffic import StepTraffic, step_traffic

# A simpler layout is preferred over one that is faster by less than this fraction, because times are estimates, or by
# less than these seconds: the estimate omits the optimizer and kernel launches, of which sharding has more.
_TIME_TOLERANCE, _SECONDS_TOLERANCE = 0.03, 1e-3
# Fraction of a rank's memory for the weights of a model that only encodes; the rest is for embeddings and search.
_ENCODING_FRACTION = 0.5
# Below this number of bytes of all-gathers per step, sharding a model that fits costs nothing worth a mention.
_MIN_ADVISED_BYTES = 5e8
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout and its costs."""

    layout: ParallelLayout
    memory: MemoryUse  # of one rank at its peak, in a step in which each chunk but one is encoded twice
    host: HostMemory  # of a node
    traffic: StepTraffic  # with the graphs that fit, which may be those of all chunks
    fits: bool  # on each rank and on each node
    caches_all: bool  # whether the graphs of all chunks fit, so that none is encoded twice
    reduce_per_step: bool  # whether gradients are reduced once per step; else after every chunk

    @property
    def name(self) -> str:
        """Short description of the layout."""
        layout = self.layout
        words = [layout.strategy.value]
        if layout.strategy is Strategy.hsdp:
            words.append(f"{layout.replicate} x {layout.shard}")
        if layout.shard > 1:
            words.append("resharded after forward" if layout.reshard_after_forward else "not resharded after forward")
        if layout.activation_checkpointing:
            words.append(f"{'selective ' * (layout.activation_checkpointing == SELECTIVE)}activation checkpointing")
        words += ["CPU offload"] * layout.cpu_offload
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The chosen layout."""

    layout: ParallelLayout  # with its `reason`
    reduce_per_step: bool  # as of LayoutCandidate
    best: LayoutCandidate | None = None  # None for a model that only encodes
    next_best: LayoutCandidate | None = None


def choose_layout(
    parallel: ParallelConfig,
    cluster: ClusterSpec,
    model: ModelSpec,
    work: StepWorkload,
    *,
    always_measure: bool = False,
) -> LayoutChoice:
    """The layout of a training; raises ConfigError or ModelError if `parallel` asks for what is impossible.

    Options of the recipe are obeyed. Of the layouts that fit, the fastest according to `step_traffic` is chosen, or a
    simpler one that takes at most 3 % or 1 ms longer: replicated weights before sharded ones, sharded within nodes
    before over all ranks, without activation checkpointing before selective one, that before all activations. CPU
    offload is chosen if nothing else fits, and smaller moments are advised before. If none fits, the one that exceeds
    the memory of a rank or a node by the smallest factor is chosen. A fixed order is no substitute for the times, which
    `plan` prints as well: a billion replicated weights fit, but with few rows per rank a step waits longer for their
    all-reduce than sharding takes.

    The memory of `cluster` is that of the rank that has the least. `always_measure` measures activations even if their
    upper bound, which needs no measurement, fits.
    """
    if parallel.activation_checkpointing == SELECTIVE and model.allows_selective() is False:
        raise not_selective(model.name)
    bounded = model.bounded()
    simplest = _candidate(next(_layouts(parallel, cluster, bounded)), parallel, cluster, bounded, work)
    if simplest.fits and simplest.caches_all and not always_measure:
        spec, qualifier = bounded, "at most "
    else:
        spec, qualifier = model, ""
    candidates = layout_candidates(parallel, cluster, spec, work)
    best = _best(candidates, cluster)
    remaining = [candidate for candidate in candidates if candidate is not best]
    reason = _reason(parallel, cluster, best, candidates, qualifier)
    advice = _advice(parallel, cluster, spec, work, best) + _moments_advice(parallel, cluster, spec, work, best)
    layout = replace(best.layout, reason=f"{reason}{advice}")
    next_best = _best(remaining, cluster) if remaining else None
    return LayoutChoice(layout, best.reduce_per_step, replace(best, layout=layout), next_best)


def choose_encoding_layout(parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec) -> LayoutChoice:
    """The layout of a model that only encodes: replicated if the weights use at most half of the memory."""
    layouts = [
        ParallelLayout(
            strategy,
            *mesh_shape(strategy, parallel, cluster.ranks, cluster.per_node),
            "",
            reshard_after_forward=parallel.reshard_after_forward is not False,
            cpu_offload=bool(parallel.cpu_offload),
        )
        for strategy in _strategies(parallel, cluster)
    ]
    sizes = [encoding_memory(model.bounded(), layout, 0).total for layout in layouts]
    fitting = [index for index, size in enumerate(sizes) if size <= _ENCODING_FRACTION * cluster.memory]
    layout = layouts[fitting[0] if fitting else len(layouts) - 1]
    weights = f"{_gib(sizes[0])} of weights, {_gib(cluster.memory)} of memory per rank"
    if parallel.strategy is not Strategy.auto:
        reason = f"requested; {weights}"
    elif layout is layouts[0]:
        reason = f"fits on every rank: {weights}"
    else:
        reason = f"too large to replicate: {weights}"
    return LayoutChoice(replace(layout, reason=reason), reduce_per_step=False)


def layout_candidates(
    parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec, work: StepWorkload
) -> list[LayoutCandidate]:
    """All layouts that the recipe allows, the simplest first."""
    return [_candidate(layout, parallel, cluster, model, work) for layout in _layouts(parallel, cluster, model)]


def mesh_shape(strategy: Strategy, parallel: ParallelConfig, ranks: int, per_node: int) -> tuple[int, int]:
    """Number of replicas, and of shards of each; ConfigError if `parallel.shard_size` does not divide the ranks."""
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


def _layouts(parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec) -> Iterator[ParallelLayout]:
    """The layouts that the recipe allows, the simplest first."""
    recompute_choices: list[bool | str] = [False]
    if model.weights.blocks:
        recompute_choices += [SELECTIVE, True] if model.allows_selective() else [True]
    for offload in _values(parallel.cpu_offload, [False, True] if cluster.gpu else [False]):
        for recompute in _values(parallel.activation_checkpointing, recompute_choices):
            for strategy in _strategies(parallel, cluster):
                replicate, shard = mesh_shape(strategy, parallel, cluster.ranks, cluster.per_node)
                resharding = _values(parallel.reshard_after_forward, [False, True])
                for reshard in resharding if shard > 1 else [parallel.reshard_after_forward is not False]:
                    yield ParallelLayout(
                        strategy,
                        replicate,
                        shard,
                        "",
                        reshard_after_forward=reshard,
                        activation_checkpointing=recompute,
                        cpu_offload=offload,
                    )


def _values(option: bool | str | None, choices: Sequence[bool | str]) -> Sequence[Any]:
    return choices if option is None else [option]


def _strategies(parallel: ParallelConfig, cluster: ClusterSpec) -> list[Strategy]:
    if parallel.shard_size is not None and parallel.strategy is not Strategy.hsdp:
        raise ConfigError(
            f"parallel.shard_size={parallel.shard_size} is only for parallel.strategy=hsdp, "
            f"not {parallel.strategy.value}"
        )
    if parallel.strategy is not Strategy.auto:
        return [parallel.strategy]
    strategies = [Strategy.ddp]
    # Within one node hsdp is the same as fsdp.
    if 1 < cluster.per_node < cluster.ranks and cluster.ranks % cluster.per_node == 0:
        strategies.append(Strategy.hsdp)
    return [*strategies, Strategy.fsdp] if cluster.ranks > 1 else strategies


def _candidate(
    layout: ParallelLayout, parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec, work: StepWorkload
) -> LayoutCandidate:
    once = reduces_once_per_step(parallel.gradient_reduction, layout, model.weights.trained, cluster.memory)
    memory = step_memory(model, layout, cluster, work, reduce_per_step=once)
    host = host_memory(model, layout, cluster, work)
    tokens = fit_activation_tokens(model, layout, cluster, work, reduce_per_step=once, free=cluster.memory)
    fitted = replace(work, activation_tokens=tokens)
    local = fitted.per_rank(cluster.ranks)
    return LayoutCandidate(
        layout,
        memory,
        host,
        step_traffic(model, layout, cluster, fitted, reduce_per_step=once),
        fits=memory.total <= cluster.usable and host.fits(cluster),
        caches_all=local.num_cached_graphs == local.chunks,
        reduce_per_step=once,
    )


def _best(candidates: list[LayoutCandidate], cluster: ClusterSpec) -> LayoutCandidate:
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return min(
            candidates, key=lambda of: max(of.memory.total / cluster.usable, of.host.total / cluster.usable_on_host)
        )
    # Its time is the least certain one: a host's cores compute the optimizer step.
    fitting = [candidate for candidate in fitting if not candidate.layout.cpu_offload] or fitting
    fastest = min(candidate.traffic.seconds for candidate in fitting)
    return next(candidate for candidate in fitting if _is_close(candidate, fastest))


def _is_close(candidate: LayoutCandidate, seconds: float) -> bool:
    return candidate.traffic.seconds <= seconds + max(_TIME_TOLERANCE * seconds, _SECONDS_TOLERANCE)


def _reason(
    parallel: ParallelConfig,
    cluster: ClusterSpec,
    best: LayoutCandidate,
    candidates: list[LayoutCandidate],
    qualifier: str,
) -> str:
    memory = f"{qualifier}{_gib(best.memory.total)} planned for model and step, of {_gib(cluster.memory)} per rank"
    if best.memory.total > cluster.usable:
        memory += f", of which {_gib(cluster.usable)} are usable"
    if best.layout.cpu_offload or not best.host.fits(cluster):
        memory += f"; {_gib(best.host.total)} of host memory per node"
    if not best.host.fits(cluster):
        memory += f", of which {_gib(cluster.usable_on_host)} are usable: the system would end a rank without a message"
    if not best.fits:
        start = "requested" if parallel.strategy is not Strategy.auto else "nothing fits, this needs the least memory"
        return f"{start}: {memory}"
    if parallel.strategy is not Strategy.auto:
        return f"requested: {memory}"
    simplest, best_seconds = candidates[0], best.traffic.seconds
    if best.layout.shard > 1:
        if simplest.fits:
            return (
                f"faster than {simplest.name}, which fits too: an estimated {_duration(best_seconds)} per step instead "
                f"of {_duration(simplest.traffic.seconds)}, of which {_duration(best.traffic.exposed)} and "
                f"{_duration(simplest.traffic.exposed)} wait for communication; {memory}"
            )
        return (
            f"{simplest.name} would need {_gib(simplest.memory.total)}; the fastest that fits: {memory}, an estimated "
            f"{_duration(best_seconds)} per step"
        )
    sharded = [candidate for candidate in candidates if candidate.layout.shard > 1 and candidate.fits]
    if not sharded:
        return f"fits on every rank: {memory}"
    rival = min(sharded, key=lambda candidate: candidate.traffic.seconds)
    comparison = f"an estimated {_duration(best_seconds)} per step, {rival.name} {_duration(rival.traffic.seconds)}"
    simpler = ", but ddp is simpler" if rival.traffic.seconds < best_seconds else ""
    return f"fits on every rank: {memory}; {comparison}{simpler}"


def _advice(
    parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec, work: StepWorkload, best: LayoutCandidate
) -> str:
    """Advice if replication fits and is at least as fast as the requested strategy, give or take the tolerance."""
    if parallel.strategy not in (Strategy.fsdp, Strategy.hsdp) or best.layout.shard == 1:
        return ""
    options = replace(parallel, strategy=Strategy.ddp, shard_size=None)
    layout = ParallelLayout(Strategy.ddp, cluster.ranks, 1, "", cpu_offload=best.layout.cpu_offload)
    ddp = _candidate(layout, options, cluster, model, work)
    is_faster = _is_close(ddp, best.traffic.seconds)
    if not ddp.fits or not is_faster or best.traffic.all_gather < _MIN_ADVISED_BYTES:
        return ""
    return (
        f"; parallel.strategy=ddp fits too, with {_gib(ddp.memory.total)}, and is simpler: an estimated "
        f"{_duration(ddp.traffic.seconds)} per step instead of {_duration(best.traffic.seconds)}"
    )


def smaller_moments(
    parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec, work: StepWorkload
) -> tuple[str, LayoutCandidate] | None:
    """The options with which moments take less, and the best layout that fits with them without CPU offload.

    bf16 if that is enough, else int8. None if neither is, or if moments are as small already. They change what is
    learned, so they are advised and never chosen.
    """
    optim, dtypes = work.optim, list(StateDtype)
    for dtype in dtypes[dtypes.index(optim.state_dtype) + 1 :]:
        smaller = replace(work, optim=replace(optim, state_dtype=dtype))
        layouts = (layout for layout in _layouts(parallel, cluster, model) if not layout.cpu_offload)
        fitting = [of for layout in layouts if (of := _candidate(layout, parallel, cluster, model, smaller)).fits]
        if fitting:
            options = f"optim.state_dtype={dtype.value}"
            if dtype is StateDtype.bf16 and optim.betas[1] > MAX_BETA2_OF_BF16:
                options += f" optim.betas=[{optim.betas[0]:g},{MAX_BETA2_OF_BF16:g}]"
            return options, _best(fitting, cluster)
    return None


def _moments_advice(
    parallel: ParallelConfig, cluster: ClusterSpec, model: ModelSpec, work: StepWorkload, best: LayoutCandidate
) -> str:
    """What smaller moments save, if weights are offloaded because nothing else fits, or if nothing fits at all."""
    is_last_resort = not best.fits or (parallel.cpu_offload is None and best.layout.cpu_offload)
    found = smaller_moments(parallel, cluster, model, work) if is_last_resort else None
    if found is None:
        return ""
    options, other = found
    without = " without CPU offload" * best.fits
    duration = f"an estimated {_duration(other.traffic.seconds)} per step"
    if best.fits:
        duration += f" instead of {_duration(best.traffic.seconds)}"
    return f"; {options} would fit{without}: {other.name}, {_gib(other.memory.total)} per rank, {duration}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
