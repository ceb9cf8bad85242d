"""What cannot work about mining, found before anything is read: the option, its value, and what is allowed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embedtrain.config.mining import MineOptions
from embedtrain.config.schema import TrainSource
from embedtrain.config.source_checks import FORMAT_SAYS, check_train_sources, is_instruction_format
from embedtrain.errors import ConfigError

Rule = tuple[Callable[[MineOptions], bool], Callable[[MineOptions], str]]

MOST_QUERIES = 8192  # that are searched at a time

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
        lambda o: not o.to,
        lambda o: "no place for the mined rows: write to=DIR, a folder of their own",
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
        lambda o: not 1 <= o.queries_at_a_time <= MOST_QUERIES,
        lambda o: f"queries_at_a_time={o.queries_at_a_time}: from 1 to {MOST_QUERIES}",
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
        _check_source(source, options.to)
    return options


def _paths(corpus: Any) -> list[str]:
    """`corpus` as a list."""
    given = [corpus] if isinstance(corpus, str) else corpus or []
    if not isinstance(given, list) or not all(isinstance(path, str) and path for path in given):
        raise ConfigError(f"corpus={corpus!r} is neither a path nor a list of paths")
    return given


def _check_source(source: TrainSource, to: str) -> None:
    if not source.path:
        raise ConfigError("data: a path is empty; write data=[PATH,...]")
    if source.name is not None and (not source.name or "/" in source.name or source.name.startswith(".")):
        raise ConfigError(
            f"data, {source.path}: name={source.name} becomes the name of a file in {to}: "
            "write one without / and without a dot at its beginning"
        )
    folder = Path(source.path).expanduser()
    if folder.is_dir() and Path(to).expanduser().resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"to={to} lies in {source.path}, whose files are all read as rows: write a folder outside of it"
        )
