"""What is measured on rankings and on pairs of sentences, and how texts become vectors for it.

Texts with labels are measured in `labels`. Rankings are measured as trec_eval does, and written as TREC run and qrels
files.

Shapes: Q queries, M candidates of the query with the most, D dimensions; n pairs.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorFormat
from embedtrain.data.images.item import chunks_of
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.evaluation.metrics import (
    PAIR_CLASSIFICATION_METRICS,
    UNCUT_DEPTH,
    judged_documents,
    mean_metrics,
    metrics_per_query,
    required_depth,
    sts_metrics,
)
from embedtrain.evaluation.types import (
    CHUNKS,
    RUN_TAG,
    Bitext,
    CompressedVectors,
    Corpus,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
    Variant,
)
from embedtrain.inference.encode import SEVERAL_VECTORS, EncodedShard, SentenceEncoder
from embedtrain.inference.index import Ranking, ShardedIndex, first_added_order, trec_order
from embedtrain.inference.pair_scorer import PairScorer, Selected
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.losses.encoded import Part
from embedtrain.losses.quantisation import Ranges
from embedtrain.losses.score import Score
from embedtrain.tracking.metrics import QueryMetrics
from embedtrain.utils.files import atomic_write

# MTEB's seed for all draws.
SEED = 42
FIRST_STAGE_RECALL = "first_stage_recall"
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

    def first_stage_recall(self, queries: Sequence[str], documents: Corpus, depth: int) -> dict[str, float]:
        """The fraction of the best documents, as many as the main metric has, that the first stage of the index finds.

        A mean over queries, by its name; `depth` documents are searched. Empty without a first stage, and for fewer
        dimensions. A collective.
        """
        if self.index.first_stage is None or self.variant is not None:
            return {}
        index = self.index_documents(documents.texts, documents.ids)
        k = required_depth(self.metrics[:1])
        recall = index.first_stage_recall(self.encode_queries(queries), k, depth)
        return {f"{FIRST_STAGE_RECALL}@{k}": recall.mean().item()}

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
        part = self._encode(texts, "texts", role).one_row_each()
        if part is None:
            raise DataError(f"{self.loaded.data.name}: {SEVERAL_VECTORS}")
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
        config = replace(self.index, first_stage=None)  # as the vectors are not pooled either
        index = ShardedIndex(first_added_order(num), self.world, config, self.score)
        local_rows = torch.arange(num)[rank :: self.world.size]
        local = documents.take(local_rows.to(documents.values.device), local_rows.numpy())
        index.add(EncodedShard(local, local_rows))
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
        if self.variant == CHUNKS:
            sizes = np.array([len(chunks_of(text)[0]) for text in texts], dtype=np.int64)
            return index.of_rows(trec_order(ids), self.score, sizes)
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


# Rankings that are dictionaries at a time: they take ten times the memory of tensors.
QUERY_BATCH_SIZE = 512


def measure_retrieval(data: RetrievalSet, context: EncoderContext) -> dict[str, float]:
    """Metrics of each query's best documents among all, identical on every rank. A collective."""
    judged, ids = data.judged_queries, data.documents.ids
    depth = required_depth(context.metrics)
    max_depth = max(_run_file_depth(context) if context.save_runs else 0, depth, context.keep_ranking)
    # One more: the query itself may be among them.
    queries = [data.queries[query] for query in judged]
    search_depth = max_depth + data.ignore_identical_ids
    ranking = context.search(queries, data.documents, search_depth)

    def ranked(number: int) -> dict[str, float]:
        documents, scores = ranking.documents[number].tolist(), ranking.scores[number].tolist()
        run = {ids[document]: score for document, score in zip(documents, scores, strict=True)}
        if data.ignore_identical_ids:
            run.pop(judged[number], None)
        return run

    if context.keep_ranking:
        context.encoded.ranking = {
            query: [number for number in row if not (data.ignore_identical_ids and ids[number] == query)][
                : context.keep_ranking
            ]
            for query, row in zip(judged, ranking.documents.tolist(), strict=True)
        }
    metrics = _ranking_metrics(data, ranked, depth, context)
    return metrics | context.first_stage_recall(queries, data.documents, search_depth)


def measure_reranking(data: RetrievalSet, context: EncoderContext | ScorerContext) -> dict[str, float]:
    """Metrics of each query's own candidates, ordered by the model, identical on every rank. A collective.

    Duplicate candidates count once. Only documents that are candidates are encoded.
    """
    judged = data.judged_queries
    candidates = _distinct_candidates(data)
    numbers = sorted({number for row in candidates for number in row})
    ids = [data.documents.ids[number] for number in numbers]
    index_of = {number: position for position, number in enumerate(numbers)}
    width = max([1, *map(len, candidates)])
    # Padded with -1.
    documents = torch.full((len(judged), width), -1, dtype=torch.int64)
    for row, row_candidates in enumerate(candidates):
        row_indices = [index_of[number] for number in row_candidates]
        documents[row, : len(row_candidates)] = torch.tensor(row_indices, dtype=torch.int64)
    texts = Corpus(ids, [data.documents.texts[number] for number in numbers])
    scores = context.candidate_scores([data.queries[query] for query in judged], texts, documents)

    def ranked(number: int) -> dict[str, float]:
        names = [ids[document] for document in documents[number].tolist() if document >= 0]
        pairs = zip(scores[number, : len(names)].tolist(), names, strict=True)
        run = {document: score for score, document in sorted(pairs, reverse=True)}  # ties by descending id
        if data.ignore_identical_ids:
            run.pop(judged[number], None)
        return run

    return _ranking_metrics(data, ranked, width, context)


def measure_first_stage(data: RetrievalSet, context: EvaluationContext) -> dict[str, float]:
    """Metrics of each query's own candidates in the order in which they are. A collective."""
    judged, candidates = data.judged_queries, _distinct_candidates(data)

    def ranked(number: int) -> dict[str, float]:
        row = candidates[number]
        run = {data.documents.ids[document]: float(len(row) - rank) for rank, document in enumerate(row)}
        if data.ignore_identical_ids:
            run.pop(judged[number], None)
        return run

    return _ranking_metrics(data, ranked, max([1, *map(len, candidates)]), context)


def _distinct_candidates(data: RetrievalSet) -> list[list[int]]:
    """The candidates of each judged query, each once, in their order."""
    assert data.candidates is not None, "a reranking set has candidates"
    return [list(dict.fromkeys(data.candidates.get(query, ()))) for query in data.judged_queries]


def _ranking_metrics(
    data: RetrievalSet, ranked: Callable[[int], Mapping[str, float]], depth: int, context: EvaluationContext
) -> dict[str, float]:
    """Means over the judged queries, identical on every rank; each rank measures a part of them. A collective.

    Rank 0 writes the TREC files if `context.save_runs` is set. For the number of a judged query, `ranked` returns the
    scores of documents by id, best first, with ties in the order of trec_eval; `depth` documents are measured.
    """
    world, judged, metrics = context.world, data.judged_queries, context.metrics
    first, end = (len(judged) * rank // world.size for rank in (world.rank, world.rank + 1))
    values = [np.empty((0, len(metrics)))]
    with world.fail_together(f"computing the metrics of {data.name}"):
        judged_anywhere = judged_documents(data.judgements)
        for start in range(first, end, QUERY_BATCH_SIZE):
            batch = range(start, min(end, start + QUERY_BATCH_SIZE))
            run = {judged[number]: dict(islice(ranked(number).items(), depth)) for number in batch}
            judgements = {query: data.judgements[query] for query in run}
            values.append(metrics_per_query(judgements, run, metrics, judged_anywhere))
        if world.is_main and context.save_runs is not None:
            rankings = ((query, ranked(number)) for number, query in enumerate(judged))
            write_run(run_path(context.save_runs, data.name), rankings, _run_file_depth(context))
            write_qrels(qrels_path(context.save_runs, data.name), data.judgements)
    by_query = np.concatenate(world.gather(np.concatenate(values)))
    if context.on_queries is not None:
        context.on_queries(QueryMetrics(judged, metrics, by_query))
    return mean_metrics(by_query, metrics)


def _run_file_depth(context: EvaluationContext) -> int:
    """Documents per query in a run file; by default the file suffices to compute the metrics again."""
    return context.run_depth or max(UNCUT_DEPTH, required_depth(context.metrics))


def run_path(directory: Path, name: str) -> Path:
    """Path of the run file of the set `name`; characters that file names cannot hold are percent-encoded."""
    return directory / f"{_file_name(name)}.run"


def qrels_path(directory: Path, name: str) -> Path:
    """Path of the qrels file of the set `name`."""
    return directory / f"{_file_name(name)}.qrels"


def write_run(path: Path, rankings: Iterable[tuple[str, Mapping[str, float]]], depth: int) -> None:
    """Write a TREC run, `query Q0 document rank score tag` per line.

    The format has no quoting, so ids are percent-encoded: whitespace, control characters and `%` itself, so that
    `urllib.parse.unquote` restores every id. Scores have nine digits: read as float32 they are the same bits, and
    trec_eval sees the same ties.

    `rankings` has, for each query, its id and the scores of documents by id, best first; `depth` of them are written.
    """
    with atomic_write(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for query, scores in rankings:
            for rank, (document, score) in enumerate(islice(scores.items(), depth), start=1):
                file.write(f"{_escape(query)} Q0 {_escape(document)} {rank} {score:.9g} {RUN_TAG}\n")


def write_qrels(path: Path, judgements: Mapping[str, Mapping[str, int]]) -> None:
    """Write TREC qrels, `query 0 document gain` per line, with ids as in the run."""
    with atomic_write(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for query, gains in judgements.items():
            file.writelines(f"{_escape(query)} 0 {_escape(document)} {gain}\n" for document, gain in gains.items())


def _file_name(name: str) -> str:
    # Injective; letters of all languages stay.
    return re.sub(r"[^\w.@+-]", lambda match: quote(match[0], safe=""), name)


def _escape(text: str) -> str:
    # A byte order mark at the start of a file is not part of what readers return.
    return re.sub(r"[%\s\x00-\x1f\x7f\ufeff]", lambda match: quote(match[0], safe=""), text)


def measure_sts(data: ScoredPairs, context: EncoderContext | ScorerContext) -> dict[str, float]:
    """Rank and linear correlation of similarities with gold scores, identical on every rank. A collective."""
    similarities = context.similarities(data.first, data.second)
    metrics: dict[str, float] = {}
    with context.world.fail_together(f"computing the metrics of {data.name}"):
        if context.world.is_main:
            metrics = sts_metrics(similarities.tolist(), data.scores)
    return context.world.broadcast(metrics)


def measure_pair_classification(data: LabelledPairs, context: EncoderContext | ScorerContext) -> dict[str, float]:
    """Metrics of the similarities of pairs, identical on every rank. A collective.

    Average precision is scikit-learn's. Accuracy, and F1 with its precision and recall, are those at the best threshold
    of each, as found by sentence-transformers' BinaryClassificationEvaluator.
    """
    similarities = context.similarities(data.first, data.second)
    metrics: dict[str, float] = {}
    with context.world.fail_together(f"computing the metrics of {data.name}"), reproducible_sklearn():
        if context.world.is_main:
            metrics = _pair_classification_metrics(similarities.numpy(), np.asarray(data.labels))
    return context.world.broadcast(metrics)


def _pair_classification_metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    # Imported here because it takes seconds, which only processes with such a set should spend.
    from sentence_transformers.sentence_transformer.evaluation import BinaryClassificationEvaluator
    from sklearn.metrics import average_precision_score

    accuracy, accuracy_threshold = BinaryClassificationEvaluator.find_best_acc_and_threshold(scores, labels, True)
    f1 = BinaryClassificationEvaluator.find_best_f1_and_threshold(scores, labels, True)
    values = (average_precision_score(labels, scores), accuracy, *f1[:3], accuracy_threshold, f1[3])
    return {metric: float(value) for metric, value in zip(PAIR_CLASSIFICATION_METRICS, values, strict=True)}


def measure_bitext(data: Bitext, context: EncoderContext) -> dict[str, float]:
    """Metrics of nearest neighbours, identical on every rank. A collective.

    From the first sentences to the second, a translation is found if the nearest neighbour is in the same row;
    precision, recall and F1 are means with rows as classes, as in MTEB. `accuracy_back` (from the second to the first)
    and `accuracy_mean` (of both directions) are those of sentence-transformers' TranslationEvaluator, which also
    accepts an equal sentence of another row. Of equally near sentences, the first counts.
    """
    from sklearn.metrics import precision_recall_fscore_support  # takes a second

    forward = context.nearest(data.first, data.second)
    backward = context.nearest(data.first, data.second, swapped=True)
    metrics: dict[str, float] = {}
    with context.world.fail_together(f"computing the metrics of {data.name}"), reproducible_sklearn():
        if context.world.is_main:
            rows = range(len(data.first))
            precision, recall, f1, _ = precision_recall_fscore_support(
                rows, forward, average="weighted", zero_division=0.0
            )
            accuracy_back = _fraction_equal(data.first, backward)
            metrics = {
                "f1": float(f1),
                "precision": float(precision),
                "recall": float(recall),
                "accuracy": sum(nearest == row for row, nearest in zip(rows, forward, strict=True)) / len(rows),
                "accuracy_back": accuracy_back,
                "accuracy_mean": (_fraction_equal(data.second, forward) + accuracy_back) / 2,
            }
    return context.world.broadcast(metrics)


def _fraction_equal(texts: Sequence[str], nearest: Sequence[int]) -> float:
    return sum(text == texts[row] for text, row in zip(texts, nearest, strict=True)) / len(texts)
