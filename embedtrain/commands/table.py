"""The console command `embedtrain COMMAND ...`: the table of commands, and the choice of one.

A command is a module with a `__main__.py`, which `python -m` runs as well. Nothing here imports torch.
"""

import difflib
import runpy
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from embedtrain import __version__
from embedtrain.cli.completion import SHELLS, completion_script
from embedtrain.cli.entry import run_command
from embedtrain.config.migration.commands import IN_PYTHON, SUBCOMMANDS
from embedtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: what follows `embedtrain`.
        module: what follows `python -m`.
        summary: its line in the overview.
        has_ranks: whether several processes may run it together, one per GPU.
    """

    name: str
    module: str
    summary: str
    has_ranks: bool = False


COMMANDS = {
    command.name: command
    for command in (
        Command("train", "embedtrain", "train a model; the same command resumes it", has_ranks=True),
        Command(
            "evaluate", "embedtrain.commands.evaluate", "measure a model on evaluation sets or MTEB", has_ranks=True
        ),
        Command("mine", "embedtrain.commands.mine", "mine hard negatives for training data", has_ranks=True),
        Command(
            "filter", "embedtrain.commands.filter", "keep the training rows whose positives rank high", has_ranks=True
        ),
        Command(
            "vectors",
            "embedtrain.commands.vectors",
            "compute a teacher's vectors of training data once",
            has_ranks=True,
        ),
        Command("search", "embedtrain.commands.search", "search a corpus with a model"),
        Command("export", "embedtrain.commands.export", "write a model directory from a checkpoint"),
        Command("verify", "embedtrain.commands.verify", "compare the vectors of serving engines with those of a model"),
        Command("merge", "embedtrain.commands.merge", "merge the weights of several models", has_ranks=True),
        Command("calibrate", "embedtrain.commands.calibrate", "prepare vectors for compression", has_ranks=True),
        Command("inspect", "embedtrain.commands.inspect", "show how data is read, cut and batched"),
        Command("prune", "embedtrain.commands.prune", "make a smaller model from some of a model's layers"),
        Command(
            "trim", "embedtrain.commands.trim", "make a smaller model without the tokens that a corpus does not use"
        ),
        Command("static", "embedtrain.commands.static", "make a static embedding model from a model", has_ranks=True),
        Command("split", "embedtrain.commands.split", "hold out queries of training data as an evaluation set"),
        Command("plan", "embedtrain.commands.plan", "estimate memory, strategy and time before a GPU is booked"),
        Command("report", "embedtrain.commands.report", "write an HTML page about one run or several"),
        Command(
            "doctor", "embedtrain.commands.doctor", "check whether this machine is ready for training", has_ranks=True
        ),
        Command("submit", "embedtrain.commands.submit", "submit a training to a cluster"),
    )
}
_OVERVIEW = """embedtrain {version}: train retrieval models on one GPU, one node or many nodes

usage: embedtrain COMMAND [option=value ...]

{commands}

First run:   embedtrain train recipe=quickstart
Options:     embedtrain COMMAND --help
Completion:  embedtrain completion bash|zsh|fish
"""


def main() -> None:
    """Run the command that the first argument names, as `python -m` runs its module."""
    program, *arguments = sys.argv
    arguments = _with_topic_last(arguments)
    if not arguments or arguments[0] not in COMMANDS:
        run_command(_answer, lambda _: None, has_ranks=False)
    command = COMMANDS[arguments[0]]
    options = ["--gpus=auto"] if command.has_ranks and not _names_ranks(arguments) else []
    sys.argv = [program, *options, *arguments[1:]]
    run_module(command)


def run_module(command: Command) -> None:
    """Run a command with the arguments of the process."""
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)


def _with_topic_last(arguments: list[str]) -> list[str]:
    """`help COMMAND`, as git and cargo have it, as `COMMAND --help`; `--help TOPIC` as `train --help TOPIC`."""
    if arguments[:1] and arguments[0].startswith("--help="):
        arguments = ["--help", arguments[0].partition("=")[2], *arguments[1:]]
    if arguments[:1] not in (["help"], ["--help"], ["-h"]) or not arguments[1:] or arguments[1].startswith("-"):
        return arguments
    if arguments[1] in COMMANDS:
        return [arguments[1], "--help", *arguments[2:]]
    return ["train", "--help", *arguments[1:]]


def _names_ranks(arguments: Sequence[str]) -> bool:
    return any(argument.startswith(("--gpus", "--nproc")) for argument in arguments)


def overview() -> str:
    """All commands, each with its line, on one screen."""
    width = max(map(len, COMMANDS))
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS.values()]
    return _OVERVIEW.format(version=__version__, commands="\n".join(lines))


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
        print(
            completion_script(
                shell, {command.name: (command.module, command.has_ranks) for command in COMMANDS.values()}
            ),
            end="",
        )
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
