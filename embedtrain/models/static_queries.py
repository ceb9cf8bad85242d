"""Queries of learned sparse models as weights of their tokens, without inference: files and lookup.

Q: queries of a chunk; V: words of the vocabulary.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from embedtrain.config.sparse import IDF
from embedtrain.data.types import QueryWords
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.file_references import read_json
from embedtrain.models.security import require_safe_files
from embedtrain.models.tokenizer_files import read_tokenizer
from embedtrain.utils.files import write_json

SPARSE_STATIC_EMBEDDING = "SparseStaticEmbedding"
# Its folder in sentence-transformers' directories, and the weights in it.
QUERY_FOLDER = f"query_0_{SPARSE_STATIC_EMBEDDING}"
WEIGHTS = "model.safetensors"
# The name of the weights in the encoder, and in the file.
QUERY_WEIGHTS, STORED_WEIGHT = "query_weights.weight", "weight"
# Peak learning rate of numbers of 1 to 10, for which that of a model is far too small.
QUERY_WEIGHTS_LR = 1e-3
# In OpenSearch's directories: a mapping of tokens to weights.
IDF_FILE = "idf.json"


@dataclass(frozen=True, kw_only=True)
class StaticQueries:
    """Where the weights of tokens are, and whether they are trained."""

    path: Path | None  # safetensors or JSON; None: they are computed from the training data
    trained: bool = False


class QueryWeights(nn.Module):
    """The weight of each token in queries, [V], in float32 as an FSDP group of its own."""

    def __init__(self, num_words: int, *, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_words), requires_grad=trained)

    def forward(self, queries: QueryWords | None) -> tuple[Tensor, Tensor]:
        """The weights of all words in each query, [Q, V], and a zero that depends on all weights.

        With the zero in its graph, a chunk without queries has a gradient as well: FSDP reduces it on all ranks.
        """
        weight, zero = self.weight, 0.0 * self.weight.sum()
        if queries is None:
            return weight.new_zeros((0, len(weight))), zero
        empty = weight.new_zeros((queries.count, len(weight)))
        return empty.index_put((queries.queries, queries.words), weight[queries.words]), zero


def read_static_embedding(folder: Path) -> StaticQueries:
    """The settings of a SparseStaticEmbedding module; a ModelError if its files are not safe, or not supported."""
    require_safe_files(folder, trust_remote_code=False)
    settings = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if settings.get("path") is not None:
        raise ModelError(
            f"{folder / 'config.json'}: path={settings['path']!r:.200} names another file; save the model with "
            "sentence-transformers, which writes the weights"
        )
    path = folder / WEIGHTS
    if not path.is_file() and any(folder.glob("*.bin")):
        raise ModelError(f"{path} is missing; save the model with sentence-transformers, which writes safetensors")
    # The directory of a run has no weights.
    return StaticQueries(path=path if path.is_file() else None, trained=not settings.get("frozen", False))


def read_query_weights(queries: StaticQueries, directory: Path | None, num_words: int) -> Tensor:
    """The weight of each word, float32 [V], from its file; 0 if there is none, because it is computed later.

    Tokens that a JSON file does not name have the weight 0; `directory` holds the tokenizer. Raises ModelError.
    """
    if queries.path is None:
        return torch.zeros(num_words)
    if queries.path.suffix != ".json":
        return _read_safetensors(queries.path, num_words)
    if directory is None:
        raise ConfigError(
            f"model.query_weights={queries.path}: needs the tokenizer of a model; set model.path, or write {IDF}"
        )
    return weights_of_json(queries.path, read_tokenizer(directory, trust_remote_code=False), num_words)


def weights_of_json(path: Path, tokenizer: PreTrainedTokenizerBase, num_words: int) -> Tensor:
    """The weight of each word, float32 [V], from a mapping of tokens to weights."""
    vocabulary, weights = tokenizer.get_vocab(), torch.zeros(num_words)
    for token, weight in read_json(path).items():
        if token not in vocabulary:
            raise ModelError(f"{path} has the token {token!r:.200}, which the model's tokenizer does not have")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ModelError(f"{path}: the weight {weight!r:.200} of {token!r:.200} is not a finite number")
        weights[vocabulary[token]] = weight
    return weights


def describe_static_queries(queries: StaticQueries) -> str:
    """Where the weights are from, for the user."""
    origin = "computed from the documents of data.train" if queries.path is None else f"from {queries.path}"
    return f"static queries with {'trained' if queries.trained else 'frozen'} weights {origin}"


def write_idf(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the weights of an export as OpenSearch reads them."""
    weights = _read_safetensors(directory / QUERY_FOLDER / WEIGHTS, None).tolist()
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    write_json(directory / IDF_FILE, {token: weights[number] for token, number in tokens if weights[number]})


def _read_safetensors(path: Path, num_words: int | None) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            shape = file.get_slice(STORED_WEIGHT).get_shape()
            fits = len(shape) == 1 and num_words in (None, shape[0])
            weights: Tensor | None = file.get_tensor(STORED_WEIGHT).float() if fits else None
    except Exception as error:  # safetensors does not export its exception type
        raise ModelError(f"{path} cannot be read as safetensors with `{STORED_WEIGHT}`: {error}") from None
    if weights is None or not weights.isfinite().all():
        raise ModelError(f"{path}: {STORED_WEIGHT} {shape} must be a finite number for each of {num_words} words")
    return weights
