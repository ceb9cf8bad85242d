"""Options of `python -m embedtrain trim`."""

from dataclasses import dataclass
from typing import Any

from embedtrain.config.checks import check_train_sources
from embedtrain.config.code import code_option
from embedtrain.config.compose import compose_command
from embedtrain.config.kinds import load_kind
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.parsing import parse_sources
from embedtrain.config.recipe import ExportDtype, Pooling
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError

HELP = """embedtrain trim: a smaller vocabulary for a model

  embedtrain trim model=DIR data=[PATH,...] top=64000 output_dir=DIR ...

Texts of which all tokens are kept are tokenized as before, and have exactly the
same outputs.

{options: model! output_dir! data corpus top min_count dtype}"""


@dataclass(kw_only=True)
class TrimOptions:
    """Options of `python -m embedtrain trim`."""

    model: str = ""  # model directory or Hub id
    output_dir: str = ""  # for the smaller model
    data: Any = None  # training rows whose texts are counted: list of TrainSource, or of paths; or one path
    # Further documents that are counted, one path or a list: BEIR directories, corpus files, tables, Hub ids.
    corpus: Any = None
    top: int | None = None  # maximum number of tokens to keep, the most frequent ones; null: no maximum
    min_count: int = 1  # how often a token that is kept occurs at least

    kind: str | None = None  # default: that of the directory
    pooling: Pooling | None = None  # default: the model's
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    # Execute Python code of the model: only for authors you trust
    trust_remote_code: bool = code_option(False, "model", "revision")
    dtype: ExportDtype = ExportDtype.source  # in which the weights are written
    check: bool = True  # compare outputs with those of the model, reopen the directory and compare them again
    cache_dir: str | None = None  # as data.cache_dir


def compose(arguments: list[str]) -> TrimOptions:
    """The options, checked."""
    options = compose_command("trim", TrimOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    if options.kind is not None:
        load_kind(options.kind, "kind")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the smaller model")
    check.at_least(1, "min_count")
    check.at_least(1, "top", "null for no maximum")
    options.corpus = [options.corpus] if isinstance(options.corpus, str) else options.corpus or []
    if not isinstance(options.corpus, list) or not all(isinstance(path, str) and path for path in options.corpus):
        raise ConfigError(f"corpus={options.corpus}: must be a path or a list of paths")
    if options.data:
        options.data = parse_sources(options.data, "data", InfoNCEConfig())
        check_train_sources(options.data, "data")
    check.require(
        bool(options.data or options.corpus), "data", "is missing, and corpus as well: write texts to count tokens of"
    )
    return options
