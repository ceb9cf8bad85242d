"""`torchrun -m embedtrain mine model=DIR data=[PATH,...] output_dir=DIR`: mine hard negatives on all ranks."""

from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.cli.entry import run_command
from embedtrain.commands.mine.options import MineOptions, compose_mine
from embedtrain.mining.options import require_inputs

if TYPE_CHECKING:  # keeps `--help` free of torch
    from embedtrain.tracking.console import Console


def compose(arguments: list[str]) -> MineOptions:
    """The options, checked, with paths that exist."""
    return require_inputs(compose_mine(arguments))


def main(options: MineOptions) -> list[Path]:
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


if __name__ == "__main__":
    run_command(compose, main, launches="mine")
