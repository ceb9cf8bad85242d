"""Tevatron's training file, made from the rows of a training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Training
from training_file import write_once


def write_data(training: Training) -> str:
    """Path of the JSONL file."""
    return write_once(Path(training.output) / "tevatron.jsonl", _groups(training))


def _groups(training: Training) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(training.rows()):
        texts = {"positive_passages": row["pos"][:1], "negative_passages": row["neg"][: training.negatives]}
        passages = {
            name: [{"docid": f"{number}-{n}", "title": "", "text": text} for n, text in enumerate(column)]
            for name, column in texts.items()
        }
        yield {"query_id": str(number), "query": row["query"], **passages}
