"""Training sources -> their rows in the cache: read, checked and written once, then memory-mapped."""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import COMPLETE, FORMAT, Cache, allow_open_files, json_digest, map_array, read_metadata
from embedtrain.data.cache.document_store import DocumentStore, documents_build
from embedtrain.data.cache.row_checks import RowStatistics, SourceReport, check_equal_counts, check_sources
from embedtrain.data.cache.row_store import (
    METADATA,
    ArrowFile,
    ArrowRows,
    RowRange,
    RowStore,
    join_pieces,
    write_piece,
)
from embedtrain.data.cache.shared_build import JOINED, Build, Task, build, is_complete
from embedtrain.data.sources.layouts import TEXTS_ONLY, RowLayout
from embedtrain.data.sources.part_reader import Piece
from embedtrain.data.sources.reader import SourceReader, SourceVersion, open_sources
from embedtrain.data.sources.resolve import source_names
from embedtrain.errors import ConfigError, DataError

PIECE_BYTES = 64 << 20
MAX_PIECES = 1024  # of a source: each is a file that stays open


class CachedRows:
    """One source's rows in the cache.

    Attributes:
        key: a digest of everything that determines the rows.
        documents: the build of the corpus, if rows name documents by id.

    Raises:
        DataError: a file of the source is missing or cannot be read.
    """

    def __init__(self, reading: SourceReader, on_error: OnError, cache: Cache) -> None:
        self._reading, self._on_error = reading, on_error
        self._version = SourceVersion(reading)
        self.key = json_digest([FORMAT, self._version.content, on_error.value])
        self.directory = cache.directory / f"rows-{self.key}"
        self.documents = None
        if reading.documents is not None:
            digests = self._version.content["documents"]
            self.documents = documents_build(reading.documents, on_error, cache, digests)
        self.build = Build(
            self.directory, self._tasks, self._join, progress=partial(cache.progress, f"reading {reading.name}")
        )
        self._layout: RowLayout | None = None
        self._names: list[str] = []

    def open(self, number: int, owner: Any, *, cached: bool) -> RowStore:
        """The rows after they are built, as those of source `number`; `owner` lives as long as they do.

        Raises:
            DataError: they are missing, or all pairs would be alike to the loss.
        """
        metadata = self._metadata(f"{JOINED}/{METADATA}")
        extra_columns = frozenset(metadata["extra_columns"])
        return RowStore(
            key=self.key,
            content=metadata["content"],
            source=number,
            report=self._report(metadata, cached=cached),
            row_ranges=[RowRange(*row_range) for row_range in metadata["row_ranges"]],
            rows=ArrowRows(self.directory, [ArrowFile(*file) for file in metadata["files"]], owner),
            extra_columns=extra_columns,
            num_positives=self._array("num_positives"),
            num_negatives=self._array("num_negatives"),
            max_negatives=self._array("max_negatives") if "max_negatives" in extra_columns else None,
        )

    def num_files(self) -> int:
        """How many files an open store holds open."""
        return len(self._metadata(COMPLETE)["files"])

    def first_vector(self) -> tuple[int, str] | None:
        """The dimension and location of the first vector."""
        width = RowStatistics.of(self._metadata(f"{JOINED}/{METADATA}")["statistics"]).width
        return width and (width[0], self._reading.parts[width[1]].location(width[2]))

    def _tasks(self) -> Mapping[str, Task]:
        reading = self._reading
        documents = None
        if self.documents is not None:
            build([self.documents])
            documents = DocumentStore(self.documents.directory)
        with self._version.during(reading.parts):  # processes must agree on the pieces
            layout = self._layout = reading.detect_layout(self._on_error)
            pieces = reading.pieces(PIECE_BYTES)
            if len(pieces) > MAX_PIECES:
                pieces = reading.pieces(PIECE_BYTES * -(-len(pieces) // MAX_PIECES))

        def task(piece: Piece) -> Task:
            def write(path: Path) -> None:
                with self._version.during([piece.part]):
                    write_piece(reading, layout, piece, documents, self._on_error, path)

            return write

        tasks = {f"rows-{number:05}": task(piece) for number, piece in enumerate(pieces)}
        self._names = list(tasks)
        return tasks

    def _join(self, path: Path) -> None:
        assert self._layout is not None
        self._version.require(self.directory, self._names)
        join_pieces(self._reading, self._layout, self.directory, self._names, self._on_error, path)

    def _report(self, metadata: dict[str, Any], *, cached: bool) -> SourceReport:
        reading = self._reading
        report = RowStatistics.of(metadata["statistics"]).report(
            reading.name, metadata["layout"], reading.parts, reading.source.negatives, cached=cached
        )
        report.left_out = reading.left_out
        has_negatives = report.negative_counts().most > 0 or reading.needs.batch_negatives > 0
        if report.rows.num_unscored == report.rows.num_rows and not has_negatives:
            named = "" if reading.source.columns is None else " that columns names too"
            raise DataError(
                f"{reading.source.path}: there are neither scores nor hard negatives to use, so all pairs would be "
                f"alike to loss={reading.needs.loss}: add scores, such as a column named score{named}, or negatives"
            )
        return report

    def _array(self, name: str) -> NDArray[np.int32]:
        try:
            return map_array(self.directory / JOINED / f"{name}.bin", np.int32)
        except OSError as error:
            raise self._missing_error(error) from error

    def _metadata(self, name: str) -> Any:
        try:
            return read_metadata(self.directory / name)
        except OSError as error:
            raise self._missing_error(error) from error

    def _missing_error(self, error: OSError) -> DataError:
        return DataError(
            f"{self.directory}: cached rows cannot be opened ({error.strerror or error}): start again, and let "
            "nothing clean up this folder meanwhile"
        )


__all__ = ["SourceReport", "read_sources"]


def read_sources(
    sources: Sequence[TrainSource],
    on_error: OnError,
    needs: RowRequirements | Sequence[RowRequirements] = TEXTS_ONLY,
    cache: Cache | None = None,
    *,
    losses: Sequence[int] | None = None,
) -> list[RowStore]:
    """Read every row of every source, so that all errors in the data are found before training.

    Sources in the cache are not read again. All processes that call this with the same arguments share the work.

    Args:
        sources: `data.train`.
        on_error: stop at the first invalid row, or skip and count invalid rows.
        needs: what the loss requires of every row, for all sources or per source.
        cache: default: a temporary directory that lasts as long as the stores.
        losses: a number per source, equal for sources with the same loss; default: one loss.

    Raises:
        DataError: an invalid row (`path:line: problem`), a file that cannot be read at all, a source without a valid
            row, or a cache that cannot be written.
        ConfigError: no source, or options of a source that contradict each other or the loss.
    """
    if not sources:
        raise ConfigError("data.train is empty: name at least one file, folder or Hub data set to train on")
    source_needs = [needs] * len(sources) if isinstance(needs, RowRequirements) else list(needs)
    check_sources(sources, source_needs)
    temporary = None
    if cache is None:
        temporary = tempfile.TemporaryDirectory(prefix="embedtrain-", ignore_cleanup_errors=True)
        cache = Cache(directory=Path(temporary.name))
    readings = open_sources(sources, source_names(sources), source_needs)
    entries = [CachedRows(reading, on_error, cache) for reading in readings]
    missing = [entry for entry in entries if not is_complete(entry.directory)]
    build([entry.documents for entry in missing if entry.documents is not None])
    build([entry.build for entry in missing])
    for entry in entries:
        if entry not in missing:
            cache.verification.add(entry.directory)
    allow_open_files(sum(entry.num_files() for entry in entries))
    stores = [entry.open(number, temporary, cached=entry not in missing) for number, entry in enumerate(entries)]
    for loss in dict.fromkeys(losses or [0]):
        _check_widths([entry.first_vector() for i, entry in enumerate(entries) if not losses or losses[i] == loss])
    for requirements in dict.fromkeys(source_needs):
        of_loss = [store for store, needs in zip(stores, source_needs, strict=True) if needs == requirements]
        check_equal_counts(requirements, [store.report.negative_counts() for store in of_loss])
    return stores


def _check_widths(vectors: Sequence[tuple[int, str] | None]) -> None:
    """Require one dimension of the teacher's vectors in all sources of a loss."""
    first, *others = [vector for vector in vectors if vector is not None] or [(0, "")]
    for width, location in others:
        if width != first[0]:
            raise DataError(f"{location}: a vector of {width} numbers, where those before have {first[0]}")
