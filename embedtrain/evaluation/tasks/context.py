"""What every kind of evaluation works with: one set on one model, and how its texts become vectors."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.distributed.world import World
from embedtrain.evaluation.types import Corpus, LoadedSet
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.exact import cosines, unit_vectors
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.inference.score import PairScorer, Selected
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.tracking.query_metrics import QueryMetrics

# MTEB's seed for all draws.
SEED = 42
# Scores that all ranks exchange at a time.
_SCORE_BATCH_SIZE = 1 << 22


@dataclass
class EncodedSet:
    """The vectors of a set, encoded once and measured with all and with fewer dimensions."""

    vectors: dict[str, Tensor] = field(default_factory=dict)  # by label, on every rank
    documents: ShardedIndex | None = None
    ranking: dict[str, list[int]] | None = None  # indices of the best documents by query id, best first


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
    """One set on a model that gives texts vectors; texts are compared by cosine."""

    encoder: SentenceEncoder  # of the live model; its prompts are used if the set has none of its own
    index: IndexConfig
    vector_cache: VectorCache | None  # for document vectors
    dimension: int | None  # of the vectors that are measured, the first of all; None: all
    encoded: EncodedSet  # filled by the first measurement
    keep_ranking: int = 0  # documents per query of a search that `encoded.ranking` has afterwards

    def encode_queries(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors of queries: float32 [n, D], on every rank. A collective."""
        return unit_vectors(self._encode(texts, "queries"))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Vectors of texts that are neither queries nor documents, not normalized: float32 [n, D], on every rank.

        They get the prompt and the maximum length of queries. A collective.
        """
        return self._encode(texts, "texts")

    def encode_pairs(self, first: Sequence[str], second: Sequence[str]) -> tuple[Tensor, Tensor]:
        """`encode_texts` of two lists of equal length."""
        vectors = self.encode_texts([*first, *second])
        return vectors[: len(first)], vectors[len(first) :]

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        """Cosines of n pairs of texts, float32 [n], on every rank. A collective."""
        # In float32, the cosine of two equal texts is exactly 1, so that they tie.
        return cosines(*self.encode_pairs(first, second)).float().cpu()

    def candidate_scores(self, queries: Sequence[str], documents: Corpus, candidates: Tensor) -> Tensor:
        """Cosines of Q queries with M candidates each, float32 [Q, M], on every rank. A collective.

        `candidates`, int64 [Q, M], are indices of documents, or -1.
        """
        vectors = self.encode_queries(queries)
        index = self.index_documents(documents.texts, documents.ids)
        batch_size = max(1, _SCORE_BATCH_SIZE // candidates.shape[1])
        batches = zip(vectors.split(batch_size), candidates.split(batch_size), strict=True)
        return torch.cat([torch.empty((0, candidates.shape[1])), *(index.scores_of(*batch) for batch in batches)])

    def _encode(self, texts: Sequence[str], label: str) -> Tensor:
        if label not in self.encoded.vectors:
            prompt = self.encoder.query_prompt if self.loaded.query_prompt is None else self.loaded.query_prompt
            self.encoded.vectors[label] = self.encoder.encode_all(
                texts, prompt, max_length=self.loaded.query_max_length, label=f"encoding {label}"
            )
        return self.encoded.vectors[label][:, : self.dimension]

    def index_documents(self, texts: Sequence[str], ids: Sequence[str]) -> ShardedIndex:
        """An index of documents for search by cosine, with ties in the order of trec_eval. A collective."""
        index = self.encoded.documents
        if index is None:
            given = self.loaded.document_prompt
            index = self.encoded.documents = ShardedIndex(trec_order(ids), self.world, self.index)
            index.add_texts(
                self.encoder,
                texts,
                self.encoder.document_prompt if given is None else given,
                max_length=self.loaded.document_max_length,
                vector_cache=self.vector_cache,
            )
        return index if self.dimension is None else index.truncated(self.dimension)


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
