"""Commands in the pages: the lines of a shell block that start embedtrain, what they compose, and their checks."""

import contextlib
import importlib
import io
import itertools
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from embedtrain.config.commands import COMMANDS
from embedtrain.distributed.signals import StopSignals
from embedtrain.pipeline.types import Pipeline

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


# Where the work of a command begins, after all checks that need no weights: a function that ends it there.
_CLAIM = "embedtrain.training.train:claim_output_dir"
_SHARD = "embedtrain.inference.loading.load:shard_encoder"
_GRAPH = "onnxruntime:InferenceSession"
WORK = {
    "train": (_CLAIM,),
    **dict.fromkeys(("evaluate", "search", "mine", "filter", "vectors", "calibrate", "static"), (_SHARD, _GRAPH)),
    "export": tuple(f"embedtrain.commands.export.convert:export_{what}" for what in ("checkpoint", "adapters")),
    "merge": ("embedtrain.commands.merge.output:locked_output",),
    "prune": ("embedtrain.models.build:full_state_dict",),
    "trim": ("embedtrain.commands.trim.vocabulary:_count_tokens",),
}
WHOLE = ("inspect", "plan", "split")  # they run to their end
# What they need besides files is no part of a test: serving engines, a cluster, a language model, PDF files, a GPU.
COMPOSED = ("verify", "submit", "synthesize", "pages", "report", "doctor")
# Of mteb, whose import takes seconds; tests/evaluate runs these.
COMPOSED_OPTIONS = ("mteb=", "suite=")


class _WorkBegins(BaseException):
    """No error: a command has made its checks."""


def check(command: Command, options: Any) -> str:
    """Run a composed command until its work begins, which needs more than configurations; what it printed.

    Raises what the command raises.
    """
    declared = COMMANDS[command.name]
    declared.require_paths(options)
    of_mteb = any(word.startswith(COMPOSED_OPTIONS) for word in command.arguments)
    if command.name in COMPOSED or of_mteb or isinstance(options, Pipeline):
        return ""
    if command.name == "train":
        options = options[:1]  # the others differ in values alone
    elif declared.output is not None and Path(getattr(options, declared.output) or "new").exists():
        new = tempfile.mkdtemp(dir=".")  # what the command writes is there already, for a later one
        setattr(options, declared.output, f"{new}/output")
    if command.name == "split":
        options.dev = 1  # the rows here are few
    with contextlib.ExitStack() as stack:
        for place in WORK.get(command.name, ()):
            module, _, function = place.partition(":")
            stack.enter_context(patch.object(importlib.import_module(module), function, side_effect=_WorkBegins))
        # As for a user with a network who has logged in: nothing is asked of the Hub before the work.
        if any(word.startswith("push_to_hub=") for word in command.arguments):
            stack.enter_context(patch("embedtrain.formats.hub.is_offline_mode", return_value=False))
            stack.enter_context(patch("embedtrain.formats.hub.get_token", return_value="hf_token"))
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(printed))
        signals = (StopSignals(),) if declared.saves_on_signal else ()
        try:
            declared.run(options, *signals)
        except _WorkBegins:
            return printed.getvalue()
    assert command.name in WHOLE or "page_library" in " ".join(command.arguments), f"{command} did its work"
    return printed.getvalue()
