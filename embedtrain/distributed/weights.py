"""Loading weights into shards: each rank reads its own rows of each tensor, or rank 0 broadcasts them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.utils.formatting import format_count

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
