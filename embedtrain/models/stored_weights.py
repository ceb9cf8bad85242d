"""Weights in the files of a model: where they are, their type, and small files of torch."""

import io
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from embedtrain.errors import ModelError
from embedtrain.models.file_references import require_own_file
from embedtrain.models.security import weight_files
from embedtrain.models.types import ModelSource
from embedtrain.utils.formatting import one_line

_MAX_BYTES = 1 << 30
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class TensorLocation(NamedTuple):
    """A safetensors file and the key of a tensor in it."""

    path: Path
    key: str


def stored_tensors(directory: Path) -> dict[str, TensorLocation]:
    """Every tensor in a model directory's safetensors files, by key; a damaged or missing file is a ModelError."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    files = weight_files(index) if index.is_file() else [single] if single.is_file() else []
    stored: dict[str, TensorLocation] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                stored |= {key: TensorLocation(path, key) for key in file.keys()}  # noqa: SIM118 - not a dict
        except Exception as error:  # safetensors does not export its exception type
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    return stored


def read_tensor(location: TensorLocation) -> Tensor:
    """The tensor at a location, in its type."""
    with safe_open(location.path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(location.key)
    return tensor


def stored_shape(location: TensorLocation) -> list[int]:
    """The shape of a stored tensor."""
    with safe_open(location.path, framework="pt") as file:
        shape: list[int] = file.get_slice(location.key).get_shape()
    return shape


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The dtype of most stored weights; float32 without any."""
    if source.towers:
        return max(map(stored_dtype, source.towers.values()), key=lambda dtype: dtype.itemsize)
    if source.directory is None:
        return torch.float32
    stored = stored_tensors(source.directory)
    if not stored:
        return source.config.dtype if isinstance(source.config.dtype, torch.dtype) else torch.float32
    num_tensors: Counter[str] = Counter()
    for path in {location.path for location in stored.values()}:
        with safe_open(path, framework="pt") as file:
            num_tensors.update(file.get_slice(key).get_dtype() for key in file.keys())  # noqa: SIM118 - not a dict
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return dtypes.get(num_tensors.most_common(1)[0][0], torch.float32)


def shapes_match(locations: Mapping[str, TensorLocation], shapes: Mapping[str, torch.Size]) -> bool:
    """Whether all tensors have these shapes in the files."""
    by_file: dict[Path, list[str]] = {}
    for name, location in locations.items():
        by_file.setdefault(location.path, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            if any(file.get_slice(locations[name].key).get_shape() != list(shapes[name]) for name in names):
                return False
    return True


def read_pickled_tensors(path: Path) -> dict[str, Tensor]:
    """The finite floating-point tensors of a small file in torch's format, by name; a ModelError for anything else.

    The format is a pickle. With `weights_only=True` torch builds tensors and mappings from it, and calls nothing else.
    """
    require_own_file(path, path.parent)
    if path.stat().st_size > _MAX_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size:,} bytes; at most {_MAX_BYTES:,} are allowed")
    try:
        state: Any = torch.load(_uncompressed(path), map_location="cpu", weights_only=True)
    except ModelError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = one_line(error)
        if type(error).__name__ == "UnpicklingError":  # torch's message explains how to execute its content
            reason = "it is damaged, or a pickle with more than tensors"
        raise ModelError(f"{path} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ModelError(f"{path} must contain tensors by name, and nothing else")
    for key, tensor in state.items():
        plain = tensor.device.type == "cpu" and not tensor.is_nested and tensor.layout is torch.strided
        if not plain or tensor.dtype not in _DTYPES:
            raise ModelError(f"{path}: {key!r:.100} must be a plain tensor of float32, float64, float16 or bfloat16")
        # A tensor may repeat a small storage, and reading it would allocate its whole shape.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ModelError(f"{path}: {key!r:.100} has the shape {list(tensor.shape)}, and fewer numbers are stored")
        if not tensor.isfinite().all():
            raise ModelError(f"{path}: {key!r:.100} must have finite numbers")
    return state


def _uncompressed(path: Path) -> io.BytesIO | Path:
    """A file for `torch.load` whose parts are no longer than the file; a ModelError if a part is compressed.

    A copy of a zip file: torch has a reader of its own, which may find other parts in the same file.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # torch's format before 1.6, whose tensors are read as they are
            return path
    copied = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copied, "w") as target:
        size = sum(part.file_size for part in source.infolist())
        if size > path.stat().st_size or any(part.compress_type for part in source.infolist()):
            raise ModelError(
                f"{path} is compressed, to {size:,} bytes of content: torch.save writes no compression; save it again"
            )
        for part in source.infolist():
            target.writestr(part.filename, source.read(part))
    copied.seek(0)
    return copied
