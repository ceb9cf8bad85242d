"""Options of `python -m embedtrain.export`, their checks and composition."""

from dataclasses import dataclass, replace

from embedtrain.config.compose import compose_command
from embedtrain.config.export_checks import check_export
from embedtrain.config.recipe import ExportConfig, ExportDtype
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class ExportOptions:
    """Options of `python -m embedtrain.export`."""

    run: str = ""  # output_dir of a run
    step: str = "latest"  # latest, best, or a step's number
    output_dir: str | None = None  # default: model/ in the run's directory
    formats: list[str] | None = None  # default: the recipe's export.formats
    dtype: ExportDtype | None = None  # default: the recipe's export.dtype
    max_file_size: str | None = None  # default: the recipe's export.max_file_size
    check: bool | None = None  # reopen and compare; default: the recipe's export.check
    push_to_hub: str | None = None  # Hub id to upload to; the recipe's is only for the export at the end of the run
    private: bool = True  # whether a repository that is created there is private
    trust_remote_code: bool = False  # run Python in the run directory; its recipe cannot allow that


def requested_export(options: ExportOptions, recipe: ExportConfig) -> ExportConfig:
    """The recipe's export options, overridden by those on the command line.

    Uploading depends on the command line only: the recipe's option is for the export at the end of the run.
    """
    overrides = {name: getattr(options, name) for name in ("formats", "dtype", "max_file_size", "check")}
    return replace(
        recipe,
        **{name: value for name, value in overrides.items() if value is not None},
        push_to_hub=options.push_to_hub,
        private=options.private,
    )


def compose_export(arguments: list[str]) -> ExportOptions:
    """The checked options.

    Raises:
        ConfigError: an option is unknown or out of range, or `run` is missing.
    """
    options = compose_command("export", ExportOptions, arguments)
    if not options.run:
        raise ConfigError("no run: write run=DIR, the output_dir of a training run")
    check_export(requested_export(options, ExportConfig()))
    return options
