"""export.options."""

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
    push_to_hub: str | None = None  # Hub id to upload it to; the recipe's is for the run's own export
    private: bool = True  # whether a repository that is made there is private
    trust_remote_code: bool = False  # run Python that lies in the run's directory; its recipe cannot allow that


def requested_export(options: ExportOptions, recipe: ExportConfig) -> ExportConfig:
    """The recipe's options of an export, but for those given on the command line.

    Whether it is uploaded is the command line's affair alone: the recipe speaks of the run's last step.
    """
    given = {name: getattr(options, name) for name in ("formats", "dtype", "max_file_size", "check")}
    return replace(
        recipe,
        **{name: value for name, value in given.items() if value is not None},
        push_to_hub=options.push_to_hub,
        private=options.private,
    )


def compose_export(arguments: list[str]) -> ExportOptions:
    """The options of `python -m embedtrain.export`."""
    options = compose_command("export", ExportOptions, arguments)
    if not options.run:
        raise ConfigError("no run: write run=DIR, the output_dir of a training run")
    check_export(requested_export(options, ExportConfig()))
    return options
