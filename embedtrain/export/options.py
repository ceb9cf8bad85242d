"""Options of `python -m embedtrain.export`."""

from dataclasses import dataclass, replace

from embedtrain.config.checks import check_export
from embedtrain.config.compose import compose_command
from embedtrain.config.recipe import ExportConfig, ExportDtype
from embedtrain.config.validation import OptionChecks

HELP = """embedtrain export: write a model directory from a checkpoint, and verify it

  embedtrain export run=runs/NAME [option=value ...]

{options: run! step output_dir dtype formats push_to_hub check}"""


@dataclass(kw_only=True)
class ExportOptions:
    """Options of `python -m embedtrain.export`."""

    run: str = ""  # output_dir of a run
    step: str = "latest"  # latest, best, or a step's number
    output_dir: str | None = None  # default: model/ in the run's directory
    formats: list[str] | None = None  # default: the recipe's export.formats
    dtype: ExportDtype | None = None  # default: the recipe's export.dtype
    truncate_dim: int | None = None  # vectors have only the first so many dimensions; default: the recipe's
    max_file_size: str | None = None  # default: the recipe's export.max_file_size
    check: bool | None = None  # reopen and compare; default: the recipe's export.check
    push_to_hub: str | None = None  # Hub id to upload to; the recipe's is only for the export of the run
    private: bool = True  # whether a repository that is created is private
    trust_remote_code: bool = False  # execute Python code in the run directory; its recipe cannot allow that


def requested_export(options: ExportOptions, recipe: ExportConfig) -> ExportConfig:
    """The export options of the recipe, overridden by those of the command line.

    The command line alone decides about an upload: the recipe's `push_to_hub` is for the last step of the run.
    """
    overrides = {
        name: getattr(options, name) for name in ("formats", "dtype", "truncate_dim", "max_file_size", "check")
    }
    return replace(
        recipe,
        **{name: value for name, value in overrides.items() if value is not None},
        push_to_hub=options.push_to_hub,
        private=options.private,
    )


def compose_export(arguments: list[str]) -> ExportOptions:
    """The options, checked."""
    options = compose_command("export", ExportOptions, arguments, HELP)
    OptionChecks(options).require(bool(options.run), "run", "is missing; write the output_dir of a training run")
    check_export(requested_export(options, ExportConfig()))
    return options
