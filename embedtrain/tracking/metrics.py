"""metrics.jsonl: one JSON object per line, one consistent history even if a run is killed and resumed."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedtrain.errors import DataError
from embedtrain.utils.files import atomic_write, open_append, require_own_file
from embedtrain.utils.records import is_count, is_number

METRICS_FILE = "metrics.jsonl"
DATASET = "dataset"  # key of an evaluation's row
_DIMENSION = "dimension"
_FIRST_STAGE = "first_stage"
_VECTORS = "vectors"
_PRECISION = "precision"
_POOLING = "token_pooling"


@dataclass(frozen=True, slots=True)
class FirstStage:
    """The ranking whose documents a reranker orders: `{"name": "bm25", "ndcg@10": 0.55}`."""

    name: str  # `bm25`, or `run` for a run file
    metric: str  # the main one of the set
    value: float  # of the documents in its order

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4f} in the order of {'BM25' if self.name == 'bm25' else 'the run file'}"

    @classmethod
    def of_row(cls, values: Any) -> "FirstStage | None":
        """From the object of a row; None if it is not valid."""
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            return None
        metrics = [(str(key), value) for key, value in values.items() if is_number(value)]
        return cls(values["name"], *metrics[0]) if len(metrics) == 1 else None


@dataclass(frozen=True, slots=True)
class VectorSize:
    """The form of the vectors of a row, and what a document takes in it."""

    label: str  # as in the name of the row; the number of dimensions for whole float vectors
    bytes: int  # that every search reads
    rescore_bytes: int  # of the copy with which the best documents are scored again; 0: none

    @classmethod
    def of_row(cls, values: Any) -> "VectorSize | None":
        """From the object of a row; None if it is not valid."""
        if not isinstance(values, Mapping) or not isinstance(values.get("label"), str):
            return None
        size, rescore_size = values.get("bytes"), values.get("rescore_bytes")
        return cls(values["label"], size, rescore_size) if is_count(size) and size and is_count(rescore_size) else None


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The object `dataset` in the row of a set: `{"kind": "retrieval", "queries": 300, ..., "subset": false}`."""

    kind: str  # a value of `SetKind`; `mean` for the means over sets, `function` for evaluation.function
    counts: Mapping[str, int]  # what was measured: numbers of queries, documents, pairs, texts, ... by unit
    subset: bool  # whether a part of the set was measured, so that its metrics are not those of the whole set
    dimension: int | None = None  # of truncated vectors
    first_stage: FirstStage | None = None  # of a set that a reranker orders during training
    vectors: VectorSize | None = None  # if several forms of vectors are compared
    precision: str | None = None  # in which the model computed: `bf16`, `fp32`, or the backend of a graph
    token_pooling: float = 1.0  # of the index of a late-interaction model: 1 keeps all vectors of documents

    def as_row(self) -> dict[str, Any]:
        """The object in the row."""
        dimension = {} if self.dimension is None else {_DIMENSION: self.dimension}
        first = self.first_stage
        before = {} if first is None else {_FIRST_STAGE: {"name": first.name, first.metric: first.value}}
        vectors = {} if self.vectors is None else {_VECTORS: asdict(self.vectors)}
        computed = {} if self.precision is None else {_PRECISION: self.precision}
        pooled = {} if self.token_pooling == 1 else {_POOLING: self.token_pooling}
        details = {**dimension, **before, **vectors, **computed, **pooled}
        return {"kind": self.kind, **self.counts, "subset": self.subset, **details}

    @property
    def label(self) -> str:
        """The kind for tables, with a mark if only a subset was measured."""
        return f"{self.kind} (subset)" if self.subset else self.kind

    @property
    def size(self) -> str:
        """The counts as text, such as `300 queries, 4,800 documents, bf16`, and the metric of the first stage."""
        counts = [f"{count:,} {unit.replace('_', ' ')}" for unit, count in self.counts.items()]
        computed = [] if self.precision is None else [self.precision]
        computed += [] if self.token_pooling == 1 else [f"{_POOLING}={self.token_pooling:g}"]
        return ", ".join([*counts, *computed, *([] if self.first_stage is None else [str(self.first_stage)])])

    @classmethod
    def of_mean(cls, infos: "Sequence[DatasetInfo]") -> "DatasetInfo":
        """Of the means over these sets."""
        return cls("mean", {"sets": len(infos)}, any(info.subset for info in infos))

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "DatasetInfo | None":
        """From a row of metrics.jsonl; None if it has no valid object, as in files of earlier versions."""
        values = row.get(DATASET)
        if not isinstance(values, Mapping) or not isinstance(values.get("kind"), str):
            return None
        others = (_DIMENSION, _POOLING)
        counts = {str(unit): count for unit, count in values.items() if is_count(count) and unit not in others}
        dimension = values.get(_DIMENSION)
        first_stage = FirstStage.of_row(values.get(_FIRST_STAGE))
        dimension = dimension if is_count(dimension) else None
        vectors = VectorSize.of_row(values.get(_VECTORS))
        precision = values.get(_PRECISION)
        precision = precision if isinstance(precision, str) else None
        pooling = values.get(_POOLING)
        return cls(
            values["kind"],
            counts,
            values.get("subset") is True,
            dimension=dimension,
            first_stage=first_stage,
            vectors=vectors,
            precision=precision,
            token_pooling=float(pooling) if is_number(pooling) else 1.0,
        )


class MetricsFile:
    """A file of rows that grows by one line at a time; each line is in the file when `append` returns."""

    def __init__(self, path: str | Path) -> None:
        """Open `path` for appending; an incomplete last line of a killed run is dropped.

        Raises:
            DataError: the file holds a line that is not a JSON object.
            ConfigError: the file is a link.
            OSError: the file cannot be written.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        require_own_file(self.path)
        if self.path.exists():
            self._rewrite(read_metrics(self.path), only_if_changed=True)
        self._file = self._open()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row. NaN and infinity, which JSON does not have, become null.

        Raises:
            OSError: the row could not be written completely (the disk is full, ...); the file holds none of it.
        """
        line = _line(row)
        try:
            written = self._file.write(line)
            if written < len(line):
                raise OSError(f"{self.path} took {written} of {len(line)} bytes: the disk is full")
        except OSError:
            # Half a line followed by the next row would make the whole file unreadable.
            self._file.truncate(self._length)
            raise
        self._length += len(line)

    def append_new(self, row: Mapping[str, Any]) -> None:
        """`append`, unless the file holds the same row."""
        if _line(row) not in set(self.path.read_bytes().splitlines(keepends=True)):
            self.append(row)

    def truncate_after(self, step: int, *, evaluated: bool = True) -> None:
        """Drop the rows of later steps, which a run resumed from `step` writes again. The file is replaced atomically.

        Rows without a step stay; the evaluation of `step` stays only if `evaluated`.
        """
        self._file.close()
        rows = [row for row in read_metrics(self.path) if row.get("step") is None or row["step"] <= step]
        self._rewrite([row for row in rows if evaluated or row.get("step") != step or "set" not in row])
        self._file = self._open()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> FileIO:
        file = open_append(self.path)
        self._length = file.tell()
        return file

    def _rewrite(self, rows: list[dict[str, Any]], only_if_changed: bool = False) -> None:
        content = b"".join(map(_line, rows))
        if only_if_changed and content == self.path.read_bytes():
            return
        with atomic_write(self.path, durable=True) as temporary:
            temporary.write_bytes(content)


def split_lines(content: bytes) -> list[str]:
    """The lines of a JSON Lines file."""
    # Not splitlines(): a text may contain U+2028, which ends a line in Python but not in JSON.
    return content.decode("utf-8", errors="replace").removesuffix("\n").split("\n")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a metrics file, without an incomplete last line; DataError if another line is no row of metrics."""
    lines = split_lines(Path(path).read_bytes())
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{path}:{number} is no row of metrics: delete this line, or move the file away")
    return rows


def parse_row(line: str) -> dict[str, Any] | None:
    """A line of a metrics file: an object whose `step`, if it has one, is a count, and whose `set` is a name."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("set", ""), str):
        return None
    return row if row.get("step") is None or is_count(row["step"]) else None


def evaluation_row(step: int, name: str, metrics: Mapping[str, float], dataset: DatasetInfo) -> dict[str, Any]:
    """The row of an evaluation set."""
    return {"step": step, "set": name, DATASET: dataset.as_row(), **metrics}


def metrics_at(run_dir: Path, step: int) -> dict[str, dict[str, float]]:
    """The evaluation results of `step` as set -> metric -> value, those that are finite; empty if there are none."""
    return {
        row["set"]: {key: value for key, value in row.items() if key != "step" and is_number(value)}
        for row in _evaluations(run_dir)
        if row["step"] == step
    }


def datasets_at(run_dir: Path, step: int) -> dict[str, DatasetInfo]:
    """What the evaluation of `step` measured, by set; without the sets of rows that do not say it."""
    infos = {row["set"]: DatasetInfo.of_row(row) for row in _evaluations(run_dir) if row["step"] == step}
    return {name: info for name, info in infos.items() if info is not None}


@dataclass(frozen=True, slots=True)
class MainChange:
    """The main metric of a set at the first step that was evaluated, and at a later one."""

    name: str  # of the set
    metric: str
    first: float
    first_step: int
    last: float
    last_step: int
    kind: str  # as in `DatasetInfo`; empty if unknown
    first_stage: FirstStage | None = None

    @property
    def is_worse(self) -> bool:
        """Whether it is below step 0 in the digits shown. Of a user's function it is unknown what is better."""
        return self.first_step == 0 and self.kind != "function" and round(self.last, 4) < round(self.first, 4)

    def __str__(self) -> str:
        first, last = f"{self.first:.4f} at step {self.first_step}", f"{self.last:.4f} at step {self.last_step}"
        changed = last if self.first_step == self.last_step else f"{first}, {last}"
        return f"{self.name}: {self.metric} {changed}{self._compared_with_first_stage()}"

    def _compared_with_first_stage(self) -> str:
        stage = self.first_stage
        if stage is None or stage.metric != self.metric:
            return "" if stage is None else f" ({stage})"
        difference = round(self.last, 4) - round(stage.value, 4)
        verdict = "better than" if difference > 0 else "worse than" if difference < 0 else "the same as"
        return f" ({verdict} {stage})"


def main_changes(run_dir: Path, step: int) -> list[MainChange]:
    """Of each set with several evaluations, or with a first stage: its main metric at the first of them and at `step`.

    Where `step` was not evaluated, the last step counts.
    """
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in _evaluations(run_dir):
        by_set.setdefault(row["set"], []).append(row)
    changes = []
    for name, rows in by_set.items():
        first, last = rows[0], next((row for row in rows if row["step"] == step), rows[-1])
        metric = next((key for key, value in last.items() if key != "step" and is_number(value)), "")
        dataset = DatasetInfo.of_row(last)
        kind, stage = ("", None) if dataset is None else (dataset.kind, dataset.first_stage)
        if (first["step"] != last["step"] or stage is not None) and is_number(first.get(metric)):
            values = (first[metric], first["step"], last[metric], last["step"])
            changes.append(MainChange(name, metric, *values, kind, stage))
    return changes


def _evaluations(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / METRICS_FILE
    return [row for row in read_metrics(path) if "set" in row and is_count(row.get("step"))] if path.is_file() else []


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n").encode()


def _finite(value: Any) -> Any:
    """The value with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)  # also scalars of numpy and torch
    return number if math.isfinite(number) else None


DIRECTORY = "query_metrics"
_QUERY = "query"


@dataclass(frozen=True, slots=True)
class QueryMetrics:
    """Metrics of each query of a set, in the order of the set."""

    queries: Sequence[str]  # Q ids
    metrics: Sequence[str]  # M names
    values: NDArray[np.float64]  # [Q, M]


def query_metrics_path(run_dir: Path, step: int, name: str) -> Path:
    """`query_metrics/step-00000500/SET.parquet`; characters that file names cannot hold are percent-encoded."""
    file_name = re.sub(r"[^\w.@+-]", lambda match: quote(match[0], safe=""), name)
    return run_dir / DIRECTORY / f"step-{step:08d}" / f"{file_name}.parquet"


def write_query_metrics(path: Path, measured: QueryMetrics) -> None:
    """Write the column `query`, and a column of float64 per metric; the file is replaced atomically.

    Raises OSError if the file cannot be written, or its folder is a link.
    """
    if path.parent.is_symlink():
        raise OSError(f"{path.parent} is a link, through which nothing is written")
    columns = [pa.array(measured.queries, pa.string()), *(pa.array(column) for column in measured.values.T)]
    with atomic_write(path) as temporary:
        pq.write_table(pa.table(columns, names=[_QUERY, *measured.metrics]), temporary, compression="zstd")


def read_query_metrics(path: Path) -> QueryMetrics | None:
    """The metrics in a file; None if it is missing or cannot be read."""
    try:
        table = pq.read_table(path, partitioning=None)
        metrics = [name for name in table.column_names if name != _QUERY]
        queries = table.column(_QUERY).to_pylist()
        values = [np.asarray(table.column(name).to_numpy(), dtype=np.float64) for name in metrics]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
    if not metrics or not queries or not all(isinstance(query, str) for query in queries):
        return None
    return QueryMetrics(queries, metrics, np.stack(values, axis=1))
