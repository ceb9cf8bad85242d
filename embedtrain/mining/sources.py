"""Training sources, and the documents that are searched for their queries."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.read_sources import read_sources
from embedtrain.data.cache.row_store import ArrowRows, RowStore
from embedtrain.data.sources.documents import DocumentReader
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.part_reader import Piece
from embedtrain.data.sources.parts import Part
from embedtrain.data.sources.resolve import (
    NO_IN_BATCH_NEGATIVES,
    expand_sources,
    find_parts,
    no_in_batch_negatives,
    resolve_parts,
    source_names,
)
from embedtrain.data.sources.values import BadRow
from embedtrain.data.text_format import TextFormat
from embedtrain.data.types import Example
from embedtrain.errors import DataError
from embedtrain.inference.encode import ProgressCallback
from embedtrain.mining.options import RowSearchOptions
from embedtrain.models.hub import split_revision
from embedtrain.utils.files import expand_user

_BATCH_SIZE = 4096
NO_SOURCE = -1


@dataclass(frozen=True, order=True, slots=True)
class DocumentFormat:
    """The text around a document, and the number of its tokens that are kept (None: the model's maximum)."""

    before: str
    after: str
    max_length: int | None

    def __call__(self, text: str) -> str:
        """The document as the model sees it."""
        return f"{self.before}{text}{self.after}"


@dataclass(frozen=True, kw_only=True)
class MiningSource:
    """The rows of one source and the options that hold for all of them."""

    name: str  # of the source, and of the file that is written for it
    store: RowStore
    document_parts: Sequence[Part]  # the corpus that its rows refer to by id, if any; all of it is searched
    text_format: TextFormat

    def format_query(self, row: Example) -> tuple[str, str]:
        """A row's query as the model sees it, and the prompt that it starts with."""
        prompt = self.text_format.query(row.instruction)
        return prompt(row.query), prompt.prefix

    def document_format(self, instruction: str | None) -> DocumentFormat:
        """The format of the documents of rows with this document instruction."""
        prompt = self.text_format.document(instruction)
        return DocumentFormat(prompt.prefix, prompt.suffix, self.text_format.document_max_length)

    def identity(self) -> dict[str, Any]:
        """Everything about this source that the mined rows depend on, as JSON."""
        return {"rows": self.store.key, **asdict(self.text_format)}


def read_mining_sources(options: RowSearchOptions, prompts: Mapping[str, str], cache: Cache) -> list[MiningSource]:
    """Read and check every row of every source.

    Of `prompts`, the model's, `query` and `document` are used. Raises DataError for a row that cannot be used, with its
    file and line, and ConfigError for options of a source that contradict each other.
    """
    # The number of negatives that a training step draws does not matter here, and would only be reported.
    try:
        sources = [replace(source, negatives=None) for source in expand_sources(options.data)]
    except DataError as error:
        raise _suggest_split(error, options.data) from error.__cause__
    stores = read_sources(sources, OnError.stop, TEXTS_ONLY, cache)
    cache.verification.wait()

    default = TextFormat(
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
        instruction_format=options.instruction_format,
    )
    return [
        MiningSource(
            name=name,
            store=store,
            document_parts=find_parts(source).document_parts,
            text_format=TextFormat.of(source, default),
        )
        for name, source, store in zip(_unique_names(sources), sources, stores, strict=True)
    ]


def _suggest_split(error: DataError, sources: Sequence[TrainSource]) -> DataError:
    """The error, with the option to write if a BEIR folder only lacks the split `train`."""
    other_split = re.search(r"holds no judgements of split=\S+, only of (\w+)", str(error))
    path = next((source.path for source in sources if str(error).startswith(f"{source.path}: ")), None)
    if other_split is None or path is None:
        return error
    return DataError(f"{error}; write data=[{{path: {path}, split: {other_split[1]}}}]")


def _unique_names(sources: Sequence[TrainSource]) -> list[str]:
    """A distinct name for each source, with a suffix if its rows may not be used as in-batch negatives.

    Training reads that suffix from the path, and the mined files do not lie in the folder that had it. A name is that
    of a file, so it has no `/`.
    """
    names = [name.replace("/", "-") for name in source_names(sources)]
    named = [
        replace(source, name=f"{name}-{NO_IN_BATCH_NEGATIVES}")
        if not name.endswith(NO_IN_BATCH_NEGATIVES)
        and (no_in_batch_negatives(source) if source.in_batch_negatives is None else not source.in_batch_negatives)
        else replace(source, name=name)
        for name, source in zip(names, sources, strict=True)
    ]
    return source_names(named)


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Documents in the order in which they are read."""

    texts: list[str]  # may contain duplicates
    ids: list[str]  # one per text, "" for none; an empty list if no document has one
    source: int  # number of the source whose rows refer to documents by these ids; NO_SOURCE if none does


def all_documents(
    sources: Sequence[MiningSource], corpus: Sequence[Part], progress: ProgressCallback
) -> Iterator[DocumentBatch]:
    """The documents of all rows (positives before negatives), then of the sources' corpora, then of `corpus`.

    Blank documents of corpora are skipped: no row may contain one.
    """
    total = sum(len(source.store) for source in sources)
    done = 0
    for number, source in enumerate(sources):
        for num_rows, documents in _row_documents(source.store, number):
            yield documents
            done += num_rows
            progress("collecting documents of rows", done, total)
    parts = [(part, number) for number, source in enumerate(sources) for part in source.document_parts]
    for part, number in (*parts, *((part, NO_SOURCE) for part in corpus)):
        yield from _corpus_documents(part, number, progress)


def corpus_parts(paths: Sequence[str]) -> list[Part]:
    """The files that the option `corpus` refers to: the corpus of a BEIR folder, all tables of any other folder."""
    parts: list[Part] = []
    for path in paths:
        corpus_files = sorted(expand_user(path).glob("corpus.*")) if expand_user(path).is_dir() else []
        name, revision = split_revision(path)
        source = TrainSource(path=str(corpus_files[0]) if corpus_files else name, revision=revision)
        parts += resolve_parts(source, every_split=True)
    return parts


def _row_documents(store: RowStore, source: int) -> Iterator[tuple[int, DocumentBatch]]:
    assert isinstance(store.rows, ArrowRows)
    has_ids = bool({"positive_ids", "negative_ids"} & store.extra_columns)
    for batch_index in range(len(store.rows.batch_starts) - 1):
        batch = store.rows.batch(batch_index)
        missing: list[Any] = [None] * batch.num_rows
        columns = (
            batch.column(name).to_pylist() if name in batch.schema.names else missing
            for name in ("positives", "negatives", "positive_ids", "negative_ids")
        )
        texts: list[str] = []
        ids: list[str] = []
        for positives, negatives, positive_ids, negative_ids in zip(*columns, strict=True):
            texts += positives
            texts += negatives
            if has_ids:
                ids += positive_ids or [""] * len(positives)
                ids += negative_ids or [""] * len(negatives)
        yield batch.num_rows, DocumentBatch(texts, ids, source)


def _corpus_documents(part: Part, source: int, progress: ProgressCallback) -> Iterator[DocumentBatch]:
    texts: list[str] = []
    ids: list[str] = []
    reader = DocumentReader([part], part.name, ids_required=False)
    for line, document in reader.documents(Piece(part)):
        if isinstance(document, BadRow):
            raise DataError(f"{part.location(line)}: {document}")
        # Whitespace around a text without a title is kept, so that it equals the same text in a row.
        text = document.text if source == NO_SOURCE and not document.title else document.full_text
        if text.strip():
            texts.append(text)
            ids.append(document.id)
        if len(texts) == _BATCH_SIZE:
            progress(f"collecting documents of {part.name}", line, line)
            yield DocumentBatch(texts, ids, source)
            texts, ids = [], []
    yield DocumentBatch(texts, ids, source)
