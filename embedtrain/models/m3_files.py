"""Reads and writes the two linear layers that FlagEmbedding stores beside the backbone of BGE-M3.

They are state dicts in torch's format, a pickle. torch reads them with `weights_only=True`, which builds tensors and
mappings and calls nothing else; everything but two tensors of the expected shapes is rejected.
"""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedtrain.config.m3 import HybridWeights, M3Settings
from embedtrain.errors import ModelError
from embedtrain.models.file_references import read_json, require_own_file
from embedtrain.models.hub import one_line
from embedtrain.utils.files import write_json

COLBERT, SPARSE = "colbert_linear", "sparse_linear"
LAYERS = (COLBERT, SPARSE)
SETTINGS = "m3.json"
_MAX_BYTES, _MAX_DIM = 1 << 30, 1 << 20
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def has_m3_layers(directory: Path) -> bool:
    """Whether both layers are in a directory; a ModelError if there is one without the other."""
    present = [name for name in LAYERS if (directory / f"{name}.pt").is_file()]
    if len(present) == 1:
        (missing,) = set(LAYERS) - set(present)
        raise ModelError(
            f"{directory} has {present[0]}.pt, but not {missing}.pt: this layer would be random; add the file, or "
            "remove both to train new layers"
        )
    return bool(present)


def is_m3(directory: Path) -> bool:
    """Whether a directory is that of such a model: of FlagEmbedding, of an export or of a run."""
    return any((directory / name).is_file() for name in (SETTINGS, *(f"{layer}.pt" for layer in LAYERS)))


def read_m3_settings(directory: Path | None) -> dict[str, Any]:
    """What the directory of a run or of an export says of the layers; empty without the file."""
    path = None if directory is None else directory / SETTINGS
    if path is None or not path.is_file():
        return {}
    settings = dict(read_json(path))
    dim, weights = settings.get("dim"), settings.get("hybrid_weights")
    if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= _MAX_DIM:
        raise ModelError(f"{path}: dim={dim!r:.200} is not a number of dimensions from 1 to {_MAX_DIM:,}")
    numbers = weights if isinstance(weights, list) and len(weights) == len(HybridWeights._fields) else [None]
    if not all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers):
        raise ModelError(f"{path}: hybrid_weights={weights!r:.200} are not three weights of at least 0")
    return settings


def read_m3_layers(directory: Path, size: int) -> dict[str, Tensor]:
    """The weights of both layers in float32, by the encoder's names; `size` is the hidden size."""
    return {
        f"{name}.{key}": tensor.float()
        for name in LAYERS
        for key, tensor in read_m3_layer(directory / f"{name}.pt", size).items()
    }


def write_m3_layer(path: Path, state: dict[str, Tensor]) -> None:
    """Write the weight and the bias of a layer as FlagEmbedding does."""
    torch.save({key: state[key].contiguous() for key in ("weight", "bias")}, path)


def write_m3_settings(directory: Path, settings: M3Settings) -> None:
    """Write what the directory of a run, which has no weights, says of the layers."""
    write_json(directory / SETTINGS, {"dim": settings.token_dimension, "hybrid_weights": list(settings.weights)})


def read_pickled_tensors(path: Path) -> dict[str, Tensor]:
    """The finite floating-point tensors of a small file in torch's format, by name; a ModelError for anything else."""
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


def read_m3_layer(path: Path, size: int) -> dict[str, Tensor]:
    """The weight [n, size] and the bias [n] of a layer, finite floating-point tensors."""
    state = read_pickled_tensors(path)
    if set(state) != {"weight", "bias"}:
        raise ModelError(f"{path} must contain the tensors weight and bias of a linear layer, and nothing else")
    weight, bias = state["weight"], state["bias"]
    if weight.ndim != 2 or weight.shape[1] != size or not len(weight) or bias.shape != weight.shape[:1]:
        raise ModelError(
            f"{path}: weight {list(weight.shape)} and bias {list(bias.shape)} must have the shapes [n, {size}] and [n]"
        )
    return {"weight": weight, "bias": bias}
