"""This rank's shards of a model and its optimizer at one step, and their copies for asynchronous saves.

Moments of 8 bits are codes and scales, as torch's own tensors (`encode_moment`), so that checkpoints store them, and
any number of ranks shards them, like weights.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.tensor_files import LocalShard, ShardPosition, TensorSpec
from embedtrain.distributed.sharding import row_range
from embedtrain.models.adapters import has_adapters

WEIGHTS, OPTIMIZER, AVERAGE = "weights", "optimizer", "ema"
ENCODER = "encoder."  # prefix of the encoder's weights; the loss's own have the prefix `loss.`


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors of a model and its optimizer at one step, as far as this rank holds them."""

    position: ShardPosition
    # Kind (`weights`, `ema` and `optimizer` if they are saved) -> name -> shard.
    tensors: Mapping[str, Mapping[str, LocalShard]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all unsharded tensors: the size of the checkpoint without headers and manifest."""
        return sum(shard.spec.num_bytes for shards in self.tensors.values() for shard in shards.values())


def live_snapshot(
    trained: nn.Module, optimizer: torch.optim.Optimizer | None, average: Mapping[str, Tensor] | None = None
) -> Snapshot:
    """The current tensors themselves, not copies; without optimizer or average if they are None. No collective."""
    model = checkpointed_weights(trained)
    tensors = {WEIGHTS: local_shards(model)}
    if average is not None:
        tensors[AVERAGE] = local_shards(average)
    if optimizer is not None:
        tensors[OPTIMIZER] = local_shards(optimizer_tensors(trained, optimizer))
    return Snapshot(shard_position(model), tensors)


def checkpointed_weights(trained: nn.Module) -> dict[str, Tensor]:
    """State dict that a checkpoint holds of a model; without the frozen weights if it has adapters."""
    options = StateDictOptions(ignore_frozen_params=has_adapters(trained))
    return cast("dict[str, Tensor]", get_model_state_dict(trained, options=options))


def optimizer_tensors(trained: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer state itself, not copies, by names of parameters: groups of a recipe do not change its names.

    Learning rates and other hyperparameters are not included, because they follow from the recipe and the step.
    """
    init_optimizer_state(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(trained, optimizer, options=options)
    return {name: value for name, value in state.items() if name.startswith("state.") and isinstance(value, Tensor)}


def local_shards(tensors: Mapping[str, Tensor]) -> dict[str, LocalShard]:
    """This rank's rows of each tensor."""
    return {
        name: LocalShard(
            spec=TensorSpec.of(tensor),
            rows=(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach(),
            first_row=row_range(tensor)[0],
            sharded=isinstance(tensor, DTensor),
        )
        for name, tensor in tensors.items()
    }


def shard_position(tensors: Mapping[str, Tensor]) -> ShardPosition:
    """Position of this rank in the mesh of the tensors."""
    mesh = next((tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return ShardPosition(replica=0, shard=0, num_shards=1)
    return ShardPosition(mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank(), mesh["shard"].size())


def rows_to_write(shards: Mapping[str, LocalShard], position: ShardPosition) -> Iterator[tuple[str, int, Tensor]]:
    """The rows that this rank writes, such that the ranks together write each row once: name, first row, rows."""
    for name, shard in shards.items():
        if position.is_writer and (shard.sharded or position.shard == 0) and shard.rows.numel():
            yield name, shard.first_row, shard.rows


@runtime_checkable
class _HasInitialState(Protocol):
    """An optimizer that creates the state of a parameter before its first step."""

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]: ...


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the initial state, of AdamW unless the optimizer says otherwise, for parameters that have none yet.

    torch creates it when a parameter first has a gradient, but a checkpoint needs it for all parameters. Those of a
    loss have none until a batch of its source occurs.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if optimizer.state[parameter]:
            continue
        if isinstance(optimizer, _HasInitialState):
            optimizer.state[parameter] = optimizer.initial_state(parameter)
        else:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


SCALES = "_scales"  # behind the name of a moment: the name of its scales, if it is stored in 8 bits
SIGNED, UNSIGNED = torch.int8, torch.uint8  # types of the codes of the first moment, and of the second one
_DECADES = 7
_TINY = torch.finfo(torch.float32).tiny


@functools.cache
def _code_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The sorted numbers from -1 or 0 to 1 that codes stand for, the bounds between them, and the index of 0.

    Each decade has twice as many numbers as the one below: dynamic tree quantisation (Dettmers, "8-bit Approximations
    for Parallelism in Deep Learning", 2015), here with 0 and 1 (and -1), so that encoding again changes no code.
    """
    decades = [
        10.0 ** (decade - _DECADES + 1)
        * torch.linspace(0.1, 1, 2 ** (decade + (dtype is UNSIGNED)) + 1, dtype=torch.float64)[1:]
        for decade in range(_DECADES)
    ]
    positive, zero = torch.cat(decades), torch.zeros(1, dtype=torch.float64)
    values = torch.cat([zero, positive] if dtype is UNSIGNED else [-positive.flip(0), zero, positive])
    bounds = (values[1:] + values[:-1]) / 2
    if dtype is UNSIGNED:
        # A second moment that became 0 beside a first one that did not would make an update as large as 1 / optim.eps.
        bounds[0] = 0
    return values.float().to(device), bounds.float().to(device), len(values) - len(positive) - 1


def encode_moment(moment: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [n, D] of type `dtype`, and fp32 scales [n, D / block], of a moment [n, D] in fp32.

    The scale is the largest magnitude of a block, and a code the nearest number relative to it (Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization", 2021).
    """
    _, bounds, zero = _code_values(dtype, moment.device)
    blocks = moment.unflatten(1, (-1, block))
    scales = blocks.abs().amax(-1)
    codes = torch.bucketize(blocks / scales.clamp(min=_TINY).unsqueeze(-1), bounds, out_int32=True)
    return (codes - zero).to(dtype).flatten(1), scales


def decode_moment(codes: Tensor, scales: Tensor) -> Tensor:
    """The moment [n, D] in fp32 of codes [n, D] and scales [n, D / block]."""
    values, _, zero = _code_values(codes.dtype, codes.device)
    blocks = values[codes.int() + zero].unflatten(1, (scales.shape[1], -1))
    moment: Tensor = (blocks * scales.unsqueeze(-1)).flatten(1)
    return moment


class Staging:
    """Host memory for copies of snapshots, reused from one save to the next, so that training continues meanwhile.

    On a GPU the copies run on a separate stream into pinned memory. Only the optimizer step changes sharded weights, so
    only it has to wait for the copies. A loss may change its buffers in every forward pass: tensors that are not
    sharded, which are small, are copied before later work of the current stream.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}  # by kind and name
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def reserve(self, snapshot: Snapshot) -> None:
        """Allocate the memory for copies of such a snapshot, unless it is allocated; pinning can take seconds."""
        rows = {(kind, name): shard.rows for kind, shards in snapshot.tensors.items() for name, shard in shards.items()}
        allocated = {key: _layout(tensor) for key, tensor in self._buffers.items()}
        if allocated != {key: _layout(tensor) for key, tensor in rows.items()}:
            self._buffers = {}
            # With parallel.cpu_offload the shards are in host memory, and the parameters of the loss on the GPU.
            for on_gpu in (False, True):
                tensors = {key: tensor for key, tensor in rows.items() if tensor.is_cuda is on_gpu}
                self._buffers |= _allocate(tensors, pinned=on_gpu)

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in host memory; on a GPU it is complete after `wait`."""
        self.reserve(snapshot)
        devices = {shard.rows.device for shards in snapshot.tensors.values() for shard in shards.values()}
        device = next((device for device in devices if device.type == "cuda"), None)
        if device is None:
            return replace(snapshot, tensors=self._copy(snapshot, (False, True)))
        whole = self._copy(snapshot, (False,))
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            sharded = self._copy(snapshot, (True,))
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        return replace(
            snapshot,
            tensors={
                kind: {name: (whole[kind] | sharded[kind])[name] for name in shards}
                for kind, shards in snapshot.tensors.items()
            },
        )

    def wait(self) -> None:
        """Block until the copies are complete; for the writing thread."""
        if (copied := self._copied) is not None:  # a local reference, because the main thread may reset it meanwhile
            copied.synchronize()

    def wait_for_staging(self) -> None:
        """Make work that this thread queues on the GPU wait for the copies; call it before weights change."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None if self._copied.query() else self._copied

    def _copy(self, snapshot: Snapshot, sharded: tuple[bool, ...]) -> dict[str, dict[str, LocalShard]]:
        """Copies of the tensors that are sharded, or not, as `sharded` lists."""
        return {
            kind: {
                name: replace(shard, rows=self._buffers[kind, name].copy_(shard.rows, non_blocking=shard.rows.is_cuda))
                for name, shard in shards.items()
                if shard.sharded in sharded
            }
            for kind, shards in snapshot.tensors.items()
        }


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _aligned_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in a buffer in which each tensor starts at a multiple of 64, as in torch's own memory."""
    return -(-tensor.nbytes // 64) * 64


def _allocate(tensors: Mapping[tuple[str, str], Tensor], *, pinned: bool) -> dict[tuple[str, str], Tensor]:
    """Uninitialised tensors of the same shapes in host memory.

    torch rounds every allocation of pinned memory up to a power of two (CachingHostAllocator, torch 2.11 to 2.15), so
    a tensor of its own would take up to twice its size. Tensors therefore share blocks whose sizes are powers of two.
    """
    buffers: dict[tuple[str, str], Tensor] = {}
    remaining = sorted(tensors, key=lambda key: _aligned_bytes(tensors[key]), reverse=True)
    while remaining:
        sizes = {key: _aligned_bytes(tensors[key]) for key in remaining}
        # The largest block that will be full; only a tensor that fits into none has a larger one.
        full, largest = 1 << max(sum(sizes.values()), 1).bit_length() - 1, sizes[remaining[0]]
        capacity = full if full >= largest else 1 << (largest - 1).bit_length()
        block, offset = torch.empty(capacity, dtype=torch.uint8, pin_memory=pinned), 0
        for key, size in sizes.items():
            if offset + size <= capacity:
                like = tensors[key]
                buffers[key] = block[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
                offset += size
        remaining = [key for key in remaining if key not in buffers]
    return buffers
