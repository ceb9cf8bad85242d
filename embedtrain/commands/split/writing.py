"""Chooses the rows to hold out by groups, writes the others for training, and these as a retrieval set like BEIR."""

import gzip
import hashlib
import io
import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.rows import Example, format_row
from embedtrain.data.sources.files import file_changed_error
from embedtrain.data.sources.layouts import TEXTS_ONLY, FlagEmbedding, RowLayout
from embedtrain.data.sources.part_reader import PartPiece
from embedtrain.data.sources.pictures import written_item
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.resolve import expand_sources, source_names
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.files import atomic_write
from embedtrain.utils.formatting import format_count

if TYPE_CHECKING:
    from embedtrain.data.cache.document_store import MappedCorpus


def equality_key(text: str) -> int:
    """A 63-bit hash that is the same for texts that differ only in white space or case."""
    normalized = " ".join(text.split()).casefold()
    digest = hashlib.blake2b(normalized.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _numbers() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class RowKeys:
    """The keys of the texts of all rows: 8 bytes each, so that no text is held in memory."""

    queries: "array[int]" = field(default_factory=_numbers)  # [R]
    positives: "array[int]" = field(default_factory=_numbers)  # [P]
    negatives: "array[int]" = field(default_factory=_numbers)  # [N]
    num_positives: "array[int]" = field(default_factory=_numbers)  # [R]
    num_negatives: "array[int]" = field(default_factory=_numbers)  # [R]

    def add(self, texts: Example) -> None:
        """Add a row."""
        self.queries.append(equality_key(texts.query))
        self.positives.extend(map(equality_key, texts.positives.texts))
        self.negatives.extend(map(equality_key, texts.negatives.texts))
        self.num_positives.append(len(texts.positives))
        self.num_negatives.append(len(texts.negatives))


@dataclass(frozen=True, slots=True)
class Split:
    """The choice of held-out rows.

    Attributes:
        is_held_out: bool [R].
        query_keys: int64 [R], of the row's query, to detect files that change while they are read.
        held_out_keys: int64, sorted: queries and positives of held-out rows. No training row may contain one.
        train_keys: int64, sorted: all texts of training rows. The held-out corpus may not contain one.
        num_queries: distinct held-out queries, and distinct queries of training rows.
        largest_group: distinct queries of the largest group that is never separated.
    """

    is_held_out: NDArray[np.bool_]
    query_keys: NDArray[np.int64]
    held_out_keys: NDArray[np.int64]
    train_keys: NDArray[np.int64]
    num_queries: tuple[int, int]
    largest_group: int


def choose_held_out(keys: RowKeys, num_queries: int, seed: int) -> Split:
    """Draw groups of rows until exactly `num_queries` queries are held out.

    Rows with an equal query or positive, and those where the query of one equals a positive of the other, are of one
    group. Raises ConfigError if no rows would be left to train on, or the groups do not add up to that number.
    """
    queries, positives, negatives, num_positives, num_negatives = (
        np.frombuffer(values, dtype=np.int64) if values else np.empty(0, dtype=np.int64)
        for values in (keys.queries, keys.positives, keys.negatives, keys.num_positives, keys.num_negatives)
    )
    num_rows = len(queries)
    groups = _groups(queries, positives, num_positives)
    _, first_rows = np.unique(queries, return_index=True)
    sizes = np.bincount(groups[first_rows], minlength=int(groups.max()) + 1)
    total = len(first_rows)
    if num_queries >= total:
        raise ConfigError(
            f"dev={num_queries}: the rows have {format_count(total, 'distinct query', 'distinct queries')}, of which "
            f"some must be left to train on: write dev={max(1, total // 10)}"
        )
    held_out_groups = np.zeros(len(sizes), dtype=bool)
    remaining = num_queries
    for group in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        size = int(sizes[group])
        if size <= remaining and size < total:
            held_out_groups[group] = True
            remaining -= size
            if not remaining:
                break
    if remaining:
        possible = num_queries - remaining
        advice = f"write dev={possible}" if possible else "remove the texts that rows share"
        raise ConfigError(
            f"dev={num_queries}: only {possible:,} of {total:,} queries can be held out without separating rows with "
            f"an equal query or positive (the largest group has {format_count(int(sizes.max()), 'query', 'queries')}): "
            f"{advice}"
        )
    is_held_out = held_out_groups[groups]
    of_positives, of_negatives = np.repeat(is_held_out, num_positives), np.repeat(is_held_out, num_negatives)
    return Split(
        is_held_out=is_held_out,
        query_keys=queries,
        held_out_keys=_unique(queries[is_held_out], positives[of_positives]),
        train_keys=_unique(queries[~is_held_out], positives[~of_positives], negatives[~of_negatives]),
        num_queries=(num_queries, total - num_queries),
        largest_group=int(sizes.max()) if num_rows else 0,
    )


def contains(keys: NDArray[np.int64], key: int) -> bool:
    """Whether sorted keys contain one."""
    index = int(keys.searchsorted(key))
    return index < len(keys) and int(keys[index]) == key


def _groups(
    queries: NDArray[np.int64], positives: NDArray[np.int64], num_positives: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The group of each row, int32 [R]: the connected components of rows and the texts that they contain."""
    num_rows = len(queries)
    rows = np.concatenate([np.arange(num_rows), np.repeat(np.arange(num_rows), num_positives)])
    distinct, texts = np.unique(np.concatenate([queries, positives]), return_inverse=True)
    num_nodes = num_rows + len(distinct)
    edges = coo_array((np.ones(len(rows), dtype=bool), (rows, num_rows + texts)), shape=(num_nodes, num_nodes))
    _, labels = connected_components(edges, directed=False)
    groups: NDArray[np.int32] = labels[:num_rows]
    return groups


def _unique(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    parts: Sequence[NDArray[np.int64]] = keys
    return np.unique(np.concatenate(parts))


# Scores of documents, which a recipe may distil, stay in the rows.
_WITH_SCORES = RowRequirements(scores=ScoreRequirement.pairs, loss="split")


@dataclass(slots=True)
class SplitSource:
    """One source: what reads its rows, and what was counted."""

    source: TrainSource
    name: str
    reader: SourceReader
    layout: RowLayout
    documents: "MappedCorpus | None" = None
    problems: list[str] = field(default_factory=list)  # of rows that were skipped
    num_rows: int = 0

    def rows(self, on_error: OnError) -> Iterator[Example]:
        """The rows in order. Raises DataError for one that cannot be used, or with `on_error=skip` counts it."""
        self.problems.clear()
        self.num_rows = 0
        for part in self.reader.parts:
            piece = PartPiece(part)
            rows = self.reader.rows(piece, self.layout, self.documents)
            for line, row in rows:
                if isinstance(row, BadRow):
                    problem = f"{part.location(line)}: {row}"
                    if on_error == OnError.stop:
                        raise DataError(problem)
                    self.problems.append(problem)
                    continue
                self.num_rows += 1
                yield row
            self.layout.ignored.update(rows.layout.ignored)
            self.layout.features.update(rows.layout.features)

    def is_compressed(self) -> bool:
        """Whether all of its files are compressed with gzip by name."""
        return all(part.name.lower().endswith(".gz") for part in self.reader.parts)


def open_sources(sources: Sequence[TrainSource], on_error: OnError, cache_dir: str | None) -> list[SplitSource]:
    """The sources of `data`, each with the layout of its rows. Raises DataError for one that cannot be read."""
    expanded = expand_sources(sources)
    return [
        _open(source, name, on_error, cache_dir) for source, name in zip(expanded, source_names(expanded), strict=True)
    ]


def _open(source: TrainSource, name: str, on_error: OnError, cache_dir: str | None) -> SplitSource:
    reader = SourceReader(source, name, TEXTS_ONLY)
    layout = reader.detect_layout(on_error)
    if isinstance(layout, FlagEmbedding):
        layout = replace(layout, needs=_WITH_SCORES)
    documents = None if reader.documents is None else _read_documents(reader, on_error, cache_dir)
    return SplitSource(source, name, reader, layout, documents)


def _read_documents(reader: SourceReader, on_error: OnError, cache_dir: str | None) -> "MappedCorpus":
    """The corpus that rows refer to by id, in the cache."""
    from embedtrain.data.cache.cache import Cache, build, cache_directory  # imports torch
    from embedtrain.data.cache.document_store import MappedCorpus, documents_build

    assert reader.documents is not None
    corpus = documents_build(reader.documents, on_error, Cache(directory=cache_directory(cache_dir)))
    build([corpus])
    return MappedCorpus(corpus.directory, reader.documents)


def file_names(sources: Sequence[SplitSource]) -> list[str]:
    """The file of training rows of each source: `train.jsonl`, or `train-NAME.jsonl` where there are several."""
    names = ["train"]
    if len(sources) > 1:  # web/qa and news/qa, or a source that is named web-qa, must not write the same file
        named = [replace(source.source, name=f"train-{source.name.replace('/', '-')}") for source in sources]
        names = source_names(named)
    return [
        f"{name}.jsonl{'.gz' if source.is_compressed() else ''}" for name, source in zip(names, sources, strict=True)
    ]


DEV_FILES = ("dev/corpus.jsonl", "dev/queries.jsonl", "dev/qrels/test.tsv")


@dataclass(slots=True)
class SplitCounts:
    """What was written."""

    train_rows: list[int] = field(default_factory=list)  # of each source
    dev_rows: int = 0
    num_relevant: int = 0  # judged documents
    num_documents: int = 0  # of the held-out corpus
    num_dropped: int = 0  # negatives of training rows that are held-out texts
    num_instructions: int = 0  # held-out rows with an instruction, which the set does not contain


def require_new(output_dir: Path, names: Sequence[str]) -> None:
    """Raise ConfigError if one of the files, or `dev`, exists."""
    for path in (output_dir / name for name in (*names, "dev")):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"output_dir={output_dir}: {path} exists: choose another directory, or delete it")


class _DevSet:
    """The held-out queries, judgements and documents; the documents are written at once."""

    def __init__(
        self, corpus: TextIO, document_keys: "np.ndarray[tuple[int], np.dtype[np.int64]]", folder: Path
    ) -> None:
        self.num_documents, self._folder = 0, folder
        self._corpus, self._keys = corpus, document_keys
        self._numbers = np.zeros(len(document_keys), dtype=np.int32)  # of written documents, from 1
        self._queries: dict[int, tuple[str, dict[str, None]]] = {}  # text and relevant ids, by the query's key

    def add_document(self, text: str) -> str:
        """The id of a document, which is written if no equal one was."""
        index = int(self._keys.searchsorted(equality_key(text)))
        if not self._numbers[index]:
            self.num_documents += 1
            self._numbers[index] = self.num_documents
            line = {"_id": f"d{self.num_documents}", "title": "", **_fields_of_item(text, self._folder)}
            self._corpus.write(json.dumps(line, ensure_ascii=False) + "\n")
        return f"d{self._numbers[index]}"

    def add_row(self, texts: Example) -> None:
        """Add a query and its positives; those of equal queries are joined."""
        _, relevant = self._queries.setdefault(equality_key(texts.query), (texts.query, {}))
        relevant.update((self.add_document(text), None) for text in texts.positives.texts)

    def write_queries(self, queries: TextIO, judgements: TextIO) -> int:
        """Write queries and judgements; returns the number of judgements."""
        count = 0
        judgements.write("query-id\tcorpus-id\tscore\n")
        for number, (text, relevant) in enumerate(self._queries.values(), 1):
            line = {"_id": f"q{number}", **_fields_of_item(text, self._folder)}
            queries.write(json.dumps(line, ensure_ascii=False) + "\n")
            judgements.writelines(f"q{number}\t{document}\t1\n" for document in relevant)
            count += len(relevant)
        return count


def write_split(
    sources: Sequence[SplitSource],
    split: Split,
    keys: RowKeys,
    output_dir: Path,
    names: Sequence[str],
    on_error: OnError,
    *,
    all_documents: bool,
) -> SplitCounts:
    """Write all files, or none. `all_documents` adds those of training rows, and of their corpora, to the held-out set.

    Raises DataError if a file has changed since its keys were computed.
    """
    counts = SplitCounts()
    with ExitStack() as stack:
        corpus_file, queries, judgements = (stack.enter_context(_new_file(output_dir / name)) for name in DEV_FILES)
        corpora = [source.documents.unique()[1] for source in sources if all_documents and source.documents is not None]
        of_corpora = map(equality_key, itertools.chain.from_iterable(corpora))
        of_rows = np.frombuffer(keys.positives + keys.negatives, dtype=np.int64)
        document_keys = _unique(of_rows, np.fromiter(of_corpora, dtype=np.int64))
        dev = _DevSet(corpus_file, document_keys, (output_dir / DEV_FILES[0]).parent)
        number = 0
        for source, name in zip(sources, names, strict=True):
            train = stack.enter_context(_new_file(output_dir / name))
            counts.train_rows.append(0)
            for texts in source.rows(on_error):
                if number >= len(split.query_keys) or equality_key(texts.query) != int(split.query_keys[number]):
                    raise file_changed_error(source.source.path)
                if split.is_held_out[number]:
                    counts.dev_rows += 1
                    counts.num_instructions += bool(texts.instruction)
                    dev.add_row(texts)
                    for text in texts.negatives.texts:
                        if all_documents or not contains(split.train_keys, equality_key(text)):
                            dev.add_document(text)
                else:
                    counts.train_rows[-1] += 1
                    counts.num_dropped += _write_row(train, texts, split, output_dir)
                    if all_documents:
                        for text in texts.texts[1:]:
                            dev.add_document(text)
                number += 1
        if number != len(split.query_keys):
            raise file_changed_error(sources[-1].source.path)
        for text in itertools.chain.from_iterable(corpora):
            dev.add_document(text)
        counts.num_relevant = dev.write_queries(queries, judgements)
        counts.num_documents = dev.num_documents
    return counts


def _fields_of_item(item: str, folder: Path) -> dict[str, Any]:
    written = written_item(item, folder)
    return written if isinstance(written, dict) else {"text": written}


def _write_row(file: TextIO, texts: Example, split: Split, folder: Path) -> int:
    """Write a training row without negatives that are held-out texts; returns their number."""
    kept = [
        index
        for index, text in enumerate(texts.negatives.texts)
        if not contains(split.held_out_keys, equality_key(text))
    ]
    negatives = texts.negatives.take(kept)
    scores = (texts.positives.scores, negatives.scores) if texts.positives.scores else None
    written = partial(written_item, folder=folder)
    file.write(format_row(texts, negatives.texts, negatives.ids, scores, written) + "\n")
    return len(texts.negatives) - len(kept)


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name when all is written; one named .gz is compressed."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        if path.suffix != ".gz":
            with io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
                yield text
            return
        # Without name and time, so that the same rows give the same bytes.
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed,
            io.TextIOWrapper(cast(io.BufferedWriter, compressed), encoding="utf-8", newline="\n") as text,
        ):
            yield text
