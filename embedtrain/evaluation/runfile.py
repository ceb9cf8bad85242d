"""Rankings and judgements as TREC files, what trec_eval and its relatives read.

A run file holds `query Q0 document rank score tag`, a qrels file `query 0 document gain`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from embedtrain.files import atomic_write

_TAG = "embedtrain"


def run_path(folder: Path, name: str) -> Path:
    """Where the run of the set `name` is written; what cannot stand in a file name is written as in a URL."""
    return folder / f"{_file_name(name)}.run"


def qrels_path(folder: Path, name: str) -> Path:
    """Where its judgements are written."""
    return folder / f"{_file_name(name)}.qrels"


def write_run(path: Path, rankings: Iterable[tuple[str, Mapping[str, float]]], depth: int) -> None:
    """Write the first `depth` documents of each query: its id, and scores by document id, best first.

    The format has no quoting, so white space within an id is written as in a URL (`%20`). Scores have nine
    digits: read as float32 they are the same bits, and trec_eval finds the same ties.
    """
    _write(
        path,
        (
            f"{_word(query)} Q0 {_word(document)} {rank} {score:.9g} {_TAG}\n"
            for query, found in rankings
            for rank, (document, score) in enumerate(islice(found.items(), depth), start=1)
        ),
    )


def write_qrels(path: Path, judgements: Mapping[str, Mapping[str, int]]) -> None:
    """Write every judgement; ids as in the run."""
    _write(
        path,
        (
            f"{_word(query)} 0 {_word(document)} {gain}\n"
            for query, gains in judgements.items()
            for document, gain in gains.items()
        ),
    )


def _write(path: Path, lines: Iterator[str]) -> None:
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)


def _file_name(name: str) -> str:
    # Two names never become one. Letters of all languages stay.
    return re.sub(r"[^\w.@+-]", lambda found: quote(found[0], safe=""), name)


def _word(text: str) -> str:
    return re.sub(r"\s+", lambda space: quote(space[0]), text)
