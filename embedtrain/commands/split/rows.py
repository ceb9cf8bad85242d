"""Reads the rows of the sources to split, twice in the same order, without holding them in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.rows import Example
from embedtrain.data.sources.keyed_layouts import FlagEmbedding
from embedtrain.data.sources.layouts import TEXTS_ONLY, DocumentLookup, RowLayout
from embedtrain.data.sources.part_reader import Piece
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.resolve import expand_sources, source_names
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import DataError

# Scores of documents, which a recipe may distil, stay in the rows.
_WITH_SCORES = RowRequirements(scores=ScoreRequirement.pairs, loss="split")


@dataclass(slots=True)
class SplitSource:
    """One source: what reads its rows, and what was counted."""

    source: TrainSource
    name: str
    reader: SourceReader
    layout: RowLayout
    documents: DocumentLookup | None = None
    problems: list[str] = field(default_factory=list)  # of rows that were skipped
    num_rows: int = 0

    def rows(self, on_error: OnError) -> Iterator[Example]:
        """The rows in order. Raises DataError for one that cannot be used, or with `on_error=skip` counts it."""
        self.problems.clear()
        self.num_rows = 0
        for part in self.reader.parts:
            piece = Piece(part)
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


def _read_documents(reader: SourceReader, on_error: OnError, cache_dir: str | None) -> DocumentLookup:
    """The corpus that rows refer to by id, in the cache."""
    from embedtrain.data.cache.cache import Cache, cache_directory  # imports torch
    from embedtrain.data.cache.document_store import DocumentStore, documents_build
    from embedtrain.data.cache.shared_build import build

    assert reader.documents is not None
    corpus = documents_build(reader.documents, on_error, Cache(directory=cache_directory(cache_dir)))
    build([corpus])
    return DocumentStore(corpus.directory)


def file_names(sources: Sequence[SplitSource]) -> list[str]:
    """The file of training rows of each source: `train.jsonl`, or `train-NAME.jsonl` where there are several."""
    names = ["train"]
    if len(sources) > 1:  # web/qa and news/qa, or a source that is named web-qa, must not write the same file
        named = [replace(source.source, name=f"train-{source.name.replace('/', '-')}") for source in sources]
        names = source_names(named)
    return [
        f"{name}.jsonl{'.gz' if source.is_compressed() else ''}" for name, source in zip(names, sources, strict=True)
    ]
