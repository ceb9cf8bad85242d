"""quantisation.json in a model directory: the ranges with which its vectors become int8 or uint8.

    {"version": 1, "origin": {"documents": 10000, ...},
     "ranges": {"384": {"min": [-0.13, ...], "max": [0.12, ...]}, "128": ...}}

`calibrate` writes the file, and the export of a run whose loss quantises to int8. The ranges are those of so many
first dimensions as the model compares them: with the cosine, normalised again. `min` and `max` are the two rows of the
argument `ranges` of sentence-transformers' `quantize_embeddings`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedtrain.errors import ModelError
from embedtrain.losses.quantisation import Ranges, ranges_dimension
from embedtrain.utils.records import is_number

QUANTISATION_FILE = "quantisation.json"
_VERSION = 1
_KEYS = ("min", "max")


def read_ranges(directory: Path | None) -> dict[int, Ranges]:
    """Ranges by the number of dimensions; none without the file. ModelError if it is not as described.

    `directory` has the weights of a model: the file may be beside them, or beside modules.json in the folder above.
    """
    if directory is None:
        return {}
    is_nested = not (directory / "modules.json").is_file() and (directory.parent / "modules.json").is_file()
    path = (directory.parent if is_nested else directory) / QUANTISATION_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != _VERSION:
            raise ModelError(f"{path}: version {content['version']!r} is not {_VERSION}, the only one that is read")
        return {int(dimension): _ranges(int(dimension), values) for dimension, values in content["ranges"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has no ranges of vectors ({error}): remove it, or calibrate again") from None


def write_ranges(path: Path, ranges: Mapping[int, Ranges], origin: Mapping[str, Any]) -> None:
    """Write the file; `origin` is what the ranges depend on."""
    of_dimension = {
        str(dimension): dict(zip(_KEYS, (bounds.low.tolist(), bounds.high.tolist()), strict=True))
        for dimension, bounds in ranges.items()
    }
    content = {"version": _VERSION, "origin": dict(origin), "ranges": of_dimension}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_trained_ranges(directory: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write the ranges in the state dict of a trained loss, if it has any, to a model's directory.

    Those without a batch yet are left out.
    """
    ranges = {
        number: Ranges(tensor[0].float().cpu(), tensor[1].float().cpu())
        for name, tensor in tensors.items()
        if (number := ranges_dimension(name)) is not None and not tensor.isnan().any()
    }
    if ranges:
        write_ranges(directory / QUANTISATION_FILE, dict(sorted(ranges.items(), reverse=True)), {"step": step})


def _ranges(dimension: int, values: Mapping[str, list[float]]) -> Ranges:
    low, high = (values[key] for key in _KEYS)
    for numbers in (low, high):
        if len(numbers) != dimension or not all(is_number(number) and math.isfinite(number) for number in numbers):
            raise ValueError(f"{dimension} dimensions need as many numbers")
    if any(first > last for first, last in zip(low, high, strict=True)):
        raise ValueError("a min is larger than its max")
    return Ranges(torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32))
