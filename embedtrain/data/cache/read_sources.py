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
from embedtrain.data.cache.cache import FORMAT, Cache, allow_open_files, json_digest, mapped, read_metadata
from embedtrain.data.cache.documents import DocumentStore, documents_build
from embedtrain.data.cache.file_changes import SourceVersion
from embedtrain.data.cache.row_files import join_pieces, write_piece
from embedtrain.data.cache.row_store import ArrowFile, ArrowRows, RowRange, RowStore
from embedtrain.data.cache.shared_build import COMPLETE, JOINED, Build, Task, build, is_complete
from embedtrain.data.cache.source_report import RowStatistics, SourceReport, check_equal_counts, check_sources
from embedtrain.data.sources.layouts import TEXTS_ONLY, RowLayout
from embedtrain.data.sources.part_reader import Piece
from embedtrain.data.sources.reader import SourceReader, open_sources
from embedtrain.data.sources.resolve import source_names
from embedtrain.errors import ConfigError, DataError

PIECE_BYTES = 64 << 20
MAX_PIECES = 1024  # of a source: each is a file that stays open


class CachedRows:
    """One source's rows as they are to be kept.

    Args:
        reading: the source.
        on_error: stop at the first bad row, or pass over bad rows and count them.
        cache: where rows are kept.

    Attributes:
        key: a digest of all that decides about the rows.
        directory: where they are kept.
        documents: how the corpus is built that they name documents of, if they do.
        build: how the rows are built.

    Raises:
        DataError: a file of the source is gone or cannot be read.
    """

    def __init__(self, reading: SourceReader, on_error: OnError, cache: Cache) -> None:
        self._reading, self._on_error = reading, on_error
        self._unchanged = SourceVersion(reading)
        self.key = json_digest([FORMAT, self._unchanged.content, on_error.value])
        self.directory = cache.directory / f"rows-{self.key}"
        self.documents = None
        if reading.documents is not None:
            digests = self._unchanged.content["documents"]
            self.documents = documents_build(reading.documents, on_error, cache, digests)
        self.build = Build(
            self.directory, self._tasks, self._join, progress=partial(cache.progress, f"reading {reading.name}")
        )
        self._layout: RowLayout | None = None
        self._names: list[str] = []

    def open(self, number: int, keeps: Any, *, cached: bool) -> RowStore:
        """The rows, once they are built, as those of source `number`; `keeps` lives as long as they do.

        Raises:
            DataError: they are gone, or all pairs would be alike to the loss.
        """
        facts = self._facts(f"{JOINED}/facts.json")
        row_ranges = [RowRange(*stretch) for stretch in facts["stretches"]]
        files = [ArrowFile(*file) for file in facts["files"]]
        has_limits = "most_negatives" in facts["beside"]
        return RowStore(
            directory=self.directory,
            key=self.key,
            content=facts["content"],
            source=number,
            report=self._report(facts, cached=cached),
            files=[part.name for part in self._reading.parts],
            row_ranges=row_ranges,
            rows=ArrowRows(self.directory, files),
            extra_columns=frozenset(facts["beside"]),
            num_positives=self._array("num_positives", np.int32),
            num_negatives=self._array("num_negatives", np.int32),
            most_negatives=self._array("most_negatives", np.int32) if has_limits else None,
            keeps=keeps,
        )

    def num_files(self) -> int:
        """How many files an open store holds open."""
        return len(self._facts(COMPLETE)["files"])

    def first_vector(self) -> tuple[int, str] | None:
        """The width of the first row's vectors that has some, and where it is."""
        width = RowStatistics.of(self._facts(f"{JOINED}/facts.json")["findings"]).width
        return width and (width[0], self._reading.parts[width[1]].location(width[2]))

    def _tasks(self) -> Mapping[str, Task]:
        reading = self._reading
        documents = self._open_documents()
        with self._unchanged.during(reading.parts):  # else the pieces here would be other ones than elsewhere
            layout = self._layout = reading.detect_layout(self._on_error)
            pieces = reading.pieces(PIECE_BYTES)
            if len(pieces) > MAX_PIECES:
                pieces = reading.pieces(PIECE_BYTES * -(-len(pieces) // MAX_PIECES))

        def task(piece: Piece) -> Task:
            def write(path: Path) -> None:
                with self._unchanged.during([piece.part]):
                    write_piece(reading, layout, piece, documents, self._on_error, path)

            return write

        tasks = {f"rows-{number:05}": task(piece) for number, piece in enumerate(pieces)}
        self._names = list(tasks)
        return tasks

    def _join(self, path: Path) -> None:
        assert self._layout is not None
        self._unchanged.require(self.directory, self._names)
        join_pieces(self._reading, self._layout, self.directory, self._names, self._on_error, path)

    def _open_documents(self) -> DocumentStore | None:
        if self.documents is None:
            return None
        build([self.documents])
        return DocumentStore(self.documents.directory)

    def _report(self, facts: dict[str, Any], *, cached: bool) -> SourceReport:
        reading = self._reading
        report = RowStatistics.of(facts["findings"]).report(
            reading.name, facts["layout"], reading.parts, reading.source.negatives, cached=cached
        )
        if report.num_unscored == report.num_rows and report.counts().most == 0:
            named = "" if reading.source.columns is None else " that columns names too"
            raise DataError(
                f"{reading.source.path}: there are neither scores nor hard negatives to use, so all pairs would be "
                f"alike to loss={reading.needs.loss}: add scores, such as a column named score{named}, or negatives"
            )
        return report

    def _array(self, name: str, kind: Any) -> NDArray[Any]:
        try:
            return mapped(self.directory / JOINED / f"{name}.bin", kind)
        except OSError as error:
            raise self._gone(error) from error

    def _facts(self, name: str) -> Any:
        try:
            return read_metadata(self.directory / name)
        except OSError as error:
            raise self._gone(error) from error

    def _gone(self, error: OSError) -> DataError:
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
    """Read every row of every source, so that what is wrong with any is known before training.

    What the cache holds is not read again. All processes that call this alike share the work.

    Args:
        sources: `data.train`.
        on_error: stop at the first row that cannot be used, or pass over such rows and count them.
        needs: what the loss asks of every row; one for all sources, or one for each.
        cache: where rows are kept; default: a temporary folder that lasts as long as the stores.
        losses: which loss each source has, as a number that is the same for sources of one loss; default: all one.

    Returns:
        For each source its rows.

    Raises:
        DataError: a row that cannot be used (`path:line: what is wrong`), a file that cannot be read as a
            whole whatever `on_error` says, a source without a usable row, or a cache that cannot be written.
        ConfigError: options of a source that contradict each other or the loss, or no source.
    """
    if not sources:
        raise ConfigError("data.train is empty: name at least one file, folder or Hub data set to train on")
    each = [needs] * len(sources) if isinstance(needs, RowRequirements) else list(needs)
    check_sources(sources, each)
    temporary = None
    if cache is None:
        temporary = tempfile.TemporaryDirectory(prefix="embedtrain-", ignore_cleanup_errors=True)
        cache = Cache(directory=Path(temporary.name))
    readings = open_sources(sources, source_names(sources), each)
    wanted = [CachedRows(reading, on_error, cache) for reading in readings]
    new = [one for one in wanted if not is_complete(one.directory)]
    build([one.documents for one in new if one.documents is not None])
    build([one.build for one in new])
    allow_open_files(sum(one.num_files() for one in wanted))
    stores = [one.open(number, temporary, cached=one not in new) for number, one in enumerate(wanted)]
    for loss in dict.fromkeys(losses or [0]):
        of_loss = [one for i, one in enumerate(wanted) if losses is None or losses[i] == loss]
        _check_widths([one.first_vector() for one in of_loss])
    for one in dict.fromkeys(each):
        check_equal_counts(one, [store.report.counts() for store, its in zip(stores, each, strict=True) if its == one])
    return stores


def _check_widths(vectors: Sequence[tuple[int, str] | None]) -> None:
    """Refuse a teacher's vectors of several widths, of different sources of one loss."""
    found = [vector for vector in vectors if vector is not None]
    for width, place in found[1:]:
        if width != found[0][0]:
            raise DataError(f"{place}: a vector of {width} numbers, where those before have {found[0][0]}")
