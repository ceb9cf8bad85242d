"""Of how many tokens a rank keeps the graphs between a step's forward and backward passes: as many as memory has room.

What is kept is not encoded a second time, which is a quarter of a step's arithmetic where nothing is. What a token's
graph takes is measured (see `activations`); it is the same gradient either way.
"""

from dataclasses import replace

from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.planning.memory import step_memory
from embedtrain.planning.model_costs import ModelSpec
from embedtrain.planning.workload import ClusterSpec, StepWorkload

# Of memory, what may be planned with here. Less than for a layout: one that does not fit fails at once, this would
# with the one batch whose texts are longest.
_SHARE = 0.8


def activation_tokens(
    facts: ModelSpec, layout: ParallelLayout, machines: ClusterSpec, work: StepWorkload, *, whole: bool, free: int
) -> int:
    """What `train.activation_tokens` is where the recipe leaves it open; at least `train.chunk_tokens`.

    Args:
        facts: the model.
        layout: how its weights lie.
        machines: where.
        work: what a step does.
        whole: whether whole gradients are kept between chunks.
        free: bytes that a rank still has, of its GPU or of its part of the node.
    """
    most = work.passes(machines.ranks).texts * work.tokens_per_text
    if work.activation_tokens is not None or most <= work.chunk_tokens:
        return work.chunk_tokens if work.activation_tokens is None else work.activation_tokens
    room = _SHARE * min(free, machines.memory)
    found = work.chunk_tokens
    for known in (facts.bounded(), facts):  # measured only where it has to be
        each = known.keeps(layout.activation_checkpointing).kept(len(known.blocks))
        taken = step_memory(
            known, layout, machines, replace(work, activation_tokens=work.chunk_tokens), whole=whole
        ).total
        found = work.chunk_tokens + max(0, int((room - taken) / each))
        if found >= most:
            return most
    return found
