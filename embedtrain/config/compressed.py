"""Options of compressed vectors: which forms of the same vectors an evaluation measures, and what each is called."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embedtrain.config.evaluation import EvaluationConfig, EvaluationSet, VectorPrecision
from embedtrain.config.kinds import Kind, load_kind
from embedtrain.config.options import check_values, option
from embedtrain.config.parsing import merge_options, parse_items
from embedtrain.config.recipe import Recipe
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

_PRECISION = "(?:float|int8|uint8|binary)"
# What `VectorFormat.label` returns.
_LABEL = re.compile(rf"(\d+|(\d+-)?{_PRECISION}(-float-query)?(-x\d+(-{_PRECISION})?(-\d+)?(-top\d+)?)?)")


@dataclass(kw_only=True)
class RescoreConfig:
    """A second, more precise copy of the vectors that orders the best documents of a search again.

    The query is a float vector. Documents beyond those that are scored again follow in the order of the search.
    """

    times: int = option(4, at_least=1)  # so many times `top_k` documents are scored again
    top_k: int = option(10, at_least=1)  # results that a search serves
    documents: VectorPrecision = VectorPrecision.int8  # of the copy
    dims: int | None = option(None, at_least=1)  # of the copy; default: all


@dataclass(kw_only=True)
class VectorFormat:
    """A form of the vectors to measure, an element of `evaluation.vectors` (a string is its `documents`)."""

    dims: int | None = option(None, at_least=1)  # the first so many dimensions, normalised again; default: all
    documents: VectorPrecision = VectorPrecision.float
    queries: VectorPrecision | None = None  # float, or the precision of the documents, which is the default
    rescore: RescoreConfig | None = None  # options of RescoreConfig; default: documents are scored once

    @property
    def has_float_queries(self) -> bool:
        """Whether float vectors of queries are compared with compressed documents."""
        return self.documents is not VectorPrecision.float and self.queries is VectorPrecision.float

    @property
    def label(self) -> str:
        """The name that follows that of the set, such as `256-binary-x4`: defaults are left out."""
        parts = [] if self.dims is None else [str(self.dims)]
        if self.documents is not VectorPrecision.float or self.rescore is not None or self.dims is None:
            parts.append(self.documents.value)
        parts += ["float-query"] * self.has_float_queries
        if self.rescore is not None:
            parts.append(f"x{self.rescore.times}")
            is_default = self.rescore.documents is RescoreConfig.documents and self.rescore.dims is None
            parts += [self.rescore.documents.value] * (not is_default)
            parts += [] if self.rescore.dims is None else [str(self.rescore.dims)]
            parts += [f"top{self.rescore.top_k}"] * (self.rescore.top_k != RescoreConfig.top_k)
        return "-".join(parts)

    def bytes_per_document(self, dimension: int) -> int:
        """Bytes of a document that every search reads; `dimension` is that of the whole vectors."""
        return stored_bytes(self.dims or dimension, self.documents)

    def rescore_bytes(self, dimension: int) -> int:
        """Bytes of a document's copy for rescoring; 0 without."""
        return 0 if self.rescore is None else stored_bytes(self.rescore.dims or dimension, self.rescore.documents)


def stored_bytes(dims: int, precision: VectorPrecision) -> int:
    """Bytes of a vector."""
    match precision:
        case VectorPrecision.float:
            return 4 * dims
        case VectorPrecision.int8 | VectorPrecision.uint8:
            return dims
        case VectorPrecision.binary:
            return -(-dims // 8)


def is_label(text: str) -> bool:
    """Whether the name of a set may end with `@` and this text because its vectors are truncated or compressed."""
    return _LABEL.fullmatch(text) is not None


def dims_of(formats: Sequence[VectorFormat]) -> list[int]:
    """All dimensions that are named."""
    rescored = [form.rescore.dims for form in formats if form.rescore is not None]
    return [dims for dims in (*(form.dims for form in formats), *rescored) if dims is not None]


def parse_vectors(value: Any, option: str) -> list[VectorFormat]:
    """The elements of a list option: mappings of options of VectorFormat, or precisions of documents.

    Raises a ConfigError for one that cannot be.
    """
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"{option}={value!r} is not a list, such as [int8,binary]")
    formats = [parse_vector_format(element, f"{option}[{index}]") for index, element in enumerate(value)]
    labels = [form.label for form in formats]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise ConfigError(f"{option}[{index}] is the same as {option}[{labels.index(label)}] ({label}): remove one")
    return formats


def parse_vector_format(value: Any, option: str) -> VectorFormat:
    """One form of vectors: a mapping of options of VectorFormat, or the precision of documents.

    Raises a ConfigError for one that cannot be.
    """
    options = {"documents": value} if isinstance(value, str) else value
    if not isinstance(options, dict):
        raise ConfigError(f"{option}={value!r} is neither int8, uint8, binary nor a mapping with `documents`")
    return _checked(merge_options(VectorFormat, options, option), f"{option}.")


def parse_evaluation(evaluation: EvaluationConfig) -> None:
    """Turn the elements of its lists into dataclasses."""
    evaluation.sets = parse_items(evaluation.sets, EvaluationSet, "evaluation.sets")
    evaluation.vectors = parse_vectors(evaluation.vectors, "evaluation.vectors")


def check_evaluated_vectors(recipe: Recipe) -> None:
    """Raise a ConfigError for truncated or compressed vectors that cannot be evaluated."""
    evaluation = recipe.evaluation
    check_truncate_dims(evaluation.truncate_dims, "evaluation.truncate_dims")
    if evaluation.vectors:
        check_kind_of_vectors(load_kind(recipe.model.kind), "evaluation.vectors")


def check_kind_of_vectors(kind: Kind, option: str) -> None:
    """Raise a ConfigError for a model that does not compute one vector per text."""
    if not kind.has_one_vector:
        raise ConfigError(f"{option}: is for one vector of each text (model.kind=dense), not {kind.name}; leave it out")


def check_truncate_dims(dims: Sequence[int] | None, option: str) -> None:
    """Raise a ConfigError for dimensions that no vector can be truncated to."""
    if dims is not None and (min(dims, default=1) < 1 or len(set(dims)) < len(dims)):
        raise ConfigError(
            f"{option}={written(dims)}: must be different numbers of dimensions above 0, such as [256,64], or [] for "
            "none"
        )


def _checked(vectors: VectorFormat, prefix: str) -> VectorFormat:
    check = OptionChecks(vectors, prefix)
    check_values(vectors, prefix)
    check.require(
        vectors.queries in (None, VectorPrecision.float, vectors.documents),
        "queries",
        f"must be float or that of the documents, {vectors.documents.value}",
    )
    is_float = vectors.documents is VectorPrecision.float
    check.require(
        not is_float or vectors.dims is not None or vectors.rescore is not None,
        "documents",
        "is the form that vectors have without this option; write int8, uint8 or binary, or dims",
    )
    if vectors.rescore is not None:
        rescoring = OptionChecks(vectors.rescore, f"{prefix}rescore.")
        rescoring.require(
            vectors.rescore.documents in (VectorPrecision.float, VectorPrecision.int8, VectorPrecision.uint8),
            "documents",
            "must be float, int8 or uint8, which are more precise than binary",
        )
    return vectors
