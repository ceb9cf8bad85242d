"""Settings of learned sparse models: how the logits of a text's tokens become weights of words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.config.sparse import SparseActivation, SparsePooling, SparseQueries
from embedtrain.errors import ModelError
from embedtrain.models.file_references import read_json
from embedtrain.models.static_queries import SPARSE_STATIC_EMBEDDING, StaticQueries

SPLADE_POOLING = "SpladePooling"
# The module before it: of sentence-transformers 6, and of version 5.
TRANSFORMERS = ("Transformer", "MLMTransformer")


@dataclass(frozen=True, kw_only=True)
class WordWeights:
    """The settings of a sparse model: those of its files, with the options of the recipe in their stead."""

    pooling: SparsePooling = SparsePooling.max
    activation: SparseActivation = SparseActivation.relu
    queries: StaticQueries | None = None  # of queries that are not encoded

    @property
    def is_new(self) -> bool:
        """False: the vocabulary head is in the files."""
        return False

    @property
    def query_mode(self) -> SparseQueries:
        """How queries become weights of words."""
        return SparseQueries.encoded if self.queries is None else SparseQueries.static


def read_word_weights(path: Path) -> WordWeights:
    """The settings of a SpladePooling module; a ModelError if a value is not supported."""
    settings: dict[str, Any] = read_json(path)
    try:
        return WordWeights(
            pooling=SparsePooling(settings.get("pooling_strategy", "max")),
            activation=SparseActivation(settings.get("activation_function", "relu")),
        )
    except ValueError as error:
        raise ModelError(f"{path}: {error}; supported are max and sum, relu and log1p_relu") from None


def require_sparse_modules(directory: Path, kinds: Sequence[str]) -> None:
    """A ModelError unless these are the modules of a sparse model."""
    if (
        list(kinds[1:]) not in ([SPLADE_POOLING], [SPLADE_POOLING, SPARSE_STATIC_EMBEDDING])
        or kinds[0] not in TRANSFORMERS
    ):
        raise ModelError(
            f"{directory / 'modules.json'} has the modules {', '.join(kinds)}; supported with {SPLADE_POOLING} is a "
            "Transformer before it, and nothing else"
        )
