"""`python -m embedtrain report runs/NAME [runs/OTHER ...] [output=FILE]`: runs on one HTML page."""

from dataclasses import dataclass, field
from pathlib import Path

from embedtrain.config.command_line import quote_value
from embedtrain.config.compose import compose_command
from embedtrain.config.validation import OptionChecks, require_single_process
from embedtrain.utils.files import expand_user

HELP = """embedtrain report: one or several runs on one page, as an HTML file

  embedtrain report runs/NAME [runs/OTHER ...] [output=FILE]

Runs may be in progress, stopped or failed. The page is report.html in the
run's directory; for several runs comparison.html in the first run's directory.

{options: runs! output}"""


@dataclass(kw_only=True)
class ReportOptions:
    """Options of `python -m embedtrain report`."""

    runs: list[str] = field(default_factory=list)  # output_dirs of runs; also as plain arguments
    output: str | None = None  # path of the page; default: in the first run's directory


def compose(arguments: list[str]) -> ReportOptions:
    """The options, checked. An argument that is not an option is the directory of a run."""
    require_single_process("report")
    runs = [argument for argument in arguments if not _is_option(argument)]
    overrides = [quote_value(argument, "output") for argument in arguments if _is_option(argument)]
    options = compose_command("report", ReportOptions, overrides, HELP)
    options.runs = [*options.runs, *runs]
    check = OptionChecks(options)
    check.require(bool(options.runs), "runs", "no run; write python -m embedtrain report runs/NAME, its output_dir")
    is_directory = options.output is not None and Path(options.output).is_dir()
    check.require(not is_directory, "output", "is a directory; name a file in it")
    return options


def _is_option(argument: str) -> bool:
    """A directory of a sweep may have a `=` in its name."""
    return argument.startswith(("-", "output=", "runs=", "hydra.")) or ("=" in argument and not Path(argument).exists())


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
