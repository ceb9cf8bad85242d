"""`python -m embedtrain.report runs/NAME [runs/OTHER ...] [output=FILE]`: what runs have come to, on one page."""

from embedtrain.cli import run_command
from embedtrain.report.options import ReportOptions, compose_report


def act(options: ReportOptions) -> None:
    """Read the runs' directories and write the page; nothing else is touched, also where a run is still going."""
    from pathlib import Path

    from embedtrain.errors import DataError
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.report.page import COMPARISON_FILE, REPORT_FILE, write_report

    directories = [Path(run).expanduser() for run in options.runs]
    own = REPORT_FILE if len(directories) == 1 else COMPARISON_FILE
    to = Path(options.output).expanduser() if options.output else directories[0] / own
    try:
        write_report(directories, to)
    except OSError as error:
        raise DataError(f"output={to} cannot be written: {error.strerror or error}") from error
    Console().note(f"report: {to}")


if __name__ == "__main__":
    run_command(compose_report, act)
