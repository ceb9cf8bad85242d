"""Building an encoder without memory for its weights, and saying where each weight is to be read from."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel

from embedtrain.errors import ModelError
from embedtrain.models.encoder import Dense, Encoder, prepare_backbone
from embedtrain.models.hub import one_line
from embedtrain.models.security import weight_files
from embedtrain.models.source import DenseSource, ModelSource

_MOST_PARAMETERS_PER_BYTE = 8  # a bit each: nobody stores less
_SAMPLES, _SAMPLE = 64, 1 << 16


class TensorLocation(NamedTuple):
    """Where a tensor is stored: a safetensors file and the key in it."""

    path: Path
    key: str


def build_encoder(source: ModelSource) -> Encoder:
    """The encoder with parameters on the meta device and buffers in memory, ready to be sharded.

    Buffers are real from the start because many are in no checkpoint (position ids, rotary frequencies):
    a model that goes through `to_empty` keeps garbage in them, some models in silence.
    """
    with init_empty_weights(include_buffers=False):
        return assemble_encoder(source)


def assemble_encoder(source: ModelSource) -> Encoder:
    """The encoder in memory with random weights; on the meta device inside torch's or accelerate's contexts."""
    try:
        backbone = AutoModel.from_config(source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code)
        heads = [Dense(d.num_in, d.num_out, bias=d.bias, activation=d.activation) for d in source.dense]
    except Exception as error:  # of sizes that make no sense torch and transformers raise nearly anything
        raise ModelError(
            f"no model can be built from this {source.config.model_type} configuration "
            f"({type(error).__name__}: {one_line(error)})"
        ) from None
    return Encoder(prepare_backbone(backbone), source.pooling, normalize=source.normalize, dense=heads)


def full_state_dict(source: ModelSource, seed: int) -> dict[str, Tensor]:
    """Every weight of the encoder, whole and in memory, as the state dict that `build_encoder` has.

    For a source without weights they are random, a function of `seed` alone; for a directory they are what
    transformers reads from it, whatever its format. For one rank, which hands them to the others.

    Raises:
        ModelError: the directory holds no weights that transformers can read, or not all of them.
    """
    if source.directory is not None:
        _require_plausible_size(source, source.directory)
    torch.manual_seed(seed)
    encoder = assemble_encoder(source)
    if source.directory is not None:
        try:
            backbone, report = AutoModel.from_pretrained(
                source.directory,
                config=source.config,
                dtype=torch.float32,
                trust_remote_code=source.trust_remote_code,
                weights_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ModelError(f"no weights can be read from {source.directory}: {_told(error)}") from None
        weights = prepare_backbone(backbone).state_dict()
        missing = sorted(set(report["missing_keys"]) & set(weights))
        if missing:
            raise ModelError(
                f"{source.directory} lacks {len(missing)} of {len(weights)} weights, {missing[0]} among them: "
                f"they would be random"
            )
        encoder.backbone.load_state_dict(weights)
        for index, dense in enumerate(source.dense):
            for name, place in _dense_places(index, dense).items():
                with safe_open(place.path, framework="pt") as file:
                    encoder.get_parameter(name).data.copy_(file.get_tensor(place.key))
    return dict(encoder.state_dict())


def _require_plausible_size(source: ModelSource, directory: Path) -> None:
    """Refuse a configuration far larger than the weights beside it before memory is asked for."""
    stored = sum(path.stat().st_size for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
    needed = sum(parameter.numel() for parameter in build_encoder(source).parameters())
    if stored and needed > _MOST_PARAMETERS_PER_BYTE * stored:
        raise ModelError(
            f"{directory / 'config.json'} describes {needed:,} parameters, and the weights beside it take {stored:,} "
            "bytes: they are not this model's"
        )


def _told(error: Exception) -> str:
    if type(error).__name__ == "UnpicklingError":  # torch's own words explain how to run what it holds all the same
        return "they are a pickle that holds more than tensors; ask its authors for safetensors"
    return one_line(error)


def locate_weights(source: ModelSource, shapes: Mapping[str, torch.Size]) -> dict[str, TensorLocation] | None:
    """Where each of the encoder's tensors is stored, or None where they cannot be read one by one.

    They can where the directory has safetensors files whose keys are the model's own, perhaps behind its
    prefix (`roberta.`, `bert.`, `model.`), with equal shapes. Old names and pickled files are read by
    transformers instead: see `full_state_dict`.
    """
    if source.directory is None:
        return None
    stored = stored_tensors(source.directory)
    places: dict[str, TensorLocation] = {}
    for index, dense in enumerate(source.dense):
        places |= _dense_places(index, dense)
    names = [name.removeprefix("backbone.") for name in shapes if name.startswith("backbone.")]
    for prefix in _prefixes(stored, names):
        if all(prefix + name in stored for name in names):
            places |= {"backbone." + name: stored[prefix + name] for name in names}
            break
    if set(places) != set(shapes) or not _shapes_match(places, shapes):
        return None
    return places


def stored_tensors(directory: Path) -> dict[str, TensorLocation]:
    """Every tensor in the safetensors files of a model directory, by key.

    Raises:
        ModelError: a file is damaged, or the index names one that is not there.
    """
    index = directory / "model.safetensors.index.json"
    whole = directory / "model.safetensors"
    files = weight_files(index) if index.is_file() else [path for path in [whole] if path.is_file()]
    stored: dict[str, TensorLocation] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                stored |= {key: TensorLocation(path, key) for key in file.keys()}  # noqa: SIM118 - not a dict
        except Exception as error:  # safetensors raises an exception type of its own that it does not export
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    return stored


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The type most of the stored weights have; float32 where there are none to look at."""
    if source.directory is None:
        return torch.float32
    stored = stored_tensors(source.directory)
    if not stored:
        return source.config.dtype if isinstance(source.config.dtype, torch.dtype) else torch.float32
    counted: Counter[str] = Counter()
    for path in {place.path for place in stored.values()}:
        with safe_open(path, framework="pt") as file:
            counted.update(file.get_slice(key).get_dtype() for key in file.keys())  # noqa: SIM118 - not a dict
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return names.get(counted.most_common(1)[0][0], torch.float32)


def weights_digest(source: ModelSource) -> str:
    """A digest of a model's stored weights, by samples: names, sizes, and of every file 64 pieces of 64 KiB.

    Enough to tell one model from another, and from what it was before it was trained on; a whole one of an 8B model
    would take half a minute.
    """
    digest = hashlib.blake2b(digest_size=16)
    directories = [] if source.directory is None else [source.directory, *(dense.directory for dense in source.dense)]
    for directory in directories:
        for path in sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for place in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE) * place // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _prefixes(stored: Iterable[str], names: list[str]) -> list[str]:
    """Prefixes under which the first of the model's tensors is found, the shortest first."""
    return sorted({key.removesuffix(names[0]) for key in stored if key.endswith(names[0])}, key=len)


def _dense_places(index: int, dense: DenseSource) -> dict[str, TensorLocation]:
    stored = stored_tensors(dense.directory)
    shapes = {"linear.weight": torch.Size([dense.num_out, dense.num_in])}
    if dense.bias:
        shapes["linear.bias"] = torch.Size([dense.num_out])
    if set(stored) != set(shapes) or not _shapes_match(stored, shapes):
        wanted = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ModelError(f"{dense.directory / 'model.safetensors'} should hold {wanted}: this head would be random")
    return {f"dense.{index}.{key}": place for key, place in stored.items()}


def _shapes_match(places: Mapping[str, TensorLocation], shapes: Mapping[str, torch.Size]) -> bool:
    by_file: dict[Path, list[str]] = {}
    for name, place in places.items():
        by_file.setdefault(place.path, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            if any(file.get_slice(places[n].key).get_shape() != list(shapes[n]) for n in names):
                return False
    return True
