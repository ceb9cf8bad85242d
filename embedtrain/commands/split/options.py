"""Options of `python -m embedtrain split`."""

from dataclasses import dataclass
from enum import Enum

from embedtrain.config.checks import check_train_sources
from embedtrain.config.command_options import ErrorOptions, OutputOptions, RowsOptions, SeedOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.parsing import parse_sources
from embedtrain.config.validation import OptionChecks, require_single_process
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user

HELP = """embedtrain split: hold out queries of training rows as a retrieval set

  embedtrain split data=PATH output_dir=DIR [dev=300] [option=value ...]

PATH: whatever training reads; several in brackets; with options as
'{path: PATH, columns: [title,body]}'.
Writes DIR/train.jsonl for data.train, and DIR/dev (corpus, queries,
qrels) for evaluation.sets.

{options: data! output_dir! dev corpus seed on_error cache_dir}"""


class DevCorpus(str, Enum):
    """The documents of the held-out set: those of its rows that no training row contains, or those of all rows."""

    held_out = "held_out"
    all = "all"


@dataclass(kw_only=True)
class SplitOptions(RowsOptions, OutputOptions, ErrorOptions, SeedOptions):
    """Options of `python -m embedtrain split`."""

    dev: int = 300  # queries to hold out, with all rows that share a query or a positive with them
    corpus: DevCorpus = DevCorpus.held_out  # all: search among the documents of training rows as well


def compose(arguments: list[str]) -> SplitOptions:
    """The options, checked."""
    require_single_process("split")
    options = compose_command("split", SplitOptions, arguments, HELP)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    check = OptionChecks(options)
    check.require(bool(options.data), "data", "is missing; write data=PATH, a file, folder or Hub data set of rows")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for train.jsonl and dev/")
    check.at_least(1, "dev")
    check.seed("seed")
    check_train_sources(options.data, "data")
    output_dir = expand_user(options.output_dir)
    for source in options.data:
        directory = expand_user(source.path)
        if directory.is_dir() and output_dir.resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"output_dir={options.output_dir} is in {source.path}, whose files are all read as rows: write a "
                "directory outside"
            )
    return options
