"""Moving weights onto shards: each rank reads its own rows of each tensor, or rank 0 hands them out."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from embedtrain.distributed.world import World


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


def read_shards(tensors: Mapping[str, Tensor], places: Mapping[str, tuple[Path, str]]) -> None:
    """Fill tensors in place from safetensors files; of each only this rank's rows are read.

    Args:
        tensors: by name; sharded parameters or plain buffers of any dtype (values are cast).
        places: for every name the file and the key in it, of equal shape.
    """
    by_file: dict[Path, list[str]] = {}
    for name in tensors:
        by_file.setdefault(places[name][0], []).append(name)
    for path, names in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in names:
                tensor, key = tensors[name], places[name][1]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.dim() == 0:
                    local.copy_(file.get_tensor(key))
                elif local.numel():
                    start, end = row_range(tensor)
                    local.copy_(file.get_slice(key)[start:end])


def hand_out(tensors: Mapping[str, Tensor], world: World, make: Callable[[], Mapping[str, Tensor]]) -> None:
    """Give every rank its rows of the weights that `make` returns on rank 0, tensor by tensor. A collective.

    Only rank 0 ever holds the whole model; of one tensor all do, on their devices. `make` may fail; then all ranks fail
    together.

    Args:
        tensors: by name; sharded parameters or plain buffers of any dtype (values are cast).
        world: the ranks.
        make: whole tensors by the same names, with the same shapes.
    """
    whole: Mapping[str, Tensor] = {}
    with world.together("reading the model's weights on rank 0"):
        if world.is_main:
            whole = make()
            assert whole.keys() == tensors.keys(), f"{sorted(whole.keys() ^ tensors.keys())[:3]} on one side alone"
    for name, tensor in tensors.items():
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        if world.is_main:
            sent = whole[name].detach().to(world.device, dtype).contiguous()
        else:
            sent = torch.empty(tensor.shape, dtype=dtype, device=world.device)
        dist.broadcast(sent, src=0, group=world.group)
        keep_rows(tensor, sent)


def keep_rows(tensor: Tensor, whole: Tensor) -> None:
    """Fill a tensor in place with this rank's rows of the whole; values are cast."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        if local.dim() == 0:
            local.copy_(whole)
        elif local.numel():
            start, end = row_range(tensor)
            local.copy_(whole[start:end])
