"""Training rows and evaluation sets that a Python program holds in memory, as files that are read like all others.

The name of a file carries a checksum of its content: the same rows are the same file, so caches and resumed runs find
them, and recipe.yaml names what was trained on.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedtrain.config.overrides import Interpolation
from embedtrain.errors import ConfigError, DataError
from embedtrain.files import atomic_write

FOLDER = "data"  # in output_dir
_JUDGEMENTS = ("qrels", "relevant_docs")  # BEIR's name, and that of sentence-transformers
_EXPECTED = "must be a path, a list of rows (mappings), a Dataset, or a list of these"

Lines = Callable[[], Iterator[bytes]]


@dataclass
class InMemoryData:
    """Converts data in memory to options with a path, and writes the files at these paths."""

    files: dict[str, Lines] = field(default_factory=dict)  # by name in `FOLDER`

    def sources(self, value: Any, option: str, name: str = "rows") -> list[Any]:
        """Elements of a list option such as `data.train` or `sets`, with a path instead of rows.

        `value` is an element or a list of them: a path, a mapping of options with `path`, `rows` or `queries`, a list
        of rows (mappings), or a Dataset of the library datasets. Every rank must hold the same rows. `name` is the name
        of what has none. Raises ConfigError and DataError for anything else.
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
            if path.is_file() and not path.is_symlink() and _digest([lines]) == _file_digest(path):
                continue
            with atomic_write(path) as temporary, temporary.open("wb") as file:
                file.writelines(lines())

    def _element(self, element: Any, option: str, name: str) -> Any:
        if isinstance(element, str | os.PathLike):
            return os.fspath(element)
        if not isinstance(element, Mapping):
            if not isinstance(element, list | tuple | Iterator) and not hasattr(element, "column_names"):
                raise ConfigError(f"{option}={element!r}: {_EXPECTED}")
            return {"name": name, "path": self._add_rows(element, option)}
        options = dict(element)
        if "path" in options:
            return options | {"path": os.fspath(options["path"])}
        options.setdefault("name", name)
        if "rows" in options:
            return options | {"path": self._add_rows(options.pop("rows"), option)}
        if "queries" in options:
            judgements = next((options.pop(key) for key in _JUDGEMENTS if key in options), None)
            path = self._add_retrieval_set(options.pop("queries"), options.pop("corpus", None), judgements, option)
            return options | {"path": path}
        raise ConfigError(
            f"{option}: a mapping with {', '.join(map(repr, element))}: rows are a list of mappings; a mapping names "
            "`path`, `rows`, or `queries`, `corpus` and `qrels` (of a DatasetDict, pass one split)"
        )

    def _add_rows(self, rows: Any, option: str) -> str:
        if isinstance(rows, Iterator):
            rows = list(rows)
        lines = _lines(rows, option)
        name = f"rows-{_digest([lines])[:16]}.jsonl"
        self.files[name] = lines
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
        files = {name: _lines(rows, f"{option}, {name}") for name, rows in tables.items()}
        folder = f"set-{_digest(files.values())[:16]}"
        self.files |= {f"{folder}/{name}": lines for name, lines in files.items()}
        return Interpolation(f"${{output_dir}}/{FOLDER}/{folder}")


def _is_element(value: Any, option: str) -> bool:
    """Whether a value is one source or set, not a list of them."""
    if isinstance(value, str | os.PathLike | Mapping | Iterator) or hasattr(value, "column_names"):
        return True
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{option}={value!r}: {_EXPECTED}")
    return bool(value) and all(
        isinstance(row, Mapping) and not {"path", "rows", "queries"} & row.keys() for row in value
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


def _lines(rows: Any, option: str) -> Lines:
    """The rows as JSON Lines, any number of times."""

    def lines() -> Iterator[bytes]:
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"{option}[{index}]: a row is a mapping of columns, not {type(row).__name__}")
            try:
                text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
                yield text.encode() + b"\n"
            except (TypeError, ValueError) as error:
                raise DataError(f"{option}[{index}]: the row cannot be written as JSON: {error}") from None

    return lines


def _plain(value: Any) -> Any:
    """An array or scalar of numpy or torch as Python's numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not text, a number or a list of these")


def _digest(files: Iterable[Lines]) -> str:
    digest = hashlib.sha256()
    for lines in files:
        for line in lines():
            digest.update(line)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
