"""Building an encoder without memory for its weights, and saying where each weight is to be read from."""

import json
import textwrap
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
from embedtrain.models.source import DenseSource, ModelSource


class TensorPlace(NamedTuple):
    """Where a tensor is stored: a safetensors file and the key in it."""

    path: Path
    key: str


def build_encoder(source: ModelSource) -> Encoder:
    """The encoder with parameters on the meta device and buffers in memory, ready to be sharded.

    Buffers are real from the start because many are in no checkpoint (position ids, rotary frequencies):
    a model that goes through `to_empty` keeps garbage in them, some models in silence.
    """
    with init_empty_weights(include_buffers=False):
        return assemble(source)


def assemble(source: ModelSource) -> Encoder:
    """The encoder in memory with random weights; on the meta device inside torch's or accelerate's contexts."""
    try:
        backbone = AutoModel.from_config(source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code)
    except (ValueError, TypeError, ImportError) as error:
        raise ModelError(f"no model can be built from this {source.config.model_type} configuration: {error}") from None
    heads = [Dense(d.num_in, d.num_out, bias=d.bias, activation=d.activation) for d in source.dense]
    return Encoder(prepare_backbone(backbone), source.pooling, normalize=source.normalize, dense=heads)


def initialise(source: ModelSource, seed: int) -> dict[str, Tensor]:
    """Every weight of the encoder, whole and in memory, as the state dict that `build_encoder` has.

    For a source without weights they are random, a function of `seed` alone; for a directory they are what
    transformers reads from it, whatever its format. For one rank, which hands them to the others.

    Raises:
        ModelError: the directory holds no weights that transformers can read, or not all of them.
    """
    torch.manual_seed(seed)
    encoder = assemble(source)
    if source.directory is not None:
        try:
            backbone, report = AutoModel.from_pretrained(
                source.directory,
                config=source.config,
                dtype=torch.float32,
                trust_remote_code=source.trust_remote_code,
                output_loading_info=True,
            )
        except Exception as error:  # a damaged pickle raises nearly anything
            reason = textwrap.shorten(str(error), 300, placeholder=" ...")
            raise ModelError(f"no weights can be read from {source.directory}: {reason}") from None
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


def find_weights(source: ModelSource, shapes: Mapping[str, torch.Size]) -> dict[str, TensorPlace] | None:
    """Where each of the encoder's tensors is stored, or None where they cannot be read one by one.

    They can where the directory has safetensors files whose keys are the model's own, perhaps behind its
    prefix (`roberta.`, `bert.`, `model.`), with equal shapes. Old names and pickled files are read by
    transformers instead: see `initialise`.
    """
    if source.directory is None:
        return None
    stored = stored_tensors(source.directory)
    places: dict[str, TensorPlace] = {}
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


def stored_tensors(directory: Path) -> dict[str, TensorPlace]:
    """Every tensor in the safetensors files of a model directory, by key.

    Raises:
        ModelError: a file is damaged, or the index names one that is not there.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{index} cannot be read: it should hold a `weight_map` of keys to files") from None
        files = sorted({directory / str(name) for name in names})
    else:
        files = [path for path in [directory / "model.safetensors"] if path.is_file()]
    stored: dict[str, TensorPlace] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                stored |= {key: TensorPlace(path, key) for key in file.keys()}  # noqa: SIM118 - not a dict
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


def _prefixes(stored: Iterable[str], names: list[str]) -> list[str]:
    """Prefixes under which the first of the model's tensors is found, the shortest first."""
    return sorted({key.removesuffix(names[0]) for key in stored if key.endswith(names[0])}, key=len)


def _dense_places(index: int, dense: DenseSource) -> dict[str, TensorPlace]:
    stored = stored_tensors(dense.directory)
    shapes = {"linear.weight": torch.Size([dense.num_out, dense.num_in])}
    if dense.bias:
        shapes["linear.bias"] = torch.Size([dense.num_out])
    if set(stored) != set(shapes) or not _shapes_match(stored, shapes):
        wanted = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ModelError(f"{dense.directory / 'model.safetensors'} should hold {wanted}: this head would be random")
    return {f"dense.{index}.{key}": place for key, place in stored.items()}


def _shapes_match(places: Mapping[str, TensorPlace], shapes: Mapping[str, torch.Size]) -> bool:
    by_file: dict[Path, list[str]] = {}
    for name, place in places.items():
        by_file.setdefault(place.path, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            if any(file.get_slice(places[n].key).get_shape() != list(shapes[n]) for n in names):
                return False
    return True
