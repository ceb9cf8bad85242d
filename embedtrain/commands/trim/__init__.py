"""`python -m embedtrain trim model=DIR data=[PATH,...] top=64000 output_dir=DIR`: a smaller vocabulary for a model."""

from dataclasses import dataclass
from pathlib import Path

from embedtrain.config.checks import check_train_sources
from embedtrain.config.command_options import (
    CorpusOptions,
    KindOptions,
    ModelOptions,
    PoolingOptions,
    RowsOptions,
    WrittenModelOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.kinds import load_kind
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_corpus, parse_sources
from embedtrain.config.paths import require_models, require_sources
from embedtrain.config.validation import OptionChecks

HELP = """embedtrain trim: a smaller vocabulary for a model

  embedtrain trim model=DIR data=[PATH,...] top=64000 output_dir=DIR ...

Texts of which all tokens are kept are tokenized as before, and have exactly the
same outputs.

{options: model! output_dir! data corpus top min_count dtype}"""


@dataclass(kw_only=True)
class TrimOptions(WrittenModelOptions, CorpusOptions, RowsOptions, PoolingOptions, KindOptions, ModelOptions):
    """Options of `python -m embedtrain trim`."""

    # maximum number of tokens to keep, the most frequent ones; null: no maximum
    top: int | None = option(None, at_least=1, hint="null for no maximum")
    min_count: int = option(1, at_least=1)  # how often a token that is kept occurs at least


def compose(arguments: list[str]) -> TrimOptions:
    """The options, checked."""
    options = compose_command("trim", TrimOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    if options.kind is not None:
        load_kind(options.kind, "kind")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the smaller model")
    options.corpus = parse_corpus(options.corpus)
    if options.data:
        options.data = parse_sources(options.data, "data", InfoNCEConfig())
        check_train_sources(options.data, "data")
    check.require(
        bool(options.data or options.corpus), "data", "is missing, and corpus as well: write texts to count tokens of"
    )
    return options


def require_paths(options: TrimOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_models(model=options.model)
    require_sources(options.data or [], options.corpus)


def run(options: TrimOptions) -> Path:
    """Count the tokens of the texts, write the model with the tokens to keep, reopen and verify it."""
    from embedtrain.commands.trim.vocabulary import trim_model
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    return trim_model(options, Path(options.output_dir), Console()).directory
