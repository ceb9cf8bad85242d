"""What to change: the largest chunk that fits, and what else makes room."""

from dataclasses import replace

from embedtrain.config.schema import ParallelConfig
from embedtrain.distributed.mesh import Layout
from embedtrain.planning.choose import Candidate, every_candidate
from embedtrain.planning.facts import ModelFacts
from embedtrain.planning.memory import memory_of
from embedtrain.planning.work import Machines, Work

_MOST_RANKS = 4096


def largest_chunk(facts: ModelFacts, layout: Layout, machines: Machines, work: Work, *, whole: bool) -> int | None:
    """The largest `train.chunk_tokens` of whole texts with which the layout fits; None: not even one text.

    It is no larger than what a rank has to encode in a step.
    """
    most = max(1, work.passes(machines.ranks).texts)

    def fits(texts: int) -> bool:
        tried = replace(work, chunk_tokens=texts * work.tokens_per_text)
        return memory_of(facts, layout, machines, tried, whole=whole).total <= machines.usable

    if not fits(1):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * work.tokens_per_text


def changes(parallel: ParallelConfig, machines: Machines, facts: ModelFacts, work: Work, best: Candidate) -> list[str]:
    """What would make it fit, each as a sentence that says what to write; empty where it fits."""
    if best.fits:
        return []
    told = []
    chunk = largest_chunk(facts, best.layout, machines, work, whole=best.whole)
    if chunk is not None:
        told.append(f"train.chunk_tokens={chunk}: the largest with which {best.name} fits")
    freed = _set_free(parallel)
    if freed is not None:
        fitting = [one for one in every_candidate(freed, machines, facts, work) if one.fits]
        if fitting:
            quickest = min(fitting, key=lambda one: one.traffic.step)
            told.append(f"leave parallel.* open: {quickest.name} fits")
    ranks = machines.ranks * 2
    while ranks <= _MOST_RANKS:
        more = replace(machines, ranks=ranks)
        if any(one.fits for one in every_candidate(replace(parallel, shard_size=None), more, facts, work)):
            told.append(f"gpus={ranks}: so many ranks have room for it")
            break
        ranks *= 2
    if facts.trained > 0.5 * facts.parameters:
        told.append("model.lora.rank=16: adapters alone have gradients and Adam's moments")
    if work.tokens_per_text > 128:
        told.append("model.max_length=...: shorter texts, where yours are")
    return told


def _set_free(parallel: ParallelConfig) -> ParallelConfig | None:
    """The options with everything open; None if they are."""
    free = replace(
        parallel,
        strategy=type(parallel.strategy).auto,
        shard_size=None,
        reshard=None,
        activation_checkpointing=None,
        cpu_offload=None,
    )
    return None if free == parallel else free
