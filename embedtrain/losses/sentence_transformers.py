"""The loss classes of sentence-transformers on precomputed embeddings, exact on any number of ranks.

B: rows on this rank, M documents each; N: rows on all ranks; C = 1 + M columns, the queries first; D, T:
dimensions of the model's and of a guide's vectors.
"""

import contextlib
import inspect
import logging
import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import sentence_transformers
import torch
import torch.distributed as dist
from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from embedtrain.config.loss_checks import (
    FUNCTION_ARGUMENTS,
    LOSSES_WITH_GUIDE,
    MATRYOSHKA,
    check_sentence_transformers,
)
from embedtrain.config.losses import SentenceTransformersConfig
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, ScoreRequirement
from embedtrain.distributed.collectives import gather_rows
from embedtrain.errors import ConfigError, DataError
from embedtrain.losses.types import FROM_ROWS, BatchInfo, Guide, Loss, LossOutput

# The smallest and largest number of documents per row, for the classes that limit it.
_DOCUMENTS: dict[str, tuple[int, int]] = {
    "MegaBatchMarginLoss": (1, 1),
    "GISTEmbedLoss": (1, 2),
    "TripletLoss": (2, 2),
    "BatchAllTripletLoss": (0, 0),
    "BatchHardTripletLoss": (0, 0),
    "BatchHardSoftMarginTripletLoss": (0, 0),
    "BatchSemiHardTripletLoss": (0, 0),
}
# Classes of pairs: each document of a row forms a pair with its query.
_PAIRS = [name for name, needs in SENTENCE_TRANSFORMERS_LOSSES.items() if needs.scores is ScoreRequirement.pairs] + [
    "SoftmaxLoss"
]
_LARGEST = 2**62
_VERSION = tuple(int(part) for part in sentence_transformers.__version__.split(".")[:2])


class SentenceTransformersLoss(Loss):
    """A class of `sentence_transformers.losses`, exact on any number of ranks.

    Every rank gathers the whole batch, computes the class's loss on it and takes 1/W as its part; the
    gather sums the ranks' gradients. So *every* rank needs the time and the memory of the global batch:
    embedtrain's own losses of the same name divide the work among the ranks, and cost less.

    The class gets a placeholder model without parameters, whose inputs are vectors. Classes that cache gradients
    run without their cache. Parameters of the class are parameters here, under `theirs`. Its random numbers are a
    function of `BatchInfo.origin.batch`. A class or arguments that sentence-transformers rejects raise a ConfigError.
    """

    def __init__(
        self, config: SentenceTransformersConfig, *, dimension: int, guide_dimensions: Mapping[str, int]
    ) -> None:
        super().__init__()
        check_sentence_transformers(config)
        arguments, name = config.arguments, config.class_name
        self.label = f"loss.class_name={name}"
        if name == MATRYOSHKA:
            name = arguments["loss"]["class_name"]
            self.label += f" of {name}"
            arguments = arguments["loss"].get("arguments", {})
        self.class_name: str = name
        self.needs = SENTENCE_TRANSFORMERS_LOSSES[name]
        self.guide = config.guide
        self.num_classes: int = arguments.get("num_labels", 0)
        projected = arguments.get("projection_dim")
        self.teacher_dimension: int = dimension if projected is None else projected

        tokenizer = placeholder_tokenizer() if name in LOSSES_WITH_GUIDE else None
        model = PlaceholderModel("vectors", dimension, tokenizer)
        guide = PlaceholderModel("guide", guide_dimensions.get(self.guide or "", dimension), tokenizer)
        with _rank_zero_warnings():
            if config.class_name == MATRYOSHKA:
                inner = build_loss_module(name, arguments, model, guide, "loss.arguments.loss")
                outer_arguments = {**config.arguments, "loss": inner}
                self.theirs = build_loss_module(MATRYOSHKA, outer_arguments, model, guide, "loss")
            else:
                self.theirs = build_loss_module(name, arguments, model, guide, "loss")
        if self.needs.vectors:
            self._check_teacher(guide_dimensions.get(FROM_ROWS, self.teacher_dimension), ConfigError)
            if config.class_name == MATRYOSHKA and _VERSION < (6, 2):
                raise ConfigError(
                    f"{self.label} needs sentence-transformers 6.2 or newer, which truncates the teacher's vectors"
                )

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """1/W of the class's loss of the global batch.

        Raises a DataError if rows differ in their number of documents or lack the scores, labels or vectors that the
        class needs, or if the class rejects the batch.
        """
        guide = batch_info.guides.get(FROM_ROWS if self.needs.vectors else self.guide or "")
        per_row, counts = batch_info.rows.num_documents, batch_info.rows.counts.queries
        num_documents = int(per_row.max(initial=0))
        self._check_rows(int(per_row.min(initial=_LARGEST)), num_documents, self._lacks_columns(batch_info, guide))
        vectors = gather_rows(_by_row(queries, documents, num_documents), counts)
        guides = None
        if self.needs.vectors or self.guide is not None:
            assert guide is not None
            guides = gather_rows(_by_row(guide.queries, guide.documents, num_documents).to(vectors.dtype), counts)
        columns, labels = list(vectors.unbind(1)), None
        if self.needs.vectors:
            assert guides is not None
            self._check_teacher(guides.shape[-1], DataError)
            labels, guides = guides, None
        elif self.needs.label:
            assert batch_info.labels is not None
            labels = gather_rows(batch_info.labels, counts)
        elif self.needs.scores is not ScoreRequirement.none:
            labels = gather_rows(_scores(batch_info).to(queries.dtype).reshape(len(queries), num_documents), counts)
            if self.class_name in _PAIRS:
                columns = [columns[0].repeat_interleave(num_documents, dim=0), vectors[:, 1:].flatten(0, 1)]
                labels = self._classes(labels.flatten()) if self.class_name == "SoftmaxLoss" else labels.flatten()

        features = [{"vectors": column} for column in columns]
        if guides is not None:
            for feature, column in zip(features, guides.unbind(1), strict=True):
                feature["guide"] = column
        with _seeded(batch_info.origin.batch, queries.device), _rank_zero_warnings():
            try:
                output = self.theirs(features, labels)
            except ValueError as error:
                raise DataError(f"{self.label} rejects the batch: {first_line(error)}") from error
        parts: dict[str, Tensor] = output if isinstance(output, dict) else {}
        loss = torch.stack(list(parts.values())).sum() if parts else output
        ranks = dist.get_world_size()
        return LossOutput(loss / ranks, {name: part.detach() / ranks for name, part in parts.items()})

    def _lacks_columns(self, batch_info: BatchInfo, guide: Guide | None) -> bool:
        """Whether this rank's rows lack a column that the class needs and that has no default."""
        return (
            (self.needs.scores is ScoreRequirement.teacher and batch_info.scores is None)
            or (self.needs.label and batch_info.labels is None)
            or ((self.needs.vectors or self.guide is not None) and guide is None)
        )

    def _check_rows(self, smallest: int, largest: int, missing: bool) -> None:
        if smallest != largest:
            raise DataError(
                f"{self.label} needs the same number of documents in every row, and this batch has {smallest} to "
                f"{largest}: set `negatives` of the sources in data.train to a number that every row has"
            )
        minimum, maximum = _DOCUMENTS.get(self.class_name, (self.needs.documents + self.needs.negatives, None))
        if largest < minimum or (maximum is not None and largest > maximum):
            allowed = f"{minimum} or more" if maximum is None else " or ".join(map(str, sorted({minimum, maximum})))
            raise DataError(
                f"{self.label} needs rows of {allowed} documents, and this batch has rows of {largest}: "
                "set `negatives` of the sources in data.train, or change the rows"
            )
        if missing:
            scores = self.needs.scores is ScoreRequirement.teacher
            column = "labels" if self.needs.label else "scores" if scores else "vectors"
            raise DataError(f"{self.label} needs rows with {column}, and this batch has rows without")

    def _check_teacher(self, width: int, kind: type[ConfigError | DataError]) -> None:
        if width != self.teacher_dimension:
            raise kind(
                f"{self.label}: the rows' vectors have {width} dimensions, the vectors compared with them have "
                f"{self.teacher_dimension}: set loss.arguments.projection_dim={width}"
            )

    def _classes(self, scores: Tensor) -> Tensor:
        classes = scores.round().to(torch.int64)
        if (
            not scores.is_cpu
        ):  # reading them would wait for the device; a recipe's rows were checked when they were read
            return classes
        invalid = scores[(classes != scores) | (classes < 0) | (classes >= self.num_classes)]
        if len(invalid):
            raise DataError(
                f"{self.label}: a row's score is {invalid[0].item():g}, and loss.arguments.num_labels="
                f"{self.num_classes} has the classes 0 to {self.num_classes - 1}"
            )
        return classes


def _by_row(queries: Tensor, documents: Tensor, per_row: int) -> Tensor:
    """[B, D] and [B * M, D] to [B, C, D]."""
    width = queries.shape[1]
    return torch.cat([queries.unsqueeze(1), documents.reshape(len(queries), per_row, width)], dim=1)


def _scores(batch_info: BatchInfo) -> Tensor:
    """The documents' scores; without any, 1 for a positive and 0 for a negative."""
    if batch_info.scores is not None:
        return batch_info.scores
    scores = torch.zeros(len(batch_info.owners), device=batch_info.owners.device)
    return scores.index_fill_(0, batch_info.positives, 1.0)


@contextlib.contextmanager
def _rank_zero_warnings() -> Iterator[None]:
    """Show warnings of the classes on rank 0 only; every rank would repeat them."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        yield
        return
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed Python's and torch's random numbers, and restore their state afterwards."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(state)


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
