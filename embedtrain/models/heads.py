"""Dense heads: new ones of a recipe (`model.heads`) with their initial weights, and those of pickles and adapters."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from embedtrain.config.kind_settings import HeadActivation, HeadConfig, HeadInit
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.encoder import POOLING_MODULE, Dense, hidden_size
from embedtrain.models.stored_weights import (
    TensorLocation,
    read_pickled_tensors,
    read_tensor,
    shapes_match,
    stored_tensors,
)
from embedtrain.models.types import DenseSource, HeadAdapter, ModelSource

# Of a Dense module that a version of sentence-transformers before 2.3 wrote.
_PICKLE = "pytorch_model.bin"
_ACTIVATIONS = {
    HeadActivation.identity: "torch.nn.modules.linear.Identity",
    HeadActivation.tanh: "torch.nn.modules.activation.Tanh",
    HeadActivation.gelu: "torch.nn.modules.activation.GELU",
    HeadActivation.silu: "torch.nn.modules.activation.SiLU",
}


def dense_heads(
    stored: tuple[DenseSource, ...], config: PretrainedConfig, heads: Sequence[HeadConfig]
) -> tuple[DenseSource, ...]:
    """The heads of a dense model: those of its files, or those of the recipe.

    A ConfigError if there are both: a run that starts from the export of another one would have its heads twice.
    """
    if stored and heads:
        raise ConfigError(
            f"model.heads[0].out={heads[0].out}: the model has a head already, {stored[0].directory}; leave "
            "model.heads out"
        )
    sizes = [hidden_size(config), *(head.out for head in heads)]
    new = tuple(
        DenseSource(
            directory=None,
            num_in=num_in,
            num_out=head.out,
            bias=head.bias,
            activation=_ACTIVATIONS[head.activation],
            init=head.init,
        )
        for num_in, head in zip(sizes, heads, strict=False)
    )
    return stored or new


def build_heads(dense: Sequence[DenseSource]) -> list[Dense]:
    """The heads with torch's initial weights."""
    return [Dense(d.num_in, d.num_out, bias=d.bias, activation=d.activation, is_new=d.directory is None) for d in dense]


def initial_head_weights(dense: Sequence[DenseSource], seed: int) -> dict[str, Tensor]:
    """The initial weights of new heads, float32, by the encoder's names: a function of the seed and the name.

    Rows of `identity` beyond the inputs are 0. Where the next head is `identity` as well and drops their outputs, they
    are normal instead: otherwise neither these rows nor the next head's columns would ever get a gradient.
    """
    weights: dict[str, Tensor] = {}
    for index, head in enumerate(dense):
        if head.directory is not None or head.init is None:
            continue
        name = f"dense.{index}.linear.weight"
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        weight = torch.randn(head.num_out, head.num_in, generator=generator) / math.sqrt(head.num_in)
        if head.init is HeadInit.identity:
            following = dense[index + 1] if index + 1 < len(dense) else None
            num_used = head.num_out
            if following is not None and following.init is HeadInit.identity:
                num_used = max(head.num_in, following.num_out)
            weight[:num_used] = torch.eye(head.num_out, head.num_in)[:num_used]
        weights[name] = weight
        if head.bias:
            weights[f"dense.{index}.linear.bias"] = torch.zeros(head.num_out)
    return weights


def is_read_whole(dense: DenseSource) -> bool:
    """Whether the weights of a head are in `pytorch_model.bin` only, or have an adapter to merge."""
    directory = dense.directory
    if dense.adapter is not None:
        return True
    if directory is None or dense.inline is not None or (directory / "model.safetensors").is_file():
        return False
    return (directory / _PICKLE).is_file()


def whole_head_names(dense: Sequence[DenseSource], names: Iterable[str]) -> set[str]:
    """Those of the encoder's names that are weights of heads for which `is_read_whole`."""
    whole = tuple(f"dense.{index}." for index, head in enumerate(dense) if is_read_whole(head))
    return {name for name in names if name.startswith(whole)} if whole else set()


def whole_head_weights(dense: Sequence[DenseSource]) -> dict[str, Tensor]:
    """The weights of the heads for which `is_read_whole`, by the encoder's names; a ModelError if they are others."""
    weights: dict[str, Tensor] = {}
    for index, head in enumerate(dense):
        if head.directory is None or not is_read_whole(head):
            continue
        if head.adapter is not None:
            weights |= _merged_weights(index, head, head.adapter)
            continue
        path = head.directory / _PICKLE
        shapes = {"linear.weight": [head.num_out, head.num_in]} | ({"linear.bias": [head.num_out]} if head.bias else {})
        stored = read_pickled_tensors(path)
        if {name: list(tensor.shape) for name, tensor in stored.items()} != shapes:
            expected = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            raise ModelError(f"{path} should contain {expected}: this head would be random")
        weights |= {f"dense.{index}.{name}": tensor.float() for name, tensor in stored.items()}
    return weights


def _merged_weights(index: int, head: DenseSource, adapter: HeadAdapter) -> dict[str, Tensor]:
    """The weights of a head with its adapter; a ModelError if the adapter does not fit."""
    weights = {}
    for name, location in _dense_locations(index, replace(head, adapter=None)).items():
        weights[name] = read_tensor(location).float()
    a, b = (read_tensor(TensorLocation(adapter.path, key)).float() for key in (adapter.a, adapter.b))
    if a.shape[1:] != (head.num_in,) or b.shape != (head.num_out, len(a)):
        raise ModelError(
            f"{adapter.path}: {adapter.b} x {adapter.a} has the shapes {list(b.shape)} x {list(a.shape)}, and the "
            f"projection of {head.directory} has {[head.num_out, head.num_in]}: it is an adapter of another model"
        )
    weights[f"dense.{index}.linear.weight"] += adapter.scale * (b @ a)
    return weights


def module_locations(source: ModelSource) -> dict[str, TensorLocation]:
    """Where the weights of dense heads and of a user's pooling are, by the encoder's names. Raises ModelError."""
    own = {} if source.vectors.pooling_directory is None else stored_tensors(source.vectors.pooling_directory)
    locations = {f"{POOLING_MODULE}.{name}": location for name, location in own.items()}
    for index, dense in enumerate(source.vectors.dense):
        locations |= _dense_locations(index, dense)
    return locations


def _dense_locations(index: int, dense: DenseSource) -> dict[str, TensorLocation]:
    """Where the weights of a head are, by the encoder's names; none of one that is new or read whole.

    Raises ModelError.
    """
    if dense.directory is None or is_read_whole(dense):
        return {}
    stored = stored_tensors(dense.directory)
    shapes = {"linear.weight": torch.Size([dense.num_out, dense.num_in])}
    if dense.bias:
        shapes["linear.bias"] = torch.Size([dense.num_out])
    if dense.inline is not None:
        keys = {f"{dense.inline}.{name.removeprefix('linear.')}": name for name in shapes}
        stored = {name: stored[key] for key, name in keys.items() if key in stored}
    if set(stored) != set(shapes) or not shapes_match(stored, shapes):
        expected = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ModelError(
            f"{dense.directory / 'model.safetensors'} should contain {expected}: this head would be random"
        )
    return {f"dense.{index}.{key}": location for key, location in stored.items()}
