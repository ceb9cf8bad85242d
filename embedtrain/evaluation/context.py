"""What every kind of evaluation works with: one set on one model, and how its texts become vectors."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from embedtrain.config.compressed import VectorFormat
from embedtrain.config.evaluation import IndexConfig
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.evaluation.types import CompressedVectors, Corpus, LoadedSet, Variant
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.index import Ranking, ShardedIndex, first_added_order, trec_order
from embedtrain.inference.pair_scorer import PairScorer, Selected
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.losses.encoded import Part
from embedtrain.losses.quantisation import Ranges
from embedtrain.losses.score import Score
from embedtrain.tracking.metrics import QueryMetrics

# MTEB's seed for all draws.
SEED = 42
# Scores that all ranks exchange at a time.
_SCORE_BATCH_SIZE = 1 << 22


@dataclass
class EncodedSet:
    """The vectors of a set, encoded once and measured with all and with fewer dimensions."""

    texts: dict[str, Part] = field(default_factory=dict)  # by label, on every rank
    documents: ShardedIndex | None = None
    ranking: dict[str, list[int]] | None = None  # indices of the best documents by query id, best first
    ranges: dict[int, Ranges] = field(default_factory=dict)  # of values, by the number of dimensions


@dataclass(frozen=True, kw_only=True)
class EvaluationContext:
    """One set on one model, or in the order of a first stage."""

    world: World
    loaded: LoadedSet  # the set, with its prompts and maximum lengths
    metrics: tuple[str, ...]  # names of the metrics to compute
    save_runs: Path | None = None  # directory for TREC files
    run_depth: int | None = None  # documents per query in a run file; None: as many as the metrics need, at least 1000
    on_queries: Callable[[QueryMetrics], None] | None = None  # called on every rank with the metrics of each query


@dataclass(frozen=True, kw_only=True)
class EncoderContext(EvaluationContext):
    """One set on a model that encodes texts, and compares them by their representations."""

    encoder: SentenceEncoder  # of the live model; its prompts are used if the set has none of its own
    index: IndexConfig
    vector_cache: VectorCache | None  # for document vectors
    variant: Variant
    compressed: CompressedVectors
    encoded: EncodedSet  # filled by the first measurement
    keep_ranking: int = 0  # documents per query of a search that `encoded.ranking` has afterwards

    @property
    def score(self) -> Score:
        """How texts are compared in this measurement."""
        score = self.encoder.score
        return score.views[self.variant] if isinstance(self.variant, str) else score

    def encode_queries(self, texts: Sequence[str]) -> Part:
        """Queries as an index compares them, on every rank. A collective."""
        return self.score.search_part(self._encode(texts, "queries"))

    def search(self, queries: Sequence[str], documents: Corpus, depth: int) -> Ranking:
        """The best documents of each query among all. A collective."""
        if not isinstance(self.variant, VectorFormat):
            encoded = self.encode_queries(queries)
            return self.index_documents(documents.texts, documents.ids).search(encoded, depth)
        vectors = self._encode(queries, "queries").values
        whole = self.index_documents(documents.texts, documents.ids)
        index = self.compressed.index(whole, self.variant, vectors.shape[1], self.encoded.ranges)
        return index.search(vectors, depth)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Vectors of texts that are neither queries nor documents, not normalized: float32 [n, D], on every rank.

        They get the prompt and the maximum length of queries, or of documents if a model only encodes these. A
        collective.
        """
        role = TextRole.query if self.score.is_symmetric else TextRole.document
        part = self._encode(texts, "texts", role)
        assert part.sizes is None, "sets that need one vector per text are rejected for other models"
        return part.values

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], *, swapped: bool = False) -> tuple[Part, Part]:
        """Two lists of equal length: queries and documents if the score distinguishes them, else texts.

        With `swapped`, the second texts are the queries. A collective.
        """
        if not self.score.is_symmetric:
            suffix = " in the other direction" if swapped else ""
            queries, documents = (second, first) if swapped else (first, second)
            return (
                self._encode(queries, f"queries{suffix}"),
                self._encode(documents, f"documents{suffix}", TextRole.document),
            )
        texts = self._encode([*first, *second], "texts")
        parts = texts.slice(0, len(first)), texts.slice(len(first), len(texts))
        return parts[::-1] if swapped else parts

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        """Scores of n pairs of texts, float32 [n], on every rank. A collective."""
        return self.score.exact(*self.encode_pairs(first, second))

    def nearest(self, first: Sequence[str], second: Sequence[str], *, swapped: bool = False) -> list[int]:
        """For each of the first texts, or of the second ones, the index of the nearest one of the others. A collective.

        Every rank has all vectors and searches a part of them.
        """
        queries, documents = map(self.score.search_part, self.encode_pairs(first, second, swapped=swapped))
        num, rank = len(documents), self.world.rank
        index = ShardedIndex(first_added_order(num), self.world, self.index, self.score)
        local_rows = torch.arange(num)[rank :: self.world.size]
        local = documents.take(local_rows.to(documents.values.device), local_rows.numpy())
        index.add(EncodedShard(local.values, local_rows, local.sizes))
        nearest: list[int] = index.search(queries, 1).documents.flatten().tolist()
        return nearest

    def candidate_scores(self, queries: Sequence[str], documents: Corpus, candidates: Tensor) -> Tensor:
        """Scores of Q queries with M candidates each, float32 [Q, M], on every rank. A collective.

        `candidates`, int64 [Q, M], are indices of documents, or -1.
        """
        encoded = self.encode_queries(queries)
        index = self.index_documents(documents.texts, documents.ids)
        scores = [torch.empty((0, candidates.shape[1]))]
        batch_size = max(1, _SCORE_BATCH_SIZE // candidates.shape[1])
        for start in range(0, len(encoded), batch_size):
            stop = min(start + batch_size, len(encoded))
            scores.append(index.scores_of(encoded.slice(start, stop), candidates[start:stop]))
        return torch.cat(scores)

    def _text_options(self, role: TextRole) -> tuple[str, int | None]:
        """The prompt and the maximal length of texts: the set's, or the model's where the set has none."""
        loaded, encoder = self.loaded, self.encoder
        if role is TextRole.document:
            prompt, default, max_length = loaded.document_prompt, encoder.document_prompt, loaded.document_max_length
        else:
            prompt, default, max_length = loaded.query_prompt, encoder.query_prompt, loaded.query_max_length
        return default if prompt is None else prompt, max_length

    def _encode(self, texts: Sequence[str], label: str, role: TextRole = TextRole.query) -> Part:
        encoder, encoded = self.encoder, self.encoded.texts
        if label not in encoded:
            prompt, max_length = self._text_options(role)
            encoded[label] = encoder.encode(texts, prompt, role=role, max_length=max_length, label=f"encoding {label}")
        if not isinstance(self.variant, int):
            return encoded[label]
        return encoded[label].with_values(encoded[label].values[:, : self.variant])

    def index_documents(self, texts: Sequence[str], ids: Sequence[str]) -> ShardedIndex:
        """An index of documents, with ties in the order of trec_eval. A collective."""
        index = self.encoded.documents
        if index is None:
            prompt, max_length = self._text_options(TextRole.document)
            index = ShardedIndex(trec_order(ids), self.world, self.index, self.encoder.score)
            self.encoded.documents = index
            index.add_texts(self.encoder, texts, prompt, max_length=max_length, vector_cache=self.vector_cache)
        if isinstance(self.variant, str):
            return index.viewed(self.variant)
        return index.truncated(self.variant) if isinstance(self.variant, int) else index


@dataclass(frozen=True, kw_only=True)
class ScorerContext(EvaluationContext):
    """One set on a cross-encoder, which reads a query and a document together."""

    scorer: PairScorer  # of the live model; its prompts are used if the set has none of its own

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        """Scores of n pairs of texts, float32 [n], on every rank. A collective."""
        prompts = self.loaded.query_prompt, self.loaded.document_prompt
        return self.scorer.score(first, second, query_prompt=prompts[0], document_prompt=prompts[1])

    def candidate_scores(self, queries: Sequence[str], documents: Corpus, candidates: Tensor) -> Tensor:
        """Scores of Q queries with M candidates each, float32 [Q, M], on every rank. A collective.

        `candidates`, int64 [Q, M], are indices of documents, or -1.
        """
        rows, columns = (candidates >= 0).nonzero(as_tuple=True)
        scores = torch.zeros(candidates.shape)
        scores[rows, columns] = self.similarities(
            Selected(queries, rows.numpy()), Selected(documents.texts, candidates[rows, columns].numpy())
        )
        return scores


@contextlib.contextmanager
def reproducible_sklearn() -> Iterator[None]:
    """Run scikit-learn on one thread and without warnings.

    The last bits of a product, and occasionally a prediction, depend on the number of threads; launchers give all cores
    to a single process, and one to each of several. Warnings (no convergence within the maximum number of iterations, a
    class that was never predicted) are part of the metrics' definition.
    """
    with warnings.catch_warnings(), threadpool_limits(limits=1):
        warnings.simplefilter("ignore")
        yield
