"""What this rank holds of a model and its optimiser at one step, and copies of it that training may outrun."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.weight_files import TensorSpec
from embedtrain.distributed.weights import row_range
from embedtrain.models.adapters import has_adapters

WEIGHTS, OPTIMIZER = "weights", "optimizer"
ENCODER = "encoder."  # before the names of the encoder's weights; the loss's own are `loss.`


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's rows of one tensor.

    Attributes:
        spec: of the whole tensor.
        rows: what this rank holds, on whatever device; all of it where the tensor is not cut.
        first: the row of the whole that `rows` begins with.
        cut: whether the shards hold different rows.
    """

    spec: TensorSpec
    rows: Tensor
    first: int
    cut: bool


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Which part of the weights is this rank's: shard `shard` of `shards`, in copy `replica`."""

    replica: int
    shard: int
    shards: int

    @property
    def writes(self) -> bool:
        """Whether this rank writes: of several copies one does."""
        return self.replica == 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model's and its optimiser's tensors at one step, as far as this rank holds them.

    Attributes:
        share: which part is this rank's.
        tensors: `weights` and `optimizer` -> name -> part; the latter is missing where it is not saved. Learning rates
            and the like are not kept: they follow from the recipe and the step.
    """

    share: ShardPosition
    tensors: Mapping[str, Mapping[str, LocalShard]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all whole tensors: what a checkpoint takes on disk, but for headers and manifest."""
        return sum(part.spec.num_bytes for parts in self.tensors.values() for part in parts.values())


def take_snapshot(trained: nn.Module, optimizer: torch.optim.Optimizer | None) -> Snapshot:
    """The present tensors themselves, not copies; no collective.

    Args:
        trained: encoder and loss, sharded, between two steps.
        optimizer: theirs, or None where its state is not saved.
    """
    model = checkpointed_weights(trained)
    tensors = {WEIGHTS: local_shards(model)}
    if optimizer is not None:
        init_optimizer_state(optimizer)
        state: dict[str, Any] = get_optimizer_state_dict(
            trained, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        tensors[OPTIMIZER] = local_shards({name: value for name, value in state.items() if isinstance(value, Tensor)})
    return Snapshot(shard_position(model), tensors)


def checkpointed_weights(trained: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds of a model, by name: with adapters, what is frozen is not among them."""
    options = StateDictOptions(ignore_frozen_params=has_adapters(trained))
    return cast("dict[str, Tensor]", get_model_state_dict(trained, options=options))


def local_shards(tensors: Mapping[str, Tensor]) -> dict[str, LocalShard]:
    """What this rank holds of each tensor."""
    return {
        name: LocalShard(
            spec=TensorSpec.of(tensor),
            rows=(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach(),
            first=row_range(tensor)[0],
            cut=isinstance(tensor, DTensor),
        )
        for name, tensor in tensors.items()
    }


def shard_position(tensors: Mapping[str, Tensor]) -> ShardPosition:
    """Which part of sharded tensors is this rank's."""
    mesh = next((tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return ShardPosition(0, 0, 1)
    return ShardPosition(mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank(), mesh["shard"].size())


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that no step has reached (those of a loss whose source has not come) AdamW's first state.

    It is made when a parameter first has a gradient, but asked for of all parameters when a checkpoint is read.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


class Staging:
    """Host memory that a snapshot is copied to, kept from one save to the next: training goes on beside the writing.

    From a GPU the copies run on a stream of their own into pinned memory. Weights change in the optimiser's step
    alone, so only that has to wait for them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in host memory; on a GPU it is complete after `wait`."""
        first = next(part.rows for parts in snapshot.tensors.values() for part in parts.values())
        if first.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(first.device)
            self._stream.wait_stream(torch.cuda.current_stream(first.device))
            with torch.cuda.stream(self._stream):
                copied = self._copy(snapshot)
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
            return copied
        return self._copy(snapshot)

    def wait(self) -> None:
        """Block until the copies are complete: for the thread that writes them."""
        if (copied := self._copied) is not None:  # held here, for the main thread may let go of it meanwhile
            copied.synchronize()

    def wait_for_staging(self) -> None:
        """Let what this thread queues next on the GPU wait for the copies: before weights change."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None if self._copied.query() else self._copied

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        return replace(
            snapshot,
            tensors={
                kind: {
                    name: replace(part, rows=self._copied_rows((kind, name), part.rows)) for name, part in parts.items()
                }
                for kind, parts in snapshot.tensors.items()
            },
        )

    def _copied_rows(self, key: tuple[str, str], rows: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != rows.shape or buffer.dtype != rows.dtype:
            buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(rows, non_blocking=rows.is_cuda)
