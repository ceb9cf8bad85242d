"""`torchrun -m embedtrain filter model=DIR data=[PATH,...] output_dir=DIR`: a consistency filter on all ranks."""

from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.commands.filter.options import FilterOptions, compose
from embedtrain.mining.options import require_inputs

if TYPE_CHECKING:  # keeps `--help` free of torch
    from embedtrain.tracking.console import Console

__all__ = ["FilterOptions", "compose", "require_paths", "run"]


def require_paths(options: FilterOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    require_inputs(options)


def run(options: FilterOptions) -> list[Path]:
    """Read the rows, encode all documents, rank the positives of each row, write the rows, and print a summary.

    Returns the files of kept rows, one for each source.
    """
    from embedtrain.commands.filter.consistency import ConsistencyFilter
    from embedtrain.commands.filter.summary import print_summary
    from embedtrain.mining.run import Finish, RowSearch, run_row_search

    def rank_positives(search: RowSearch, console: "Console") -> Finish:
        consistency_filter = ConsistencyFilter(search, options)
        with console.progress() as progress:
            consistency_filter.rank_positives(progress)
        return consistency_filter.finish

    return run_row_search(options, rank_positives, print_summary, rows="filtered", temporary=".filtering")
