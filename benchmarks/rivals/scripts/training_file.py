"""A training file in the format of a library."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_once(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """`path`, a JSONL file of `rows`: rank 0 writes it if it is not there yet, and the other ranks wait for it."""
    if int(os.environ.get("RANK", "0")) == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        partial.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return str(path)
