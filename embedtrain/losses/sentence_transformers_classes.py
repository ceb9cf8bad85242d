"""Instances of sentence-transformers' loss classes, of a recipe's plain values and a model that is none.

Checked on sentence-transformers 6.0 to 6.2, whose classes use only public names here, but for
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

# Our gradient cache takes the place of theirs, and with it these arguments lose their meaning.
_UNCACHED = {
    "CachedMultipleNegativesRankingLoss": "MultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss": "MultipleNegativesSymmetricRankingLoss",
}
_CACHING = ("mini_batch_size", "mini_batch_num_tokens", "show_progress_bar", "use_mini_batched_version")
_LARGEST = 2**62


class PlaceholderModel(nn.Module):
    """What the classes ask of a SentenceTransformer whose texts are vectors already; it has no parameters."""

    max_seq_length = 0
    device = torch.device("cpu")  # where the classes put their parameters; the Loss moves them

    def __init__(self, key: str, dimension: int, tokenizer: PreTrainedTokenizerFast | None) -> None:
        super().__init__()
        self.key, self.dimension, self.tokenizer = key, dimension, tokenizer

    def get_embedding_dimension(self) -> int:
        """Of its vectors."""
        return self.dimension

    def __getitem__(self, index: int) -> nn.Module:
        """Classes look at the first module, to see what kind of model it is."""
        return self

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The vectors that are in `features`."""
        return {"sentence_embedding": features[self.key]}


class _CachedGIST(losses.CachedGISTEmbedLoss):  # type: ignore[misc]
    """CachedGISTEmbedLoss without its cache; unlike GISTEmbedLoss it takes any number of hard negatives."""

    uses_gradient_cache = False

    def forward(self, features: Sequence[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        vectors = [[self.model(column)["sentence_embedding"]] for column in features]
        guides = [[self.guide(column)["sentence_embedding"]] for column in features]
        return self.calculate_loss(vectors, guides)  # type: ignore[no-any-return]


def build(
    name: str, given: Mapping[str, Any], model: "PlaceholderModel", guide: "PlaceholderModel", option: str
) -> nn.Module:
    """An instance of the class `name`, of arguments as they stand in the recipe."""
    kind = getattr(losses, name)
    hints = get_type_hints(kind.__init__)
    taken = {
        argument: parameter
        for argument, parameter in inspect.signature(kind.__init__).parameters.items()
        if argument not in ("self", "model", "guide")
    }
    arguments: dict[str, Any] = {}
    if "embedding_dimension" in taken:
        arguments["embedding_dimension"] = model.dimension
    for argument, value in given.items():
        written = f"{option}.arguments.{argument}"
        if argument not in taken:
            raise ConfigError(f"{written}={value}: {name} has no such argument; it takes {', '.join(taken)}")
        if argument in FUNCTION_ARGUMENTS.get(name, {}):
            arguments[argument] = _function(name, argument, value)
            continue
        hint = hints.get(argument, Any)
        if not _fits(value, hint):
            raise ConfigError(f"{written}={value}: {name} takes {_told(hint)}")
        if argument == "embedding_dimension" and value != model.dimension:
            raise ConfigError(f"{written}={value}: the model's vectors have {model.dimension} dimensions; leave it out")
        arguments[argument] = tuple(value) if argument == "directions" else value
    for argument, parameter in taken.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise ConfigError(f"{option}.arguments.{argument} is missing: {name} takes {_told(hints[argument])}")
    if "mini_batch_size" in taken:
        arguments = {argument: value for argument, value in arguments.items() if argument not in _CACHING}
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
    except (ValueError, TypeError, RuntimeError) as error:  # the last of torch, such as of a negative width
        raise ConfigError(f"{option}.class_name={name} refuses its arguments: {first_line(error)}") from error


def _function(name: str, argument: str, value: str) -> Any:
    """The function that `FUNCTION_ARGUMENTS` knows by this name."""
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
    """Whether a value of YAML is one of an annotated type. What is annotated otherwise is left to the class."""
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


def _told(hint: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_told(kind) for kind in inner))
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list, each {_told(inner[0])}"
    words = {float: "a number", int: "a whole number", bool: "true or false", NoneType: "null"}
    return words.get(hint, str(getattr(hint, "__name__", hint)))


def placeholder_tokenizer() -> PreTrainedTokenizerFast:
    """The classes with a guide ask for tokenizers, to see that they are equal; no text is tokenized with them."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))


def first_line(error: Exception) -> str:
    """What an error says first."""
    return str(error).strip().partition("\n")[0]
