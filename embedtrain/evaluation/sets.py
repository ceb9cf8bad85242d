"""Loads the sets of `evaluation.sets`: chooses the reader of each, checks its options and content, takes its subset."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from embedtrain.config.evaluation import Classifier, EvaluationSet, SetKind
from embedtrain.data.cache.cache import Cache, cache_directory
from embedtrain.data.cache.document_store import select_texts
from embedtrain.data.rows import text_key
from embedtrain.data.sources.parts import is_saved_dataset, may_be_hub_id, stem_of
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, HubUnavailable
from embedtrain.evaluation.first_stage import read_run, with_candidates
from embedtrain.evaluation.readers.retrieval import (
    is_beir_folder,
    read_beir_folder,
    read_hub_retrieval,
    read_llama_index,
)
from embedtrain.evaluation.readers.tables import read_tables, tables_of_file, tables_of_folder, tables_of_repository
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    Corpus,
    EvaluationData,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
    check_metrics,
    explain_no_metric,
    has_metric,
)
from embedtrain.utils.files import expand_user

DataAndNotes = tuple[EvaluationData, list[str]]

_KINDS: dict[type[EvaluationData], str] = {
    RetrievalSet: "a retrieval set",
    ScoredPairs: "an STS set",
    LabelledPairs: "a set of labelled pairs",
    Bitext: "a bitext set",
    ClassificationSet: "a classification set",
    ClusteringSet: "a clustering set",
}
# Options of some kinds of sets.
_KINDS_OF_OPTION: dict[str, tuple[type[EvaluationData], ...]] = {
    "candidates": (RetrievalSet,),
    "subset_documents": (RetrievalSet,),
    "ignore_identical_ids": (RetrievalSet,),
    "exchange_sides": (RetrievalSet,),
    "train": (ClassificationSet,),
    "classifier": (ClassificationSet,),
    "samples_per_label": (ClassificationSet,),
    "experiments": (ClassificationSet, ClusteringSet),
}
_DOCUMENT_OPTIONS = ("document_prompt", "document_max_length")


def load_sets(
    configs: Sequence[EvaluationSet],
    world: World,
    *,
    subset: int | None = None,
    metrics: Sequence[str] | None = None,
    cache: Cache | None = None,
    option: str = "evaluation.sets",
    optional: Callable[[str], bool] = lambda name: False,
    warn: Callable[[str], None] = lambda text: None,
) -> list[LoadedSet]:
    """Read all sets on every rank; an error on one rank is raised on all.

    A set is left out on all ranks, with a warning, if `optional` is true of its name, it is on the Hub, and some rank
    cannot reach the Hub.

    `subset` and `metrics` are for sets without their own; of `metrics`, those that the kind of the set has. `option`
    names the list in messages; `cache`, for large corpora, defaults to that of data.cache_dir. Raises ConfigError if
    two sets have the same name, an option does not fit a set, or no set has a metric, and DataError if a set cannot be
    read.
    """
    sets: list[LoadedSet | None] = []
    with world.fail_together("reading evaluation sets"):
        check_names(configs, option)
        for config in configs:
            try:
                sets.append(read_set(config, subset=subset, cache=cache))
            except HubUnavailable as error:
                if not optional(set_name(config)):
                    raise type(error)(f"{option}: {error}; write {option}=[PATH,...] with local files") from None
                sets.append(None)
    missing_by_rank = world.gather([index for index, loaded in enumerate(sets) if loaded is None])
    missing = sorted({index for indices in missing_by_rank for index in indices})
    for index in missing:
        warn(
            f"{option}: {configs[index].path} is not evaluated: it is not cached, and the Hugging Face Hub cannot be "
            f"reached; write {option}=[PATH,...] with local files, or {option}=[] for none"
        )
    present = [loaded for index, loaded in enumerate(sets) if loaded is not None and index not in missing]
    with world.fail_together("reading evaluation sets"):
        return present if metrics is None else _with_metrics(present, metrics, option.replace("sets", "metrics"))


def check_paths(configs: Sequence[EvaluationSet], option: str) -> None:
    """Raise the errors about names and files that need no Hub: ConfigError for equal names, DataError for no file."""
    check_names(configs, option)
    for config in configs:
        if not expand_user(config.path).exists() and not may_be_hub_id(config.path, config.revision):
            _reject_missing(config.path)
        if config.candidates is not None and not expand_user(config.candidates).is_file():
            raise DataError(f"{option}, {config.path}: candidates={config.candidates}: no such file")


def check_names(configs: Sequence[EvaluationSet], option: str) -> None:
    """Reject two sets with the same name, with a ConfigError: their metrics could not be distinguished."""
    paths: dict[str, str] = {}
    for config in configs:
        name = set_name(config)
        if name in paths:
            raise ConfigError(
                f"{option}: {paths[name]} and {config.path} are both called {name!r}; "
                f"write {{path: {config.path}, name: ...}} for one of them"
            )
        paths[name] = config.path


def _with_metrics(sets: Sequence[LoadedSet], metrics: Sequence[str], option: str) -> list[LoadedSet]:
    """The sets with those of `metrics` that their kind has; ConfigError for a metric that no set has."""
    for metric in metrics:
        if sets and not any(has_metric(loaded.data, metric) for loaded in sets):
            raise ConfigError(explain_no_metric([loaded.data for loaded in sets], metric, option))
    return [
        loaded
        if loaded.metrics is not None
        else replace(loaded, metrics=tuple(metric for metric in metrics if has_metric(loaded.data, metric)) or None)
        for loaded in sets
    ]


def set_name(config: EvaluationSet) -> str:
    """The `name` of the options, else the last part of the path without the suffix of a data file."""
    if config.name:
        return config.name
    path = Path(config.path)
    name = stem_of(path)
    return name if name not in ("", "..") else path.resolve().name


def read_set(config: EvaluationSet, *, subset: int | None = None, cache: Cache | None = None) -> LoadedSet:
    """Read one set from a table, a BEIR folder, a folder of tables, a copy of a Hub repository, or the Hub.

    `subset` is the maximal number of queries or rows, where the options have none. Raises DataError if the set does not
    exist, is of another kind or cannot be read, and ConfigError if an option does not fit it.
    """
    name = set_name(config)
    data, notes = _read(config, name, cache or Cache(directory=cache_directory(None)))
    if isinstance(data, RetrievalSet):
        data, notes = _apply_ranking_options(data, config, notes)
    notes += _check_options(config, data)
    _require_usable(data, config.path)
    count = subset if config.subset is None else config.subset
    data, subset_notes = take_subset(data, count, config.subset_documents)
    if subset_notes:
        _require_usable(data, f"{config.path} with subset={count}")
    if config.metrics is not None:
        check_metrics(data, config.metrics, f"metrics of {name}")
    return LoadedSet(
        data,
        config.query_prompt,
        config.document_prompt,
        config.query_max_length,
        config.document_max_length,
        None if config.metrics is None else tuple(config.metrics),
        bool(subset_notes),
        notes=tuple(notes + subset_notes),
    )


def _read(config: EvaluationSet, name: str, cache: Cache) -> DataAndNotes:
    path = expand_user(config.path)
    for option, value in (("revision", config.revision), ("qrels_revision", config.qrels_revision)):
        if value is not None and path.exists():
            raise ConfigError(
                f"{option}={value} chooses a version of a Hub data set, and {config.path} is not on the Hub: leave it "
                "out"
            )
    if path.is_file():
        return _read_file(path, config, name)
    if path.is_dir():
        return _read_folder(path, config, name, cache)
    if not may_be_hub_id(config.path, config.revision):
        _reject_missing(config.path)
    try:
        return _read_repository(config.path, config, name, cache)
    except DataError as error:
        raise type(error)(f"{error} (no file or folder is called {config.path} either)") from error


def _reject_missing(path: str) -> NoReturn:
    quoted = " (this is a text: quote the whole list, not the mapping in it)" if path.startswith("{") else ""
    raise DataError(f"{path}: no such file or folder{quoted}")


def _read_file(path: Path, config: EvaluationSet, name: str) -> DataAndNotes:
    data_and_notes = read_llama_index(path, name)
    if data_and_notes is not None:
        _require_kind(config, path, "one file with corpus, queries and relevant_docs")
        return data_and_notes
    if stem_of(path) in ("corpus", "queries") and is_beir_folder(path.parent):
        raise DataError(f"{path} is one file of a retrieval set: write its folder, {path.parent}")
    return read_tables(name, config, tables_of_file(path, config))


def _read_folder(path: Path, config: EvaluationSet, name: str, cache: Cache) -> DataAndNotes:
    if is_beir_folder(path):
        _require_kind(config, path, "BEIR folder")
        if config.config is not None:
            raise ConfigError(f"config={config.config} is of Hub data sets, and {path} is a BEIR folder: leave it out")
        return read_beir_folder(path, name, config, cache)
    if not is_saved_dataset(path) and ((path / "README.md").is_file() or (path / "data").is_dir()):
        return _read_repository(str(path), config, name, cache)
    tables = tables_of_folder(path, config)
    if tables is None:
        raise DataError(
            f"{path} is not an evaluation set: expected corpus.jsonl, queries.jsonl and qrels/test.tsv (BEIR), a "
            "table, or the README.md or data/ of a Hub repository"
        )
    return read_tables(name, config, tables)


def _read_repository(path: str, config: EvaluationSet, name: str, cache: Cache) -> DataAndNotes:
    if config.kind in (SetKind.auto, SetKind.retrieval, SetKind.reranking):
        data_and_notes = read_hub_retrieval(path, config, name, cache)
        if data_and_notes is not None:
            _require_kind(config, path, "corpus, queries and judgements on the Hub")
            return data_and_notes
    return read_tables(name, config, tables_of_repository(path, config))


def _apply_ranking_options(
    data: RetrievalSet, config: EvaluationSet, notes: list[str]
) -> tuple[RetrievalSet, list[str]]:
    """The set with its sides exchanged, its candidates and `ignore_identical_ids`."""
    if config.exchange_sides:
        if data.candidates is not None:
            raise ConfigError(
                f"exchange_sides=true has no use with {config.path}, whose queries have documents to rank: leave it "
                "out, or write kind: retrieval where all documents are searched"
            )
        data, more = exchanged(data)
        notes = notes + more
    if config.candidates is not None:
        if data.candidates is not None:
            raise ConfigError(
                f"candidates={config.candidates} has no use with {config.path}, whose rows hold their own"
            )
        path = expand_user(config.candidates)
        data, more = with_candidates(data, read_run(path), str(path), first_stage="run")
        notes = notes + more
    if config.kind is SetKind.reranking and data.candidates is None:
        raise DataError(
            f"{config.path} gives no documents to rank for its queries, so kind=reranking needs a run file: "
            f"write {{path: {config.path}, kind: reranking, candidates: FILE}}"
        )
    return replace(data, ignore_identical_ids=config.ignore_identical_ids), notes


def exchanged(data: RetrievalSet) -> tuple[RetrievalSet, list[str]]:
    """The set with its relevant documents as queries and all its queries as documents, and notes.

    Judgements above 0 stay.
    """
    judgements: dict[str, dict[str, int]] = {}
    for query, gains in data.judgements.items():
        for document, gain in gains.items():
            if gain > 0:
                judgements.setdefault(document, {})[query] = gain
    numbers = [number for number, name in enumerate(data.documents.ids) if name in judgements]
    relevant = _documents(data.documents, numbers)
    queries = dict(zip(relevant.ids, relevant.texts, strict=True))
    missing = len(judgements) - len(queries)
    notes = [f"{data.name}: {missing} relevant documents that are not there are left out as queries"] if missing else []
    return (
        replace(
            data,
            queries=queries,
            documents=Corpus.from_dict(data.queries),
            judgements={query: judgements[query] for query in queries},
        ),
        notes,
    )


def _require_kind(config: EvaluationSet, path: Path | str, layout: str) -> None:
    if config.columns is not None:
        raise ConfigError(f"columns={config.columns} are of tables, and {path} is no table ({layout}): leave it out")
    if config.kind not in (SetKind.auto, SetKind.retrieval, SetKind.reranking):
        raise DataError(f"{path} is a retrieval set ({layout}), but kind={config.kind.value}")


def _check_options(config: EvaluationSet, data: EvaluationData) -> list[str]:
    """Reject options that would have no effect; document prompts and lengths only cause a note."""
    default = {field.name: field.default for field in fields(EvaluationSet)}
    for option, kinds in _KINDS_OF_OPTION.items():
        value = getattr(config, option)
        if value != default[option] and not isinstance(data, kinds):
            raise ConfigError(
                f"{option}={value} has no use with {config.path}, which is {_KINDS[type(data)]}: leave it out"
            )
    if config.classifier is Classifier.centroid and config.samples_per_label != default["samples_per_label"]:
        raise ConfigError(
            f"samples_per_label={config.samples_per_label} has no use with classifier=centroid, which takes all texts "
            f"of {config.path}: leave it out"
        )
    if isinstance(data, RetrievalSet):
        if data.candidates is not None and config.subset_documents is not None:
            raise ConfigError(
                f"subset_documents={config.subset_documents} has no use with {config.path}, "
                f"of which only candidates are ranked: leave it out"
            )
        return []
    unused = [option for option in _DOCUMENT_OPTIONS if getattr(config, option) is not None]
    return [f"{data.name}: {unused[0]} has no use, since {_KINDS[type(data)]} has no documents"] if unused else []


def _require_usable(data: EvaluationData, source: str) -> None:
    """Reject a set on which the metric is undefined or the same for every model. `source` names it in the message."""
    match data:
        case RetrievalSet() if not any(
            gain > 0 and (data.candidates is None or data.candidates.get(query))
            for query, gains in data.judgements.items()
            for gain in gains.values()
        ):
            lacking = "a relevant document" if data.candidates is None else "a relevant document and candidates"
            raise DataError(f"{source}: no query has {lacking}, so every model would score 0")
        case ScoredPairs() if len(set(data.scores)) < 2:
            count = len(data.scores)
            raise DataError(f"{source}: {count} pairs with {len(set(data.scores))} different scores, so no correlation")
        case LabelledPairs() if len(set(data.labels)) < 2:
            same = f" and all have the label {data.labels[0]}" if data.labels else ""
            raise DataError(f"{source}: {len(data.labels)} pairs{same}, so there is nothing to distinguish")
        case Bitext() if not data.first:
            raise DataError(f"{source} is empty")
        case ClassificationSet() if len(set(data.train_labels)) < 2:
            raise DataError(
                f"{source}: all {len(data.train_labels)} texts to learn from have the label {data.train_labels[0]}, "
                f"so there is nothing to distinguish"
            )
        case ClusteringSet() if not any(len(set(clusters)) > 1 for clusters in _clusters(data)):
            raise DataError(
                f"{source}: {len(data.texts)} texts without two clusters, so there is nothing to distinguish"
            )
        case _:
            return


def _clusters(data: ClusteringSet) -> list[list[int | str]]:
    """The clusters of each group of texts that are clustered together, on the finest level."""
    groups = [range(len(data.texts))] if data.groups is None else data.groups
    return [[data.labels[row][-1] for row in group] for group in groups]


T = TypeVar("T")

# Precedes each text, so that the order is independent of other orders by keys of texts.
_KEY_PREFIX = "subset\0"


def take_subset(
    data: EvaluationData, subset: int | None, subset_documents: int | None
) -> tuple[EvaluationData, list[str]]:
    """A subset, and notes on it.

    `subset` is the maximal number of judged queries, pairs, texts to classify or cluster, or groups of texts;
    `subset_documents` that of documents besides those that are judged for a remaining query.
    """
    notes: list[str] = []
    if subset is not None:
        total, unit = _size(data)
        if subset < total:
            data = _take_subset(data, subset)
            notes.append(
                f"{data.name}: {subset:,} of its {total:,} {unit} are measured (subset={subset}); "
                "metrics are not those of the whole set"
            )
    if subset_documents is not None and isinstance(data, RetrievalSet):
        total = len(data.documents)
        data = _fewer_documents(data, subset_documents)
        if len(data.documents) < total:
            notes.append(
                f"{data.name}: {len(data.documents):,} of its {total:,} documents are searched "
                f"(subset_documents={subset_documents}); metrics are not those of the whole set"
            )
    return data, notes


def _size(data: EvaluationData) -> tuple[int, str]:
    match data:
        case RetrievalSet():
            return len(data.judged_queries), "judged queries"
        case ClassificationSet():
            return len(data.texts), "texts"
        case ClusteringSet():
            return (len(data.texts), "texts") if data.groups is None else (len(data.groups), "groups")
        case _:
            return len(data.first), "pairs"


def _take_subset(data: EvaluationData, count: int) -> EvaluationData:
    match data:
        case RetrievalSet():
            return _fewer_queries(data, count)
        case ScoredPairs():
            rows = _first_by_hash(_pairs(data), count)
            return replace(
                data,
                first=_select(data.first, rows),
                second=_select(data.second, rows),
                scores=_select(data.scores, rows),
            )
        case LabelledPairs():
            rows = _first_by_hash(_pairs(data), count)
            return replace(
                data,
                first=_select(data.first, rows),
                second=_select(data.second, rows),
                labels=_select(data.labels, rows),
            )
        case Bitext():
            rows = _first_by_hash(_pairs(data), count)
            return replace(data, first=_select(data.first, rows), second=_select(data.second, rows))
        case ClassificationSet():
            rows = _first_by_hash(data.texts, count)
            return replace(data, texts=_select(data.texts, rows), labels=_select(data.labels, rows))
        case ClusteringSet():
            return _fewer_clustered(data, count)


def _fewer_queries(data: RetrievalSet, count: int) -> RetrievalSet:
    judged = data.judged_queries
    remaining = [judged[row] for row in _first_by_hash([data.queries[query] for query in judged], count)]
    data = replace(
        data,
        queries={query: data.queries[query] for query in remaining},
        judgements={query: data.judgements[query] for query in remaining},
    )
    if data.candidates is None:
        return data
    # Documents that no remaining query ranks need not be encoded.
    rows = sorted(set(chain.from_iterable(data.candidates[query] for query in remaining)))
    indices = {row: index for index, row in enumerate(rows)}
    candidates = {query: [indices[row] for row in data.candidates[query]] for query in remaining}
    return replace(data, documents=_documents(data.documents, rows), candidates=candidates)


def _fewer_documents(data: RetrievalSet, count: int) -> RetrievalSet:
    judged = set(chain.from_iterable(data.judgements[query] for query in data.judged_queries))
    is_judged = np.fromiter((document in judged for document in data.documents.ids), bool, len(data.documents))
    unjudged = np.flatnonzero(~is_judged)
    if count >= len(unjudged):
        return data
    ids = select_texts(data.documents.ids, unjudged.tolist())
    rows = np.concatenate([np.flatnonzero(is_judged), unjudged[_first_by_hash(ids, count)]])
    return replace(data, documents=_documents(data.documents, np.sort(rows).tolist()))


def _fewer_clustered(data: ClusteringSet, count: int) -> ClusteringSet:
    if data.groups is None:
        rows = _first_by_hash(data.texts, count)
        return replace(data, texts=_select(data.texts, rows), labels=_select(data.labels, rows))
    numbers = _first_by_hash(["\0".join(data.texts[row] for row in group) for group in data.groups], count)
    groups = [data.groups[number] for number in numbers]
    rows = list(chain.from_iterable(groups))
    starts = np.cumsum([0, *map(len, groups)]).tolist()
    return replace(
        data,
        texts=_select(data.texts, rows),
        labels=_select(data.labels, rows),
        groups=[range(start, stop) for start, stop in pairwise(starts)],
    )


def _pairs(data: ScoredPairs | LabelledPairs | Bitext) -> list[str]:
    return [f"{first}\0{second}" for first, second in zip(data.first, data.second, strict=True)]


def _first_by_hash(texts: Sequence[str], count: int) -> list[int]:
    """The numbers of the `count` texts with the smallest hashes, in the order of the texts."""
    keys = np.fromiter((text_key(_KEY_PREFIX + text) for text in texts), np.int64, len(texts))
    return sorted(np.argsort(keys, kind="stable")[:count].tolist())


def _select(values: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [values[row] for row in rows]


def _documents(documents: Corpus, rows: Sequence[int]) -> Corpus:
    return Corpus(select_texts(documents.ids, rows), select_texts(documents.texts, rows))
