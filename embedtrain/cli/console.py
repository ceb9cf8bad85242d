"""The console command `embedtrain COMMAND ...`: the choice of a command, the overview, and what was probably meant."""

import difflib
import shlex
import sys
from collections.abc import Sequence

from embedtrain import __version__
from embedtrain.cli.completion import SHELLS, completion_script
from embedtrain.cli.entry import run_command, run_named
from embedtrain.config.commands import COMMANDS, TOPICS, Command, find_command
from embedtrain.config.migration import IN_PYTHON, SUBCOMMANDS
from embedtrain.errors import ConfigError

_OVERVIEW = """embedtrain {version}: train retrieval models on one GPU, one node or many nodes

usage: embedtrain COMMAND [option=value ...]

{commands}

First run:   embedtrain train recipe=quickstart
Options:     embedtrain COMMAND --help
Completion:  embedtrain completion bash|zsh|fish
"""


def main() -> None:
    """Run the command that the first argument names, on all GPUs if it has ranks."""
    program, *arguments = sys.argv
    arguments = _with_topic_last(arguments)
    if not arguments or (arguments[0] not in COMMANDS and ":" not in arguments[0]):
        run_command(_answer, lambda _: None, has_ranks=False)
    sys.argv = [program, *arguments]

    def find() -> Command:
        command = find_command(arguments[0])
        if command is None:
            raise ConfigError(_suggestion(arguments))
        return command

    run_named(find, on_all_gpus=True)


def _with_topic_last(arguments: list[str]) -> list[str]:
    """`help COMMAND`, as git and cargo have it, as `COMMAND --help`; `--help TOPIC` as `train --help TOPIC`."""
    if arguments[:1] and arguments[0].startswith("--help="):
        arguments = ["--help", arguments[0].partition("=")[2], *arguments[1:]]
    if arguments[:1] not in (["help"], ["--help"], ["-h"]) or not arguments[1:] or arguments[1].startswith("-"):
        return arguments
    if arguments[1] in COMMANDS:
        return [arguments[1], "--help", *arguments[2:]]
    return ["train", "--help", *arguments[1:]]


def overview() -> str:
    """All commands, each with its line, on one screen."""
    width = max(map(len, COMMANDS))
    parts = []
    for topic, title in TOPICS.items():
        lines = [f"  {each.name:<{width}}  {each.summary}" for each in COMMANDS.values() if each.topic == topic]
        parts.append("\n".join([f"{title}:", *lines]))
    return _OVERVIEW.format(version=__version__, commands="\n".join(parts))


def _answer(arguments: Sequence[str]) -> None:
    """Print the overview or the version; a ConfigError names the command that was probably meant."""
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(overview(), end="")
        return
    if arguments[0] in ("--version", "-V", "version"):
        print(f"embedtrain {__version__}")
        return
    if arguments[0] == "completion":
        shell = arguments[1] if len(arguments) > 1 else ""
        if shell not in SHELLS:
            written = shlex.join(["completion", *arguments[1:2]])
            raise ConfigError(f"{written}: write `embedtrain completion SHELL`, one of {', '.join(SHELLS)}")
        print(completion_script(shell), end="")
        return
    raise ConfigError(_suggestion(arguments))


def _suggestion(arguments: Sequence[str]) -> str:
    first, rest = arguments[0], arguments[1:]
    named = next((argument for argument in rest if argument in COMMANDS), None)
    if first.startswith("-") and named is not None:
        arguments = [named, *(argument for argument in arguments if argument != named)]
        return f"{first} before the command: write `embedtrain {shlex.join(arguments)}`"
    if "=" in first or first.startswith("-"):
        return f"a command is missing before {first}: write `embedtrain train {shlex.join(arguments)}`"
    if first.lower() in IN_PYTHON:
        return (
            f"there is no command {first!r}: open the exported directory with sentence-transformers, or use "
            "embedtrain.load_encoder in Python; `embedtrain search` searches a corpus"
        )
    close = difflib.get_close_matches(first.lower(), [*COMMANDS, *SUBCOMMANDS], n=1, cutoff=0.6)
    hint = f"did you mean `embedtrain {SUBCOMMANDS.get(close[0], close[0])}`? " if close else ""
    return f"there is no command {first!r}: {hint}commands are {', '.join(COMMANDS)}"


if __name__ == "__main__":
    main()
