"""What is measured on rankings and on pairs of sentences; see `labels` for texts with labels.

Rankings are measured as trec_eval does, and written as TREC run and qrels files.

Shapes: Q queries, M candidates of the query with the most, D dimensions; n pairs.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from sklearn.metrics import (
    average_precision_score,
)

from embedtrain.evaluation.context import (
    EncoderContext,
    EvaluationContext,
    ScorerContext,
    reproducible_sklearn,
)
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
    RUN_TAG,
    Bitext,
    Corpus,
    LabelledPairs,
    RetrievalSet,
    ScoredPairs,
)
from embedtrain.tracking.metrics import QueryMetrics
from embedtrain.utils.files import atomic_write

# Rankings that are dictionaries at a time: they take ten times the memory of tensors.
QUERY_BATCH_SIZE = 512


def measure_retrieval(data: RetrievalSet, context: EncoderContext) -> dict[str, float]:
    """Metrics of each query's best documents among all, identical on every rank. A collective."""
    judged, ids = data.judged_queries, data.documents.ids
    depth = required_depth(context.metrics)
    max_depth = max(_run_file_depth(context) if context.save_runs else 0, depth, context.keep_ranking)
    # One more: the query itself may be among them.
    queries = [data.queries[query] for query in judged]
    ranking = context.search(queries, data.documents, max_depth + data.ignore_identical_ids)

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
    return _ranking_metrics(data, ranked, depth, context)


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
