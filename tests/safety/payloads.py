"""Malicious files, and commands that open them on one rank with a user who answers yes to every prompt."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from embedtrain.config.commands import COMMANDS
from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError

MARKER = "marker"


class Outcome(NamedTuple):
    """The result of a command: whether foreign code ran, its output, and the message and class of its error."""

    ran: bool
    printed: str
    message: str
    kind: str


class Bomb:
    """Creates the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (code(self.marker),)


def code(marker: Path) -> str:
    """Python code that creates the marker."""
    return f"open({str(marker)!r}, 'w').close()\n"


def plant_module(folder: Path, marker: Path) -> None:
    """Write `evil.py` with the classes that the payloads refer to."""
    names = ("Mod", "Config", "Model", "Tok")
    (folder / "evil.py").write_text(code(marker) + "".join(f"class {name}: ...\n" for name in names))


def plant_pickle(path: Path, marker: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a file that torch.load would execute, with the tensors that it should hold."""
    torch.save({**(tensors or {}), "more": Bomb(marker)}, path)


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file, which is created if missing."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def deep(opening: str, closing: str, times: int = 100_000) -> str:
    """JSON or YAML with many nested levels."""
    return opening * times + closing * times


def _train(arguments: list[str]) -> None:
    from embedtrain.distributed.world import joined_world
    from embedtrain.training.train import train

    (recipe,) = compose_recipes(arguments)
    with joined_world() as world:
        train(recipe, world)


def _command(name: str) -> Callable[[list[str]], None]:
    """Composes the options of a command and runs it."""
    if name == "train":
        return _train
    command = COMMANDS[name]
    return lambda arguments: command.run(command.compose(arguments))


def attempt(_world: World, command: str, folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run a command in `folder`, which is on Python's path; prompts are answered with yes."""
    printed, message, kind = io.StringIO(), "", ""
    marker = folder / MARKER
    marker.unlink(missing_ok=True)
    stdin, sys.stdin = sys.stdin, io.StringIO("y\n" * 100)
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            _command(command)(list(arguments))
    except EmbedtrainError as error:
        message, kind = str(error), type(error).__name__
    except SystemExit as error:
        kind = f"exit {error.code}"
    finally:
        sys.stdin = stdin
        sys.path.remove(str(folder))
    return Outcome(marker.exists(), printed.getvalue(), message, kind)
