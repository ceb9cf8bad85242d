"""Checks that need no weights: most need not even the Hub, and end a run before anything is downloaded."""

import copy
from collections.abc import Sequence

from embedtrain.config.compressed import dims_of
from embedtrain.config.loss_checks import guide_paths
from embedtrain.config.losses import LossConfig
from embedtrain.config.matryoshka import matryoshka_dims_of
from embedtrain.config.pair_template import PLAIN_INSTRUCTION
from embedtrain.config.recipe import Recipe, TrainSource
from embedtrain.config.source_losses import source_loss
from embedtrain.config.sparse_checks import check_query_regularizer
from embedtrain.config.validation import TEXT_ALONE
from embedtrain.data.sources.parts import may_be_hub_id
from embedtrain.data.sources.resolve import resolve_parts
from embedtrain.data.sources.urls import is_url
from embedtrain.data.train_data import TrainData
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.metrics import MEAN, set_of_metric
from embedtrain.evaluation.sets import check_paths, set_name
from embedtrain.losses.build import exit_layers, require_dimensions
from embedtrain.models.build import build_encoder
from embedtrain.models.early_exits import ExitPath, exit_path
from embedtrain.models.hub import require_hub_id, split_revision
from embedtrain.models.rope import set_rope_theta
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import expand_user


def instruction_warnings(source: ModelSource, data: TrainData) -> list[str]:
    """A warning for each source whose rows have instructions in another format than that of the model's template."""
    template = None if source.head is None else source.head.template
    if template is None or template.instruction_format in (None, PLAIN_INSTRUCTION):
        return []
    formats = {
        store.report.name: settings.text_format.instruction_format
        for store, settings in zip(data.stores, data.settings, strict=True)
        if "instruction" in store.extra_columns
    }
    return [
        f"{name}: the instructions of its rows are formatted as {own!r}, and this reranker was trained with "
        f"{template.instruction_format!r}: set data.instruction_format to it"
        for name, own in formats.items()
        if own not in (template.instruction_format, TEXT_ALONE)
    ]


def check_local_inputs(recipe: Recipe) -> None:
    """Raise the errors about files, folders and names that show without the Hub.

    Raises ModelError for a model, tokenizer, adapter or guide that is no folder and no id of the Hub, DataError for
    training data or an evaluation set that does not exist, and ConfigError for equal names of sets or a
    `checkpoint.best_metric` of none of them.
    """
    model = recipe.model
    for option, path, revision in (
        ("model.path", model.path, model.revision),
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
    """Raise ConfigError if a loss trains on more dimensions than the model's vectors have, or it cannot be exported.

    Queries of a sparse model may be static because of its files, which the recipe's own checks do not see.
    """
    set_rope_theta(copy.deepcopy(source.config), recipe.export.rope_theta, "export.rope_theta")
    if source.words is not None:
        check_query_regularizer(recipe.sparsity, source.words.query_mode)
    for loss in (recipe.loss, *(source_loss(train_source, recipe.loss) for train_source in recipe.data.train)):
        require_dimensions(loss, source.dimension)


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
