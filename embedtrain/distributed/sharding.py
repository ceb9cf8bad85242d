"""Sharding an encoder with FSDP2: checkpointing, then compile, then blocks, then root, then memory.

The order is fixed. Activation checkpointing first, for it must lie inside what FSDP gathers; compilation
next, block by block and in place, so that parameter names stay clean; then every block is a group of its
own, a large vocabulary's embedding another, and what is left (final norm, heads) the root's. The optimiser
is built after all this: one built before holds tensors that are no longer the model's.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.errors import ModelError, TrainingError

# From so many elements on a vocabulary's embedding is gathered for the lookup alone: as a part of the root it would
# stay whole for the whole step, as would its gradient (XLM-R: 192 million elements).
LARGE_EMBEDDING = 2**24
# Groups that keep their weights after a forward pass, as was asked for; FSDP does not tell.
_KEEP: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def shard_(
    encoder: nn.Module, blocks: list[nn.Module], layout: ParallelLayout, parallel: ParallelConfig, device: torch.device
) -> None:
    """Shard `encoder` in place and give its parameters (uninitialised) memory. A collective.

    Args:
        encoder: parameters on the meta device, of any types that training mixes; buffers in memory.
        blocks: the modules inside that become groups of their own.
        layout: how the weights lie, and what is saved of their memory.
        parallel: precision and compilation.
        device: where this rank computes.

    Raises:
        ModelError: a parameter cannot be sharded, or blocks cannot be recomputed.
    """
    _require_shardable(encoder, blocks)
    if layout.activation_checkpointing:
        _recompute(encoder, blocks)
    if parallel.compile:
        for block in blocks:
            block.compile(dynamic=True)
    mesh = layout.mesh(device)
    policy = _precision(parallel.precision)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if layout.cpu_offload else OffloadPolicy()
    # With one shard there is nothing to give back, and gathering again would only copy.
    gives_back = layout.shard > 1 and layout.reshard_after_forward
    embedding = large_embedding(encoder) if layout.shard > 1 else None
    for part in (*blocks, *([] if embedding is None else [embedding])):
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=gives_back)
        if not layout.reshard_after_forward:
            _KEEP.add(part)
    if isinstance(embedding, FSDPModule):
        embedding.set_unshard_in_backward(False)  # the gradient of a lookup asks for the ids alone
    fully_shard(encoder, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    home = torch.device("cpu") if layout.cpu_offload else device
    encoder._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))
    # Not inside compiled blocks, where a hook of Python's would break the graph at every linear layer.
    _guard_direct_calls(encoder, outside=blocks if parallel.compile else [])


def large_embedding(encoder: nn.Module) -> nn.Embedding | None:
    """The vocabulary's embedding where it is large enough to be a group of its own."""
    find = getattr(getattr(encoder, "backbone", None), "get_input_embeddings", None)
    try:
        found = None if find is None else find()
    except NotImplementedError:  # of a model's own code
        return None
    # Nothing but the table itself: a module that also holds a norm needs its weights in the backward pass.
    if not isinstance(found, nn.Embedding) or [name for name, _ in found.named_parameters()] != ["weight"]:
        return None
    return found if found.weight.numel() >= LARGE_EMBEDDING else None


def _recompute(encoder: nn.Module, blocks: list[nn.Module]) -> None:
    """Let blocks keep their inputs alone, and compute the rest again in the backward pass.

    Not by transformers' own switch: some models have none (MPNet, and many with code of their own), and it is of no
    effect in evaluation mode.
    """
    if not blocks:
        raise ModelError(
            f"{type(encoder.backbone).__name__} has no list of repeated layers whose activations could be computed "
            "again: set parallel.activation_checkpointing=false"
        )
    for block in blocks:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # Around `forward` and not around the call: what FSDP hangs on a call would gather the weights once more.
    @functools.wraps(forward)
    def computed_twice(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return computed_twice


def _require_shardable(encoder: nn.Module, blocks: list[nn.Module]) -> None:
    """Refuse what FSDP cannot cut, or would fail on within the first step, by the parameter's name."""
    owner = {id(p): block for block in blocks for p in block.parameters()}
    types: dict[int, tuple[torch.dtype, str]] = {}
    for name, parameter in encoder.named_parameters():
        if parameter.dim() == 0:
            raise ModelError(f"parameter {name} has no dimension, so it cannot be sharded: give it the shape (1,)")
        if not parameter.requires_grad:
            continue
        first, of = types.setdefault(id(owner.get(id(parameter))), (parameter.dtype, name))
        if parameter.dtype != first:
            raise ModelError(
                f"parameters {of} ({first}) and {name} ({parameter.dtype}) are trained in one block with two types: "
                "give them one"
            )


def _precision(precision: Precision) -> MixedPrecisionPolicy:
    # reduce_dtype is always said: left out it means param_dtype up to torch 2.13 and fp32 from 2.15 on.
    match precision:
        case Precision.bf16:
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        case Precision.fp32:
            return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


def reshard(module: nn.Module) -> None:
    """Give back the memory of every gathered weight below `module`.

    Needed after forward passes without a backward pass: FSDP leaves the root's weights gathered then, and
    whoever looks at the parameters next (an optimiser, a norm, a checkpoint) would see plain tensors that
    are not the ones trained.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextlib.contextmanager
def unsharded_weights(encoder: nn.Module, one_pass: Callable[[], object]) -> Iterator[None]:
    """Keep all weights gathered during the block: a forward pass is no collective then, and ranks may run any number.

    Every rank holds the whole model meanwhile. Afterwards weights are sharded as before. Without effect on a module
    that is not sharded.

    Args:
        encoder: sharded, in evaluation mode, and called without gradient during the block.
        one_pass: runs one forward pass on every rank; it gathers.
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
            gives_back = part is not encoder and part not in _KEEP and _has_shards(part)
            part.set_reshard_after_forward(gives_back, recurse=False)


def _has_shards(part: nn.Module) -> bool:
    first = next(iter(part.parameters()), None)
    return isinstance(first, DTensor) and first.device_mesh.size(first.device_mesh.ndim - 1) > 1


def warm_up(encoder: nn.Module, device: torch.device) -> None:
    """Run one token through the sharded encoder, without gradient, and give the weights back.

    FSDP learns which module is the root from the first forward pass. Whoever would call a block first, or
    evaluate under `torch.inference_mode` first, would spoil every later step; now neither is the first.
    """
    training = encoder.training
    with torch.no_grad():
        one = torch.zeros((1, 1), dtype=torch.int64, device=device)
        encoder.eval()(one, torch.ones_like(one))
    encoder.train(training)
    reshard(encoder)


def set_gradient_sync(encoder: nn.Module, *, last: bool, whole: bool = True) -> None:
    """Say before a backward pass whether it is the last of its step.

    Without effect on a module that is not sharded.

    Args:
        encoder: about to run a backward pass.
        last: whether it is the step's last.
        whole: until the last one gradients pile up on this rank, unreduced, so that a step costs one
            reduce-scatter a group however many chunks it has; else every pass reduces, this rank keeps its
            shards, and only the sum over replicas waits for the last one.
    """
    if isinstance(encoder, FSDPModule):
        encoder.set_requires_gradient_sync(last or not whole)
        encoder.set_requires_all_reduce(last)
        encoder.set_is_last_backward(last)
        encoder.set_reshard_after_backward(last or not whole)


def _guard_direct_calls(encoder: nn.Module, outside: list[nn.Module]) -> None:
    """Make calls that bypass the gathering of weights say so, instead of failing deep inside torch.

    Only `encoder(ids, mask)` gathers the root's weights. `encoder.forward(...)` or a call of a part of it
    would meet sharded embeddings ("mixed torch.Tensor and DTensor", "'weight' must be 2-D").
    """
    skipped = {id(part) for block in outside for part in block.modules()}
    for part in encoder.modules():
        if id(part) in skipped or isinstance(part, FSDPModule):
            continue
        if next(part.parameters(recurse=False), None) is not None:
            part.register_forward_pre_hook(_refuse_shards)


def _refuse_shards(part: nn.Module, _args: tuple[Any, ...]) -> None:
    # Between a block's hooks and here FSDP has put plain tensors in place; shards mean it was not asked.
    if isinstance(next(part.parameters(recurse=False)), DTensor):
        raise TrainingError(
            f"{type(part).__name__} was reached while its weights are sharded: call the encoder itself, "
            f"encoder(ids, mask), on every rank; not its forward method and not a part of it"
        )
