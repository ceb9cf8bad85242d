"""Options of `python -m embedtrain.mine`."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from embedtrain.config.checks import check_train_sources
from embedtrain.config.compose import compose_command
from embedtrain.config.evaluation import IndexConfig, Unshard
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.parsing import parse_sources
from embedtrain.config.recipe import DataConfig, Pooling, Precision, TrainSource
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

HELP = f"""embedtrain mine: hard negatives for training rows

  embedtrain mine model=DIR data=[PATH,...] output_dir=DIR [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain.mine model=DIR data=[PATH,...] ...

PATH: whatever training reads. Negatives come from all documents of all rows,
and from corpus. The same command resumes, on any number of ranks.

{{options: model! data! output_dir! corpus negatives rank_min rank_max relative_margin
  sampling teacher keep_existing_negatives query_prompt precision}}

{LAUNCH_HELP}"""


class Sampling(str, Enum):
    """Which of the qualifying candidates become negatives: the best, or a random sample."""

    top = "top"
    random = "random"


class MarginReference(str, Enum):
    """The positive whose score margins refer to, if a query has several, in one row or in many."""

    lowest = "lowest"
    highest = "highest"


@dataclass(kw_only=True)
class MineOptions:
    """Options of `python -m embedtrain.mine`."""

    adapter: str | None = None  # a LoRA adapter in PEFT's format: directory or Hub id
    model: str = ""  # model directory or Hub id
    data: Any = None  # list of TrainSource, or of paths; or one path
    # Further documents to search, one path or a list: BEIR directories, corpus files, tables, Hub ids (ID@REVISION).
    corpus: Any = None
    output_dir: str = ""  # for the mined rows, a file per source, and summary.json

    negatives: int = 15  # maximum per row, including those that it keeps
    rank_min: int = 0  # number of the best qualifying candidates to skip
    rank_max: int = 100  # number of candidates per query
    # A negative scores at most (1 - this) times the positive: the 95 % rule. With a cross-encoder as teacher, its
    # probability is at most so much of the positive's, both after a sigmoid.
    relative_margin: float | None = 0.05
    absolute_margin: float | None = None  # a negative scores at most the positive's score minus this
    max_score: float | None = None  # of a negative; the teacher's score if there is one
    min_score: float | None = None  # of a negative; the teacher's score if there is one
    margin_reference: MarginReference = MarginReference.highest
    sampling: Sampling = Sampling.top
    seed: int = 42  # which negatives `sampling=random` draws
    keep_existing_negatives: bool = False  # keep the rows' negatives before the new ones, except for positives

    # Bi-encoder or cross-encoder whose scores are written and used for margins and the ranks of negatives. Those of a
    # cross-encoder are raw, before any sigmoid.
    teacher: str | None = None
    teacher_revision: str | None = None  # a commit, tag or branch of its Hub repository
    teacher_max_length: int | None = None  # tokens, of a pair for a cross-encoder; default: the teacher's
    teacher_pair_template: Any = None  # of a cross-encoder, as model.pair_template
    # A cross-encoder reads a document that is too long in overlapping windows, of which the best counts.
    teacher_document_windows: bool = False
    scores: bool = True  # write pos_scores and neg_scores

    pooling: Pooling | None = None
    normalize: bool | None = None  # L2-normalize vectors; default: the model's setting
    max_length: int | None = None  # tokens; default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    instruction_format: str = DataConfig.instruction_format  # as data.instruction_format
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    trust_remote_code: bool = False  # execute Python code of the model: only for authors you trust
    precision: Precision | None = None  # default: bf16 on GPUs, fp32 on CPUs
    chunk_tokens: int = 16384  # per forward pass, including padding
    unshard: Unshard = Unshard.layer
    index: IndexConfig = field(default_factory=IndexConfig)
    query_batch_size: int = 4096  # rows that are mined and written together; an interrupted run resumes after them
    cache_dir: str | None = None  # as data.cache_dir
    timeout: float = 1800.0  # seconds that a rank waits for the others, also while rank 0 collects documents


def check_mine(options: MineOptions) -> MineOptions:
    """Check the options; `data` must be a list of sources."""
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    data = "is missing; write data=[PATH,...], files, folders or Hub data sets of training rows"
    check.require(bool(options.data), "data", data)
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the mined rows")
    check.at_least(1, "negatives")
    check.at_least(0, "rank_min")
    check.require(options.rank_min < options.rank_max, "rank_min", f"must be below rank_max={options.rank_max}")
    num_ranks = options.rank_max - options.rank_min
    check.require(
        options.negatives <= num_ranks,
        "negatives",
        f"between rank_min={options.rank_min} and rank_max={options.rank_max} are {num_ranks} documents; "
        "write a larger rank_max, or fewer negatives",
    )
    check.require(
        options.relative_margin is None or 0 <= options.relative_margin < 1,
        "relative_margin",
        "must be a fraction of the positive's score from 0 to below 1, such as 0.05; null for none",
    )
    check.at_least(0, "absolute_margin", "null for none")
    check.number("min_score", "null for no limit")
    check.number("max_score", "null for no limit")
    check.require(
        options.min_score is None or options.max_score is None or options.min_score <= options.max_score,
        "min_score",
        f"is above max_score={options.max_score}",
    )
    check.seed("seed")
    for name in ("teacher_max_length", "teacher_revision", "teacher_pair_template", "teacher_document_windows"):
        has_effect = not getattr(options, name) or options.teacher is not None
        check.require(has_effect, name, "has no effect without a teacher; write teacher=DIR")
    check.require(options.teacher != "", "teacher", "is empty; write a bi-encoder or cross-encoder, or null for none")
    check.length("max_length")
    check.length("teacher_max_length")
    check.instruction_format()
    check.at_least(1, "chunk_tokens")
    check.within(1, 8192, "query_batch_size")
    check.positive("timeout")
    corpus = [options.corpus] if isinstance(options.corpus, str) else options.corpus or []
    if not isinstance(corpus, list) or not all(isinstance(path, str) and path for path in corpus):
        raise ConfigError(f"corpus={written(corpus)}: must be a path or a list of paths")
    options.corpus = corpus
    check_train_sources(options.data, "data")
    for source in options.data:
        _check_source(source, options.output_dir)
    return options


def _check_source(source: TrainSource, output_dir: str) -> None:
    if not source.path:
        raise ConfigError("data: a path is empty; write data=[PATH,...]")
    OptionChecks(source, f"data, {source.path}: ").require(
        source.name is None or (bool(source.name) and "/" not in source.name and not source.name.startswith(".")),
        "name",
        f"becomes the name of a file in {output_dir}; write one without / that does not start with a dot",
    )
    directory = Path(source.path).expanduser()
    if directory.is_dir() and Path(output_dir).expanduser().resolve().is_relative_to(directory.resolve()):
        raise ConfigError(
            f"output_dir={output_dir} is in {source.path}, whose files are all read as rows: write a directory outside"
        )


def compose_mine(arguments: list[str]) -> MineOptions:
    """The options, checked."""
    options = compose_command("mine", MineOptions, arguments, HELP)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    return check_mine(options)
