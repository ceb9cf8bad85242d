"""Sharding an encoder with FSDP2, and loading weights into the shards.

The order of sharding is fixed. Activation checkpointing comes first, because FSDP must gather weights around it. Then
every block becomes an FSDP group, a large token embedding another, and everything else (final norm, heads) belongs to
the root. The optimizer is built after all this: if built before, it holds tensors that the model no longer uses.

Each rank then reads its own rows of each tensor from files, or rank 0 broadcasts them. Blocks are compiled last, when
the model is verified: the texts of verifications have forms that training never has, and each form costs a graph.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # a private name, checked on torch 2.15
from torch.utils.hooks import RemovableHandle

from embedtrain.config.recipe import ParallelConfig, Precision, Strategy
from embedtrain.distributed.block_compute import Fallback, compile_forward, recompute_activations
from embedtrain.distributed.device import has_bf16
from embedtrain.distributed.world import World, device_group
from embedtrain.errors import ModelError, TrainingError
from embedtrain.utils.formatting import format_count


@dataclass(frozen=True)
class ParallelLayout:
    """How weights are distributed over the ranks, and which memory savings apply."""

    strategy: Strategy
    replicate: int  # number of copies
    shard: int  # number of shards of each copy
    reason: str  # why this layout was chosen, for the user
    # Whether a block frees its unsharded weights after the forward pass; no effect with one shard.
    reshard_after_forward: bool = True
    # Which activations of a block are recomputed in the backward pass: true, false or `SELECTIVE`, as in the recipe.
    activation_checkpointing: bool | str = False
    # Whether weights, gradients and optimizer state are kept in host memory and copied on demand.
    cpu_offload: bool = False

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The device mesh with dimensions (replicate, shard). A collective."""
        # DTensor caches sharding decisions by mesh, and treats the mesh of a destroyed process group (of an earlier job
        # of a multirun, or test) as equal to this one: "Could not resolve the process group".
        _clear_sharding_prop_cache()
        replicas = [[replica * self.shard + shard for shard in range(self.shard)] for replica in range(self.replicate)]
        shards = [list(ranks) for ranks in zip(*replicas, strict=True)]
        groups = [
            device_group(device, shards, "replicas of a shard"),
            # The gradient norm and the full tensor of offloaded shards are sums and parts in host memory.
            device_group(device, replicas, "shards of a replica", in_host_memory=self.cpu_offload),
        ]
        return DeviceMesh.from_group(groups, device.type, replicas, mesh_dim_names=("replicate", "shard"))


# Number of elements from which a token embedding is an FSDP group: as part of the root it would stay unsharded for the
# whole step, as would its gradient (XLM-R: 192 million elements).
LARGE_EMBEDDING = 2**24
# Weights below which a frozen vision tower is replicated: 2 GB in bf16.
_MAX_REPLICATED = 10**9
# FSDP groups that keep their unsharded weights after a forward pass (reshard_after_forward=false); FSDP has no getter.
_KEEP_UNSHARDED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
# Hooks of `_guard_direct_calls`, by encoder.
_GUARDS: "weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = weakref.WeakKeyDictionary()
# The blocks of sharded encoders, whose classes FSDP has renamed. Not by encoder: a block refers to its encoder through
# FSDP, so that the entry would keep the encoder, and with it the process groups of its mesh.
_BLOCKS: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def resolve_precision(precision: Precision, world: World) -> Precision:
    """The precision that `auto` stands for on these ranks. A collective."""
    if precision is not Precision.auto:
        return precision
    return Precision.bf16 if all(world.gather(has_bf16(world.device))) else Precision.fp32


def shard_encoder(
    encoder: nn.Module, blocks: list[nn.Module], layout: ParallelLayout, parallel: ParallelConfig, device: torch.device
) -> None:
    """Shard `encoder` in place and allocate its parameters without initialising them. A collective.

    Its parameters are on the meta device, buffers in memory; blocks become FSDP groups.
    """
    _require_shardable(encoder, blocks)
    if layout.activation_checkpointing:
        _require_blocks(encoder, blocks)
        recompute_activations(blocks, layout.activation_checkpointing)
    mesh = layout.mesh(device)
    policy = _precision(parallel.precision)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if layout.cpu_offload else OffloadPolicy()
    # With one shard there is nothing to free, and gathering again would only copy.
    reshard_blocks = layout.shard > 1 and layout.reshard_after_forward
    towers = towers_of(encoder)
    vision = [module for tower in towers for module in getattr(tower, "vision_modules", ())]
    replicated = replicated_weights(vision)
    in_vision = {id(part) for module in vision for part in module.modules()}
    # What a vision tower gets is of the types that it computes in; weights of interpolation stay in float32.
    vision_policy = dataclasses.replace(policy, cast_forward_inputs=False)
    if replicated:
        blocks = [block for block in blocks if id(block) not in in_vision]
        vision = []
    embeddings = [found for tower in towers if (found := large_embedding(tower)) is not None and layout.shard > 1]
    for part in (*blocks, *embeddings):
        own = vision_policy if id(part) in in_vision else policy
        fully_shard(part, mesh=mesh, mp_policy=own, offload_policy=offload, reshard_after_forward=reshard_blocks)
        if not layout.reshard_after_forward:
            _KEEP_UNSHARDED.add(part)
    for embedding in embeddings:
        assert isinstance(embedding, FSDPModule)
        embedding.set_unshard_in_backward(False)  # the gradient of a lookup only needs the ids
    for part in vision:  # a group of its own, which passes without pictures do not gather
        fully_shard(part, mesh=mesh, mp_policy=vision_policy, offload_policy=offload, reshard_after_forward=False)
        _KEEP_UNSHARDED.add(part)
    for tower in towers:
        head = getattr(tower, "float32_head", None)
        if head is not None:
            fully_shard(
                head,
                mesh=mesh,
                mp_policy=_precision(Precision.fp32),
                offload_policy=offload,
                reshard_after_forward=False,
            )
            _KEEP_UNSHARDED.add(head)
        if tower is not encoder:
            fully_shard(
                tower,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=False,
                ignored_params=replicated,
            )
            _KEEP_UNSHARDED.add(tower)
    fully_shard(
        encoder,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=False,
        ignored_params=replicated,
    )
    storage = torch.device("cpu") if layout.cpu_offload else device
    encoder._apply(lambda t: torch.empty_like(t, device=storage) if t.is_meta else t.to(device))
    _BLOCKS.update(blocks)
    _guard_direct_calls(encoder, outside=[])


def towers_of(encoder: nn.Module) -> list[nn.Module]:
    """The parts of an encoder of which a pass computes one, each an FSDP group besides its blocks."""
    return list(getattr(encoder, "towers", {"": encoder}).values())


def replicated_weights(vision: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The weights of a frozen vision tower, which every rank has in full if they are few: it needs no collective."""
    weights = {parameter for module in vision for parameter in module.parameters()}
    is_frozen = not any(parameter.requires_grad for parameter in weights)
    return weights if is_frozen and sum(weight.numel() for weight in weights) < _MAX_REPLICATED else set()


def large_embedding(encoder: nn.Module) -> nn.Embedding | None:
    """The token embedding, if it is large enough to be an FSDP group, and is not one already (`float32_head`).

    One that is the vocabulary head of a sparse model as well stays in the root's group, which is unsharded from the
    lookup to the head: a group is unsharded around the calls of its own module only.
    """
    if getattr(encoder, "tied", False):
        return None
    get_embedding = getattr(getattr(encoder, "backbone", None), "get_input_embeddings", None)
    try:
        embedding = None if get_embedding is None else get_embedding()
    except NotImplementedError:  # raised by some models with custom code
        return None
    # Only a plain table: a module that also contains a norm needs its weights in the backward pass.
    if not isinstance(embedding, nn.Embedding) or [name for name, _ in embedding.named_parameters()] != ["weight"]:
        return None
    if embedding is getattr(encoder, "float32_head", None):
        return None
    return embedding if embedding.weight.numel() >= LARGE_EMBEDDING else None


def _require_blocks(encoder: nn.Module, blocks: list[nn.Module]) -> None:
    if not blocks:
        backbone = towers_of(encoder)[0].backbone
        raise ModelError(
            f"{type(backbone).__name__} has no list of repeated layers whose activations could be "
            "recomputed: set parallel.activation_checkpointing=false"
        )


def compile_blocks(encoder: nn.Module, fallback: Fallback = lambda _: []) -> None:
    """`compile_forward` of the blocks of a sharded encoder, whose layers are no longer checked for sharded weights."""
    blocks = [part for part in encoder.modules() if part in _BLOCKS]
    compile_forward(encoder, blocks, fallback)
    # Not inside compiled blocks, where a Python hook would break the graph at every linear layer.
    remove_guards(encoder)
    _guard_direct_calls(encoder, outside=blocks)


def _require_shardable(encoder: nn.Module, blocks: list[nn.Module]) -> None:
    """Reject parameters that FSDP cannot shard, or on which it would fail in the first step."""
    owner = {id(p): block for block in blocks for p in block.parameters()}
    types: dict[int, tuple[torch.dtype, str]] = {}
    for name, parameter in encoder.named_parameters():
        if parameter.dim() == 0:
            raise ModelError(f"parameter {name} has no dimension, so it cannot be sharded: give it the shape (1,)")
        if not parameter.requires_grad:
            continue
        first_dtype, first_name = types.setdefault(id(owner.get(id(parameter))), (parameter.dtype, name))
        if parameter.dtype != first_dtype:
            raise ModelError(
                f"parameters {first_name} ({first_dtype}) and {name} ({parameter.dtype}) of one block are "
                "trained with two dtypes: convert them to one"
            )


def _precision(precision: Precision) -> MixedPrecisionPolicy:
    assert precision is not Precision.auto, "resolve_precision comes first"
    # reduce_dtype is explicit: its default is param_dtype up to torch 2.13 and fp32 from 2.15 on.
    match precision:
        case Precision.bf16:
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        case Precision.fp32:
            return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


def reshard(module: nn.Module) -> None:
    """Free all unsharded weights below `module`.

    Needed after forward passes without a backward pass: FSDP leaves the root's weights unsharded then, and code that
    reads the parameters next (optimizer, norm, checkpoint) would see plain tensors that are not the trained ones.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextlib.contextmanager
def unsharded_weights(encoder: nn.Module, one_pass: Callable[[], object]) -> Iterator[None]:
    """Keep all weights unsharded during the block, so that a forward pass is not a collective.

    `one_pass` runs a forward pass on every rank, which gathers the weights. Every rank then holds the full model and
    may run any number of passes, in evaluation mode and without gradient. Afterwards the weights are sharded as before.
    Without effect on a module that is not sharded.
    """
    parts = [part for part in encoder.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
    try:
        if parts:
            one_pass()
        yield
    finally:
        reshard(encoder)
        for part in parts:
            reshards = part is not encoder and part not in _KEEP_UNSHARDED and _has_shards(part)
            part.set_reshard_after_forward(reshards, recurse=False)


def _has_shards(part: nn.Module) -> bool:
    first = next(iter(part.parameters()), None)
    return isinstance(first, DTensor) and first.device_mesh.size(first.device_mesh.ndim - 1) > 1


def warm_up(encoder: nn.Module, chunk: object) -> None:
    """Run a small chunk through the sharded encoder without gradient, and reshard its weights.

    FSDP determines the root module in the first forward pass. If that were a call of a block, or under
    `torch.inference_mode`, every later step would fail.
    """
    training = encoder.training
    with torch.no_grad():
        encoder.eval()(chunk)
    encoder.train(training)
    reshard(encoder)


def set_gradient_sync(
    encoder: nn.Module, *, last: bool, reduce_per_step: bool = True, finished: Iterable[nn.Module] = ()
) -> None:
    """Configure gradient reduction for the next backward pass. Without effect on a module that is not sharded.

    Args:
        last: whether the pass is the last of its step.
        reduce_per_step: accumulate unsharded gradients locally until the last pass, so that a step costs one
            reduce-scatter per FSDP group. Otherwise every pass reduces into shards, and only the sum over replicas
            waits for the last pass.
        finished: towers of the encoder that no later pass of the step computes. Replicas would never sum the gradients
            of a tower that the last pass does not compute, because FSDP does so for gradients of the pass only.
    """
    if isinstance(encoder, FSDPModule):
        encoder.set_is_last_backward(last)
        for part, is_last in ((encoder, last), *((tower, True) for tower in finished)):
            assert isinstance(part, FSDPModule)
            part.set_requires_gradient_sync(is_last or not reduce_per_step)
            part.set_requires_all_reduce(is_last)
            part.set_reshard_after_backward(is_last or not reduce_per_step)


def _guard_direct_calls(encoder: nn.Module, outside: list[nn.Module]) -> None:
    """Make calls that bypass FSDP raise a clear error instead of failing inside torch.

    Only `encoder(chunk)` gathers the root's weights. `encoder.forward(...)` or a call of a submodule would use
    sharded weights ("mixed torch.Tensor and DTensor", "'weight' must be 2-D").
    """
    skipped = {id(part) for block in outside for part in block.modules()}
    _GUARDS[encoder] = [
        part.register_forward_pre_hook(_refuse_shards)
        for part in encoder.modules()
        if id(part) not in skipped
        and not isinstance(part, FSDPModule)
        and next(part.parameters(recurse=False), None) is not None
    ]


def remove_guards(encoder: nn.Module) -> None:
    """Stop checking every call of a layer for sharded weights; for code that has trained `encoder` for a step.

    A hook of every layer costs time in each forward pass, and a program that calls the encoder correctly once does so
    in every step. Without effect if there is nothing to remove.
    """
    for handle in _GUARDS.pop(encoder, []):
        handle.remove()


def _refuse_shards(part: nn.Module, _args: tuple[Any, ...]) -> None:
    # FSDP's hooks replace shards by plain tensors before this hook runs; shards mean that they did not run.
    if isinstance(next(part.parameters(recurse=False)), DTensor):
        raise TrainingError(
            f"{type(part).__name__} was reached while its weights are sharded: call encoder(chunk) on every "
            f"rank, not its forward method or a submodule"
        )


_CHECKED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class UnshardedWeight(NamedTuple):
    """A weight that every rank needs unsharded."""

    shape: torch.Size
    receive: Callable[[Tensor], None]  # called with the weight on the rank's device


def row_range(tensor: Tensor) -> tuple[int, int]:
    """Rows [start, end) of the full tensor that the local shard holds; all rows if the tensor is not sharded.

    FSDP2 splits the first dimension like `torch.chunk`: equal parts rounded up, the last ones shorter or empty.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    start, end = 0, tensor.shape[0]
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_shard():
            continue
        assert placement == Shard(0), f"expected sharded rows, not {placement}"
        part = -(-(end - start) // tensor.device_mesh.size(dim))
        start = min(start + part * tensor.device_mesh.get_local_rank(dim), end)
        end = min(start + part, end)
    assert end - start == tensor.to_local().shape[0], "FSDP split rows differently than torch.chunk"
    return start, end


def require_finite_weights(module: nn.Module, model: str, world: World) -> None:
    """Reject NaN and infinity in parameters, which make every vector meaningless. A collective.

    Raises ModelError on every rank if any rank has such values; `model` begins the message.
    """
    names, extremes = [], []
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.numel() and local.dtype in _CHECKED_DTYPES:
            names.append(name)
            # The extremes are not finite if any value is not, and need no memory, unlike torch.isfinite.
            extremes.append(torch.stack(torch.aminmax(local.detach())).to(world.device, torch.float64))
    finite = torch.stack(extremes).isfinite().all(dim=1).tolist() if extremes else []
    local_names = [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    broken = {name for of_rank in world.gather(local_names) for name in of_rank}
    if broken:
        first = next(name for name, _ in module.named_parameters() if name in broken).removeprefix("backbone.")
        raise ModelError(
            f"{model}: values of {format_count(len(broken), 'weight')} are not finite, the first of them {first}: "
            "download the model again, or choose another one"
        )


def read_shards(
    tensors: Mapping[str, Tensor],
    locations: Mapping[str, tuple[Path, str]],
    unsharded_weights: Mapping[str, UnshardedWeight] | None = None,
    device: torch.device | None = None,
) -> None:
    """Fill tensors in place from safetensors files, reading only the local rows of each.

    Args:
        tensors: sharded parameters or plain buffers of any dtype by name; values are cast.
        locations: file and key in the file of every name; shapes must be equal.
        unsharded_weights: weights that every rank needs unsharded, by name.
    """
    unsharded = unsharded_weights or {}
    by_file: dict[Path, list[str]] = {}
    for name in (*tensors, *unsharded):
        by_file.setdefault(locations[name][0], []).append(name)
    for path, names in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in names:
                key = locations[name][1]
                if name in unsharded:
                    unsharded[name].receive(file.get_tensor(key).to(device))
                    continue
                tensor = tensors[name]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.dim() == 0:
                    local.copy_(file.get_tensor(key))
                elif local.numel():
                    start, end = row_range(tensor)
                    local.copy_(file.get_slice(key)[start:end])


def broadcast_weights(
    tensors: Mapping[str, Tensor],
    unsharded_weights: Mapping[str, UnshardedWeight],
    world: World,
    make: Callable[[], Mapping[str, Tensor]],
) -> None:
    """Give every rank its rows of the weights that `make` returns on rank 0, tensor by tensor. A collective.

    `make` returns full tensors of the same names and shapes; values are cast to the dtypes of `tensors`.
    Only rank 0 holds the full model; other ranks hold one full tensor at a time, on their devices. If `make` fails, all
    ranks fail.
    """
    full: Mapping[str, Tensor] = {}
    with world.fail_together("reading the model's weights on rank 0"):
        if world.is_main:
            full = make()
            expected = tensors.keys() | unsharded_weights.keys()
            assert full.keys() == expected, f"{sorted(full.keys() ^ expected)[:3]} only on one side"
    for name, tensor in tensors.items():
        copy_local_rows(tensor, _broadcast(full.get(name), tensor.shape, tensor.dtype, world))
    for name, weight in unsharded_weights.items():
        weight.receive(_broadcast(full.get(name), weight.shape, torch.float32, world))


def _broadcast(full: Tensor | None, shape: torch.Size, dtype: torch.dtype, world: World) -> Tensor:
    """Rank 0's tensor on every rank's device; floating-point tensors in fp32."""
    dtype = torch.float32 if dtype.is_floating_point else dtype
    if full is not None:
        tensor = full.detach().to(world.device, dtype).contiguous()
    else:
        tensor = torch.empty(shape, dtype=dtype, device=world.device)
    dist.broadcast(tensor, src=0, group=world.group)
    return tensor


def copy_local_rows(tensor: Tensor, full: Tensor) -> None:
    """Fill a tensor in place with the local rows of the full tensor; values are cast."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        if local.dim() == 0:
            local.copy_(full)
        elif local.numel():
            start, end = row_range(tensor)
            local.copy_(full[start:end])
