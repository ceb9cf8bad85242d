"""Unchecked rows of Parquet and Arrow files, and of data sets of the Hugging Face Hub."""

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from embedtrain.data.sources.files import MAX_LINE_BYTES, is_url, open_url, require_regular_file, unreachable_error
from embedtrain.data.sources.parts import PartKind, SourcePart, is_saved_dataset
from embedtrain.data.sources.text_rows import RawRow
from embedtrain.data.sources.values import MAX_COLUMNS, BadRow, describe_error, list_names, not_utf8
from embedtrain.errors import DataError, HubUnavailable
from embedtrain.utils.formatting import format_bytes
from embedtrain.utils.hub import hub_is_reachable

ROWS_PER_BATCH = 1024
_MAX_BATCH_BYTES = 1 << 30
_MAX_ROWS_PER_BYTE = 100  # of a Parquet file: a row has texts
_MAX_SMALL_ROWS = 1 << 20  # of any file
_DICTIONARY_HEADER = re.compile(rb"\x15[\x00-\x7f]\x15([\x80-\xff]{0,4}[\x00-\x7f])\x15")


def parquet_rows(
    name: Path | str, columns: list[str] | None, start: int = 0, stop: int | None = None
) -> Iterator[RawRow]:
    """The rows of a Parquet file, or of its row groups from `start` up to `stop`, numbered from 1."""
    with _open_parquet(str(name)) as (file, source):
        selected = _select_columns(str(name), file.schema_arrow.names, columns)
        groups = list(range(start, file.num_row_groups if stop is None else stop))
        rows = _rows_per_batch(file.metadata, source, groups)
        yield from _numbered_rows(str(name), file.iter_batches(batch_size=rows, columns=selected, row_groups=groups))


def parquet_sizes(name: str) -> list[tuple[int, int]]:
    """Rows and bytes of each row group of a Parquet file."""
    with _open_parquet(name) as (file, _):
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups]


def arrow_rows(name: str, columns: list[str] | None, start: int = 0, stop: int | None = None) -> Iterator[RawRow]:
    """The rows of an Arrow file, or of its record batches from `start` up to `stop`, numbered from 1."""
    with _open_arrow(name) as (schema, batches):
        selected = _select_columns(name, schema.names, columns)
        chosen = (batch for i, batch in enumerate(batches) if i >= start and (stop is None or i < stop))
        yield from _numbered_rows(name, (piece for batch in chosen for piece in _slices(batch.select(selected))))


def arrow_sizes(name: str) -> list[tuple[int, int]]:
    """Rows and bytes of each record batch of an Arrow file."""
    with _open_arrow(name) as (_, batches):
        return [(batch.num_rows, batch.nbytes) for batch in batches]


def dataset_rows(
    data: Any, name: str, columns: list[str] | None, start: int = 0, stop: int | None = None
) -> Iterator[RawRow]:
    """The rows of an opened data set from `start` up to `stop`, numbered from 1."""
    data = data.select_columns(_select_columns(name, data.column_names, columns)).with_format("arrow")
    if start or stop is not None:
        data = data.select(range(start, len(data) if stop is None else stop))
    try:
        batches = (batch for table in data.iter(batch_size=ROWS_PER_BATCH) for batch in table.to_batches())
        yield from _numbered_rows(name, batches)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: its data cannot be read: {describe_error(error)}") from error


@contextmanager
def _as_data_error(name: str, kind: str) -> Iterator[None]:
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
        if not is_url(name):  # pyarrow converts values with classes of Python: dates after the year 9999, and more
            raise DataError(f"{name}: cannot be read as {kind}: {describe_error(error)}") from error
        raise unreachable_error(name, error) from error


def _require_regular_file(name: str) -> None:
    if not is_url(name) and os.path.exists(name):
        require_regular_file(name)


@contextmanager
def _open_parquet(name: str) -> Iterator[tuple[Any, Any]]:
    """The opened Parquet file, and the file of its bytes."""
    _require_regular_file(name)
    with (
        _as_data_error(name, "Parquet"),
        open_url(name) if is_url(name) else pa.OSFile(name) as bytes_,
        pq.ParquetFile(bytes_) as file,
    ):
        num_rows, size = file.metadata.num_rows, bytes_.size() if isinstance(bytes_, pa.OSFile) else bytes_.size
        if size and num_rows > max(_MAX_SMALL_ROWS, _MAX_ROWS_PER_BYTE * size):
            raise DataError(f"{name}: {num_rows:,} rows in {format_bytes(size)}, which is less than any text needs")
        yield file, bytes_


def _rows_per_batch(metadata: Any, source: Any, groups: Sequence[int]) -> int:
    """How many rows take at most 1 GiB if each has the longest text of a dictionary: a small file may have long ones.

    Other texts are stored as often as they occur, and on average, as with pictures, take at most 64 MiB. Writers limit
    dictionaries to about 1 MiB.
    """
    largest = 1
    for group in map(metadata.row_group, groups):
        average = group.total_byte_size // max(1, group.num_rows)
        largest = max(largest, average * _MAX_BATCH_BYTES // MAX_LINE_BYTES)
        for column in map(group.column, range(group.num_columns)):
            if column.has_dictionary_page and column.total_uncompressed_size > _MAX_BATCH_BYTES // ROWS_PER_BATCH:
                source.seek(column.dictionary_page_offset)
                # The page header in Thrift's compact protocol: kind of the page, bytes uncompressed and compressed.
                header = _DICTIONARY_HEADER.match(source.read(32))
                digits = header[1] if header is not None else b""
                size = sum((digit & 0x7F) << 7 * i for i, digit in enumerate(digits)) >> 1
                largest = max(largest, size if header is not None else column.total_uncompressed_size)
    return min(ROWS_PER_BATCH, max(1, _MAX_BATCH_BYTES // largest))


@contextmanager
def _open_arrow(name: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Schema and record batches of an Arrow file or stream: `datasets` writes streams."""
    _require_regular_file(name)
    # Mapped, so that skipped batches cost nothing.
    with (
        _as_data_error(name, "Arrow"),
        pa.PythonFile(open_url(name), "r") if is_url(name) else pa.memory_map(name) as bytes_,
    ):
        is_file = bytes_.read(6) == b"ARROW1"
        bytes_.seek(0)
        reader = pa.ipc.open_file(bytes_) if is_file else pa.ipc.open_stream(bytes_)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        yield reader.schema, batches


def _select_columns(name: str, present: Sequence[str], columns: list[str] | None) -> list[str]:
    counts = Counter(present)
    repeated = next((column for column in counts if counts[column] > 1), None)
    if repeated is not None:
        raise DataError(f"{name}: two columns are called {repeated!r}: rename one of them")
    if len(present if columns is None else columns) > MAX_COLUMNS:
        raise DataError(f"{name}: {len(present):,} columns; at most {MAX_COLUMNS:,} are read")
    if columns is None:
        return [column for column in present if not column.startswith("__index_level_")]  # a pandas index
    missing = [column for column in columns if column not in counts]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}; there are: {list_names(present)}")
    return columns


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices: as Python objects its rows take several times their bytes."""
    return (batch.slice(start, ROWS_PER_BATCH) for start in range(0, batch.num_rows, ROWS_PER_BATCH))


def _numbered_rows(name: str, batches: Iterator[pa.RecordBatch]) -> Iterator[RawRow]:
    number = 0
    for whole in batches:
        _validate(whole)
        for batch in _bounded_slices(_encoded_images(whole)):
            if batch.nbytes > MAX_LINE_BYTES:
                limit = format_bytes(MAX_LINE_BYTES)
                raise DataError(f"{name}: row {number + 1}: a row of more than {limit} is not read")
            for row in _python_rows(batch):
                number += 1
                yield number, row


def _encoded_images(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with each Image of `datasets` as struct<bytes, path>, which some files have as bytes or paths."""
    metadata = batch.schema.metadata or {}
    if b'"Image"' not in metadata.get(b"huggingface", b""):
        return batch
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        images = {name for name, feature in features.items() if feature.get("_type") == "Image"}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # of another library
        return batch
    for index, name in enumerate(batch.schema.names):
        column = batch.column(index)
        if name not in images or pa.types.is_struct(column.type):
            continue
        fields = {"bytes": pa.nulls(len(column), pa.binary()), "path": pa.nulls(len(column), pa.string())}
        fields["bytes" if _is_binary(column.type) else "path"] = column
        batch = batch.set_column(index, name, pa.StructArray.from_arrays([*fields.values()], [*fields]))
    return batch


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _bounded_slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices that have one row or at most the bytes of the longest row."""
    if batch.num_rows <= 1 or batch.nbytes <= MAX_LINE_BYTES:
        yield batch
    else:
        half = batch.num_rows // 2
        yield from _bounded_slices(batch.slice(0, half))
        yield from _bounded_slices(batch.slice(half))


def _validate(batch: pa.RecordBatch) -> None:
    """Reject offsets that point outside of a column: an Arrow file can hold any, and reading them ends the process."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            # A row whose text is not UTF-8 is reported with its number. Offsets are checked before texts.
            is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            if not (is_text and "UTF8" in str(error)):
                raise


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | BadRow]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # rare, so row by row only now
        return [_python_row(batch.slice(i, 1)) for i in range(batch.num_rows)]


def _python_row(batch: pa.RecordBatch) -> dict[str, Any] | BadRow:
    try:
        return dict(batch.to_pylist()[0])
    except UnicodeDecodeError as error:
        return BadRow(not_utf8(error.object, error.start))


T = TypeVar("T")

_UNKNOWN_SPLIT = re.compile(r"Unknown split .*? Should be one of \[(.*)\]")  # of datasets


def open_dataset(part: SourcePart, subset: str | None, split: str) -> Any:
    """One split of a data set of the Hub or of a folder; the part's own subset and split take precedence."""
    import datasets  # takes a second, and most sources are plain files

    name, subset, split = part.name, part.subset or subset, part.split or split
    try:
        if not Path(name).exists():
            hub_is_reachable()
        if is_saved_dataset(Path(name)):
            data = datasets.load_from_disk(name)
            if not isinstance(data, datasets.DatasetDict):
                return data
            if split not in data:
                raise DataError(_no_split(name, split, list(data)))
            return data[split]
        return datasets.load_dataset(name, subset, split=split, revision=part.revision)
    except DataError:
        raise
    except Exception as error:  # anything: network, name, split, the data set's own files
        reason = " ".join(str(error).split())
        if match := _UNKNOWN_SPLIT.match(reason):
            raise DataError(_no_split(name, split, re.findall(r"\w[\w.-]*", match[1]))) from None
        revision = "" if part.revision is None else f", revision {part.revision}"
        raise _kind_of_error(name, error)(
            f"{name}: neither a local file nor a data set that can be opened "
            f"(subset {subset}, split {split}{revision}): {type(error).__name__}: {reason}"
        ) from error


def _no_split(name: str, split: str, splits: list[str]) -> str:
    return f"{name}: has no split {split}, but {', '.join(splits)}; write {{path: {name}, split: {splits[0]}}}"


def _kind_of_error(path: str, error: Exception) -> type[DataError]:
    if Path(path).exists():
        return DataError
    unreachable = isinstance(error, ConnectionError | TimeoutError) or not hub_is_reachable()
    return HubUnavailable if unreachable else DataError


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without the progress bars of `datasets`, which every rank would print; the caller's setting is restored."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


class HubRepository:
    """The configurations and splits of a data set repository: a Hub id, or a folder with the layout of one."""

    def __init__(self, path: str, revision: str | None = None) -> None:
        import datasets

        self.path, self.revision = path, revision
        names, splits = datasets.get_dataset_config_names, datasets.get_dataset_split_names
        self.configs: list[str] = _query_hub(path, lambda: names(path, revision=revision))
        self.splits_of = cache(lambda config: _query_hub(path, lambda: list(splits(path, config, revision=revision))))

    @property
    def default_config(self) -> str | None:
        """The configuration used where none is named."""
        return "default" if "default" in self.configs else self.configs[0] if len(self.configs) == 1 else None

    def part(self, config: str, split: str) -> SourcePart:
        """One split of a configuration."""
        return SourcePart(self.path, PartKind.hub, subset=config, split=split, revision=self.revision)

    def table(self, config: str, name: str, split: str) -> SourcePart:
        """A table of a retrieval set: the split of its name, else `split`, else the only one."""
        splits = self.splits_of(config)
        chosen = name if name in splits else split if split in splits else splits[0] if len(splits) == 1 else None
        if chosen is None:
            raise DataError(
                f"{self.path} ({config}) holds the splits {', '.join(splits)}, and neither {name} nor {split}"
            )
        return self.part(config, chosen)


def _query_hub(path: str, query: Callable[[], T]) -> T:
    try:
        if not Path(path).exists():
            hub_is_reachable()
        with no_progress_bars():
            return query()
    # The library raises dozens of types, of its own, of fsspec, of requests and of pyarrow.
    except Exception as error:
        raise _kind_of_error(path, error)(
            f"{path}: neither a local file nor a data set that can be opened ({describe_error(error)})"
        ) from error
