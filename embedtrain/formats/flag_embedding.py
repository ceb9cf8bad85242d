"""Directories of FlagEmbedding: the two linear layers that it stores beside the backbone of BGE-M3.

They are state dicts in torch's format, a pickle; everything but two tensors of the expected shapes is rejected.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedtrain.config.kind_settings import HybridWeights, M3Settings
from embedtrain.errors import ModelError
from embedtrain.models.file_references import read_json
from embedtrain.models.stored_weights import read_pickled_tensors
from embedtrain.utils.files import write_json

COLBERT, SPARSE = "colbert_linear", "sparse_linear"
LAYERS = (COLBERT, SPARSE)
SETTINGS = "m3.json"
_MAX_DIM = 1 << 20


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
