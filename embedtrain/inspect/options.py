"""The command line of inspect: options of its own, or those of a training -> a recipe whose data is inspected."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from embedtrain.config.checks import check_recipe
from embedtrain.config.compose import compose_command, compose_training, to_recipe
from embedtrain.config.elements import parse_sources
from embedtrain.config.loss_checks import check_loss_name
from embedtrain.config.losses import LOSSES
from embedtrain.config.recipe import DataConfig, Recipe
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class InspectOptions:
    """Options of `python -m embedtrain.inspect`."""

    data: Any = field(default_factory=list)  # of TrainSource, or of paths; or one path
    model: str | None = None  # model directory or Hub id: lengths in its tokens, examples as it sees them
    revision: str | None = None  # a commit, tag or branch of its Hub repository
    max_length: int | None = None  # default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    instruction_format: str = DataConfig.instruction_format  # as data.instruction_format
    for_loss: str = "infonce"  # what the rows are to be trained with: some losses need scores, classes or vectors
    examples: int = 2  # rows shown of each source
    problems: int = 10  # rows that cannot be used, named of each source
    cache_dir: str | None = None  # as data.cache_dir
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust


_CONFIG_FLAGS = ("--config", "-cd", "-cp", "-cn")
_DISPLAY_OPTIONS = ("examples", "problems")  # what is shown, whatever is inspected


def compose_inspect(arguments: list[str]) -> tuple[Recipe, InspectOptions]:
    """The options of `python -m embedtrain.inspect`, and a recipe that has the data, model and loss that are meant.

    The arguments are those of the door itself, or those of a training (`recipe=NAME ...`, `data.train=[...]`): then
    its data is meant, and `examples` and `problems` alone are the door's.
    """
    because = next(filter(_is_training_option, arguments), None)
    if because is not None:
        of_training, own = _split_arguments(arguments, because)
        config = compose_training(of_training)
        recipe = to_recipe(config)
        if not _names_recipe(of_training):
            recipe.name = recipe.name or "inspect"
            if recipe.train.steps is None and recipe.train.epochs is None:
                recipe.train.epochs = 1.0
        return _check_without_model(recipe), _inspect_options(own)
    options = _inspect_options([_as_list(argument) for argument in arguments])
    if not options.data:
        raise ConfigError("no data: write data=PATH or data=[PATH,...], or recipe=NAME and its options")
    recipe = Recipe(name="inspect", loss=LOSSES[check_loss_name(options.for_loss, "for_loss")]())
    recipe.train.steps = 1
    recipe.model.path, recipe.model.revision = options.model, options.revision
    recipe.model.max_length = options.max_length
    recipe.model.query_prompt, recipe.model.document_prompt = options.query_prompt, options.document_prompt
    recipe.model.trust_remote_code = options.trust_remote_code
    recipe.data.train = parse_sources(options.data, "data", recipe.loss)
    recipe.data.instruction_format = options.instruction_format
    recipe.data.cache_dir = options.cache_dir
    return _check_without_model(recipe), options


def _inspect_options(arguments: list[str]) -> InspectOptions:
    options = compose_command("inspect", InspectOptions, arguments)
    if options.examples < 0 or options.problems < 0:
        raise ConfigError(f"examples={options.examples}, problems={options.problems}: numbers of rows, 0 for none")
    return options


def _check_without_model(recipe: Recipe) -> Recipe:
    """The recipe itself, checked. Without a model lengths are told in characters, so none has to be named."""
    has_model = recipe.model.path is not None or recipe.model.config is not None
    check_recipe(recipe if has_model else replace(recipe, model=replace(recipe.model, path="none")))
    return recipe


def _is_training_option(argument: str) -> bool:
    """Whether an argument names a recipe, or is an option of one."""
    first, *others = _option_name(argument).split(".")
    if argument.startswith(_CONFIG_FLAGS) or first == "recipe":
        return True
    own = [field.name for field in fields(InspectOptions)]
    return first in (field.name for field in fields(Recipe)) and (bool(others) or first not in own)


def _split_arguments(arguments: list[str], because: str) -> tuple[list[str], list[str]]:
    """The arguments of a training, and those that say what inspect shows.

    Args:
        arguments: all of them.
        because: one that is a training's.

    Raises:
        ConfigError: `data=PATH` among them.
    """
    others: list[str] = []
    own: list[str] = []
    for argument in arguments:
        key = _option_name(argument)
        if key == "data":
            raise ConfigError(
                f"{argument} does not go with {because}, an option of a training: write data.train=[PATH,...] instead"
            )
        (own if key in _DISPLAY_OPTIONS else others).append(argument)
    return others, [argument.lstrip("+") for argument in own]


def _names_recipe(arguments: list[str]) -> bool:
    return any(argument.startswith(_CONFIG_FLAGS) or _option_name(argument) == "recipe" for argument in arguments)


def _as_list(argument: str) -> str:
    """`data=` with one path in brackets and quotes: a bare path may hold signs that mean something to Hydra."""
    path = argument.removeprefix("data=")
    if path == argument or not path:
        return argument
    match path[0], path[-1]:
        case ("[", "]"):
            return argument
        case ("{", "}") | ("'", "'") | ('"', '"') if len(path) > 1:
            return f"data=[{path}]"
    quoted = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'data=["{quoted}"]'


def _option_name(argument: str) -> str:
    """The option that an argument sets."""
    return argument.lstrip("+~").partition("=")[0]
