"""Moving weights onto shards: each rank reads its own rows of each tensor, or rank 0 hands them out."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from embedtrain.distributed.world import World

# The shape of a weight that is wanted whole, and what takes it.
WholeWeight: TypeAlias = tuple[torch.Size, Callable[[Tensor], None]]


def row_range(tensor: Tensor) -> tuple[int, int]:
    """Which rows [start, end) of the whole tensor this rank's shard holds; all of them where it is not cut.

    FSDP2 cuts along the first dimension as `torch.chunk` does: equal parts rounded up, the last ones
    shorter or empty.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    start, end = 0, tensor.shape[0]
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_shard():
            continue
        assert placement == Shard(0), f"expected rows to be cut, not {placement}"
        part = -(-(end - start) // tensor.device_mesh.size(dim))
        start = min(start + part * tensor.device_mesh.get_local_rank(dim), end)
        end = min(start + part, end)
    assert end - start == tensor.to_local().shape[0], "FSDP cut rows in another way than torch.chunk"
    return start, end


def read_shards(
    tensors: Mapping[str, Tensor],
    places: Mapping[str, tuple[Path, str]],
    whole_weights: Mapping[str, WholeWeight] | None = None,
    device: torch.device | None = None,
) -> None:
    """Fill tensors in place from safetensors files; of each only this rank's rows are read.

    Args:
        tensors: by name; sharded parameters or plain buffers of any dtype (values are cast).
        places: for every name the file and the key in it, of equal shape.
        whole_weights: weights that every rank wants whole, by name.
        device: where it wants them.
    """
    wholes = whole_weights or {}
    by_file: dict[Path, list[str]] = {}
    for name in (*tensors, *wholes):
        by_file.setdefault(places[name][0], []).append(name)
    for path, names in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in names:
                key = places[name][1]
                if name in wholes:
                    wholes[name][1](file.get_tensor(key).to(device))
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
    whole_weights: Mapping[str, WholeWeight],
    world: World,
    make: Callable[[], Mapping[str, Tensor]],
) -> None:
    """Give every rank its rows of the weights that `make` returns on rank 0, tensor by tensor. A collective.

    Only rank 0 ever holds the whole model; of one tensor all do, on their devices. `make` may fail; then all ranks fail
    together.

    Args:
        tensors: by name; sharded parameters or plain buffers of any dtype (values are cast).
        whole_weights: likewise of weights that every rank wants whole: their shape, and what takes them.
        world: the ranks.
        make: whole tensors by the same names, with the same shapes.
    """
    whole: Mapping[str, Tensor] = {}
    with world.fail_together("reading the model's weights on rank 0"):
        if world.is_main:
            whole = make()
            asked = tensors.keys() | whole_weights.keys()
            assert whole.keys() == asked, f"{sorted(whole.keys() ^ asked)[:3]} on one side alone"
    for name, tensor in tensors.items():
        copy_local_rows(tensor, _sent(whole.get(name), tensor.shape, tensor.dtype, world))
    for name, (shape, keep) in whole_weights.items():
        keep(_sent(whole.get(name), shape, torch.float32, world))


def _sent(whole: Tensor | None, shape: torch.Size, dtype: torch.dtype, world: World) -> Tensor:
    """Rank 0's whole tensor, on every rank's device; floating-point ones in fp32."""
    dtype = torch.float32 if dtype.is_floating_point else dtype
    if whole is not None:
        sent = whole.detach().to(world.device, dtype).contiguous()
    else:
        sent = torch.empty(shape, dtype=dtype, device=world.device)
    dist.broadcast(sent, src=0, group=world.group)
    return sent


def copy_local_rows(tensor: Tensor, whole: Tensor) -> None:
    """Fill a tensor in place with this rank's rows of the whole; values are cast."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        if local.dim() == 0:
            local.copy_(whole)
        elif local.numel():
            start, end = row_range(tensor)
            local.copy_(whole[start:end])
