"""Training rows and evaluation sets that a Python program holds in memory, as files that are read like all others.

The name of a file carries a checksum of its content: the same rows are the same file, so caches and resumed runs find
them, and recipe.yaml names what was trained on.
"""

import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

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
_EXPECTED = "must be a path, a list of rows (mappings), a DataFrame, a Dataset, a mapping of lists, or a list of these"
_ROWS_PER_BATCH = 1024

_KEYS = {"path", "rows", "queries", "corpus", *_JUDGEMENTS}

Rows = Callable[[], Iterator[Any]]
Lines = Callable[[], Iterator[bytes]]


@dataclass
class InMemoryData:
    """Converts data in memory to options with a path, and writes the files at these paths.

    `folder` is where they are written; by default the output_dir of the command.
    """

    folder: Path | None = None
    files: dict[str, Lines] = field(default_factory=dict)  # by name in `FOLDER`
    _pictures: "_Pictures" = field(default_factory=lambda: _Pictures())  # noqa: PLW0108  # defined below

    def sources(self, value: Any, option: str, name: str = "rows") -> list[Any]:
        """Elements of a list option such as `data.train` or `sets`, with a path instead of rows.

        `value` is an element or a list of them: a path, a mapping of options with `path`, `rows` or `queries`, a list
        of rows (mappings), a DataFrame of pandas or polars, a table of pyarrow, a Dataset or DatasetDict of the library
        datasets, or a mapping of columns. Every rank must hold the same rows. `name` is the name of what has none.
        Raises ConfigError and DataError for anything else.
        """
        if _is_element(value, option):
            return [self._element(value, option, name)]
        return [
            self._element(element, f"{option}[{index}]", f"{name}_{index + 1}" if len(value) > 1 else name)
            for index, element in enumerate(value)
        ]

    def write(self, output_dir: Path) -> None:
        """Write the files that are missing or differ; on one rank."""
        for name, lines in self.files.items():
            path = output_dir / FOLDER / name
            self._pictures.folder = path.parent / _IMAGES  # where pictures are written when lines are read
            if path.is_file() and not path.is_symlink() and _digest([lines]) == _file_digest(path):
                continue
            with atomic_write(path) as temporary, temporary.open("wb") as file:
                file.writelines(lines())

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
        lines = self._pictures.lines(_as_rows(rows, option), option)
        name = f"rows-{_digest([lines])[:16]}.jsonl"
        self.files[name] = lines
        return self._path(name)

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
        files = {
            name: self._pictures.lines(_as_rows(rows, option), f"{option}, {name}") for name, rows in tables.items()
        }
        folder = f"set-{_digest(files.values())[:16]}"
        self.files |= {f"{folder}/{name}": lines for name, lines in files.items()}
        return self._path(folder)


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


def _as_rows(value: Any, option: str) -> Rows:
    """The rows of lists, iterators, tables and mappings of columns, any number of times."""
    if isinstance(value, Iterator):
        value = list(value)
    if hasattr(value, "cast_column") and hasattr(value, "features"):
        for name, feature in value.features.items():
            if type(feature).__name__ == "Image":  # its file as it is, not decoded and encoded again
                value = value.cast_column(name, type(feature)(decode=False))
    if isinstance(value, list | tuple) or hasattr(value, "features"):
        return lambda: iter(value)
    if isinstance(value, Mapping) and _is_columns(value):
        return lambda: (dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True))
    if not _is_table(value):
        hint = "; call collect() first" if hasattr(value, "collect") else ""
        raise ConfigError(f"{option} {_EXPECTED}, not {type(value).__name__}{hint}")
    if hasattr(value, "itertuples"):  # pandas, of which Arrow refuses columns of mixed types
        index = [name for name in value.index.names if name is not None and name not in value.columns]
        frame = value.reset_index(level=index) if index else value  # groupby("query") makes the query an index
        names = _distinct([str(name) for name in frame.columns], option)
        return lambda: (dict(zip(names, row, strict=True)) for row in frame.itertuples(index=False, name=None))
    import pyarrow as pa

    table = pa.table(value)
    _distinct(table.column_names, option)
    return lambda: (row for batch in table.to_batches(max_chunksize=_ROWS_PER_BATCH) for row in batch.to_pylist())


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

    The files are written while the lines are read, once `folder` is set.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._names: dict[int, tuple[Any, str]] = {}  # of objects of Pillow by their id, which they keep

    def lines(self, rows: Rows, option: str) -> Lines:
        """The rows as JSON Lines, any number of times."""

        def lines() -> Iterator[bytes]:
            for index, row in enumerate(rows()):
                if not isinstance(row, Mapping):
                    raise DataError(f"{option}[{index}]: a row is a mapping of columns, not {type(row).__name__}")
                try:
                    yield _json(self._named(row)).encode() + b"\n"
                except (TypeError, ValueError, RecursionError) as error:
                    raise DataError(f"{option}[{index}]: the row cannot be written as JSON: {error}") from None

        return lines

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
        known = self._names.get(id(value))
        if known is None or self.folder is not None:
            known = self._names[id(value)] = (value, self._write(png_bytes(value), ".png"))
        return {"image": known[1]}

    def _write(self, data: bytes, suffix: str) -> str:
        name = hashlib.sha256(data).hexdigest()[:16] + suffix.lower()
        if self.folder is not None and not (self.folder / name).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = self.folder / f".{name}.{os.getpid()}"
            unfinished.write_bytes(data)
            unfinished.replace(self.folder / name)
        return f"{_IMAGES}/{name}"


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


def _json(row: Mapping[Any, Any]) -> str:
    try:
        text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
        text.encode()
        return text
    except ValueError:  # NaN or half of a surrogate pair, which the reader reports where a column is used
        return json.dumps(_without_nan(row), allow_nan=False)


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


def _digest(files: Iterable[Lines]) -> str:
    digest = hashlib.sha256()
    for lines in files:
        for line in lines():
            digest.update(line)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
