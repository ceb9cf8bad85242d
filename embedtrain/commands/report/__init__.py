"""`python -m embedtrain report runs/NAME [runs/OTHER ...] [output=FILE]`: runs on one HTML page."""

from embedtrain.commands.report.options import ReportOptions, compose
from embedtrain.utils.files import expand_user

__all__ = ["ReportOptions", "compose", "run"]


def run(options: ReportOptions) -> None:
    """Read the directories of the runs and write the page; nothing else is changed, even if a run is in progress."""
    from embedtrain.errors import DataError
    from embedtrain.report.page import COMPARISON_FILE, REPORT_FILE, write_report
    from embedtrain.tracking.console import Console

    directories = [expand_user(run) for run in options.runs]
    name = REPORT_FILE if len(directories) == 1 else COMPARISON_FILE
    path = expand_user(options.output) if options.output else directories[0] / name
    try:
        write_report(directories, path)
    except OSError as error:
        raise DataError(f"output={path} cannot be written: {error.strerror or error}") from error
    Console().note(f"report: {path}")
