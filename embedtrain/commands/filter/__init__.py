"""`torchrun -m embedtrain filter model=DIR data=[PATH,...] output_dir=DIR`: a consistency filter on all ranks."""

from dataclasses import dataclass
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

HELP = f"""embedtrain filter: keep the training rows whose positives a model ranks high

  embedtrain filter model=DIR data=[PATH,...] output_dir=DIR [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain filter model=DIR data=[PATH,...] ...

PATH: whatever training reads. A positive is ranked among all documents of all
rows, and of corpus. The same command resumes, on any number of ranks.

{{options: model! data! output_dir! corpus keep_rank pool min_score teacher
  annotate query_prompt precision}}

{LAUNCH_HELP}"""


@dataclass(kw_only=True)
class FilterOptions(SeedOptions, RowSearchOptions):
    """Options of `python -m embedtrain filter`."""

    # A positive is kept if at most keep_rank - 1 documents score higher, other positives of its query and documents
    # that equal one not counted. KaLM-Embedding-V2: 50; E5 and nomic: 2, with pool=1000000. Null: any rank.
    keep_rank: int | None = option(50, at_least=1, hint="null for any rank")
    # Documents that each positive is ranked among: those of its part of a random partition into parts of about this
    # size. Null: all documents.
    pool: int | None = option(None, at_least=2, hint="null for all documents")
    # Write every row with the columns `rank` and `score`, which have a number for each positive, and reject none:
    # `where` of a source, such as "rank <= 2", then chooses rows each time they are read.
    annotate: bool = False


def compose(arguments: list[str]) -> FilterOptions:
    """The options, checked."""
    options = compose_command("filter", FilterOptions, arguments, HELP, check_teacher_use)
    options.data = parse_sources(options.data or [], "data", InfoNCEConfig())
    check_row_search(options)
    check = OptionChecks(options)
    check.require(
        options.keep_rank is not None or options.min_score is not None or options.annotate,
        "keep_rank",
        "without min_score keeps every row; write a rank such as 50, or a min_score",
    )
    check.require(
        options.pool is None or options.keep_rank is not None or options.annotate,
        "pool",
        "has no effect without keep_rank; leave it out",
    )
    check.require(
        options.teacher is None or options.min_score is not None or options.annotate,
        "teacher",
        "has no effect without min_score, which limits its scores",
    )
    return options


def require_paths(options: FilterOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_inputs(options)


def run(options: FilterOptions) -> list[Path]:
    """Read the rows, encode all documents, rank the positives of each row, write the rows, and print a summary.

    Returns the files of kept rows, one for each source.
    """
    from embedtrain.commands.filter.consistency import ConsistencyFilter, print_summary
    from embedtrain.mining.run import Finish, RowSearch, run_row_search

    def rank_positives(search: RowSearch, console: "Console") -> Finish:
        consistency_filter = ConsistencyFilter(search, options)
        with console.progress() as progress:
            consistency_filter.rank_positives(progress)
        return consistency_filter.finish

    return run_row_search(options, rank_positives, print_summary, rows="filtered", temporary=".filtering")
