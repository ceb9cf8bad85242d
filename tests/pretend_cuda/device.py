"""A pretended CUDA device: tensors say that they are on `cuda:0` and compute on the CPU.

    def check(world):                                         # world.device is cuda:0
        with host_reads() as reads, collectives() as calls:
            train_step(...)
        return reads, calls

    reads, calls = cuda_ranks(2, check)[0]                     # a fixture; one result per rank, as of `ranks`

An operation on tensors of different devices raises, as on a GPU. `host_reads` counts what makes the host wait for the
device: values read (`item`, `nonzero`, ...), blocking copies in either direction, copies from memory that is not
page-locked, waiting for an event, a stream or the device. Keys are "file:line function: operation", the innermost line
of the package, or "autograd" for an operation of a backward pass. `collectives` counts collectives by "device name".

What the process group does, gloo does. What it cannot show: kernels and their rounding, races between streams, NCCL,
memory and speed. The device never runs late, so a missing wait has no effect here.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.planning import flops
from tests.pretend_cuda import attention, runtime

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOT = str(Path(__file__).resolve().parents[2])
# Files that no line is reported of.
OWN = (__file__, runtime.__file__, attention.__file__)
TORCH, STANDARD_LIBRARY = f"{Path(torch.__file__).parent}/", f"{Path(threading.__file__).parent}/"

# Operations whose result the host needs, to return a number or a tensor whose size depends on values.
READS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::_linalg_check_errors",
}  # fmt: skip
# Besides pointwise operations, these accept a number in a CPU tensor without dimensions.
NUMBERS = {
    "aten::fill_.Tensor",
    "aten::masked_fill.Tensor",
    "aten::masked_fill_.Tensor",
    "aten::index_fill_.int_Tensor",
}

_records: dict[str, list[Counter[str]]] = {"reads": [], "collectives": []}


@contextlib.contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """Count what makes the host wait for the device, by line and operation."""
    with _recorded("reads") as counts:
        yield counts


@contextlib.contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Count collectives by device and name, such as "cuda allreduce_"."""
    with _recorded("collectives") as counts:
        yield counts


@contextlib.contextmanager
def _recorded(name: str) -> Iterator[Counter[str]]:
    counts = Counter[str]()
    _records[name].append(counts)
    try:
        yield counts
    finally:
        _records[name].remove(counts)


def _waits(operation: str) -> None:
    if _records["reads"]:
        key = f"{_line()}: {operation.removeprefix('aten::')}"
        for counts in _records["reads"]:
            counts[key] += 1


def _line() -> str:
    """The innermost line of the package that is being executed, else of a library other than torch."""
    frame, other = sys._getframe(1), None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/embedtrain/"):
            return f"{path.removeprefix(f'{ROOT}/embedtrain/')}:{frame.f_lineno} {frame.f_code.co_name}"
        installed = "/site-packages/" in path or not path.startswith(STANDARD_LIBRARY)
        if other is None and installed and not path.startswith((*OWN, "<", TORCH)):
            short = path.rsplit("site-packages/", 1)[-1].removeprefix(f"{ROOT}/")
            other = f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd" if other is None else other


class CudaTensor(torch.Tensor):
    """A tensor of the pretended device. Its own storage is on the meta device; `values` holds its values."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "CudaTensor":
        assert type(values) is not CudaTensor
        if values.layout is torch.strided:
            like = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device="meta")
        else:  # a sparse matrix, which products take
            like = torch.empty(values.size(), dtype=values.dtype, device="meta")
        built = torch.Tensor._make_subclass(cls, like, False, dispatch_device=True, device_for_backend_keys=CUDA)
        built.values = values
        return built

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, types, args, kwargs or {})

    def __repr__(self) -> str:
        return f"CudaTensor({self.values!r})"

    def data_ptr(self) -> int:
        """Of the values: tensors that share their memory are known by it."""
        return self.values.data_ptr()

    def tolist(self) -> Any:
        _waits("tolist")
        return self.values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def record_stream(self, stream: Any) -> None:
        """There is one stream."""


class PretendedCuda(TorchDispatchMode):
    """Sees the operations that no CudaTensor takes part in, such as `torch.empty(3, device="cuda")`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, types, args, kwargs or {})


def _dispatch(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if any(issubclass(t, torch._subclasses.FakeTensor) for t in types) or torch._C._get_dispatch_mode(
        torch._C._TorchDispatchModeKey.FAKE
    ):
        return func(*args, **kwargs)
    if any(t not in (CudaTensor, torch.Tensor, torch.nn.Parameter) for t in types):
        return NotImplemented  # DTensor and others come back with the tensors inside them
    # Makes torch.tensor(..., device="cuda") copy a CPU tensor, which the mode sees. The setting belongs to a thread,
    # and nothing else is called in all threads, among them those of autograd.
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    name = func.name()
    leaves = list(_tensors((args, kwargs)))
    on_cuda = [leaf for leaf in leaves if type(leaf) is CudaTensor]
    on_cpu = [leaf for leaf in leaves if type(leaf) is not CudaTensor and leaf.device.type == "cpu"]
    if name == "prim::device":
        return CUDA if on_cuda else func(*args)
    if name.startswith(("c10d::", "_c10d_functional::")):
        _collective(name, on_cuda, on_cpu)
    elif name in _SPECIAL:
        return _SPECIAL[name](args, kwargs)
    elif on_cuda:
        _check_devices(func, name, args, on_cpu)
        _count_reads(name, args, kwargs)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":  # a factory
        kwargs, on_cuda = {**kwargs, "device": CPU}, [None]
        wrap: Callable[[Tensor], Tensor] = CudaTensor
    else:
        wrap = CudaTensor if on_cuda and device is None else _unchanged
    # Operations in place return their argument, and the caller expects the very object it gave.
    given = {id(leaf.values): leaf for leaf in on_cuda if leaf is not None}

    def outside(result: Any) -> Any:
        if not isinstance(result, Tensor) or type(result) is CudaTensor:
            return result
        if id(result) not in given:
            return wrap(result)
        same = given[id(result)]
        assert same.size() == result.size() and same.stride() == result.stride(), f"{name} changes a shape in place"
        return same

    return _mapped(outside, func(*_mapped(_inside, args), **_mapped(_inside, kwargs)))


def _inside(value: Any) -> Any:
    return value.values if type(value) is CudaTensor else value


# torch's pytree does both, several times slower.
def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, part) for part in value)
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    return change(value)


def _unchanged(value: Tensor) -> Tensor:
    return value


def _collective(name: str, on_cuda: list[Any], on_cpu: list[Tensor]) -> None:
    if name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
        return  # of a collective that is counted already
    if on_cuda and on_cpu:
        raise RuntimeError(f"{name}: tensors on cuda:0 and cpu in one collective, at {_line()}")
    for counts in _records["collectives"]:
        counts[f"{'cuda' if on_cuda else 'cpu'} {name.split('::')[1].split('.', maxsplit=1)[0]}"] += 1


def _check_devices(func: Any, name: str, args: Any, on_cpu: list[Tensor]) -> None:
    """Raise as a GPU would if an operation mixes devices."""
    allowed = torch.Tag.pointwise in func.tags or name in NUMBERS
    if name.startswith(("aten::index.", "aten::index_put", "aten::_index_put_impl_")) and type(args[0]) is CudaTensor:
        # Indices may be on the CPU, but are then copied; a value without dimensions is a number.
        indices = [index for index in args[1] if index is not None and type(index) is not CudaTensor]
        for _ in indices:
            _waits(f"{name}, indices on the CPU")
        on_cpu = [leaf for leaf in on_cpu if not any(leaf is index for index in indices)]
        allowed = True
    wrong = [tuple(leaf.shape) for leaf in on_cpu if leaf.dim() > 0 or not allowed]
    if wrong:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu {wrong} in {name}, at {_line()}"
        )


def _count_reads(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    if name in READS or (name == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None):
        _waits(name)
    elif name == "aten::segment_reduce" and not kwargs.get("unsafe", False):
        _waits(f"{name}, checks")
    elif name.startswith(("aten::index.", "aten::index_put", "aten::_index_put_impl_")):
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        filled = "index_put" in name and args[2].numel() == 1  # is a masked_fill
        if masks and not filled:
            _waits(f"{name}, a mask")


def _to_copy(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """`Tensor.to`, which copies."""
    source, options = args[0], dict(kwargs)
    target, non_blocking = options.pop("device", None), options.pop("non_blocking", False)
    from_cuda = type(source) is CudaTensor
    target = (CUDA if from_cuda else CPU) if target is None else torch.device(target)
    if target.type not in ("cpu", "cuda"):
        return torch.ops.aten._to_copy.default(_inside(source), **kwargs)
    values = torch.ops.aten._to_copy.default(_inside(source), **options)
    if from_cuda and target.type == "cpu":
        if not non_blocking:
            _waits("copy to the CPU")
        elif values.numel():  # torch allocates page-locked memory then
            return values.pin_memory()
    if not from_cuda and target.type == "cuda":
        _count_upload(source, non_blocking)
    return CudaTensor(values) if target.type == "cuda" else values


def _count_upload(source: Tensor, non_blocking: bool) -> None:
    if source.numel() and source.device.type == "cpu" and not (non_blocking and source.is_pinned()):
        reason = "not page-locked" if non_blocking else "blocking"
        _waits(f"copy to the device, {reason}")


def _copy(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """`Tensor.copy_`."""
    target, source = args[:2]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    to_cuda, from_cuda = type(target) is CudaTensor, type(source) is CudaTensor
    if to_cuda and not from_cuda:
        _count_upload(source, non_blocking)
    if from_cuda and not to_cuda and target.numel() and not (non_blocking and target.is_pinned()):
        _waits("copy to the CPU" if not non_blocking else "copy to the CPU, not page-locked")
    _inside(target).copy_(_inside(source))
    return target


def _foreach_copy(args: Any, kwargs: dict[str, Any]) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        _copy((target, source, *args[2:]), kwargs)


def _pin(args: Any, kwargs: dict[str, Any]) -> Tensor:
    if type(args[0]) is CudaTensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return torch.ops.aten._pin_memory.default(args[0])


def _attention(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def on_device(args: Any, kwargs: dict[str, Any]) -> Any:
        if not all(type(leaf) is CudaTensor for leaf in _tensors((args, kwargs))):
            raise RuntimeError(f"varlen_attn: all tensors must be on the device, at {_line()}")
        return tuple(CudaTensor(value) for value in function(*_mapped(_inside, args), **_mapped(_inside, kwargs)))

    return on_device


_SPECIAL: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy,
    "aten::_foreach_copy_": _foreach_copy,
    "aten::_pin_memory": _pin,
    "torch_attn::_varlen_attn": _attention(attention.forward),
    "torch_attn::_varlen_attn_backward": _attention(attention.backward),
}


def install() -> torch.device:
    """Install the device in this process for good. The C++ part has to be loaded; see library.py."""
    runtime.install(_waits)
    # The values of a tensor cannot be swapped for those of another device, so `module.to` makes new parameters.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # FSDP moves parameters by exchanging their values; the package allocates them on the device itself.
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard

    for module in (_fsdp_init, _fully_shard):
        if hasattr(module, "_move_states_to_device"):
            module._move_states_to_device = lambda *args: None
    # Products of the sizes of a GPU take minutes on a CPU without instructions for bf16.
    flops.SIZES["cuda"] = flops.SIZES["cpu"]
    # Modes belong to a thread.
    run = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        with PretendedCuda():
            torch.empty(0, device=CUDA)
            run(thread)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]
    PretendedCuda().__enter__()
    torch.empty(0, device=CUDA)
    return CUDA
