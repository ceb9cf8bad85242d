"""The command line of report: folders of runs as they are, and options behind them or between them."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from embedtrain.config.compose import compose_command
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class ReportOptions:
    """Options of `python -m embedtrain.report`."""

    runs: list[str] = field(default_factory=list)  # output_dirs of runs; written without a name as well
    output: str | None = None  # the file; default: in the first run's directory


def compose_report(arguments: list[str]) -> ReportOptions:
    """The options of `python -m embedtrain.report`.

    Whatever is no option is a run's folder; a folder may have a `=` in its name, as jobs of a sweep do.

    Raises:
        ConfigError: no run, or an unknown option.
        SystemExit: after `--help` and its like.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("report reads files in one process: start it with python, not with torchrun")
    runs = [argument for argument in arguments if not _is_option(argument)]
    options = compose_command("report", ReportOptions, [_quoted(one) for one in arguments if _is_option(one)])
    options.runs = [*options.runs, *runs]
    if not options.runs:
        raise ConfigError("no run: write python -m embedtrain.report runs/NAME, the output_dir of a run, or several")
    if options.output is not None and Path(options.output).is_dir():
        raise ConfigError(
            f"output={options.output} is a folder: name a file, such as output={options.output.rstrip('/')}/report.html"
        )
    return options


def _is_option(argument: str) -> bool:
    return argument.startswith(("-", "output=", "runs=", "hydra.")) or ("=" in argument and not Path(argument).exists())


def _quoted(argument: str) -> str:
    """`output=` with its path in quotes: a path may hold what means something to Hydra."""
    if not argument.startswith("output=") or argument[7:8] in ("'", '"', ""):
        return argument
    path = argument.removeprefix("output=").replace("\\", "\\\\").replace('"', '\\"')
    return f'output="{path}"'
