"""Options of `python -m embedtrain.mine`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from embedtrain.config.compose import compose_command
from embedtrain.config.data_checks import FORMAT_SAYS, check_train_sources, is_instruction_format
from embedtrain.config.elements import parse_sources
from embedtrain.config.evaluation import IndexConfig, Unshard
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import DataConfig, Pooling, Precision, TrainSource
from embedtrain.errors import ConfigError


class Sampling(str, Enum):
    """Which of the documents that qualify become negatives: the best, or any, drawn by the seed."""

    top = "top"
    random = "random"


class MarginReference(str, Enum):
    """The positive whose score margins are taken from, where a question has several, in one row or in many."""

    lowest = "lowest"
    highest = "highest"


@dataclass(kw_only=True)
class MineOptions:
    """Options of `python -m embedtrain.mine`."""

    adapter: str | None = None  # a LoRA adapter on the model, as PEFT writes them: directory or Hub id
    model: str = ""  # model directory or Hub id
    data: Any = None  # list of TrainSource, or of paths; or one path
    # More documents to find negatives in, one path or a list: BEIR folders, corpus files, tables, Hub ids, which
    # ID@REVISION pins.
    corpus: Any = None
    output_dir: str = ""  # folder for the mined rows: a file for each source, and summary.json

    negatives: int = 15  # of each row at most, those that it keeps among them
    rank_min: int = 0  # so many of the best documents that qualify are passed over
    rank_max: int = 100  # so many of the best documents that may be negatives are looked at
    relative_margin: float | None = 0.05  # at most (1 - this) of the positive's score: the positive-aware 95 % rule
    absolute_margin: float | None = None  # at most the positive's score less this
    max_score: float | None = None  # of a negative; the teacher's score, where there is a teacher
    min_score: float | None = None  # of a negative; the teacher's score, where there is a teacher
    margin_reference: MarginReference = MarginReference.highest
    sampling: Sampling = Sampling.top
    seed: int = 42  # which negatives `sampling=random` draws
    keep_existing_negatives: bool = (
        False  # negatives that rows have stay, before those found; but positives are left out
    )

    # Bi-encoder or cross-encoder whose scores are written, and margins and ranks of negatives taken by.
    teacher: str | None = None
    teacher_revision: str | None = None  # a commit, tag or branch of its Hub repository
    # Pairs a cross-encoder scores at a time. Where memory ran out, mining goes on with fewer, as with another
    # `chunk_tokens`, `unshard` or `index.place`: only the last bits of scores may differ.
    teacher_batch_size: int = 32
    teacher_max_length: int | None = None  # tokens; default: the teacher's
    scores: bool = True  # write pos_scores and neg_scores

    pooling: Pooling | None = None
    normalize: bool | None = None  # L2-normalise vectors; default: as the model says
    max_length: int | None = None  # tokens; default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    instruction_format: str = DataConfig.instruction_format  # as data.instruction_format
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust
    precision: Precision | None = None  # default: bf16 on GPUs, fp32 on CPUs
    chunk_tokens: int = 16384  # of a forward pass, padding included
    unshard: Unshard = Unshard.layer
    index: IndexConfig = field(default_factory=IndexConfig)
    query_batch_size: int = 4096  # rows mined, and written, between two places to resume from
    cache_dir: str | None = None  # as data.cache_dir
    timeout: float = 1800.0  # seconds a rank waits for the others, and for rank 0 to collect the documents


Rule = tuple[Callable[[MineOptions], bool], Callable[[MineOptions], str]]

MAX_QUERY_BATCH_SIZE = 8192  # that are searched at a time

RULES: list[Rule] = [
    (
        lambda o: not o.model,
        lambda o: "no model: write model=DIR, a model directory or a Hub id",
    ),
    (
        lambda o: not o.data,
        lambda o: "no data: write data=[PATH,...], files, folders or Hub data sets of training rows",
    ),
    (
        lambda o: not o.output_dir,
        lambda o: "no place for the mined rows: write output_dir=DIR, a folder of their own",
    ),
    (
        lambda o: o.negatives < 1,
        lambda o: f"negatives={o.negatives}: at least 1 for each row",
    ),
    (
        lambda o: o.rank_min < 0,
        lambda o: f"rank_min={o.rank_min}: a number of documents that are passed over, 0 for none",
    ),
    (
        lambda o: o.rank_min >= o.rank_max,
        lambda o: f"rank_min={o.rank_min} and rank_max={o.rank_max} leave no document between: rank_max must be larger",
    ),
    (
        lambda o: o.negatives > o.rank_max - o.rank_min,
        lambda o: (
            f"negatives={o.negatives}, and between rank_min={o.rank_min} and rank_max={o.rank_max} are "
            f"{o.rank_max - o.rank_min} documents: write a larger rank_max, or fewer negatives"
        ),
    ),
    (
        lambda o: o.relative_margin is not None and not 0 <= o.relative_margin < 1,
        lambda o: (
            f"relative_margin={o.relative_margin}: a share of the positive's score from 0 to below 1, such as 0.05; "
            "null for none"
        ),
    ),
    (
        lambda o: o.absolute_margin is not None and not (math.isfinite(o.absolute_margin) and o.absolute_margin >= 0),
        lambda o: f"absolute_margin={o.absolute_margin}: a difference of scores, not negative; null for none",
    ),
    (
        lambda o: not all(score is None or math.isfinite(score) for score in (o.min_score, o.max_score)),
        lambda o: f"min_score={o.min_score}, max_score={o.max_score}: finite numbers; null for no limit",
    ),
    (
        lambda o: o.min_score is not None and o.max_score is not None and o.min_score > o.max_score,
        lambda o: f"min_score={o.min_score} is above max_score={o.max_score}: no document could qualify",
    ),
    (
        lambda o: not 0 <= o.seed < 2**63,
        lambda o: f"seed={o.seed}: a number from 0 to {2**63 - 1}",
    ),
    (
        lambda o: o.teacher is None and o.teacher_max_length is not None,
        lambda o: f"teacher_max_length={o.teacher_max_length} has no use without a teacher: write teacher=DIR",
    ),
    (
        lambda o: o.teacher is None and o.teacher_revision is not None,
        lambda o: f"teacher_revision={o.teacher_revision} has no use without a teacher: write teacher=ID",
    ),
    (
        lambda o: o.teacher == "",
        lambda o: "teacher= is empty: a bi-encoder or cross-encoder directory, or null for none",
    ),
    (
        lambda o: o.teacher_batch_size < 1,
        lambda o: f"teacher_batch_size={o.teacher_batch_size}: at least 1 pair",
    ),
    (
        lambda o: any(length is not None and length < 3 for length in (o.max_length, o.teacher_max_length)),
        lambda o: (
            f"max_length={o.max_length}, teacher_max_length={o.teacher_max_length}: at least 3, "
            "or there is no room for text between special tokens"
        ),
    ),
    (
        lambda o: not is_instruction_format(o.instruction_format),
        lambda o: f"instruction_format={o.instruction_format!r} {FORMAT_SAYS}",
    ),
    (
        lambda o: o.chunk_tokens < 1,
        lambda o: f"chunk_tokens={o.chunk_tokens}: must be above 0",
    ),
    (
        lambda o: not 1 <= o.query_batch_size <= MAX_QUERY_BATCH_SIZE,
        lambda o: f"query_batch_size={o.query_batch_size}: from 1 to {MAX_QUERY_BATCH_SIZE}",
    ),
    (
        lambda o: not (math.isfinite(o.timeout) and o.timeout > 0),
        lambda o: f"timeout={o.timeout}: seconds, above 0",
    ),
]


def check_mine(options: MineOptions) -> MineOptions:
    """The options themselves, if they can work. `data` must be a list of sources.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for broken, sentence in RULES:
        if broken(options):
            raise ConfigError(sentence(options))
    options.corpus = _paths(options.corpus)
    check_train_sources(options.data)
    for source in options.data:
        _check_source(source, options.output_dir)
    return options


def _paths(corpus: Any) -> list[str]:
    """`corpus` as a list."""
    given = [corpus] if isinstance(corpus, str) else corpus or []
    if not isinstance(given, list) or not all(isinstance(path, str) and path for path in given):
        raise ConfigError(f"corpus={corpus!r} is neither a path nor a list of paths")
    return given


def _check_source(source: TrainSource, output_dir: str) -> None:
    if not source.path:
        raise ConfigError("data: a path is empty; write data=[PATH,...]")
    if source.name is not None and (not source.name or "/" in source.name or source.name.startswith(".")):
        raise ConfigError(
            f"data, {source.path}: name={source.name} becomes the name of a file in {output_dir}: "
            "write one without / and without a dot at its beginning"
        )
    folder = Path(source.path).expanduser()
    if folder.is_dir() and Path(output_dir).expanduser().resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"output_dir={output_dir} is in {source.path}, whose files are all read as rows: write a folder outside it"
        )


def compose_mine(arguments: list[str]) -> MineOptions:
    """The options of `python -m embedtrain.mine`."""
    options = compose_command("mine", MineOptions, arguments)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    return check_mine(options)
