"""Rows of tables with a schema, unchecked: Parquet, Arrow files, and what `datasets` opens -> (row number, row)."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embedtrain.data.sources.kinds import Part, saved_to_disk
from embedtrain.data.sources.problems import BadRow, describe_error, not_utf8
from embedtrain.data.sources.remote import is_url, open_url, unreachable
from embedtrain.errors import DataError

ROWS_AT_ONCE = 1024


def parquet_rows(
    name: Path | str, columns: list[str] | None, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of a Parquet file, or of its row groups from `start` up to `stop`, numbered from 1."""
    with _open_parquet(str(name)) as file:
        wanted = _wanted(str(name), file.schema_arrow.names, columns)
        groups = list(range(start, file.num_row_groups if stop is None else stop))
        yield from _numbered(file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted, row_groups=groups))


def parquet_sizes(name: str) -> list[tuple[int, int]]:
    """Rows and bytes of each row group of a Parquet file."""
    with _open_parquet(name) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def arrow_rows(
    name: str, columns: list[str] | None, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of an Arrow file, or of its record batches from `start` up to `stop`, numbered from 1."""
    with _open_arrow(name) as (schema, batches):
        wanted = _wanted(name, schema.names, columns)
        chosen = (batch for i, batch in enumerate(batches) if i >= start and (stop is None or i < stop))
        yield from _numbered(piece for batch in chosen for piece in _small(batch.select(wanted)))


def arrow_sizes(name: str) -> list[tuple[int, int]]:
    """Rows and bytes of each record batch of an Arrow file."""
    with _open_arrow(name) as (_, batches):
        return [(batch.num_rows, batch.nbytes) for batch in batches]


def open_dataset(part: Part, subset: str | None, split: str) -> Any:
    """One split of a data set of the Hub, or of a folder that `datasets` can open.

    Args:
        part: which, with its revision; its own subset and split come first.
        subset: where the part says none.
        split: likewise.

    Raises:
        DataError: it cannot be opened.
    """
    import datasets  # takes a second, and most sources are plain files

    name, subset, split = part.name, part.subset or subset, part.split or split
    try:
        if saved_to_disk(Path(name)):
            data = datasets.load_from_disk(name)
            return data[split] if isinstance(data, datasets.DatasetDict) else data
        return datasets.load_dataset(name, subset, split=split, revision=part.revision)
    except Exception as error:  # anything: network, name, split, the data set's own files
        what = " ".join(str(error).split())
        at = "" if part.revision is None else f", revision {part.revision}"
        raise DataError(
            f"{name}: neither a file here nor a data set that can be opened "
            f"(subset {subset}, split {split}{at}): {type(error).__name__}: {what}"
        ) from error


def dataset_rows(
    data: Any, name: str, columns: list[str] | None, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of an opened data set from `start` up to `stop`, numbered from 1."""
    data = data.select_columns(_wanted(name, data.column_names, columns)).with_format("arrow")
    if start or stop is not None:
        data = data.select(range(start, len(data) if stop is None else stop))
    try:
        yield from _numbered(batch for table in data.iter(batch_size=ROWS_AT_ONCE) for batch in table.to_batches())
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: its data cannot be read: {describe_error(error)}") from error


@contextmanager
def _told(name: str, kind: str) -> Iterator[None]:
    """Turn what reading a file of this kind raises into one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{name}: cannot be read: {os.strerror(errno.ENOENT)}") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as {kind}: {' '.join(str(error).split())}") from error
    except DataError:
        raise
    except Exception as error:
        if not is_url(name):
            raise
        raise unreachable(name, error) from error


@contextmanager
def _open_parquet(name: str) -> Iterator[Any]:
    with (
        _told(name, "Parquet"),
        open_url(name) if is_url(name) else pa.OSFile(name) as bytes_,
        pq.ParquetFile(bytes_) as file,
    ):
        yield file


@contextmanager
def _open_arrow(name: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Schema and record batches of a file in either of Arrow's formats: `datasets` writes streams."""
    # Mapped, so that batches which are passed over cost nothing.
    with (
        _told(name, "Arrow"),
        pa.PythonFile(open_url(name), "r") if is_url(name) else pa.memory_map(name) as bytes_,
    ):
        is_file = bytes_.read(6) == b"ARROW1"
        bytes_.seek(0)
        reader = pa.ipc.open_file(bytes_) if is_file else pa.ipc.open_stream(bytes_)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        yield reader.schema, batches


def _wanted(name: str, present: Sequence[str], columns: list[str] | None) -> list[str]:
    twice = next((column for i, column in enumerate(present) if column in present[:i]), None)
    if twice is not None:
        raise DataError(f"{name}: two columns are called {twice!r}: give each a name of its own")
    if columns is None:
        return [column for column in present if not column.startswith("__index_level_")]  # a pandas index
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}; there are: {', '.join(present)}")
    return columns


def _small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices: as Python objects its rows take several times their bytes."""
    return (batch.slice(start, ROWS_AT_ONCE) for start in range(0, batch.num_rows, ROWS_AT_ONCE))


def _numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    number = 0
    for batch in batches:
        for row in _python_rows(batch):
            number += 1
            yield number, row


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | BadRow]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # rare, so only now row by row
        return [_python_row(batch.slice(i, 1)) for i in range(batch.num_rows)]


def _python_row(batch: pa.RecordBatch) -> dict[str, Any] | BadRow:
    try:
        return dict(batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return BadRow(not_utf8(error.object, error.start))
