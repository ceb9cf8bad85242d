"""Options of `python -m embedtrain inspect`, whose command line takes those of a recipe instead, if it names one."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from embedtrain.config.arguments import option_of, quote
from embedtrain.config.checks import check_recipe
from embedtrain.config.command_options import CacheOptions, InstructionOptions, ModelOptions, TextOptions
from embedtrain.config.compose import compose_command, compose_recipe
from embedtrain.config.loss_checks import check_loss_name
from embedtrain.config.losses import LOSSES
from embedtrain.config.parsing import parse_sources
from embedtrain.config.recipe import Recipe
from embedtrain.config.validation import OptionChecks, require_single_process
from embedtrain.errors import ConfigError

HELP = """embedtrain inspect: what training data holds, as the model will see it

  embedtrain inspect data=PATH [model=DIR] [option=value ...]
  embedtrain inspect recipe=NAME data.train=[PATH,...] [any option of training]

PATH: a file, a folder, a pattern (rows/*.jsonl.gz), a URL, or the id of a Hub
data set; several in brackets; with options as '{path: PATH, columns: [q,a]}'.
The exit code is 0 where every row can be used, and 1 where one cannot.

{options: data! model for_loss examples problems max_length query_prompt}"""


@dataclass(kw_only=True)
class InspectOptions(ModelOptions, TextOptions, InstructionOptions, CacheOptions):
    """Options of `python -m embedtrain inspect`."""

    data: Any = field(default_factory=list)  # sources: options of TrainSource, or paths; or one path
    for_loss: str = "infonce"  # the loss to train with: some need scores, classes or embeddings
    examples: int = 2  # rows to show of each source
    problems: int = 10  # rows that cannot be used, to list for each source


_CONFIG_DIR = ("--config-dir", "-cd")
_DISPLAY_OPTIONS = ("examples", "problems")  # apply to `data=` and to a recipe


def compose(arguments: list[str]) -> tuple[Recipe, InspectOptions]:
    """A recipe with the data, model and loss to inspect, and the options, both checked.

    The command line has either options of its own (`data=PATH model=DIR`), or those of a training (`recipe=NAME`,
    `data.train=[...]`) besides `examples` and `problems`.

    Raises:
        ConfigError: as `compose_recipes`; no data, or options of both kinds.
        SystemExit: after `--help` and `--cfg job`.
    """
    require_single_process("inspect")
    training_option = next(filter(_is_training_option, arguments), None)
    if training_option is not None:
        training, display = _split_arguments(arguments, training_option)
        recipe = compose_recipe(training)
        if not any(argument.startswith(_CONFIG_DIR) or option_of(argument) == "recipe" for argument in training):
            recipe.name = recipe.name or "inspect"
        return _check_without_model(recipe), _compose_options(display)
    options = _compose_options([_as_list(argument) for argument in arguments])
    OptionChecks(options).require(
        bool(options.data), "data", "no data; write data=PATH or data=[PATH,...], or recipe=NAME and its options"
    )
    recipe = Recipe(name="inspect", loss=LOSSES[check_loss_name(options.for_loss, "for_loss")]())
    recipe.train.steps = 1
    recipe.model.path, recipe.model.revision = options.model or None, options.revision
    recipe.model.max_length = options.max_length
    recipe.model.query_prompt, recipe.model.document_prompt = options.query_prompt, options.document_prompt
    recipe.model.trust_remote_code = options.trust_remote_code
    recipe.data.train = parse_sources(options.data, "data", recipe.loss)
    recipe.data.instruction_format = options.instruction_format
    recipe.data.cache_dir = options.cache_dir
    return _check_without_model(recipe), options


def _compose_options(arguments: list[str]) -> InspectOptions:
    options = compose_command("inspect", InspectOptions, arguments, HELP)
    check = OptionChecks(options)
    for name in _DISPLAY_OPTIONS:
        check.at_least(0, name)
    return options


def _check_without_model(recipe: Recipe) -> Recipe:
    """The recipe itself, checked. A model is optional: without one lengths are in characters."""
    has_model = recipe.model.path is not None or recipe.model.config is not None
    check_recipe(recipe if has_model else replace(recipe, model=replace(recipe.model, path="none")))
    return recipe


def _is_training_option(argument: str) -> bool:
    first, *rest = option_of(argument).split(".")
    if argument.startswith(_CONFIG_DIR) or first == "recipe":
        return True
    inspect_options = [field.name for field in fields(InspectOptions)]
    return first in (field.name for field in fields(Recipe)) and (bool(rest) or first not in inspect_options)


def _split_arguments(arguments: list[str], training_option: str) -> tuple[list[str], list[str]]:
    """The arguments of a training, and those of inspect.

    Raises:
        ConfigError: `data=PATH` among them.
    """
    if data := next((argument for argument in arguments if option_of(argument) == "data"), None):
        raise ConfigError(
            f"{data} cannot be combined with {training_option}, an option of a training: write data.train=[PATH,...]"
        )
    display = [argument for argument in arguments if option_of(argument) in _DISPLAY_OPTIONS]
    return [argument for argument in arguments if argument not in display], [
        argument.lstrip("+") for argument in display
    ]


def _as_list(argument: str) -> str:
    """`data=` with a single path in brackets and quotes: a bare path may hold what Hydra's grammar reserves."""
    path = argument.removeprefix("data=")
    if path == argument or not path:
        return argument
    match path[0], path[-1]:
        case ("[", "]"):
            return argument
        case ("{", "}") | ("'", "'") | ('"', '"') if len(path) > 1:
            return f"data=[{path}]"
    return f"data=[{quote(path)}]"
