"""Bytes that a rank takes in a step, by kind, at the moment when it takes most.

What is linear in the number of weights is counted, activations are measured (see `activations`), and a step is gone
through moment by moment, for a sum over kinds would add what is never there together. FSDP2's own buffers are those of
torch 2.13: gathered weights are copies in the type that is computed in, also where a rank has the whole model; a
group's gradient is whole, in that type, until the group is through, then copied to fp32 and reduced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from embedtrain.config.losses import Implementation, InfoNCEConfig
from embedtrain.config.recipe import GradientReduction
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.losses.infonce import MAX_GATHERED_BYTES, MAX_PLAIN_BYTES
from embedtrain.losses.softmax import TILE_CELLS
from embedtrain.planning.model_costs import ModelSpec
from embedtrain.planning.workload import ClusterSpec, StepWorkload

_FP32 = 4
_ADAM = 8  # two moments in fp32
# Unreduced gradients of the whole model, in fp32, may take this share of a rank's memory while chunks are to come.
_WHOLE_GRADIENTS_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank by kind; `total` is their sum.

    Attributes:
        parameters: trained weights in fp32, others as they are stored, and buffers.
        gradients: reduced or whole, as they lie between passes.
        optimizer: Adam's moments.
        activations: of the graphs that are kept and of the pass that runs.
        loss: vectors, those of all ranks, their gradients, and scores.
        gathered: weights as they are computed with.
        reducing: gradients on their way to be reduced.
        moment: when this is.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    loss: float = 0.0
    gathered: float = 0.0
    reducing: float = 0.0
    moment: str = ""

    @property
    def kinds(self) -> dict[str, float]:
        """All kinds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.kinds.values())


def reduces_once_per_step(
    gradient_reduction: GradientReduction, layout: ParallelLayout, trained: int, memory: int
) -> bool:
    """Turn `parallel.gradient_reduction` into whether a rank holds whole gradients between the chunks of a step.

    Where weights are replicated its part is the whole in any case.

    Args:
        gradient_reduction: the recipe's option.
        layout: how the weights lie.
        trained: elements of weights that have a gradient.
        memory: bytes of the rank that has least.
    """
    match gradient_reduction:
        case GradientReduction.per_step:
            return True
        case GradientReduction.per_chunk:
            return False
        case GradientReduction.auto:
            return layout.shard == 1 or _FP32 * trained <= _WHOLE_GRADIENTS_SHARE * memory


def step_memory(
    facts: ModelSpec, layout: ParallelLayout, machines: ClusterSpec, work: StepWorkload, *, whole: bool
) -> MemoryUse:
    """What one rank takes at most in a step after the first.

    Args:
        facts: the model.
        layout: how its weights lie.
        machines: where.
        work: what a step does.
        whole: `reduces_once_per_step`.
    """
    step = _Step(facts, layout, machines, work, whole=whole)
    return max(step.moments(), key=lambda moment: moment.total)


def encoding_memory(facts: ModelSpec, layout: ParallelLayout, tokens: int) -> MemoryUse:
    """What one rank takes at most that only encodes: weights, copies to compute with, a pass without gradient."""
    return MemoryUse(
        parameters=_parameters(facts, layout),
        gathered=_gathered(facts, layout),
        activations=facts.keeps(False).alone * tokens,
        moment="encoding",
    )


class _Step:
    """A step, moment by moment."""

    def __init__(
        self, facts: ModelSpec, layout: ParallelLayout, machines: ClusterSpec, work: StepWorkload, *, whole: bool
    ) -> None:
        self.facts, self.layout, self.work, self.whole = facts, layout, work, whole
        self.keeps = facts.keeps(layout.activation_checkpointing)
        self.passes = work.passes(machines.ranks)
        self.each = facts.compute_bytes
        here = 0 if layout.cpu_offload else 1  # offloaded, all that is not in use lies in host memory
        self.reduced = _FP32 * facts.trained / layout.shard * here
        unreduced = whole or layout.shard == 1
        self.between = _FP32 * facts.trained if unreduced else self.reduced  # held while there are passes to come
        self.parameters = _parameters(facts, layout) * here + facts.buffers * (1 - here)
        self.optimizer = _ADAM * facts.trained / layout.shard * here
        self.loss = _loss(facts, machines, work, self.passes.texts)
        self.vectors = 3.0 * _FP32 * self.passes.texts * facts.dimension
        self.graph = self.keeps.kept(len(facts.blocks)) * self.passes.tokens

    def moments(self) -> Iterator[MemoryUse]:
        """All at which most may be taken."""
        passes, several = self.passes, self.work.gradient_accumulation_steps > 1
        yield self._at("the optimiser's step", gradients=self.reduced)
        # Between batches of one step there are gradients already.
        held = self.between if several else 0.0
        graphs = passes.kept * self.graph
        gathered = _gathered(self.facts, self.layout)
        before = graphs if passes.kept < passes.chunks else graphs - self.graph  # the last chunk's lookup
        looked_up = _looked_up(self.facts, self.layout)
        yield self._at("the lookup of tokens", before, gradients=held, gathered=looked_up)
        if passes.kept < passes.chunks:
            yield self._at("a later lookup of tokens", gradients=self.between, gathered=looked_up)
        yield self._at("the loss", graphs, gradients=held, gathered=gathered, loss=self.loss)
        if passes.kept:
            most = graphs + self.keeps.forward * passes.tokens
            yield self._at("a forward pass", most, gradients=held, gathered=gathered, loss=self.vectors)
        if passes.kept < passes.chunks:
            most = graphs + self.keeps.alone * passes.tokens
            yield self._at("a pass without graph", most, gradients=held, gathered=gathered, loss=self.vectors)
        for number in {0, 1, passes.kept, passes.chunks - 1} & set(range(passes.chunks)):
            last = number == passes.chunks - 1
            for of_first_batch in (True, False) if several else (True,):
                for of_last_batch in (False, True) if several else (True,):
                    first = number == 0 and of_first_batch
                    yield from self._backward(number, first=first, last=last and of_last_batch)

    def _backward(self, number: int, *, first: bool, last: bool) -> Iterator[MemoryUse]:
        """One backward pass: where it begins, after its first block, and where it ends.

        Args:
            number: of it within its batch.
            first: whether no gradient is there yet.
            last: whether it is the step's last.
        """
        facts, keeps, passes, each = self.facts, self.keeps, self.passes, self.each
        block = facts.block.trained
        graphs = max(1, passes.kept - number) * self.graph
        gradients = 0.0 if first else self.between
        stays = self.whole and not last and self.layout.shard > 1  # weights stay gathered for the next pass
        everything = each * (facts.parameters - facts.embedding.elements)
        gathered = _gathered(facts, self.layout)
        if 0 < number < passes.kept and self.whole:
            gathered = max(gathered, everything)
        begin = {"gathered": gathered, "gradients": gradients, "loss": self.vectors}
        name = "the backward pass" if first else "a later backward pass"
        yield self._at(f"{name} begins", graphs + keeps.backward * passes.tokens, reducing=each * block, **begin)
        # A block's gradient is whole in the type that is computed in, then on its way in fp32 while the next is made.
        if len(facts.blocks) > 1:
            left = graphs + (keeps.backward - keeps.block) * passes.tokens
            yield self._at(name, left, reducing=(each + _FP32) * block, **begin)
        # The root's and the embedding's are through at its end only.
        ends = facts.root.trained + facts.embedding.trained
        way = each * ends
        if self.whole and last and not first:
            way = _FP32 * ends
        if not self.whole or last:
            way += _FP32 * max(facts.root.trained, facts.embedding.trained, block)
        yield self._at(
            f"{name} ends",
            graphs - self.graph + keeps.rest * passes.tokens,
            loss=self.vectors,
            gathered=max(gathered, everything) if stays else each * facts.root.elements,
            reducing=way,
            gradients=self.reduced if last else self.between,
        )

    def _at(self, moment: str, activations: float = 0.0, **others: float) -> MemoryUse:
        return MemoryUse(
            parameters=self.parameters, optimizer=self.optimizer, activations=activations, moment=moment, **others
        )


def _parameters(facts: ModelSpec, layout: ParallelLayout) -> float:
    return (_FP32 * facts.trained + facts.frozen_bytes) / layout.shard + facts.buffers


def _gathered(facts: ModelSpec, layout: ParallelLayout) -> float:
    """Copies of weights to compute with: all, or, where they are given back, the root's, a block's, and the next."""
    each, largest = facts.compute_bytes, facts.block.elements
    if _gives_back(facts, layout):
        return each * (facts.root.elements + min(2, len(facts.blocks)) * largest)
    return each * (facts.parameters + (largest if layout.shard > 1 else 0))


def _looked_up(facts: ModelSpec, layout: ParallelLayout) -> float:
    """The same where a forward pass begins: the embedding as it arrives, and its copy."""
    if _gives_back(facts, layout):
        return facts.compute_bytes * (facts.root.elements + 2 * facts.embedding.elements)
    return _gathered(facts, layout)


def _gives_back(facts: ModelSpec, layout: ParallelLayout) -> bool:
    return layout.shard > 1 and layout.reshard_after_forward and bool(facts.blocks)


def _loss(facts: ModelSpec, machines: ClusterSpec, work: StepWorkload, texts: int) -> float:
    """Vectors of this rank and of all, with their gradients, and scores. Other losses are taken for InfoNCE."""
    all_rows = work.rows
    candidates = all_rows * max(1, work.texts_per_row - 1)
    rows = -(-all_rows // machines.ranks)
    directions = len(work.loss.directions) if isinstance(work.loss, InfoNCEConfig) else 1
    own = 6.0 * _FP32 * texts * facts.dimension  # vectors, their copies at home, normalised, and gradients of each
    gathered = 2.0 * _FP32 * candidates * facts.dimension
    scores = _FP32 * rows * candidates * directions
    way = work.loss.implementation if isinstance(work.loss, InfoNCEConfig) else Implementation.auto
    if way is Implementation.plain or (way is Implementation.auto and scores <= MAX_PLAIN_BYTES):
        return own + gathered + 4.0 * scores
    if way is Implementation.ring or (
        way is Implementation.auto and gathered * (1 - 1 / machines.ranks) > MAX_GATHERED_BYTES
    ):
        return own + 4.0 * gathered / machines.ranks + 2.0 * _FP32 * TILE_CELLS
    return own + gathered + 2.0 * _FP32 * TILE_CELLS


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
