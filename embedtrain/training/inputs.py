"""What a training run reads, model files, training rows and evaluation sets, and the checks that need no weights."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.accelerate import describe_accelerate_config
from embedtrain.config.checks import prompt_warnings, untrained_prompt_warnings
from embedtrain.config.code import code_options
from embedtrain.config.evaluation import dims_of
from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_checks import check_loss, guide_paths, matryoshka_dims_of
from embedtrain.config.losses import (
    AnglEConfig,
    CombinedConfig,
    CoSENTConfig,
    CosineMSEConfig,
    Distance,
    LossConfig,
    Similarity,
    VectorSimilarity,
)
from embedtrain.config.recipe import ONNX, Recipe, TrainSource
from embedtrain.config.source_losses import source_loss
from embedtrain.config.validation import TEXT_ALONE, model_option, written
from embedtrain.data.cache.cache import Cache, writable_cache_directory
from embedtrain.data.sources.files import is_url
from embedtrain.data.sources.parts import may_be_hub_id
from embedtrain.data.sources.resolve import resolve_parts
from embedtrain.data.train_data import TrainData, load_recipe_data
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.evaluator import (
    EvaluationFunction,
    Evaluator,
    check_function_name,
    function_name,
    load_function,
)
from embedtrain.evaluation.first_stage import first_stage_note, with_candidates_of
from embedtrain.evaluation.metrics import MEAN, parse_best_metric, set_of_metric
from embedtrain.evaluation.sets import check_paths, load_sets, set_name
from embedtrain.evaluation.types import LoadedSet, RetrievalSet, Variant, check_sets_of_kind, metric_names
from embedtrain.formats.hub import download_configuration, require_export_support, require_hub_id, split_revision
from embedtrain.formats.onnx import require_graph
from embedtrain.formats.source import open_model_source
from embedtrain.formats.weights import weights_digest
from embedtrain.inference.index import require_poolable
from embedtrain.losses.build import exit_layers, load_loss_class, require_dimensions
from embedtrain.models.adapters import add_adapters, check_settings
from embedtrain.models.blocks import ExitPath, exit_path
from embedtrain.models.build import build_encoder
from embedtrain.models.rope import set_rope_theta
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console
from embedtrain.utils.files import expand_user

_CHOICES: dict[str, type[Similarity] | type[Distance]] = {"similarity": Similarity, "distance": Distance}
_COSINE = (CoSENTConfig, AnglEConfig, CosineMSEConfig)  # by definition


def instruction_warnings(source: ModelSource, data: TrainData) -> list[str]:
    """A warning for each source whose rows have instructions in another format than that of the model's template."""
    trained = source.kind.trained_instruction_format(source)
    if trained is None:
        return []
    formats = {
        store.report.name: settings.text_format.instruction_format
        for store, settings in zip(data.stores, data.settings, strict=True)
        if "instruction" in store.extra_columns
    }
    return [
        f"{name}: the instructions of its rows are formatted as {own!r}, and this reranker was trained with "
        f"{trained!r}: set data.instruction_format to it"
        for name, own in formats.items()
        if own not in (trained, TEXT_ALONE)
    ]


def check_local_inputs(recipe: Recipe) -> None:
    """Raise the errors about files, folders and names that show without the Hub.

    Raises ModelError for a model, tokenizer, adapter or guide that is no folder and no id of the Hub, DataError for
    training data or an evaluation set that does not exist, and ConfigError for equal names of sets or a
    `checkpoint.best_metric` of none of them.
    """
    model = recipe.model
    if model.adapters.on and model.adapters.path is None:
        check_settings(model.adapters)

    def check_id(part: Any) -> Any:
        if part.path is not None and not expand_user(part.path).is_dir():
            require_hub_id(part.path, model_option("path"), part.revision)
        return part

    load_kind(model.kind).with_models(model, check_id)
    for option, path, revision in (
        ("model.tokenizer", model.tokenizer, model.tokenizer_revision),
        ("model.lora.path", model.lora.path, model.lora.revision),
        *(("loss.guide", *split_revision(path)) for path in _guides(recipe)),
    ):
        if path is not None and not expand_user(path).is_dir():
            require_hub_id(path, option, revision)
    for source in recipe.data.train:
        _check_source(source)
        if source.documents is not None:
            _check_source(TrainSource(path=source.documents, revision=source.documents_revision))
    check_paths(recipe.evaluation.sets, "evaluation.sets")
    best, names = recipe.checkpoint.best_metric, [set_name(config) for config in recipe.evaluation.sets]
    has_function = recipe.evaluation.function is not None  # which is a further set
    if best is not None and not has_function and set_of_metric(best) not in (*names, MEAN):
        raise ConfigError(
            f"checkpoint.best_metric={best} must be set/metric with a set of evaluation.sets: {', '.join(names)}"
        )


def check_dimensions(recipe: Recipe, source: ModelSource) -> None:
    """Raise ConfigError if a loss trains on more dimensions than the model's vectors have, or it cannot be exported."""
    set_rope_theta(copy.deepcopy(source.config), recipe.export.rope_theta, "export.rope_theta")
    source.kind.check_recipe(recipe, source)
    try:
        source.kind.files.check_export(recipe.export, recipe.model.kind)
    except ConfigError as error:  # it names options as the command export does
        raise ConfigError(f"export.{error}") from None
    if ONNX in recipe.export.formats:
        require_graph(source)
    for loss in (recipe.loss, *(source_loss(train_source, recipe.loss) for train_source in recipe.data.train)):
        require_dimensions(loss, source.dimension)


def check_new_adapters(recipe: Recipe, source: ModelSource) -> None:
    """Raise ConfigError for new adapters that cannot be added to the model."""
    adapters = recipe.model.adapters
    if adapters.on and adapters.path is None:
        add_adapters(build_encoder(source), adapters, None, torch.float32)


def check_layers(recipe: Recipe, source: ModelSource) -> ExitPath | None:
    """How the model computes the layers that losses train besides the last; None without such losses.

    Raises ConfigError for layers that the model has not, or a model whose first layers are no model.
    """
    layers = exit_layers([source_loss(train_source, recipe.loss) for train_source in recipe.data.train])
    return exit_path(build_encoder(source), source.config, layers) if layers else None


def truncate_dims(recipe: Recipe, losses: Sequence[LossConfig], source: ModelSource) -> list[int]:
    """Dimensions of truncated vectors that are evaluated, the largest first; ConfigError if the model has fewer."""
    dims = recipe.evaluation.truncate_dims
    source.require_dimensions(dims or (), "evaluation.truncate_dims")
    if recipe.evaluation.vectors:
        source.require_inner_products("evaluation.vectors")
    source.require_dimensions(dims_of(recipe.evaluation.vectors), "evaluation.vectors")
    source.require_dimensions([recipe.export.truncate_dim], "export.truncate_dim")
    if dims is None:
        dims = list(set().union(*map(matryoshka_dims_of, losses)))
    return sorted((dim for dim in dims if dim < source.dimension), reverse=True)


def _check_source(source: TrainSource) -> None:
    is_on_hub = may_be_hub_id(source.path, source.revision) and not expand_user(source.path).exists()
    if not is_url(source.path) and not is_on_hub:
        resolve_parts(source)


def _guides(recipe: Recipe) -> list[str]:
    losses = (recipe.loss, *(source_loss(source, recipe.loss) for source in recipe.data.train))
    return list(dict.fromkeys(path for loss in losses for path in guide_paths(loss)))


def require_same_data(data: TrainData, world: World) -> None:
    """Reject training files that differ between hosts: ranks would use different rows for one batch."""
    files_by_rank = world.gather([(store.report.name, store.content) for store in data.stores])
    reference = files_by_rank[0]
    for rank, files in enumerate(files_by_rank):
        names, expected = [name for name, _ in files], [name for name, _ in reference]
        if names != expected:
            name = next(iter(set(names) ^ set(expected)), "their order")
            raise DataError(
                f"data.train: rank {rank} has other files than rank 0 ({name}): they must be the same on all hosts"
            )
        for (name, content), (_, expected_content) in zip(files, reference, strict=True):
            if content != expected_content:
                raise DataError(
                    f"data.train: {name} has other rows on rank {rank} than on rank 0: its files must be the same on "
                    "all hosts"
                )


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


class RunLength(NamedTuple):
    """How long a run trains."""

    steps: int  # of the optimizer
    batches: int  # global batches; the last step may have fewer than the others
    steps_per_epoch: float


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
    length: RunLength


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
        check_new_adapters(recipe, source)
        path = check_layers(recipe, source)
    directory = writable_cache_directory(recipe.data.cache_dir, run.run_dir.cache, world, run.console.note)
    with world.fail_together("reading training data"), run.console.progress() as progress:
        cache = Cache.of_world(directory, world, progress=progress)
        data, losses = load_recipe_data(recipe, source.prompts, cache)
        length = run_length(recipe, data)
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
    if source.kind.scores_pairs:
        sets = _with_first_stage_metrics(with_candidates_of(sets, world, evaluation.rerank_depth), world)
    with world.fail_together("reading evaluation sets"):
        check_sets_of_kind(sets, source.kind, "evaluation.sets")
    views = tuple(source.kind.score(source).views)
    best_metric = parse_recipe_metric(recipe, sets, function, (*dims, *views, *evaluation.vectors))
    with world.fail_together("opening the model"):
        if described is not recipe.model:
            source = open_model_source(recipe.model)
        base_digest = weights_digest(source) if world.is_main and recipe.model.adapters.on else None
        opened = source
        source, losses = with_similarity(recipe.model, opened, losses)
        if recipe.evaluation.sets and not source.kind.scores_pairs:
            score = source.kind.score(source)
            score.store(recipe.evaluation.index, torch.device("cpu"), 0)  # an error if it cannot
            require_poolable(score, recipe.evaluation.index)
    run.note(_similarity_note(opened, source))
    if source.vectors.truncate_dim is not None:
        run.console.note(
            f"model.path truncates its vectors to {source.vectors.truncate_dim} dimensions (truncate_dim): training, "
            f"evaluation and export use all {source.dimension}"
        )
    run.note([*describe_accelerate_config(recipe), *data.notes, *(note for loaded in sets for note in loaded.notes)])
    run.console.warn(*data.warnings)
    run.note([first_stage_note(loaded) for loaded in sets if loaded.first_stage_metrics is not None])
    return RunInputs(source, base_digest, cache, data, losses, path, sets, function, best_metric, length)


def with_similarity(
    model: Any, source: ModelSource, losses: Sequence[LossConfig]
) -> tuple[ModelSource, list[LossConfig]]:
    """The model with the similarity that it is trained for, and the losses of its sources, which all name theirs.

    The trained model compares vectors as its losses do, which compare them as its directory does by default. Of vectors
    that are normalised, the cosine, the inner product and the Euclidean distance give the same order: there the model
    keeps the similarity that it has. A ConfigError for a loss that does not know the model's similarity.
    """
    if source.vectors.normalize or not source.kind.score(source).named_by_loss:
        return source, list(losses)
    resolved = [_resolved(loss, source.vectors.similarity) for loss in losses]
    named = {similarity for loss in resolved for similarity in _similarities(loss)}
    if model.similarity is None and len(named) == 1:
        source = replace(source, vectors=replace(source.vectors, similarity=named.pop()))
    return source, resolved


def _resolved(loss: LossConfig, similarity: VectorSimilarity) -> LossConfig:
    """The loss, whose similarity or distance is the model's unless it names one."""
    if isinstance(loss, CombinedConfig):
        return replace(loss, losses=[_resolved(part, similarity) for part in loss.losses])
    option = _option(loss)
    if option is None or getattr(loss, option) is not None:
        return loss
    allowed = [choice.value for choice in _CHOICES[option]]
    if similarity.value not in allowed:
        raise ConfigError(
            f"loss.{option}: the model compares vectors by {similarity.value}, and loss={loss.name} knows "
            f"{', '.join(allowed)}: write one of them, by which the trained model then compares, or another loss"
        )
    choice: Any = {option: _CHOICES[option](similarity.value)}
    loss = replace(loss, **choice)
    check_loss(replace(loss, weight=1.0))
    return loss


def _similarities(loss: LossConfig) -> list[VectorSimilarity]:
    """By what a loss compares the vectors of texts; none if it does not."""
    if isinstance(loss, CombinedConfig):
        return [similarity for part in loss.losses for similarity in _similarities(part)]
    option = _option(loss)
    if isinstance(loss, _COSINE) or (
        option and (loss.matryoshka.dims or loss.matryoshka.precisions)
    ):  # on normalised vectors
        return [VectorSimilarity.cosine]
    return [] if option is None else [VectorSimilarity(getattr(loss, option).value)]


def _option(loss: LossConfig) -> str | None:
    """The option that chooses how the loss compares vectors of texts."""
    for field in fields(loss):
        if field.name in _CHOICES and isinstance(getattr(loss, field.name), Similarity | Distance | None):
            return field.name
    return None


def _similarity_note(source: ModelSource, trained: ModelSource) -> list[str]:
    """What the user should know if training changes how the model compares."""
    if trained.vectors.similarity is source.vectors.similarity:
        return []
    return [
        f"the trained model compares vectors by {written(trained.vectors.similarity)}, as its loss does; "
        f"before, by {written(source.vectors.similarity)}: model.similarity chooses another one"
    ]


def _with_first_stage_metrics(sets: Sequence[LoadedSet], world: World) -> list[LoadedSet]:
    """The sets of a cross-encoder with the metrics of their candidates before it orders them. A collective."""
    ranked = [loaded for loaded in sets if isinstance(loaded.data, RetrievalSet) and loaded.data.first_stage]
    metrics = Evaluator(ranked, None, world).evaluate() if ranked else {}
    names = {loaded.data.name for loaded in ranked}
    return [
        replace(loaded, first_stage_metrics=metrics[loaded.data.name]) if loaded.data.name in names else loaded
        for loaded in sets
    ]


def run_length(recipe: Recipe, data: TrainData) -> RunLength:
    """The length of a run with this recipe on this data."""
    batches_per_step = recipe.train.gradient_accumulation_steps
    steps_per_epoch = data.plan.steps_per_epoch / batches_per_step
    if recipe.train.epochs is None:
        steps = data.plan.total_steps(recipe.train.steps, None)
        return RunLength(steps, steps * batches_per_step, steps_per_epoch)
    batches = data.plan.total_steps(None, recipe.train.epochs)
    return RunLength(-(-batches // batches_per_step), batches, steps_per_epoch)


def import_code(recipe: Recipe) -> EvaluationFunction | None:
    """Import the losses that the recipe names, to find mistakes early, and return its evaluation function."""
    function: EvaluationFunction | None = None
    for option in code_options(recipe):
        if option.name == "evaluation.function":
            function = load_function(option.value, option.name)
        elif isinstance(option.value, str) and not option.name.endswith("pooling"):
            load_loss_class(option.value, option.name)
    return function


def parse_recipe_metric(
    recipe: Recipe, sets: Sequence[LoadedSet], function: EvaluationFunction | None, variants: Sequence[Variant]
) -> tuple[str, str] | None:
    """Set and metric of `checkpoint.best_metric`. The metrics of a function are known when it has been called."""
    best, name = recipe.checkpoint.best_metric, None if function is None else function_name(function)
    metrics = metric_names(sets, variants)
    if function is not None:
        check_function_name(function, metrics, "evaluation.function")
    if best is None:
        return None
    if name is not None and best.rpartition("/")[0] == name:
        return name, best.rpartition("/")[2]
    return parse_best_metric(best, metrics)
