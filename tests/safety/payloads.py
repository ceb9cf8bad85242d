"""What attackers put into files, and the doors that are made to open them, on one rank with someone who says yes."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError
from embedtrain.evaluate.options import compose_evaluate
from embedtrain.export.options import compose_export
from embedtrain.inspect.options import compose_inspect
from embedtrain.mine.options import compose_mine
from embedtrain.search.options import compose_search

MARKER = "marker"


class Outcome(NamedTuple):
    """What a door did: whether foreign code ran, what was printed, the sentence it ended with and its class."""

    ran: bool
    printed: str
    sentence: str
    kind: str


class Bomb:
    """Makes the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (code(self.marker),)


def code(marker: Path) -> str:
    """Python that makes the marker."""
    return f"open({str(marker)!r}, 'w').close()\n"


def plant_module(folder: Path, marker: Path) -> None:
    """`evil.py` with classes of every name that is asked for here."""
    names = ("Mod", "Config", "Model", "Tok")
    (folder / "evil.py").write_text(code(marker) + "".join(f"class {name}: ...\n" for name in names))


def plant_pickle(path: Path, marker: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """A file that torch.load would run, beside tensors that it should hold."""
    torch.save({**(tensors or {}), "more": Bomb(marker)}, path)


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file, which is made if it is missing."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def deep(opening: str, closing: str, times: int = 100_000) -> str:
    """JSON or YAML of so many levels."""
    return opening * times + closing * times


def _train(arguments: list[str]) -> None:
    from embedtrain.distributed.world import joined_world
    from embedtrain.training.train import train

    (recipe,) = compose_recipes(arguments)
    with joined_world() as world:
        train(recipe, world)


def _door(name: str) -> Callable[[list[str]], None]:
    import embedtrain.evaluate.__main__
    import embedtrain.export.__main__
    import embedtrain.inspect.__main__
    import embedtrain.mine.__main__
    import embedtrain.search.__main__

    doors: dict[str, Callable[[list[str]], None]] = {
        "train": _train,
        "evaluate": lambda given: embedtrain.evaluate.__main__.main(compose_evaluate(given)),
        "export": lambda given: embedtrain.export.act(compose_export(given)),
        "inspect": lambda given: embedtrain.inspect.act(compose_inspect(given)),
        "mine": lambda given: embedtrain.mine.__main__.main(compose_mine(given)),
        "search": lambda given: embedtrain.search.__main__.main(compose_search(given)),
    }
    return doors[name]


def attempt(_world: World, door: str, folder: Path, arguments: Sequence[str]) -> Outcome:
    """A door in `folder`, where Python finds modules as well; whoever is asked something answers yes."""
    printed, sentence, kind = io.StringIO(), "", ""
    marker = folder / MARKER
    marker.unlink(missing_ok=True)
    asked, sys.stdin = sys.stdin, io.StringIO("y\n" * 100)
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            _door(door)(list(arguments))
    except EmbedtrainError as error:
        sentence, kind = str(error), type(error).__name__
    except SystemExit as error:
        kind = f"exit {error.code}"
    finally:
        sys.stdin = asked
        sys.path.remove(str(folder))
    return Outcome(marker.exists(), printed.getvalue(), sentence, kind)
