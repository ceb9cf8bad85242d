"""Metrics of single queries, by which a report tells changes from noise: a Parquet file per set and evaluation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embedtrain.utils.files import atomic_write

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
