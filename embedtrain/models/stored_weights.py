"""Weights in the files of a model: where they are, their type, and a digest of them."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from embedtrain.errors import ModelError
from embedtrain.models.export_record import DESCRIPTIONS
from embedtrain.models.m3_files import LAYERS
from embedtrain.models.security import weight_files
from embedtrain.models.types import ModelSource

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


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


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The dtype of most stored weights; float32 without any."""
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


def weights_digest(source: ModelSource) -> str:
    """A digest of a model's stored weights: names, sizes, and 64 samples of 64 KiB of every file.

    Enough to distinguish models, and a model before and after training; a digest of all bytes of an 8B model would take
    half a minute.
    """
    directories = [] if source.directory is None else [source.directory, *(dense.directory for dense in source.dense)]
    return _sampled_digest(
        (path.name, path)
        for directory in filter(None, directories)
        for path in sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin") or p.stem in LAYERS)
    )


def directory_digest(directory: Path) -> str:
    """The same of all files that a model is read from: weights, settings and vocabulary.

    Not of the card, of hidden files, or of those that only describe how an export was made.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = ((path.relative_to(directory).as_posix(), path) for path in files)
    return _sampled_digest(
        (name, path)
        for name, path in names
        if path.name not in DESCRIPTIONS and path.suffix != ".md" and not name.startswith(".")
    )


def _sampled_digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files:
        size = path.stat().st_size
        digest.update(f"{name} {size}".encode())
        with path.open("rb") as file:
            for number in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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
