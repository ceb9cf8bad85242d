"""Instantiates sentence-transformers' loss classes from a recipe's plain values, with a placeholder for the model.

Checked with sentence-transformers 6.0 to 6.2, of which only public names are used, except for
`CachedGISTEmbedLoss.calculate_loss` and `uses_gradient_cache`.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from embedtrain.config.sentence_transformers import FUNCTION_ARGUMENTS, LOSSES_WITH_GUIDE
from embedtrain.errors import ConfigError

# Our gradient cache replaces theirs, so these arguments have no effect.
_UNCACHED = {
    "CachedMultipleNegativesRankingLoss": "MultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss": "MultipleNegativesSymmetricRankingLoss",
}
_CACHE_ARGUMENTS = ("mini_batch_size", "mini_batch_num_tokens", "show_progress_bar", "use_mini_batched_version")
_LARGEST = 2**62


class PlaceholderModel(nn.Module):
    """The part of SentenceTransformer's interface that the classes use, for inputs that are vectors; no parameters."""

    max_seq_length = 0
    device = torch.device("cpu")  # where the classes create their parameters; the Loss moves them

    def __init__(self, key: str, dimension: int, tokenizer: PreTrainedTokenizerFast | None) -> None:
        super().__init__()
        self.key, self.dimension, self.tokenizer = key, dimension, tokenizer

    def get_embedding_dimension(self) -> int:
        """The dimension of its vectors."""
        return self.dimension

    def __getitem__(self, index: int) -> nn.Module:
        """The classes inspect the first module for the kind of model."""
        return self

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The vectors in `features`."""
        return {"sentence_embedding": features[self.key]}


class _CachedGIST(losses.CachedGISTEmbedLoss):  # type: ignore[misc]
    """CachedGISTEmbedLoss without its cache; unlike GISTEmbedLoss it accepts any number of hard negatives."""

    uses_gradient_cache = False

    def forward(self, features: Sequence[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        vectors = [[self.model(column)["sentence_embedding"]] for column in features]
        guides = [[self.guide(column)["sentence_embedding"]] for column in features]
        return self.calculate_loss(vectors, guides)  # type: ignore[no-any-return]


def build_loss_module(
    name: str, options: Mapping[str, Any], model: PlaceholderModel, guide: PlaceholderModel, option: str
) -> nn.Module:
    """An instance of the class `name` with the recipe's arguments `options`; `option` names the loss in messages.

    An argument that is unknown, missing, or of the wrong type or value raises a ConfigError.
    """
    kind = getattr(losses, name)
    hints = get_type_hints(kind.__init__)
    parameters = {
        argument: parameter
        for argument, parameter in inspect.signature(kind.__init__).parameters.items()
        if argument not in ("self", "model", "guide")
    }
    arguments: dict[str, Any] = {}
    if "embedding_dimension" in parameters:
        arguments["embedding_dimension"] = model.dimension
    for argument, value in options.items():
        full_name = f"{option}.arguments.{argument}"
        if argument not in parameters:
            raise ConfigError(f"{full_name}={value}: {name} has no such argument; it takes {', '.join(parameters)}")
        if argument in FUNCTION_ARGUMENTS.get(name, {}):
            arguments[argument] = _function(name, argument, value)
            continue
        hint = hints.get(argument, Any)
        if not _fits(value, hint):
            raise ConfigError(f"{full_name}={value}: {name} expects {_describe(hint)}")
        if argument == "embedding_dimension" and value != model.dimension:
            raise ConfigError(
                f"{full_name}={value}: the model's vectors have {model.dimension} dimensions; leave it out"
            )
        arguments[argument] = tuple(value) if argument == "directions" else value
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise ConfigError(f"{option}.arguments.{argument} is missing: {name} expects {_describe(hints[argument])}")
    if "mini_batch_size" in parameters:
        arguments = {argument: value for argument, value in arguments.items() if argument not in _CACHE_ARGUMENTS}
    match name:
        case "MegaBatchMarginLoss":
            arguments["use_mini_batched_version"] = False
        case "CachedGISTEmbedLoss":
            kind = _CachedGIST
            arguments["mini_batch_size"] = _LARGEST
        case _:
            kind = getattr(losses, _UNCACHED.get(name, name))
    if name in LOSSES_WITH_GUIDE:
        arguments["guide"] = guide
    try:
        return kind(model, **arguments)  # type: ignore[no-any-return]
    except (ValueError, TypeError, RuntimeError) as error:  # torch raises the last, for example for a negative width
        raise ConfigError(f"{option}.class_name={name} rejects its arguments: {first_line(error)}") from error


def _function(name: str, argument: str, value: str) -> Any:
    """The function of this name in `FUNCTION_ARGUMENTS`."""
    if argument == "similarity_fct":
        return getattr(util, value)
    match name:
        case "TripletLoss":
            return getattr(losses.TripletDistanceMetric, value)
        case "ContrastiveLoss" | "OnlineContrastiveLoss":
            return getattr(losses.SiameseDistanceMetric, value)
        case _:
            return getattr(losses.BatchHardTripletLossDistanceFunction, value)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value has an annotated type. Other annotations are left to the class."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, NoneType):
        return isinstance(value, hint)
    return True


def _describe(hint: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_describe(kind) for kind in inner))
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list, each item {_describe(inner[0])}"
    words = {float: "a number", int: "a whole number", bool: "true or false", NoneType: "null"}
    return words.get(hint, str(getattr(hint, "__name__", hint)))


def placeholder_tokenizer() -> PreTrainedTokenizerFast:
    """The classes with a guide compare its tokenizer with the model's; no text is tokenized."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]
