"""`torchrun -m embedtrain.filter model=DIR data=[PATH,...] output_dir=DIR`: a consistency filter on all ranks."""

from pathlib import Path

from embedtrain.cli import run_command
from embedtrain.config.paths import require_models, require_sources
from embedtrain.filter.options import FilterOptions, compose_filter


def compose(arguments: list[str]) -> FilterOptions:
    """The options, checked, with paths that exist."""
    options = compose_filter(arguments)
    require_models(model=options.model, adapter=options.adapter, teacher=options.teacher)
    require_sources(options.data, options.corpus)
    return options


def main(options: FilterOptions) -> list[Path]:
    """Read the rows, encode all documents, rank the positives of each row, write the rows, and print a summary.

    Returns the files of kept rows, one for each source.
    """
    from embedtrain.distributed.world import explain_lost_contact, joined_world
    from embedtrain.filter.consistency import ConsistencyFilter
    from embedtrain.filter.summary import print_summary
    from embedtrain.loading.load import quiet_libraries
    from embedtrain.mining.run import start_row_search
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.pages import Page

    quiet_libraries()
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        folder, search = start_row_search(options, world, console, rows="filtered", temporary=".filtering")
        if search is None:
            return folder.written_files()
        consistency_filter = ConsistencyFilter(search, options)
        with console.progress() as progress:
            consistency_filter.rank_positives(progress)
        with explain_lost_contact("writing filtered files"):
            summary = consistency_filter.finish()
        if world.is_main:
            print_summary(Page(), summary, options)
        return folder.written_files()


if __name__ == "__main__":
    run_command(compose, main, launches="embedtrain.filter")
