"""`torchrun -m embedtrain mine model=DIR data=[PATH,...] output_dir=DIR`: mine hard negatives on all ranks."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.config.command_options import SeedOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_sources
from embedtrain.config.validation import OptionChecks
from embedtrain.mining.options import RowSearchOptions, check_row_search, check_teacher_use, require_inputs

if TYPE_CHECKING:
    from embedtrain.tracking.console import Console


HELP = f"""embedtrain mine: hard negatives for training rows

  embedtrain mine model=DIR data=[PATH,...] output_dir=DIR [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain mine model=DIR data=[PATH,...] ...

PATH: whatever training reads. Negatives come from all documents of all rows,
and from corpus. The same command resumes, on any number of ranks.

{{options: model! data! output_dir! corpus negatives rank_min rank_max relative_margin
  sampling teacher keep_existing_negatives query_prompt precision}}

{LAUNCH_HELP}"""


class Sampling(str, Enum):
    """Which of the qualifying candidates become negatives: the best, or a random sample."""

    top = "top"
    random = "random"

    @property
    def is_random(self) -> bool:
        """Whether they are a sample."""
        return self is Sampling.random


class MarginReference(str, Enum):
    """The positive whose score margins refer to, if a query has several, in one row or in many."""

    lowest = "lowest"
    highest = "highest"

    @property
    def is_lowest(self) -> bool:
        """Whether it is the positive with the lowest score."""
        return self is MarginReference.lowest


@dataclass(kw_only=True)
class MineOptions(SeedOptions, RowSearchOptions):
    """Options of `python -m embedtrain mine`."""

    # Maximum per row, including those that it keeps. 0 adds none: the rows' own are written with their scores.
    negatives: int = option(15, at_least=0)
    rank_min: int = option(0, at_least=0)  # number of the best qualifying candidates to skip
    rank_max: int = 100  # number of candidates per query
    # A negative scores at most (1 - this) times the positive: the 95 % rule. With a cross-encoder as teacher, its
    # probability is at most so much of the positive's, both after a sigmoid.
    relative_margin: float | None = option(
        0.05, at_least=0, below=1, hint="a fraction of the positive's score, such as 0.05; null for none"
    )
    # a negative scores at most the positive's score minus this
    absolute_margin: float | None = option(None, at_least=0, hint="null for none")
    # of a negative; the teacher's score if there is one
    max_score: float | None = option(None, finite=True, hint="null for no limit")
    margin_reference: MarginReference = MarginReference.highest
    sampling: Sampling = Sampling.top
    keep_existing_negatives: bool = False  # keep the rows' negatives before the new ones, except for positives
    scores: bool = True  # write pos_scores and neg_scores, the teacher's if there is one


def check_mine(options: MineOptions) -> MineOptions:
    """Check the options; `data` must be a list of sources."""
    check_row_search(options)
    check = OptionChecks(options)
    check.require(options.rank_min < options.rank_max, "rank_min", f"must be below rank_max={options.rank_max}")
    num_ranks = options.rank_max - options.rank_min
    check.require(
        options.negatives <= num_ranks,
        "negatives",
        f"between rank_min={options.rank_min} and rank_max={options.rank_max} are {num_ranks} documents; "
        "write a larger rank_max, or fewer negatives",
    )
    check.require(
        options.negatives > 0 or (options.keep_existing_negatives and options.scores),
        "negatives",
        "adds none; write keep_existing_negatives=true and scores=true to score those of the rows",
    )
    check.require(
        options.min_score is None or options.max_score is None or options.min_score <= options.max_score,
        "min_score",
        f"is above max_score={options.max_score}",
    )
    return options


def compose(arguments: list[str]) -> MineOptions:
    """The options, checked."""
    options = compose_command("mine", MineOptions, arguments, HELP, check_teacher_use)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    return check_mine(options)


def require_paths(options: MineOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_inputs(options)


def run(options: MineOptions) -> list[Path]:
    """Read the rows, encode all documents, choose the negatives of each row, write them, and print a summary.

    Returns the files of mined rows, one for each source.
    """
    from embedtrain.commands.mine.miner import Miner
    from embedtrain.commands.mine.stats import print_summary
    from embedtrain.mining.run import Finish, RowSearch, run_row_search

    def mine(search: RowSearch, console: "Console") -> Finish:
        miner = Miner(search, options)
        with console.progress() as progress:
            miner.mine(progress)
        console.note(f"mined {sum(len(source.store) for source in search.sources):,} rows")
        return miner.finish

    return run_row_search(options, mine, print_summary, rows="mined", temporary=".mining")
