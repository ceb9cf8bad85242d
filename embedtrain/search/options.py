"""search.options."""

import os
from dataclasses import dataclass

from embedtrain.config.compose import compose_command
from embedtrain.config.recipe import Precision
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class SearchOptions:
    """Options of `python -m embedtrain.search`."""

    model: str = ""  # model directory or Hub id
    corpus: str = ""  # BEIR folder, or a corpus.jsonl
    query: str | None = None  # without it queries are read from the keyboard, or line by line from a pipe
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    top_k: int = 5  # documents shown of each query
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # tokens (padding included) one forward pass may hold
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust


def compose_search(arguments: list[str]) -> SearchOptions:
    """The options of `python -m embedtrain.search`."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("search answers one person in one process: start it with python, not with torchrun")
    options = compose_command("search", SearchOptions, [_quoted(argument) for argument in arguments])
    if not options.model or not options.corpus:
        raise ConfigError("write model=DIR corpus=DIR, a model directory and a folder with a corpus.jsonl")
    if options.chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens={options.chunk_tokens}: must be above 0")
    if options.top_k < 1:
        raise ConfigError(f"top_k={options.top_k}: at least 1")
    return options


def _quoted(argument: str) -> str:
    """`query=` with its text in quotes: a question has commas and apostrophes, which mean something to Hydra."""
    if not argument.startswith("query=") or argument[6:7] in ("'", '"', ""):
        return argument
    text = argument.removeprefix("query=").replace("\\", "\\\\").replace('"', '\\"')
    return f'query="{text}"'
