"""What the tests of mining share: rows whose positives are near their queries, a model, and the command on ranks."""

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedtrain.commands.mine import compose as compose_mine
from embedtrain.commands.mine import run as main
from embedtrain.errors import EmbedtrainError
from tests.small import WORDS, save_guide, small_model

Rows = Sequence[Mapping[str, Any]]


def words(*numbers: int) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in numbers)


def query(i: int) -> str:
    return words(*(i * (j + 1) + i // 13 + j * j for j in range(3 + i % 3)))


def positive(i: int) -> str:
    """The query, and one or two words more."""
    return f"{query(i)} {words(7 * i + 3, *([5 * i] * (i % 2)))}"


def rows_alone(num_rows: int) -> list[dict[str, Any]]:
    """Rows of one positive each, no query twice."""
    rows = {query(i): {"query": query(i), "pos": [positive(i)]} for i in range(num_rows)}
    return list(rows.values())


def more_documents(count: int) -> list[str]:
    """Documents that answer no query."""
    return list(dict.fromkeys(words(*(11 * i + i // 7 * j + j for j in range(4 + i % 5))) for i in range(count)))


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def save_model(folder: Path, seed: int = 0) -> Path:
    """A sentence-transformers directory."""
    folder.mkdir(parents=True, exist_ok=True)
    return save_guide(small_model("bert"), folder, seed)


def mine(_world: Any, arguments: Sequence[str]) -> None:
    """Run the command on this rank."""
    main(compose_mine(list(arguments)))


def try_mining(_world: Any, folder: Path, arguments: Sequence[str]) -> tuple[str, str]:
    """Run the command on this rank in a folder: what it printed, and the message of its error, "" for none."""
    printed, error = io.StringIO(), ""
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        try:
            main(compose_mine(list(arguments)))
        except EmbedtrainError as caught:
            error = str(caught)
    return printed.getvalue(), error


def arguments(model: Path, data: Sequence[object], to: Path, **options: object) -> list[str]:
    """A command line in fp32 without margins, unless `options` set them."""
    chosen = {"relative_margin": "null", "precision": "fp32", **options}
    listed = ",".join(source if isinstance(source, str) else f"'{source}'" for source in data)
    return [
        f"model={model}",
        f"data=[{listed}]",
        f"output_dir={to}",
        *(f"{name}={value}" for name, value in chosen.items()),
    ]
