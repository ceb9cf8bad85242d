"""Rankings as TREC run files: `query Q0 document rank score tag`, what trec_eval and its relatives read."""

import os
import re
from pathlib import Path
from urllib.parse import quote

from embedtrain.evaluation.metrics import Run

_TAG = "embedtrain"


def run_path(folder: Path, name: str) -> Path:
    """Where the run of the set `name` is written; what cannot stand in a file name becomes `_`."""
    return folder / (re.sub(r"[^\w.@+-]", "_", name) + ".run")


def write_run(path: Path, run: Run, depth: int) -> None:
    """Write the first `depth` documents of each query, best first.

    The format has no quoting, so white space within an id is written as in a URL (`%20`). Scores have nine
    digits: read as float32 they are the same bits, and trec_eval finds the same ties.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("w", encoding="utf-8") as file:
        for query, found in run.items():
            for rank, (document, score) in enumerate(list(found.items())[:depth], start=1):
                file.write(f"{_word(query)} Q0 {_word(document)} {rank} {score:.9g} {_TAG}\n")
    os.replace(unfinished, path)


def _word(text: str) -> str:
    return re.sub(r"\s+", lambda space: quote(space[0]), text)
