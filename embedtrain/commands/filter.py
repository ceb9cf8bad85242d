"""`torchrun -m embedtrain filter model=DIR data=[PATH,...] output_dir=DIR`: a consistency filter on all ranks."""

from pathlib import Path

from embedtrain.config.compose import compose_command
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.parsing import parse_sources
from embedtrain.config.validation import OptionChecks
from embedtrain.mining.options import FilterOptions, check_row_search, check_teacher_use, require_inputs

HELP = f"""embedtrain filter: keep the training rows whose positives a model ranks high

  embedtrain filter model=DIR data=[PATH,...] output_dir=DIR [option=value ...]
  torchrun --nproc-per-node 8 -m embedtrain filter model=DIR data=[PATH,...] ...

PATH: whatever training reads. A positive is ranked among all documents of all
rows, and of corpus. The same command resumes, on any number of ranks.

{{options: model! data! output_dir! corpus keep_rank pool min_score teacher
  annotate query_prompt precision}}

{LAUNCH_HELP}"""


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
    from embedtrain.mining.consistency import filter_rows, print_summary

    return filter_rows(options, print_summary)
