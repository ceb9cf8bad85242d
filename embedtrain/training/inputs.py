"""What a training run reads: the model's files, training rows and evaluation sets."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.accelerate import describe_accelerate_config
from embedtrain.config.code import code_options
from embedtrain.config.losses import LossConfig
from embedtrain.config.m3 import HybridWeights
from embedtrain.config.prompts import prompt_warnings, untrained_prompt_warnings
from embedtrain.config.recipe import ModelKind, Recipe
from embedtrain.data.cache.cache import Cache, writable_cache_directory
from embedtrain.data.train_data import TrainData, load_recipe_data
from embedtrain.distributed.world import World
from embedtrain.evaluation.evaluator import (
    EvaluationFunction,
    Evaluator,
    check_function_name,
    function_name,
    load_function,
)
from embedtrain.evaluation.first_stage import first_stage_note, with_candidates_of
from embedtrain.evaluation.metrics import MEAN, parse_best_metric, set_of_metric
from embedtrain.evaluation.sets import load_sets
from embedtrain.evaluation.types import LoadedSet, RetrievalSet, Row, check_sets_of_kind, metric_names
from embedtrain.formats.hub import require_export_support
from embedtrain.inference.comparisons import comparison_of
from embedtrain.losses.custom import load_loss_class
from embedtrain.models.early_exits import ExitPath
from embedtrain.models.hub import download_configuration
from embedtrain.models.source import open_model_source
from embedtrain.models.stored_weights import weights_digest
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console
from embedtrain.training.early_checks import (
    check_dimensions,
    check_layers,
    check_local_inputs,
    instruction_warnings,
    require_same_data,
    truncate_dims,
)
from embedtrain.training.similarity import similarity_note, with_similarity


@dataclass(frozen=True)
class Run:
    """What every part of a run needs."""

    recipe: Recipe
    world: World
    console: Console
    run_dir: RunDirectory

    def note(self, lines: Iterable[str]) -> None:
        """Print lines for the user."""
        for line in lines:
            self.console.note(line)


@dataclass(frozen=True)
class RunInputs:
    """What a run reads: the model's files, training rows and evaluation sets."""

    source: ModelSource
    base_digest: str | None  # digest of the weights below adapters; None without adapters
    cache: Cache
    data: TrainData
    losses: Sequence[LossConfig]  # of each source
    exit_path: ExitPath | None  # of the layers that losses train besides the last; None without such losses
    sets: Sequence[LoadedSet]
    function: EvaluationFunction | None  # of the user, called after the sets
    best_metric: tuple[str, str] | None  # set and metric of `checkpoint.best_metric`
    total_steps: int  # optimizer steps
    total_batches: int  # global batches; the last step may have fewer than the others


def read_inputs(run: Run) -> RunInputs:
    """Read everything that the user may have got wrong, before anything is written."""
    recipe, world = run.recipe, run.world
    # In the order of what they cost: names and local files, the configuration of the model, data, evaluation sets,
    # and last the weights, of which a Hub model downloads gigabytes.
    with world.fail_together("importing code"):
        function = import_code(recipe)
    with world.fail_together("checking paths"):
        if world.is_main:
            require_export_support(recipe.export)
        check_local_inputs(recipe)
    run.console.warn(*prompt_warnings(recipe))
    with world.fail_together("opening the model"):
        described = download_configuration(recipe.model)
        source = open_model_source(described)
        run.console.warn(*untrained_prompt_warnings(recipe.data.train, source.prompts))
        check_dimensions(recipe, source)
        path = check_layers(recipe, source)
    directory = writable_cache_directory(recipe.data.cache_dir, run.run_dir.cache, world, run.console.note)
    with world.fail_together("reading training data"), run.console.progress() as progress:
        cache = Cache.of_world(directory, world, progress=progress)
        data, losses = load_recipe_data(recipe, source.prompts, cache)
        total_steps, total_batches = run_length(recipe, data)
    require_same_data(data, world)
    run.console.warn(*instruction_warnings(source, data))
    evaluation, best = recipe.evaluation, recipe.checkpoint.best_metric
    dims = truncate_dims(recipe, losses, source)
    sets = load_sets(
        evaluation.sets,
        world,
        subset=evaluation.subset,
        metrics=evaluation.metrics,
        cache=cache,
        optional=lambda name: best is None or set_of_metric(best) not in (name, MEAN),
        warn=run.console.warn,
    )
    if recipe.model.kind is ModelKind.cross_encoder:
        sets = _with_first_stage_metrics(with_candidates_of(sets, world, evaluation.rerank_depth), world)
    with world.fail_together("reading evaluation sets"):
        check_sets_of_kind(sets, recipe.model.kind, "evaluation.sets")
    views = HybridWeights._fields if source.m3 is not None else ()
    best_metric = parse_recipe_metric(recipe, sets, function, (*dims, *views, *evaluation.vectors))
    with world.fail_together("opening the model"):
        if described is not recipe.model:
            source = open_model_source(recipe.model)
        base_digest = weights_digest(source) if world.is_main and recipe.model.lora.on else None
        opened = source
        source, losses = with_similarity(recipe.model, opened, losses)
        if recipe.evaluation.sets and source.kind is not ModelKind.cross_encoder:
            comparison_of(source).store(recipe.evaluation.index, torch.device("cpu"), 0)  # an error if it cannot
    run.note(similarity_note(opened, source))
    if source.truncate_dim is not None:
        run.console.note(
            f"model.path truncates its vectors to {source.truncate_dim} dimensions (truncate_dim): training, "
            f"evaluation and export use all {source.dimension}"
        )
    run.note([*describe_accelerate_config(recipe), *data.notes, *(note for loaded in sets for note in loaded.notes)])
    run.note([first_stage_note(loaded) for loaded in sets if loaded.first_stage_metrics is not None])
    return RunInputs(
        source, base_digest, cache, data, losses, path, sets, function, best_metric, total_steps, total_batches
    )


def _with_first_stage_metrics(sets: Sequence[LoadedSet], world: World) -> list[LoadedSet]:
    """The sets of a cross-encoder with the metrics of their candidates before it orders them. A collective."""
    ranked = [loaded for loaded in sets if isinstance(loaded.data, RetrievalSet) and loaded.data.first_stage]
    metrics = Evaluator(ranked, None, world).evaluate() if ranked else {}
    names = {loaded.data.name for loaded in ranked}
    return [
        replace(loaded, first_stage_metrics=metrics[loaded.data.name]) if loaded.data.name in names else loaded
        for loaded in sets
    ]


def run_length(recipe: Recipe, data: TrainData) -> tuple[int, int]:
    """Optimizer steps and global batches."""
    batches_per_step = recipe.train.gradient_accumulation_steps
    if recipe.train.epochs is None:
        steps = data.plan.total_steps(recipe.train.steps, None)
        return steps, steps * batches_per_step
    batches = data.plan.total_steps(None, recipe.train.epochs)
    return -(-batches // batches_per_step), batches


def import_code(recipe: Recipe) -> EvaluationFunction | None:
    """Import the losses that the recipe names, to find mistakes early, and return its evaluation function."""
    function: EvaluationFunction | None = None
    for option in code_options(recipe):
        if option.name == "evaluation.function":
            function = load_function(option.value, option.name)
        elif isinstance(option.value, str):
            load_loss_class(option.value, option.name)
    return function


def parse_recipe_metric(
    recipe: Recipe, sets: Sequence[LoadedSet], function: EvaluationFunction | None, rows: Sequence[Row]
) -> tuple[str, str] | None:
    """Set and metric of `checkpoint.best_metric`. The metrics of a function are known when it has been called."""
    best, name = recipe.checkpoint.best_metric, None if function is None else function_name(function)
    metrics = metric_names(sets, rows)
    if function is not None:
        check_function_name(function, metrics, "evaluation.function")
    if best is None:
        return None
    if name is not None and best.rpartition("/")[0] == name:
        return name, best.rpartition("/")[2]
    return parse_best_metric(best, metrics)
