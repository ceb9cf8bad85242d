"""`torchrun -m embedtrain synthesize corpus=PATH output_dir=DIR`: training rows that a language model writes."""

import importlib.util
import math
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.commands.synthesize.checks import ChecksConfig, check_checks
from embedtrain.commands.synthesize.types import WriterBackend, WriterConfig, check_writer
from embedtrain.config.command_options import CorpusOptions, ErrorOptions, OutputOptions, RankOptions, SeedOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.options import check_values, option
from embedtrain.config.parsing import parse_corpus, parse_sources
from embedtrain.config.paths import require_models, require_output_outside, require_sources
from embedtrain.config.recipe import TrainSource
from embedtrain.config.validation import OptionChecks, is_expected
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import install_command

if TYPE_CHECKING:
    from embedtrain.distributed.signals import StopSignals

HELP = f"""embedtrain synthesize: training rows from documents, by a language model

  embedtrain synthesize corpus=PATH writer.model=MODEL output_dir=DIR
  torchrun --nproc-per-node 8 -m embedtrain synthesize corpus=PATH ...

PATH: documents, as search and mine read them. The language model writes
queries for each. Every answer is stored before it is used: the same command
resumes, on any number of ranks, and asks nothing twice.

{{options: corpus! output_dir! writer.backend writer.model writer.url
  queries.per_document queries.examples max_documents max_requests max_tokens}}

{LAUNCH_HELP}"""


class Positive(str, Enum):
    """What the positive of a row is: the whole document, or the window that the query was written for."""

    document = "document"
    window = "window"


@dataclass(kw_only=True)
class QueriesConfig:
    """Which queries are written."""

    per_document: int = option(3, within=(1, 1000))  # queries of a document; of a long one, for several windows
    # Kinds and their shares, of question, keywords, sentence, title, cross_lingual, multi_hop, instruction, and
    # templates of your own in `prompts`: one name, or a mapping. Default: {question: 2, keywords: 1, sentence: 1}.
    kinds: Any = None
    languages: list[str] = field(default_factory=list)  # of cross_lingual, as ISO 639-1 codes: [de,fr]
    # Training rows of your own: list of TrainSource, or of paths; or one path. Prompts show some as examples.
    examples: Any = option(None, is_input=True, items=TrainSource)
    num_examples: int = option(3, within=(1, 100))  # in each prompt, if there are any
    negatives: int = option(0, within=(0, 100))  # hard negatives of each query that the language model writes


@dataclass(kw_only=True)
class WindowConfig:
    """How long documents are read: a query is for one window."""

    words: int = option(400, at_least=10)  # of a window; two characters of Chinese or Japanese are a word
    overlap: int = option(50, at_least=0)  # words that a window has in common with the one before it
    positive: Positive = Positive.document  # of a row: the document, or the window that its query is for


@dataclass(kw_only=True)
class SynthesizeOptions(SeedOptions, ErrorOptions, RankOptions, OutputOptions, CorpusOptions):
    """Options of `python -m embedtrain synthesize`."""

    writer: WriterConfig = field(default_factory=WriterConfig)
    queries: QueriesConfig = field(default_factory=QueriesConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    # a folder of templates NAME.jinja, which replace those of the same name; other names are kinds of your own
    prompts: str | None = option(None, is_input=True)
    paraphrase: float = option(0.0, within=(0, 1))  # share of queries that are asked for once more in other words
    max_documents: int | None = option(None, at_least=1, hint="null for all documents")  # the first ones
    # Limits of all requests of output_dir, also of runs that were interrupted or had other options. Null: no limit.
    max_requests: int | None = option(None, at_least=1, hint="null for no limit")
    # of what is read, and the most that may be written
    max_tokens: int | None = option(None, at_least=1, hint="null for no limit")


_LANGUAGE = re.compile(r"[a-z]{2}")
DEFAULT_KINDS = {"question": 2.0, "keywords": 1.0, "sentence": 1.0}
_KIND = re.compile(r"[A-Za-z][\w-]*")


def compose(arguments: list[str]) -> SynthesizeOptions:
    """The options, checked."""
    options = compose_command("synthesize", SynthesizeOptions, arguments, HELP)
    check = OptionChecks(options)
    options.corpus = parse_corpus(options.corpus)
    check.require(bool(options.corpus), "corpus", "is missing; write files, folders or Hub data sets of documents")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the rows")
    require_output_outside(options.output_dir, options.corpus, read_as="documents")
    check_writer(options.writer, "writer.")
    check_checks(options.checks, "checks.")
    _check_queries(options.queries)
    OptionChecks(options.window, "window.").require(
        options.window.overlap < options.window.words, "overlap", f"must be below window.words={options.window.words}"
    )
    return options


def _check_queries(queries: QueriesConfig) -> None:
    from embedtrain.commands.synthesize.prompts import QUERY_KINDS

    check = OptionChecks(queries, "queries.")
    queries.kinds = _parse_kinds(queries.kinds)
    for code in queries.languages:
        check.require(
            bool(_LANGUAGE.fullmatch(code)), "languages", f"{code!r} is no ISO 639-1 code of two letters, such as de"
        )
    asked = [name for name, kind in QUERY_KINDS.items() if kind.has_language and queries.kinds.get(name)]
    check.require(
        bool(queries.languages) or not asked,
        "languages",
        f"queries.kinds has {', '.join(asked)}, which needs languages; write queries.languages=[de,fr]",
    )
    check.require(
        bool(asked) or not queries.languages,
        "languages",
        "has no effect without a kind of queries in another language; write queries.kinds={question: 0.8, "
        "cross_lingual: 0.2}",
    )
    if queries.examples is not None:
        queries.examples = parse_sources(queries.examples, "queries.examples", InfoNCEConfig())
    for source in queries.examples or ():
        check_values(source, "queries.examples.")


def _parse_kinds(value: Any) -> dict[str, float]:
    """The shares of the kinds that are asked for, by name."""
    kinds = dict(DEFAULT_KINDS) if value is None else {value: 1.0} if isinstance(value, str) else value
    if not isinstance(kinds, dict):
        raise ConfigError(
            f"queries.kinds={value!r}: write one kind, or shares by kind, as {{question: 2, keywords: 1}}"
        )
    for kind, share in kinds.items():
        if not (isinstance(kind, str) and _KIND.fullmatch(kind)):
            raise ConfigError(f"queries.kinds: {kind!r} is no name of a kind, which has letters, digits, - and _")
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not (is_number and math.isfinite(share) and share >= 0):
            raise ConfigError(f"queries.kinds.{kind}={share}: must be at least 0; shares are relative to their sum")
    kinds = {kind: float(share) for kind, share in kinds.items() if share}
    if not kinds:
        raise ConfigError(f"queries.kinds={value!r}: has no kind of queries; write question")
    return kinds


def require_paths(options: SynthesizeOptions) -> None:
    """Raise a ConfigError for a path that does not exist, or a library that is not installed."""
    require_sources(options.queries.examples or [], options.corpus)
    local = {
        f"{name}.model": writer.model
        for name, writer in (("writer", options.writer), ("checks.judge.writer", options.checks.judge.writer))
        if writer.model and writer.backend is WriterBackend.local
    }
    require_models(**local, **{"checks.round_trip.model": options.checks.round_trip.model or None})
    prompts = options.prompts
    if prompts is not None and not (expand_user(prompts).is_dir() or is_expected(prompts)):
        raise ConfigError(f"prompts={prompts}: there is no such folder")
    if importlib.util.find_spec("json_repair") is None:
        raise ConfigError(f"answers are read by json-repair, which is not installed: {install_command('synthesize')}")


def run(options: SynthesizeOptions, signals: "StopSignals") -> Path:
    """Read the documents, ask the language model, check what it wrote, write the rows, and print a summary.

    Returns the file of rows. Raises Stopped if a signal has ended it, after the requests in flight.
    """
    from embedtrain.commands.synthesize.answers import open_answers
    from embedtrain.commands.synthesize.asker import open_asker
    from embedtrain.commands.synthesize.synthesis import synthesize
    from embedtrain.distributed.signals import report_early_stop
    from embedtrain.distributed.world import joined_world
    from embedtrain.inference.loading.load import quiet_libraries
    from embedtrain.tracking.console import Console

    quiet_libraries()
    limits = {"max_requests": options.max_requests, "max_tokens": options.max_tokens}
    with (
        joined_world(options.timeout) as world,
        open_answers(expand_user(options.output_dir), world, **limits) as answers,
    ):
        console = Console(enabled=world.is_main)
        if world.watchdog is not None and signals.report is report_early_stop:  # else that of a pipeline
            signals.report = world.watchdog.end_after_signal
        with console.progress() as progress:
            asker = open_asker(options.writer, answers, signals=signals, progress=progress)
            console.note(asker.where)
            judge = None
            if options.checks.judge.writer.model:
                writer, name = options.checks.judge.writer, "checks.judge.writer"
                judge = open_asker(writer, answers, option=name, signals=signals, progress=progress)
                console.note(f"judge: {judge.where}")
            return synthesize(options, world, console, asker, asker.usage, judge)
