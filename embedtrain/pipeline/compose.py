"""From a recipe with `kind: pipeline` and the command line to a checked Pipeline; imports no torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from embedtrain.config.code import UserOptions, require_named_path
from embedtrain.config.command_line import option_of, parse_command_line, value_of
from embedtrain.config.commands import MODEL, RUN, WRITING, Command, find_command
from embedtrain.config.compose import YAML_ERRORS, to_plain
from embedtrain.config.hydra_files import folder, limited_interpolations, load_yaml
from embedtrain.config.kinds import Kind, kinds, load_kind
from embedtrain.config.parsing import explain_hydra_error
from embedtrain.config.recipe import Recipe
from embedtrain.config.validation import OptionChecks, did_you_mean, expected_directories, unknown_option
from embedtrain.errors import ConfigError
from embedtrain.pipeline.expand import DO, FROM, INIT, Expanded, References, expand, resolvers
from embedtrain.pipeline.types import (
    Pipeline,
    Selection,
    Stage,
    command_line,
    compose_options,
    is_training,
    leaves,
    naming,
)
from embedtrain.utils.files import expand_user

_RECIPE_NAME = re.compile(r"[\w-][\w./-]*")
_SHARED = re.compile(r"\$\{([\w.]+)\}")
_SELECTIONS = ("from", "until", "only")
_STAGES = "stages"
_OPTIMIZER, _INIT_FROM = "optimizer", "init_from"  # of `init`, and the option of `train`
_FOLDER = "pipelines/"  # of recipes/
_RERANKER = "reranker"  # option of evaluate
_EVALUATION = "evaluation"  # where the stages that `evaluation.after` adds come from
PIPELINE = "pipeline"  # value of `kind`


@dataclass(kw_only=True)
class PipelineConfig:
    """A recipe of several stages, which run one after the other and resume as one."""

    name: str = ""  # name of the pipeline
    kind: str = PIPELINE  # pipeline: distinguishes it from the recipe of one training
    output_dir: str = "runs/${name}"  # directory of the pipeline; stages write to stages/ in it
    shared: dict[str, Any] = field(default_factory=dict)  # values that stages refer to, such as ${shared.model}
    # Stages by name, in the order in which they run: `do` is the command, the other keys are its options.
    stages: dict[str, Any] = field(default_factory=dict)
    # Measures models after stages: `after`, names of stages, and options of evaluate, such as sets.
    evaluation: dict[str, Any] = field(default_factory=dict)
    timeout: float = 1800.0  # seconds that a rank waits for the others, except for rank 0 in stages that it runs alone


def compose_pipeline(arguments: Sequence[str], *, check_paths: bool = True) -> Pipeline | None:
    """The pipeline that `recipe=NAME` chooses; None if it is the recipe of one training.

    Without `check_paths`, models and data need not be on this machine.

    Raises a ConfigError if a stage cannot work, whichever it is, and SystemExit after `--cfg job`.
    """
    choice = next((value_of(value) for value in arguments if option_of(value) == "recipe"), None)
    if not isinstance(choice, str) or not _RECIPE_NAME.fullmatch(choice):
        return None
    command_line = parse_command_line(arguments, Recipe, multirun=True)
    content = _read(choice, command_line.config_dir)
    if content is None or command_line.help is not None:
        return None
    if command_line.multirun:
        raise ConfigError(f"recipe={choice}: multirun (-m) is for one training; `each` of a stage makes several models")
    selections, overrides = _split_selections(
        [value for value in command_line.overrides if option_of(value) != "recipe"]
    )
    with resolvers() as references:
        config = _configure(content, overrides, choice)
        context = _Context(references, command_line.config_dir, check_paths, UserOptions.of(overrides))
        pipeline = _compose(config, context, selections)
    if command_line.cfg:
        print(yaml.safe_dump(pipeline.resolved, sort_keys=False, allow_unicode=True), end="", flush=True)
        raise SystemExit(0)
    return pipeline


def _read(choice: str, config_dir: str | None) -> dict[str, Any] | None:
    """The content of a recipe's file if it is a pipeline; a file that cannot be read is reported by the composition."""
    roots = [*([] if config_dir is None else [expand_user(config_dir) / "recipe"]), folder("recipes")]
    for root in roots:
        path = root / f"{choice}.yaml"
        if path.is_file() and path.resolve().is_relative_to(root.resolve()):
            try:
                content = load_yaml(path)
            except YAML_ERRORS:
                return None
            return content if isinstance(content, dict) and content.get("kind") == PIPELINE else None
    if choice.startswith(_FOLDER):
        names = sorted(f"{_FOLDER}{path.stem}" for root in roots for path in (root / _FOLDER).glob("*.yaml"))
        raise ConfigError(
            f"recipe={choice}: there is no such pipeline{did_you_mean(choice, names)} There are {', '.join(names)}"
        )
    return None


def _split_selections(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """`from=`, `until=` and `only=`, and the other overrides."""
    selections: dict[str, str] = {}
    others = []
    for override in overrides:
        name, _, value = override.partition("=")
        if name in _SELECTIONS:
            selections[name] = value
        else:
            others.append(override)
    if "only" in selections and len(selections) > 1:
        raise ConfigError(f"only={selections['only']}: cannot be combined with from= and until=; write one of them")
    return selections, others


def _configure(content: dict[str, Any], overrides: Sequence[str], choice: str) -> DictConfig:
    """The recipe with the overrides of the command line; names and types of its own options are checked."""
    names = [field.name for field in fields(PipelineConfig)]
    for key in content:
        if key == "defaults":
            raise ConfigError(
                f"recipe={choice}: a pipeline has no defaults list; a stage starts from a recipe with `recipe: NAME`"
            )
        if key not in names:
            raise ConfigError(unknown_option(str(key), names))
    try:
        config = OmegaConf.merge(OmegaConf.structured(PipelineConfig), content)
        assert isinstance(config, DictConfig)
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        # What stages share first, because an override of a stage copies it.
        for override in sorted(parsed, key=lambda override: override.key_or_group.partition(".")[0] != "shared"):
            _set(config, override, names)
    except (OmegaConfBaseException, HydraException, RecursionError) as error:
        raise ConfigError(explain_hydra_error(error)) from None
    return config


def _set(config: DictConfig, override: Any, names: Sequence[str]) -> None:
    """Set one option of the command line, such as stages.weak.train.steps=100."""
    key, written = override.key_or_group, override.input_line
    first, _, rest = key.partition(".")
    if override.is_sweep_override():
        raise ConfigError(f"{written}: a pipeline takes one value of each option")
    if first in {field.name for field in fields(Recipe)} - set(names) or first == "loss":
        raise ConfigError(
            f"{written}: in a pipeline the options of a command belong to a stage; write stages.STAGE.{key}="
        )
    if first not in names:
        raise ConfigError(f"{written}: {unknown_option(key, [*names, *_SELECTIONS])}")
    if first == _STAGES and (stage := rest.partition(".")[0]) not in config.stages:
        stages = [str(name) for name in config.stages]
        raise ConfigError(
            f"{written}: there is no stage {stage}{did_you_mean(stage, stages)} There are {', '.join(stages)}"
        )
    if override.is_delete():
        parent = OmegaConf.select(config, key.rpartition(".")[0])
        if not isinstance(parent, DictConfig) or key.rpartition(".")[2] not in parent:
            raise ConfigError(f"{written}: there is no such option to delete")
        del parent[key.rpartition(".")[2]]
        return
    _copy_shared(config, key)
    OmegaConf.update(config, key, override.value(), merge=True, force_add=True)


def _copy_shared(config: DictConfig, key: str) -> None:
    """Replace `${shared.train}` on the way to an option by a copy of it, whose other values the stage keeps."""
    parent: Any = config
    for part in key.split(".")[:-1]:
        if not isinstance(parent, DictConfig) or part not in parent:
            return
        if OmegaConf.is_interpolation(parent, part):
            plain = OmegaConf.to_container(parent, resolve=False)
            assert isinstance(plain, dict)
            match = _SHARED.fullmatch(str(plain[part]))
            shared = None if match is None else OmegaConf.select(config, match[1])
            if not isinstance(shared, DictConfig):
                return
            parent[part] = OmegaConf.to_container(shared, resolve=False)
        parent = parent[part]


@dataclass(frozen=True)
class _Context:
    """What all stages are composed with."""

    references: References
    config_dir: str | None
    check_paths: bool
    user: UserOptions


def _compose(config: DictConfig, context: _Context, selections: Mapping[str, str]) -> Pipeline:
    references = context.references
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    expanded = references.expanded = expand(plain[_STAGES], plain["evaluation"])
    flat = OmegaConf.create({**plain, _STAGES: expanded.stages})
    with limited_interpolations():
        settings = PipelineConfig(name=flat.name, output_dir=flat.output_dir, timeout=flat.timeout)
    check = OptionChecks(settings)
    check.require(bool(settings.name), "name", "is missing; a pipeline needs a name")
    check.positive("timeout")
    if not expanded.stages:
        raise ConfigError("stages: there are none; write at least one, such as weak: {do: train, ...}")
    selection = _selection(selections, expanded)
    directories = {name: Path(settings.output_dir) / _STAGES / name for name in expanded.stages}
    resolved: dict[str, Any] = {}
    for name, directory in directories.items():
        references.used = {}
        try:
            with limited_interpolations():
                values = OmegaConf.to_container(flat[_STAGES][name], resolve=True)
        except (OmegaConfBaseException, ConfigError) as error:
            reason = references.error or explain_hydra_error(error)
            raise ConfigError(f"stages.{name}: {reason}") from None
        assert isinstance(values, dict)
        options = {str(key): value for key, value in values.items()}
        if _EVALUATION in expanded.origins[name] and is_reranker(options[MODEL], references.stages):
            _measure_reranker(name, options)
        resolved[name] = dict(options)
        expected = list(directories.values()) if context.check_paths else [Path("/")]
        with expected_directories(expected), naming(name):
            results = [stage.output(what) for stage in references.stages.values() for what in stage.command.outputs]
            user = context.user.of_stage(expanded.origins[name], results)
            stage = _stage(name, options, directory, context, settings.name, user)
            check_models(stage, references.stages)
        references.stages[name] = stage
    stages = tuple(references.stages.values())
    return Pipeline(
        name=settings.name,
        output_dir=Path(settings.output_dir),
        stages=stages,
        timeout=settings.timeout,
        resolved=to_plain(
            {"name": settings.name, "kind": PIPELINE, "output_dir": settings.output_dir, _STAGES: resolved}
        ),
        selection=selection,
    )


def _stage(
    name: str, values: dict[str, Any], directory: Path, context: _Context, pipeline: str, user: UserOptions
) -> Stage:
    references = context.references
    do = values.pop(DO)
    require_named_path(DO, do, user)
    command = find_command(do, DO) if isinstance(do, str) else None
    if command is None or command.output is None:
        raise ConfigError(
            f"do={do}: there is no such command{did_you_mean(str(do), WRITING)} It is one of {', '.join(WRITING)}"
        )
    if INIT in values:
        _set_init(values, references, command)
    output = command.output
    if output in values:
        raise ConfigError(f"{output}={values[output]}: the pipeline sets it, to {directory}; leave it out")
    values[output] = str(directory / command.folder) if command.folder else str(directory)
    if is_training(command):
        values.setdefault("name", f"{pipeline}-{name}")
    arguments = command_line(command, values)
    if is_training(command) and context.config_dir is not None:
        arguments += ["--config-dir", context.config_dir]
    options = compose_options(command, arguments, user)
    return Stage(name, command, arguments, options, directory, tuple(references.used), user)


def _measure_reranker(name: str, options: dict[str, Any]) -> None:
    """Let an evaluation measure the reranker that a stage trains: how it orders the documents that BM25 finds."""
    if options.get(_RERANKER) is not None:
        raise ConfigError(
            f"stages.{name}: evaluation.after names a stage that trains a reranker, and evaluation.reranker another "
            "one; leave one of them out"
        )
    options[_RERANKER] = options.pop(MODEL)


def _set_init(values: dict[str, Any], references: References, command: Command) -> None:
    """Replace `init: {from: NAME}` by the model of that stage, with `optimizer: true` also by its run."""
    init = values.pop(INIT)
    if not is_training(command):
        raise ConfigError(f"init={init}: is for do: train; write model: ${{out:NAME.model}}")
    is_known = isinstance(init, dict) and set(init) - {_OPTIMIZER} == {FROM}
    if not is_known or not isinstance(init.get(_OPTIMIZER, False), bool):
        raise ConfigError(
            f"init={init}: write init: {{from: NAME}}, a stage whose model is trained further, and optimizer: true to "
            "take its optimizer state as well"
        )
    model = values.setdefault("model", {})
    if not isinstance(model, dict) or "path" in model or "config" in model:
        raise ConfigError(f"init={init}: model has a path or config as well; leave one of them out")
    model["path"] = references.resolve(f"{init[FROM]}.model")
    if init.get(_OPTIMIZER):
        train = values.setdefault("train", {})
        if not isinstance(train, dict) or _INIT_FROM in train:
            raise ConfigError(f"init={init}: train has {_INIT_FROM} as well; leave one of them out")
        train[_INIT_FROM] = references.resolve(f"{init[FROM]}.{RUN}")


def _selection(selections: Mapping[str, str], expanded: Expanded) -> Selection:
    names = list(expanded.stages)
    chosen: dict[str, list[str]] = {}
    for option, value in selections.items():
        chosen[option] = expanded.groups.get(value, [expanded.aliases.get(value, value)])
        if chosen[option][0] not in names:
            raise ConfigError(
                f"{option}={value}: there is no such stage{did_you_mean(value, names)} There are {', '.join(names)}"
            )
    until = chosen.get("until")
    return Selection(tuple(chosen.get("from", ())), until[-1] if until else None, tuple(chosen.get("only", ())))


_INDEX = re.compile(r"\[\d+\]")
_LOSSES = ("loss", "loss.losses", "data.train.loss", "data.train.loss.losses")
_GUIDES = tuple(f"{loss}.{name}" for loss in _LOSSES for name in ("guide", "teacher", "teachers"))
_RERANKER_ADVICE = {
    "evaluate": "; write reranker: ${{out:{producer}.model}}, which orders what BM25 or a model has found",
    "mine": "; write teacher: ${{out:{producer}.model}} beside the embedding model that finds the documents",
}


def kind_of_model(stage: Stage, stages: Mapping[str, Stage]) -> Kind | None:
    """The kind of the model that a stage writes; None if it writes none, or changes one from outside."""
    if MODEL not in stage.command.outputs:
        return None
    if stage.is_training:
        return load_kind(stage.options.model.kind)
    if stage.command.kind is not None:
        return load_kind(stage.command.kind)
    found = [kind_of_model(stages[name], stages) for name in stage.depends]
    return next((kind for kind in found if kind is not None), None)


def is_reranker(path: Any, stages: Mapping[str, Stage]) -> bool:
    """Whether a cross-encoder will be at a path, written by one of the stages."""
    producer = _producer(path, stages)
    kind = None if producer is None else kind_of_model(producer, stages)
    return kind is not None and kind.scores_pairs


def check_models(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """Raise ConfigError if a stage takes a model of a kind that it cannot use from one of the earlier `stages`."""
    for name, value in leaves(stage.options, ""):
        takes = _taken(stage, _INDEX.sub("", name))
        producer = _producer(value, stages)
        kind = None if producer is None else kind_of_model(producer, stages)
        if stage.is_training and name == "model.path" and producer is not None and kind is not None:
            if kind.name != stage.options.model.kind:
                kind.require_other(Path(value), f"what stage {producer.name} writes", stage.options.model)
            continue
        if takes is None or producer is None or kind is None or takes(kind):
            continue
        advice = _RERANKER_ADVICE.get(stage.command.name, "") if kind.scores_pairs and name == MODEL else ""
        raise ConfigError(
            f"{name}={value}: stage {producer.name} writes a model of the kind {kind.name}, and {stage.command.name} "
            f"takes {' or '.join(one.name for one in kinds() if takes(one))}{advice.format(producer=producer.name)}"
        )


def _taken(stage: Stage, option: str) -> Callable[[Kind], bool] | None:
    """Which kinds of models an option takes; None: any, or the option names no model."""
    if stage.is_training and option in _GUIDES:
        return lambda kind: kind.has_one_vector and kind.has_one_model
    return stage.command.takes.get(option)


def _producer(path: Any, stages: Mapping[str, Stage]) -> Stage | None:
    if not isinstance(path, str):
        return None
    return next(
        (stage for stage in stages.values() if MODEL in stage.command.outputs and stage.output(MODEL) == path), None
    )
