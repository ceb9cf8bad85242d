"""Commands in the pages: the lines of a shell block that start embedtrain, and the options that they compose."""

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from embedtrain.config.commands import COMMANDS

_LAUNCH = re.compile(r"--(gpus|nproc-per-node|nodes|node-rank|master|max-restarts)(=.*)?$")
_ENDS = ("||", "&&", "|", ";", "&", ">", "2>&1")


@dataclass(frozen=True)
class Command:
    """A command, its arguments, and whether the page expects it to fail."""

    name: str
    arguments: tuple[str, ...]
    may_fail: bool = False


def commands(shell: str) -> Iterator[Command]:
    """Every `embedtrain COMMAND` and `python -m embedtrain...` in a shell script, except in here-documents.

    Options of launchers are left out.
    """
    text = re.sub(r"<<-?\s*'?(\w+)'?[^\n]*\n.*?^\s*\1$", "", shell, flags=re.MULTILINE | re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines():
        if "embedtrain" not in line:
            continue
        words = shlex.split(line, comments=True)
        for index, (before, word) in enumerate(itertools.pairwise(words)):
            ends = [later for later, word in enumerate(words) if later > index and word in _ENDS]
            end = min(ends, default=len(words))
            may_fail = "||" in words[end : end + 1]
            if before == "-m" and word == "embedtrain":
                named = words[index + 2 : index + 3]
                name = named[0] if named and named[0] in COMMANDS else "train"
                yield Command(name, tuple(words[index + (3 if named == [name] else 2) : end]), may_fail)
                break
            if re.search(r"(^|/)embedtrain$", before) and word in COMMANDS:
                yield Command(word, tuple(_without_launcher(words[index + 2 : end])), may_fail)
                break


def _without_launcher(arguments: list[str]) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        match = _LAUNCH.match(word)
        if match is None:
            yield word
        elif match[2] is None:
            next(words, None)


def compose(command: Command) -> Any:
    """The options that the command composes from its arguments."""
    return COMMANDS[command.name].compose(list(command.arguments))
