"""Retrieval sets: where their corpus, queries and judgements are, their rows, and judged queries as rows for training.

A BEIR folder (Thakur et al., "BEIR", 2021) has corpus.jsonl (`_id`, `title`, `text`), queries.jsonl (`_id`, `text`) and
qrels/<split>.tsv (`query-id`, `corpus-id`, `score`, with a header). On the Hub these are configurations or splits.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedtrain.data.sources import values
from embedtrain.data.sources.column_roles import find_column
from embedtrain.data.sources.files import read_lines
from embedtrain.data.sources.parts import (
    FOLDER_SUFFIXES,
    PartKind,
    SourcePart,
    part_of_file,
    path_of,
    stem_of,
    suffix_of,
)
from embedtrain.data.sources.table_rows import HubRepository
from embedtrain.data.sources.text_rows import RawRow
from embedtrain.data.sources.values import BadRow, list_names, not_utf8
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.formatting import format_count

SPLITS = ("test", "dev", "validation")


def choose_split(splits: Sequence[str], split: str | None, name: str) -> str:
    """The split that is asked for, else test, dev or validation, or the only one. Raises DataError if it is missing."""
    if not splits:
        raise DataError(f"{name} holds no split: expected one such as {SPLITS[0]}")
    if split is None:
        split = next((default for default in SPLITS if default in splits), splits[0] if len(splits) == 1 else None)
        if split is None:
            raise DataError(f"{name} holds the splits {', '.join(splits)}: choose one with split=")
    if split not in splits:
        raise DataError(f"{name} holds no split {split!r}, only {', '.join(splits)}")
    return split


@dataclass(frozen=True)
class RetrievalFiles:
    """The files of a BEIR folder by role; several where their names differ only in the suffix."""

    corpus: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    judgements: dict[str, list[str]] = field(default_factory=dict)  # files of `qrels/` by split


def find_retrieval_files(names: Iterable[str], folder: Path) -> RetrievalFiles:
    """The corpus, queries and judgements among the files in a folder and in its `qrels/`."""
    files = RetrievalFiles()
    for name in sorted(names):
        path = path_of(name)
        suffix = suffix_of(path)
        if path.parent == folder and suffix in FOLDER_SUFFIXES and stem_of(path) in ("corpus", "queries"):
            (files.corpus if stem_of(path) == "corpus" else files.queries).append(name)
        elif path.parent == folder / "qrels" and (suffix in FOLDER_SUFFIXES or _is_trec(path)):
            stem = Path(path.name.removesuffix(".gz")).stem if _is_trec(path) else stem_of(path)
            files.judgements.setdefault(stem, []).append(name)
    for judgements in files.judgements.values():
        judgements.sort(key=lambda name: (not path_of(name).name.removesuffix(".gz").endswith(".tsv"), name))
    return files


def judgements_part(name: str) -> SourcePart:
    """The part of a file of judgements, in TREC's format or a table."""
    return SourcePart(name, PartKind.tsv) if _is_trec(path_of(name)) else part_of_file(name)


def _is_trec(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith((".qrels", ".trec", ".txt"))


@dataclass(frozen=True)
class RetrievalTables:
    """The tables of a retrieval set on the Hub."""

    corpus: SourcePart
    queries: SourcePart
    judgements: SourcePart
    instructions: SourcePart | None = None
    candidates: SourcePart | None = None  # the documents to rank for each query (reranking)


def find_hub_tables(
    repository: HubRepository, *, language: str | None = None, split: str | None, qrels_revision: str | None = None
) -> RetrievalTables | None:
    """Locate a retrieval set in a repository; None where it holds no corpus and queries.

    There are four layouts: MTEB's (configurations `corpus`, `queries`, and `default` or `qrels`); the same with a
    language before or after each (`de-corpus`, `queries-de`); that of C-MTEB and BEIR (`corpus` and `queries` as splits
    or configurations, judgements in a second repository `<path>-qrels`, of which `qrels_revision` is the version); each
    with `top_ranked` where candidates are given, and `instruction`.

    Raises ConfigError for `qrels_revision` without a second repository, and DataError if the set is incomplete or the
    language or split cannot be chosen.
    """
    configs = _text_configs(repository, language)
    if configs is None:
        return None
    judged, config = _judgements_config(repository, language, configs, qrels_revision)
    split = choose_split(judged.splits_of(config), split, f"{judged.path} ({config})")

    def optional(name: str) -> SourcePart | None:
        named = _config_of(repository, name, language)
        return None if named is None else repository.table(named, name, split)

    return RetrievalTables(
        repository.table(configs[0], "corpus", split),
        repository.table(configs[1], "queries", split),
        judged.part(config, split),
        optional("instruction"),
        optional("top_ranked"),
    )


def _config_of(repository: HubRepository, name: str, language: str | None) -> str | None:
    """The configuration that holds one table of a retrieval set."""
    names = [name]
    if language is not None:
        names = [f"{language}-{name}", f"{name}-{language}", f"{language}_{name}", f"{name}_{language}"]
    return next((name for name in names if name in repository.configs), None)


def _text_configs(repository: HubRepository, language: str | None) -> tuple[str, str] | None:
    """The configurations of corpus and queries; None where there are none."""
    corpus = _config_of(repository, "corpus", language)
    queries = _config_of(repository, "queries", language) or ("query" if "query" in repository.configs else None)
    if corpus is not None and queries is not None:
        return corpus, queries
    whole = language if language in repository.configs else repository.default_config if language is None else None
    if whole is not None:
        splits = repository.splits_of(whole)
        if {"corpus", "queries"} <= set(splits):
            return whole, whole
        if (corpus or "corpus" in splits) and queries:
            return corpus or whole, queries
    if language is None:
        before = [name[: -len("-corpus")] for name in repository.configs if name.endswith(("-corpus", "_corpus"))]
        after = [name[len("corpus-") :] for name in repository.configs if name.startswith(("corpus-", "corpus_"))]
        if before or after:
            raise DataError(f"{repository.path} holds sets of {', '.join(before + after)}: choose one with config=")
    return None


def _judgements_config(
    repository: HubRepository, language: str | None, text_configs: tuple[str, str], revision: str | None
) -> tuple[HubRepository, str]:
    """The repository and configuration of the judgements."""
    for config in (_config_of(repository, "qrels", language), "default" if language is None else language):
        if config is not None and config in repository.configs and config not in text_configs:
            if revision is not None:
                raise ConfigError(
                    f"qrels_revision={revision} is of a repository that only holds judgements, and {repository.path} "
                    "holds its own: leave it out; revision applies to them"
                )
            return repository, config
    second = f"{repository.path.rstrip('/')}-qrels"
    try:
        judged = HubRepository(second, revision)
    except DataError as error:
        raise DataError(
            f"{repository.path} holds no judgements (a configuration called default or qrels), "
            f"and there is no {second} either: {error}"
        ) from None
    config = language if language in judged.configs else judged.default_config
    if config is None:
        raise DataError(f"{second} holds the configurations {', '.join(judged.configs)}: choose one with config=")
    return judged, config


ReadRows: TypeAlias = Callable[[SourcePart], Iterator[RawRow]]

# Names of columns, as `find_column` compares them.
_TEXT_IDS = ("id", "queryid", "qid")
_TEXTS = ("text", "query", "question")
QUERY_IDS = ("queryid", "qid", "questionid", "topicid", "query", "topic")
_DOCUMENT_IDS = ("corpusid", "docid", "documentid", "passageid", "pid", "did", "docno", "document", "passage", "doc")
_SCORES = ("score", "relevance", "relevancescore", "rel", "label", "grade", "gain", "judgement", "judgment")
_ROWS_PER_BATCH = 1 << 16


class Judgement(NamedTuple):
    """How relevant a document is for a query."""

    query: str
    document: str
    score: float


def parse_query(row: dict[str, Any]) -> tuple[str, str]:
    """The id and the text of a query. Raises BadRow if one is missing or has the wrong type."""
    id_key, text_key = find_column(row, _TEXT_IDS), find_column(row, _TEXTS)
    pictures = values.pictures_beside(row, (text_key,))
    if id_key is None or (text_key is None and not pictures):
        raise BadRow(f'a query needs "_id" and "text", and this row has: {list_names(row)}')
    name = values.identifier(row[id_key], f'"{id_key}"')
    if not name:
        raise BadRow(f'"{id_key}" is empty, and a query needs an id')
    text = "" if text_key is None else row[text_key]
    text = values.optional_string(text, f'"{text_key}"') if pictures else values.string(text, f'"{text_key}"')
    return name, values.read_pictures(pictures) + text


def read_judgements(part: SourcePart, read: ReadRows) -> Iterator[tuple[int, Judgement | BadRow]]:
    """The judgements of a file or table: a table with ids and scores, or lines in BEIR's or TREC's format."""
    if part.kind is PartKind.tsv:
        yield from _judgement_lines(part.name)
        return
    for number, row in read(part):
        if isinstance(row, BadRow):
            yield number, row
            continue
        query, document, score = _judgement_columns(list(row))
        if query is None or document is None or score is None:
            yield number, _not_judgement(row)
        else:
            yield number, _parse_judgement(row[query], row[document], row[score])


def _judgement_columns(names: Sequence[str]) -> list[str | None]:
    """The columns of the query's id, the document's id and the score; None for one that no name tells."""
    return [find_column(names, known) for known in (QUERY_IDS, _DOCUMENT_IDS, _SCORES)]


def _not_judgement(names: Iterable[object]) -> BadRow:
    return BadRow(
        f"a judgement has columns such as query-id, corpus-id and score, and these are {list_names(names)}: rename them"
    )


def _judgement_lines(name: str) -> Iterator[tuple[int, Judgement | BadRow]]:
    """The lines of a file: three fields with tabs between, TREC's four, or the columns that a header names."""
    chosen: Sequence[int] = (0, 1, 2)
    num_columns, is_first = 3, True
    for number, line in read_lines(name):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, BadRow(not_utf8(line, error.start))
            continue
        fields = text.split("\t")
        if len(fields) != num_columns and len(text.split()) == 4:
            fields = text.split()
        may_be_header, is_first = is_first, False
        if may_be_header and len(fields) >= 3:
            # Some sets have no header: skipping the first line would silently lose a judgement.
            columns = _judgement_columns(fields)
            if None not in columns:
                num_columns, chosen = len(fields), tuple(fields.index(str(column)) for column in columns)
                continue
            if _parse_number(fields[-1]) is None:
                yield number, _not_judgement(fields)
                continue
        if num_columns == 3 and len(fields) == 4:  # TREC's second field is not used
            fields = [fields[0], *fields[2:]]
        if len(fields) == num_columns:
            yield number, _parse_judgement(*(fields[index] for index in chosen))
        else:
            formats = "query-id, corpus-id and score, with tabs between, or query, 0, document and score, as in TREC"
            expected = formats if num_columns == 3 else f"{num_columns} columns, as its header says"
            yield number, BadRow(f"{format_count(len(fields), 'field')}, but a judgement has {expected}")


def _parse_judgement(query: object, document: object, score: object) -> Judgement | BadRow:
    try:
        ids = values.identifier(query, "query-id"), values.identifier(document, "corpus-id")
    except BadRow as bad:
        return bad
    for name, value in zip(("query-id", "corpus-id"), ids, strict=True):
        if not value:
            return BadRow(f"{name} is empty, and a judgement needs one")
    number = _parse_number(score)
    if number is None:
        return BadRow(f"score must be a number, not {values.describe_value(score)}")
    return Judgement(*ids, number)


def _parse_number(value: object) -> float | None:
    try:
        return values.number(values.parse_cell(value), "score")
    except BadRow:
        return None


# Judged queries as rows of a training source.


def judged_rows(part: SourcePart, read: ReadRows) -> Iterator[RawRow]:
    """One row for each judged query, with the line of its first judgement, in the order of these lines.

    A row is `{"query", "positive_ids", "positive_scores", "negative_ids", "negative_scores"}`: documents with a score
    above 0 are positives, all others hard negatives. The problem of a judgement that cannot be read has its own line.
    Raises DataError if a table cannot be read as a whole, or two queries have the same id.
    """
    judgements, queries, _ = part.tables
    table = _JudgementTable(read_judgements(judgements, read))
    ids, texts = _read_queries(queries, read)
    positions = pc.index_in(table.query_ids, value_set=ids)

    def rows() -> Iterator[RawRow]:
        for i, (line, documents, scores) in enumerate(table.by_query()):
            name, position = table.query_ids[i].as_py(), positions[i].as_py()
            if position is None:
                yield line, BadRow(f'query "{name}" is not in {queries.name}')
            else:
                yield line, _judged_row(name, texts[position].as_py(), documents, scores)

    yield from heapq.merge(rows(), table.problems, key=lambda row: row[0])


def _judged_row(name: str, query: str, documents: list[str], scores: list[float]) -> dict[str, Any] | BadRow:
    judged: dict[str, float] = {}
    for document, score in zip(documents, scores, strict=True):
        if judged.setdefault(document, score) != score:
            return BadRow(f'document "{document}" is judged {judged[document]:g} and {score:g} for query "{name}"')
    positives = {document: score for document, score in judged.items() if score > 0}
    negatives = {document: score for document, score in judged.items() if score <= 0}
    if not positives:
        return BadRow(f'query "{name}" has no document with a score above 0')
    return {
        "query": query,
        "positive_ids": list(positives),
        "positive_scores": list(positives.values()),
        "negative_ids": list(negatives),
        "negative_scores": list(negatives.values()),
    }


class _JudgementTable:
    """All judgements as Arrow arrays: some sets have millions."""

    def __init__(self, judgements: Iterable[tuple[int, Judgement | BadRow]]) -> None:
        self.problems: list[RawRow] = []
        batches: list[pa.RecordBatch] = []
        pending: list[tuple[int, Judgement]] = []
        for line, judgement in judgements:
            if isinstance(judgement, BadRow):
                self.problems.append((line, judgement))
                continue
            pending.append((line, judgement))
            if len(pending) == _ROWS_PER_BATCH:
                batches.append(_record_batch(pending))
                pending = []
        table = pa.Table.from_batches([*batches, _record_batch(pending)])
        queries = table["query"].combine_chunks().dictionary_encode()
        self.query_ids = queries.dictionary  # each query once, in the order of first judgements
        codes = queries.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        self._starts: list[int] = np.searchsorted(codes[order], np.arange(len(self.query_ids) + 1)).tolist()
        self._columns = [table[name].combine_chunks().take(order) for name in ("line", "document", "score")]

    def by_query(self) -> Iterator[tuple[int, list[str], list[float]]]:
        """For each query the line of its first judgement, the documents and their scores."""
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            lines, documents, scores = (column.slice(start, stop - start).to_pylist() for column in self._columns)
            yield lines[0], documents, scores


def _record_batch(rows: list[tuple[int, Judgement]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([line for line, _ in rows], pa.int64()),
            pa.array([judgement.query for _, judgement in rows], pa.large_string()),
            pa.array([judgement.document for _, judgement in rows], pa.large_string()),
            pa.array([judgement.score for _, judgement in rows], pa.float64()),
        ],
        ["line", "query", "document", "score"],
    )


def _read_queries(part: SourcePart, read: ReadRows) -> tuple[pa.Array, pa.Array]:
    """Ids and texts of the queries."""
    ids: list[pa.Array] = []
    texts: list[pa.Array] = []
    pending: list[tuple[str, str]] = []

    def flush() -> None:
        ids.append(pa.array([name for name, _ in pending], pa.large_string()))
        texts.append(pa.array([text for _, text in pending], pa.large_string()))
        pending.clear()

    for line, row in read(part):
        try:
            if isinstance(row, BadRow):
                raise row
            pending.append(parse_query(row))
        except BadRow as bad:
            raise DataError(f"{part.location(line)}: {bad}") from None
        if len(pending) == _ROWS_PER_BATCH:
            flush()
    flush()
    names = pa.concat_arrays(ids)
    counts = pc.value_counts(names)
    if len(counts) < len(names):
        repeated = next(count["values"] for count in counts if count["counts"].as_py() > 1)
        raise DataError(f'{part.name}: two queries have the id "{repeated}"')
    return names, pa.concat_arrays(texts)
