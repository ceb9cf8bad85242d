"""`torchrun -m embedtrain mine model=DIR data=[PATH,...] output_dir=DIR`: mine hard negatives on all ranks."""

from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.commands.mine.options import MineOptions, compose
from embedtrain.mining.options import require_inputs

if TYPE_CHECKING:  # keeps `--help` free of torch
    from embedtrain.tracking.console import Console

__all__ = ["MineOptions", "compose", "require_paths", "run"]


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
