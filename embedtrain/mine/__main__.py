"""`torchrun -m embedtrain.mine model=DIR data=[PATH,...] output_dir=DIR`: mine hard negatives on all ranks."""

from pathlib import Path

from embedtrain.cli import run_command
from embedtrain.config.paths import require_models, require_sources
from embedtrain.mine.options import MineOptions, compose_mine


def compose(arguments: list[str]) -> MineOptions:
    """The options, checked, with paths that exist."""
    options = compose_mine(arguments)
    require_models(model=options.model, adapter=options.adapter, teacher=options.teacher)
    require_sources(options.data, options.corpus)
    return options


def main(options: MineOptions) -> list[Path]:
    """Read the rows, encode all documents, choose the negatives of each row, write them, and print a summary.

    Returns the files of mined rows, one for each source.
    """
    from embedtrain.distributed.world import explain_lost_contact, joined_world
    from embedtrain.loading.load import quiet_libraries
    from embedtrain.mine.miner import Miner
    from embedtrain.mine.stats import print_summary
    from embedtrain.mining.run import start_row_search
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.pages import Page

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        folder, search = start_row_search(options, world, console, rows="mined", temporary=".mining")
        if search is None:
            return folder.written_files()
        miner = Miner(search, options)
        with console.progress() as progress:
            miner.mine(progress)
        console.note(f"mined {sum(len(source.store) for source in search.sources):,} rows")
        with explain_lost_contact("writing mined files"):
            summary = miner.finish()
        if world.is_main:
            print_summary(Page(), summary, options)
        return folder.written_files()


if __name__ == "__main__":
    run_command(compose, main, launches="embedtrain.mine")
