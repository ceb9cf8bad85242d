"""Vectors of one or eight bits per dimension, and their scores: codes with codes, or float queries with codes.

Codes are those of `quantize_embeddings` of sentence-transformers. The score of two codes is their inner product as
integers; that of a binary pair, whose bits count as -1 and 1, is the dimension less twice the Hamming distance. Float
queries are multiplied by what codes stand for: the middle of a step, -1 or 1.

quantisation.json in a model directory has the ranges with which its vectors become int8 or uint8:

    {"version": 1, "origin": {"documents": 10000, ...},
     "ranges": {"384": {"min": [-0.13, ...], "max": [0.12, ...]}, "128": ...}}

`calibrate` writes the file, and the export of a run whose loss quantises to int8. The ranges are those of so many
first dimensions as the model compares them: with the cosine, normalised again. `min` and `max` are the two rows of the
argument `ranges` of sentence-transformers' `quantize_embeddings`.

Shapes: n vectors, D dimensions, T queries, P pairs.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorFormat, VectorPrecision
from embedtrain.errors import ModelError
from embedtrain.inference.exact import norms, pack_keys, pair_batch_size, pairwise_dot
from embedtrain.inference.index import Ranking, ShardedIndex
from embedtrain.inference.store import DocumentTile, VectorTiles
from embedtrain.inference.vectors import DotProduct, VectorStore
from embedtrain.losses.encoded import Part
from embedtrain.losses.quantisation import Quantiser, Ranges, ranges_dimension
from embedtrain.utils.records import is_number

# The largest whole number up to which float32 has all others.
_EXACT = 1 << 24
_LARGEST = {VectorPrecision.int8: 128, VectorPrecision.uint8: 255, VectorPrecision.binary: 1}
QUANTISATION_FILE = "quantisation.json"
_VERSION = 1
_KEYS = ("min", "max")


def sampled_rows(count: int, size: int) -> Tensor:
    """At most `size` of `count` numbers, spread pseudo-randomly and the same in every run: bool [count]."""
    if count <= size:
        return torch.ones(count, dtype=torch.bool)
    # splitmix64: a permutation of the 64-bit integers.
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.from_numpy(np.argpartition(mixed ^ (mixed >> np.uint64(31)), size - 1)[:size])] = True
    return chosen


def sample_ranges(index: ShardedIndex, dimension: int, size: int) -> Ranges:
    """Ranges of the first dimensions of at most `size` documents, as they are compared. A collective."""
    chosen, device = sampled_rows(index.num_documents, size), index.world.device
    low, high = (torch.full((dimension,), value, device=device) for value in (torch.inf, -torch.inf))
    for shard in index.shards():
        vectors = index.score.search_rows(shard.part.values, dimension)[chosen[shard.rows].to(device)]
        if len(vectors):
            low, high = torch.minimum(low, vectors.amin(dim=0)), torch.maximum(high, vectors.amax(dim=0))
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return Ranges(low, high)


class QuantisedProduct(DotProduct):
    """Compares documents' codes with queries' codes, or with float queries, of vectors as `whole` has them."""

    def __init__(self, whole: DotProduct, quantiser: Quantiser, *, float_queries: bool) -> None:
        super().__init__()
        self.whole, self.quantiser, self.float_queries = whole, quantiser, float_queries

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """As the float vectors are compared."""
        return self.whole.search_rows(values, dimension)

    def queries(self, values: Tensor) -> Tensor:
        """Prepared queries as they are compared: float32, codes as well."""
        return values if self.float_queries else self.quantiser.encode(values).float()

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> VectorStore:
        """A store of codes."""
        if self.float_queries:
            return _DecodedStore(self.quantiser, config, device, expected)
        return _CodeStore(self.quantiser, config, device, expected)


class _DecodedStore(VectorStore):
    """Codes that are compared as the vectors that they stand for."""

    def __init__(self, quantiser: Quantiser, config: IndexConfig, device: torch.device, expected: int) -> None:
        super().__init__(config, device, expected)
        self._quantiser = quantiser
        dtype = torch.uint8 if quantiser.precision is VectorPrecision.uint8 else torch.int8
        self._vectors = VectorTiles(config, device, expected, dtype=dtype, decode=self._decode)

    def _decode(self, codes: Tensor) -> Tensor:
        return self._quantiser.decode(codes)

    def add(self, documents: Part) -> None:
        """Add the codes of a vector per document."""
        codes = self._vectors.add(self._quantiser.encode(documents.values))
        if len(codes):
            self._max_norm = torch.maximum(self._max_norm, norms(self._decode(codes)).max())


class _CodeStore(_DecodedStore):
    """Codes that are compared as integers."""

    is_exact = True

    def _decode(self, codes: Tensor) -> Tensor:
        return codes.float()

    def tiles(self) -> Iterator[tuple[int, DocumentTile]]:
        """All codes, in the order in which they were added."""
        for start, codes in self._vectors.tiles():
            yield start, _CodeTile(codes, _EXACT // _LARGEST[self._quantiser.precision] ** 2)

    def exact_scores(self, queries: Part, rows: Tensor, documents: Tensor) -> Tensor:
        """Inner products of integers, int32."""
        scores = torch.empty(len(rows), dtype=torch.int32, device=queries.values.device)
        for positions, codes in self._vectors.pick(documents, pair_batch_size(queries.values)):
            scores[positions] = pairwise_dot(queries.values[rows[positions]], codes).int()
        return scores


@dataclass(frozen=True, slots=True)
class _CodeTile(DocumentTile):
    codes: Tensor  # float32 [t, D], whole numbers
    width: int  # of so many dimensions the inner product is exact in float32

    def __len__(self) -> int:
        return len(self.codes)

    def scores(self, queries: Part) -> Tensor:
        pairs = zip(queries.values.split(self.width, 1), self.codes.split(self.width, 1), strict=True)
        total = torch.zeros((len(queries), len(self.codes)), dtype=torch.int32, device=self.codes.device)
        for left, right in pairs:
            total += (left @ right.T).int()
        return total


class CompressedIndex:
    """The documents of an index of vectors in another form, with a second copy if that form rescores.

    `dimension` is that of the vectors of `index`; `ranges_of` returns the ranges of the first dimensions. A collective
    if it is.
    """

    def __init__(
        self, index: ShardedIndex, vectors: VectorFormat, dimension: int, ranges_of: Callable[[int], Ranges]
    ) -> None:
        self._whole, self._dimension, self._ranges_of = index, dimension, ranges_of
        self._first = self._converted(vectors.dims, vectors.documents, float_queries=vectors.has_float_queries)
        self._rescore = vectors.rescore
        if vectors.rescore is not None:
            self._second = self._converted(vectors.rescore.dims, vectors.rescore.documents, float_queries=True)
        self._dims = vectors.dims

    def search(self, queries: Tensor, k: int) -> Ranking:
        """The best K documents for vectors of queries, [Q, D]; scores only give the order. A collective."""
        num_first = 0 if self._rescore is None else self._rescore.times * self._rescore.top_k
        first = self._first.search(self._queries(self._first, queries, self._dims), max(k, num_first))
        documents = first.documents
        if self._rescore is not None:
            head, rest = documents[:, :num_first], documents[:, num_first:]
            scores = self._second.scores_of(self._queries(self._second, queries, self._rescore.dims), head)
            order = pack_keys(scores, self._whole.priorities[head]).argsort(dim=1, descending=True)
            documents = torch.cat([head.gather(1, order), rest], dim=1)
        documents = documents[:, :k]
        # Not the scores themselves: those of the rest are on another scale.
        scores = torch.arange(documents.shape[1], 0, -1).float().expand(documents.shape)
        return Ranking(scores, documents)

    def _converted(self, dims: int | None, precision: VectorPrecision, *, float_queries: bool) -> ShardedIndex:
        if precision is VectorPrecision.float:
            return self._whole if dims is None else self._whole.truncated(dims)
        needs_ranges = precision is not VectorPrecision.binary
        ranges = self._ranges_of(dims or self._dimension) if needs_ranges else None
        whole = self._whole.score
        assert isinstance(whole, DotProduct), "rejected for other models"
        score = QuantisedProduct(whole, Quantiser(precision, ranges), float_queries=float_queries)
        return self._whole.converted(score, lambda vectors: score.search_rows(vectors, dims))

    def _queries(self, index: ShardedIndex, queries: Tensor, dims: int | None) -> Tensor:
        rows, score = self._whole.score.search_rows(queries, dims), index.score
        return score.queries(rows) if isinstance(score, QuantisedProduct) else rows


def read_ranges(directory: Path | None) -> dict[int, Ranges]:
    """Ranges by the number of dimensions; none without the file. ModelError if it is not as described.

    `directory` has the weights of a model: the file may be beside them, or beside modules.json in the folder above.
    """
    if directory is None:
        return {}
    is_nested = not (directory / "modules.json").is_file() and (directory.parent / "modules.json").is_file()
    path = (directory.parent if is_nested else directory) / QUANTISATION_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != _VERSION:
            raise ModelError(f"{path}: version {content['version']!r} is not {_VERSION}, the only one that is read")
        return {int(dimension): _ranges(int(dimension), values) for dimension, values in content["ranges"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has no ranges of vectors ({error}): remove it, or calibrate again") from None


def write_ranges(path: Path, ranges: Mapping[int, Ranges], origin: Mapping[str, Any]) -> None:
    """Write the file; `origin` is what the ranges depend on."""
    of_dimension = {
        str(dimension): dict(zip(_KEYS, (bounds.low.tolist(), bounds.high.tolist()), strict=True))
        for dimension, bounds in ranges.items()
    }
    content = {"version": _VERSION, "origin": dict(origin), "ranges": of_dimension}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_trained_ranges(directory: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write the ranges in the state dict of a trained loss, if it has any, to a model's directory.

    Those without a batch yet are left out.
    """
    ranges = {
        number: Ranges(tensor[0].float().cpu(), tensor[1].float().cpu())
        for name, tensor in tensors.items()
        if (number := ranges_dimension(name)) is not None and not tensor.isnan().any()
    }
    if ranges:
        write_ranges(directory / QUANTISATION_FILE, dict(sorted(ranges.items(), reverse=True)), {"step": step})


def _ranges(dimension: int, values: Mapping[str, list[float]]) -> Ranges:
    low, high = (values[key] for key in _KEYS)
    for numbers in (low, high):
        if len(numbers) != dimension or not all(is_number(number) and math.isfinite(number) for number in numbers):
            raise ValueError(f"{dimension} dimensions need as many numbers")
    if any(first > last for first, last in zip(low, high, strict=True)):
        raise ValueError("a min is larger than its max")
    return Ranges(torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32))
