"""Training rows and evaluation sets that a Python program holds in memory, as files that are read like all others.

The name of a file carries a checksum of its content: the same rows are the same file, so caches and resumed runs find
them, and recipe.yaml names what was trained on. The rows are read once. Their lines go into a temporary file while the
checksum is computed, and that file is moved to its place.
"""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.command_line import Interpolation
from embedtrain.data.sources.pictures import is_picture_name
from embedtrain.data.sources.retrieval import SPLITS
from embedtrain.data.sources.values import list_names
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.files import atomic_write

FOLDER = "data"  # in output_dir
_IMAGES = "images"  # beside the files of rows
_JUDGEMENTS = ("qrels", "relevant_docs")  # BEIR's name, and that of sentence-transformers
_EXPECTED = "must be a path, rows (mappings), a DataFrame, a Dataset, a mapping of lists, or a list of these"
_ROWS_PER_BATCH = 1024

_KEYS = {"path", "rows", "queries", "corpus", *_JUDGEMENTS}


class InMemoryData:
    """Converts data in memory to options with a path, and puts the files at these paths.

    A context manager, which removes what it has not put at its place. After an error it removes the files that it has
    put there as well, since the same call puts them there again.

    Args:
        folder: where the files will be; default: the output_dir of the command.
        near: where they will be, if it is known: the temporary files are on the same disk, and moved instead of copied.
        keeps: whether `write` will be called; otherwise the rows are read for their checksum alone.
    """

    def __init__(
        self, folder: Path | None = None, *, near: str | PathLike[str] | None = None, keeps: bool = True
    ) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}  # SHA-256 of each file, by its name in `FOLDER`
        self._near, self._keeps = folder or near, keeps
        self._temporary: TemporaryDirectory[str] | None = None
        self._pictures = _Pictures(self._place)
        self._new: list[Path] = []  # files that `write` has put at their place
        self._record: Path | None = None
        self._is_new_folder = False

    def __enter__(self) -> Self:
        """The data itself."""
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Remove the temporary files, and after an error the others."""
        if self._temporary is not None:
            self._temporary.cleanup()
        if error is not None:
            self._remove_new()

    def _remove_new(self) -> None:
        """Remove the files that `write` has put at their place, and the folders that are empty without them."""
        try:
            recorded = "" if self._record is None else self._record.read_text(encoding="utf-8", errors="replace")
        except OSError:
            recorded = ""
        tops = {file: file.parts[-file.parts[::-1].index(FOLDER)] for file in self._new}  # in `FOLDER`
        keeps_pictures = any(top != _IMAGES and top in recorded for top in tops.values())
        for file, top in tops.items():
            if keeps_pictures if top == _IMAGES else top in recorded:
                continue
            with contextlib.suppress(OSError):  # the error that ends the call says more
                file.unlink(missing_ok=True)
                for folder in file.parents[: file.parts[::-1].index(FOLDER) + self._is_new_folder]:
                    folder.rmdir()  # an error if it holds other files
        self._new.clear()

    def sources(self, value: Any, option: str, name: str = "rows") -> list[Any]:
        """Elements of a list option such as `data.train` or `sets`, with a path instead of rows.

        `value` is an element or a list of them: a path, a mapping of options with `path`, `rows` or `queries`, a list
        of rows (mappings), an iterator of them, a DataFrame of pandas or polars, a table of pyarrow, a Dataset or
        DatasetDict of the library datasets, or a mapping of columns. Every rank must hold the same rows. `name` is the
        name of what has none. Raises ConfigError and DataError for anything else.
        """
        with _explained(option):
            return self._elements(value, option, name)

    def _elements(self, value: Any, option: str, name: str) -> list[Any]:
        if _is_element(value, option):
            return [self._element(value, option, name)]
        return [
            self._element(element, f"{option}[{index}]", f"{name}_{index + 1}" if len(value) > 1 else name)
            for index, element in enumerate(value)
        ]

    def corpus(self, value: Any, option: str) -> Any:
        """Documents of an option such as `corpus`, with a path instead of documents in memory.

        `value` is a path, a mapping of options with `path`, a list of these, a mapping from ids to texts, or rows with
        `id` and `text`, as in `sources`. Raises as `sources` does.
        """
        if isinstance(value, str | PathLike) or (isinstance(value, Mapping) and "path" in value):
            return value
        if isinstance(value, list | tuple) and not any(isinstance(e, Mapping) and "path" not in e for e in value):
            return value
        if isinstance(value, Mapping) and not value.keys() <= _KEYS and not _is_columns(value) and not is_splits(value):
            value = [{"_id": str(key), **_document(text)} for key, text in value.items()]
        (source,) = self.sources(value, option, "corpus")
        return source["path"]

    def write(self, output_dir: Path, record: Path | None = None) -> None:
        """Put the files that are missing, or have another content, at their place; on one rank, once.

        `record` is a file that names the data of a run. What it names is left at its place after an error.
        """
        self._record, self._is_new_folder = record, not output_dir.exists()
        written = self._place(_IMAGES)
        assert written is not None, "keeps is False"
        for file in written.glob("*"):  # their names are checksums
            target = output_dir / FOLDER / _IMAGES / file.name
            if not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                self._new.append(target)
                _move(file, target)
        for name, digest in self.digests.items():
            target = output_dir / FOLDER / name
            if not target.is_file() or target.is_symlink() or _file_digest(target) != digest:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._new.append(target)
                _move(written.parent / name, target)

    def _element(self, element: Any, option: str, name: str) -> Any:
        if isinstance(element, str | os.PathLike):
            return os.fspath(element)
        if not isinstance(element, Mapping):
            return {"name": name, "path": self._add_rows(element, option)}
        if is_splits(element) or _is_columns(element):
            element = {"rows": element}
        options = dict(element)
        if "path" in options:
            return options | {"path": os.fspath(options["path"])}
        options.setdefault("name", name)
        if "rows" in options:
            rows = options.pop("rows")
            if isinstance(rows, Mapping) and is_splits(rows):
                rows = _split(rows, options.pop("split", None), option)
            return options | {"path": self._add_rows(rows, option)}
        if "queries" in options:
            judgements = next((options.pop(key) for key in _JUDGEMENTS if key in options), None)
            path = self._add_retrieval_set(options.pop("queries"), options.pop("corpus", None), judgements, option)
            return options | {"path": path}
        lengths = {key: len(value) for key, value in element.items() if isinstance(value, list | tuple)}
        if len(lengths) == len(element) > 1:
            counts = ", ".join(f"{key!r} {length:,}" for key, length in lengths.items())
            raise ConfigError(f"{option}: columns must have the same number of rows, and these have: {counts}")
        raise ConfigError(
            f"{option}: a mapping with {list_names(map(repr, element))}: it must have `path`, `rows`, or `queries`, "
            "`corpus` and `qrels`, or be columns (lists of one length) or splits (Datasets or DataFrames); one row is "
            "written in brackets, as a list"
        )

    def _add_rows(self, rows: Any, option: str) -> str:
        (digest,) = self._write_lines({"rows.jsonl": (_as_rows(rows, option), option)})
        name = f"{'corpus' if option == 'corpus' else 'rows'}-{digest[:16]}.jsonl"
        self._name("rows.jsonl", name, digest)
        return self._path(name)

    def _write_lines(self, tables: Mapping[str, tuple[Iterable[Any], str]]) -> list[str]:
        """Write temporary files of rows, each with the option that messages name.

        Returns the SHA-256 of each; that of several is followed by that of all together.
        """
        total, digests = hashlib.sha256(), list[str]()
        for name, (rows, option) in tables.items():
            digest = hashlib.sha256()
            with self._opened(name) as file:
                for line in self._pictures.lines(rows, option):
                    digest.update(line)
                    if len(tables) > 1:
                        total.update(line)
                    if file is not None:
                        file.write(line)
            digests.append(digest.hexdigest())
        return [*digests, total.hexdigest()] if len(tables) > 1 else digests

    def _place(self, name: str) -> Path | None:
        """The path of a temporary file, in a folder that exists; None if nothing is kept."""
        if not self._keeps:
            return None
        if self._temporary is None:
            self._temporary = TemporaryDirectory(prefix=".embedtrain-", dir=_parent(self._near))
        path = Path(self._temporary.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO | None]:
        path = self._place(name)
        if path is None:
            yield None
            return
        with path.open("wb") as file:
            yield file

    def _name(self, temporary: str, name: str, digest: str) -> None:
        """Give a temporary file the name that it will have."""
        self.digests[name] = digest
        path, named = self._place(temporary), self._place(name)
        if path is not None and named is not None:
            path.replace(named)

    def _path(self, name: str) -> str:
        if self.folder is not None:
            return str(self.folder / FOLDER / name)
        return Interpolation(f"${{output_dir}}/{FOLDER}/{name}")

    def _add_retrieval_set(self, queries: Any, corpus: Any, judgements: Any, option: str) -> str:
        """A BEIR folder of what sentence-transformers' InformationRetrievalEvaluator takes."""
        for key, value in (("queries", queries), ("corpus", corpus), ("qrels", judgements)):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{option}: {key} must be a mapping by id, as InformationRetrievalEvaluator of "
                    f"sentence-transformers takes, not {type(value).__name__}"
                )
        tables = {
            "corpus.jsonl": [{"_id": str(key), **_document(value)} for key, value in corpus.items()],
            "queries.jsonl": [{"_id": str(key), "text": text} for key, text in queries.items()],
            "qrels/test.jsonl": list(_judgement_rows(judgements)),
        }
        *digests, total = self._write_lines({name: (rows, f"{option}, {name}") for name, rows in tables.items()})
        folder = f"set-{total[:16]}"
        for name, digest in zip(tables, digests, strict=True):
            self._name(name, f"{folder}/{name}", digest)
        return self._path(folder)


def _parent(place: str | PathLike[str] | None) -> Path | None:
    """The nearest folder above a place, for temporary files; None if there is none where this user may write."""
    if place is None:
        return None
    nearest = next(folder for folder in Path(place).absolute().parents if folder.is_dir())
    return nearest if os.access(nearest, os.W_OK) else None


@contextlib.contextmanager
def _explained(option: str) -> Iterator[None]:
    """Turn a full disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{option}: the rows do not fit on the disk ({error.strerror}): they are written to a temporary file "
            "beside output_dir, or in the folder that TMPDIR names"
        ) from None


def _move(file: Path, target: Path) -> None:
    """Move a file, so that a reader of `target` sees all of it or nothing; a link there is replaced."""
    try:
        file.replace(target)
    except OSError:  # on another disk
        with atomic_write(target) as temporary:
            shutil.copyfile(file, temporary)


def is_splits(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a DatasetDict, or another mapping of split names to tables."""
    return not value.keys() <= _KEYS and all(map(_is_table, value.values()))


def _is_columns(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping has nothing but columns: lists, arrays or Series of one length."""
    return (
        not value.keys() <= _KEYS
        and all(isinstance(column, list | tuple) or _is_array(column) for column in value.values())
        and len(set(map(len, value.values()))) == 1
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "__len__")  # scalars of numpy have no length


def _is_table(value: Any) -> bool:
    """Whether a value is a Dataset, or a DataFrame or table of pandas, polars, pyarrow or others."""
    is_frame = hasattr(value, "itertuples") or hasattr(value, "__arrow_c_stream__")
    return hasattr(value, "features") or (is_frame and hasattr(value, "columns"))


def _split(splits: Mapping[str, Any], name: str | None, option: str) -> Any:
    """The split of this name; by default the only one, or that for training or evaluation."""
    if name is None and len(splits) > 1:
        defaults = SPLITS if option.partition("[")[0].endswith("sets") else ("train",)
        name = next((default for default in defaults if default in splits), defaults[0])
    name = name or next(iter(splits))
    if name not in splits:
        raise ConfigError(
            f"{option}: there is no split {name}, but {list_names(splits)}: "
            f'write {{"rows": ..., "split": "{next(iter(splits))}"}}, or pass one split'
        )
    return splits[name]


def _as_rows(value: Any, option: str) -> Iterable[Any]:
    """The rows of lists, iterators, tables and mappings of columns."""
    if isinstance(value, Iterator):
        return value
    if hasattr(value, "cast_column") and hasattr(value, "features"):
        for name, feature in (value.features or {}).items():
            if type(feature).__name__ == "Image":  # its file as it is, not decoded and encoded again
                value = value.cast_column(name, type(feature)(decode=False))
    if hasattr(value, "features"):
        return _rows_of_dataset(value)
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping) and _is_columns(value):
        return (dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True))
    if hasattr(value, "itertuples"):  # pandas, of which Arrow refuses columns of mixed types
        index = [name for name in value.index.names if name is not None and name not in value.columns]
        frame = value.reset_index(level=index) if index else value  # groupby("query") makes the query an index
        names = _distinct([str(name) for name in frame.columns], option)
        return (dict(zip(names, row, strict=True)) for row in frame.itertuples(index=False, name=None))
    if _is_table(value):
        import pyarrow as pa

        table = pa.table(value)
        _distinct(table.column_names, option)
        return (row for batch in table.to_batches(max_chunksize=_ROWS_PER_BATCH) for row in batch.to_pylist())
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping) or _is_array(value):
        hint = "; call collect() first" if hasattr(value, "collect") else ""
        raise ConfigError(f"{option} {_EXPECTED}, not {type(value).__name__}{hint}")
    return value  # an object with rows, such as a Dataset of torch


def _rows_of_dataset(dataset: Any) -> Iterable[Any]:
    """The rows of a Dataset of the library datasets; those of plain values in batches of Arrow, which is faster."""
    features = list((dataset.features or {}).values())  # unknown ones of an IterableDataset are None
    is_plain = all(type(feature).__name__ == "Value" and feature.dtype == "string" for feature in features)
    chosen = getattr(dataset, "format", None)  # by with_format or with_transform
    if not features or not is_plain or not hasattr(dataset, "iter") or (chosen and chosen["type"] is not None):
        rows: Iterable[Any] = dataset
        return rows
    batches = dataset.with_format("arrow").iter(_ROWS_PER_BATCH)
    return (row for batch in batches for row in batch.to_pylist())


def _distinct(names: list[str], option: str) -> list[str]:
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{option}: two columns are called {repeated!r}: rename one of them")
    return names


def _is_element(value: Any, option: str) -> bool:
    """Whether a value is one source or set, not a list of them."""
    if not isinstance(value, list | tuple):
        return True
    return bool(value) and all(
        isinstance(row, Mapping) and not {"path", "rows", "queries"} & row.keys() and not is_splits(row)
        for row in value
    )


def _document(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"text": value}


def _judgement_rows(judgements: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    for query, documents in judgements.items():
        if isinstance(documents, str) or not isinstance(documents, Iterable):
            raise ConfigError(f"qrels of query {query!r} must be ids of documents, or scores by id: {documents!r}")
        scores = documents if isinstance(documents, Mapping) else dict.fromkeys(documents, 1)
        # The order of a set differs from process to process, and with it the checksum.
        for document in sorted(scores, key=str):
            yield {"query-id": str(query), "corpus-id": str(document), "score": scores[document]}


class _Pictures:
    """Rows as JSON Lines, in which pictures are names of files in `images` beside the file of the rows.

    The files are written while the lines are read, to what `place` returns for their names; None: they are not.
    """

    def __init__(self, place: Callable[[str], Path | None]) -> None:
        self._place = place
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}  # of objects of Pillow by their id

    def lines(self, rows: Iterable[Any], option: str) -> Iterator[bytes]:
        """The rows as JSON Lines."""
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"{option}[{index}]: a row is a mapping of columns, not {type(row).__name__}")
            try:
                is_text = all(type(value) is str for value in row.values())
                yield _json(row if is_text else self._named(row))
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(f"{option}[{index}]: the row cannot be written as JSON: {error}") from None

    def _named(self, value: Any) -> Any:
        """The value with names of files instead of pictures: objects of Pillow, and `{bytes, path}` of `datasets`."""
        if isinstance(value, Mapping):
            if value.keys() == {"bytes", "path"} and (data := _file_of(value)) is not None:
                return {"image": self._write(data, Path(value["path"] or "").suffix)}
            return {
                key: {"image": self._write(element, "")}
                if isinstance(element, bytes) and is_picture_name(str(key))
                else self._named(element)
                for key, element in value.items()
            }
        if isinstance(value, list | tuple):
            if not value or isinstance(value[0], int | float):
                return value
            return [self._named(element) for element in value]
        if isinstance(value, np.ndarray) and value.ndim == 3:
            return {"image": self._write(png_bytes(_image_of(value)), ".png")}
        pillow = sys.modules.get("PIL.Image")
        if pillow is None or not isinstance(value, pillow.Image):
            return value
        known, name = self._names.get(id(value), (None, ""))
        if known is None or known() is not value:  # another picture had the id
            name = self._write(png_bytes(value), ".png")
            self._names[id(value)] = (weakref.ref(value), name)
        return {"image": name}

    def _write(self, data: bytes, suffix: str) -> str:
        name = f"{_IMAGES}/{hashlib.sha256(data).hexdigest()[:16]}{suffix.lower()}"
        path = self._place(name)
        if path is not None and not path.exists():
            path.write_bytes(data)
        return name


def _file_of(value: Mapping[str, Any]) -> bytes | None:
    """The bytes of an Image of `datasets`; None where there is no file of an absolute path, and for other values."""
    data, path = value["bytes"], value["path"]
    if isinstance(data, bytes):
        return data
    if data is None and isinstance(path, str) and os.path.isabs(path) and os.path.isfile(path):
        return Path(path).read_bytes()
    return None


def _image_of(array: NDArray[Any]) -> Any:
    """The picture of an array of pixels, uint8 [height, width, channels]. Raises ValueError for another array."""
    from embedtrain.data.images.files import pillow

    if array.dtype != np.uint8 or array.shape[2] not in (1, 3, 4) or not array.size:
        shape = " x ".join(map(str, array.shape))
        raise ValueError(f"an array of {shape} {array.dtype} is no picture: uint8, height x width x 1, 3 or 4 channels")
    return pillow().fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def png_bytes(image: Any) -> bytes:
    """The file of a picture of Pillow, upright."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        upright = upright.convert("RGB")
    file = io.BytesIO()
    upright.save(file, "PNG")
    return file.getvalue()


def _json(row: Mapping[Any, Any]) -> bytes:
    """A row as a line of JSON."""
    try:
        return _ENCODER.encode(row if type(row) is dict else dict(row)).encode() + b"\n"
    except ValueError:  # NaN or half of a surrogate pair, which the reader reports where a column is used
        return json.dumps(_without_nan(row), allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """A value that JSON lacks, so that the reader takes or refuses it where its column is used.

    Dates and objects become objects without a text: as texts they could pass for those of a column of texts.
    """
    if isinstance(value, Decimal):
        return None if value.is_nan() else float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if type(value).__name__ in ("NaTType", "NAType"):  # of pandas
        return None
    if hasattr(value, "tolist") and getattr(getattr(value, "dtype", None), "kind", "") not in ("m", "M"):
        plain = value.tolist()  # of numpy, torch and pandas
        if type(plain) is not type(value):  # as those of longdouble are
            return plain
    # Never the value: that of an unknown object has its address, and another file name on every rank.
    return {f"{type(value).__module__}.{type(value).__qualname__}": None}


def _without_nan(value: Any) -> Any:
    """The value without the numbers that JSON lacks: NaN is a missing value."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else {str(float(value)): None}
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value if value is None or isinstance(value, str | int) else _without_nan(_plain(value))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_plain)  # made once: half the time of a row
