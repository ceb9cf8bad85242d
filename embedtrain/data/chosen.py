"""The training data that a recipe asks for: its sources, what the rows of each are trained with, and the rows."""

from collections.abc import Mapping
from dataclasses import replace

from embedtrain.config.losses import LossConfig
from embedtrain.config.needs import needs_of
from embedtrain.config.schema import OnError, Recipe, TrainSource
from embedtrain.config.source_losses import batches_by_source, distinct, loss_of
from embedtrain.data.batches import Mixing, TrainData, load_train_data
from embedtrain.data.formats.sources import expand, no_in_batch_negatives
from embedtrain.data.store.cache import Cache


def chosen_sources(recipe: Recipe) -> tuple[list[TrainSource], list[LossConfig]]:
    """The sources of `data.train`, file by file where that is asked for, and the loss of each.

    Raises:
        DataError: a source is not there, or only some of its files are to have in-batch negatives.
        ConfigError: a source's own options do not go with its loss.
    """
    sources = [
        replace(source, in_batch_negatives=False)
        if source.in_batch_negatives is None and no_in_batch_negatives(source)
        else source
        for source in expand(recipe.data.train)
    ]
    return sources, [loss_of(source, recipe.loss) for source in sources]


def chosen_data(
    recipe: Recipe, prompts: Mapping[str, str], cache: Cache, on_error: OnError | None = None
) -> tuple[TrainData, list[LossConfig]]:
    """All rows of a recipe, checked, and the loss of each source.

    Args:
        recipe: what is asked for.
        prompts: the model's, by name: `query` and `document`.
        cache: where rows are kept.
        on_error: instead of the recipe's.

    Raises:
        DataError, ConfigError: see `load_train_data`.
    """
    sources, losses = chosen_sources(recipe)
    data = load_train_data(
        sources,
        on_error=on_error or recipe.data.on_error,
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
        instruction_format=recipe.data.instruction_format,
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        needs=[needs_of(loss) for loss in losses],
        losses=distinct(losses)[1],
        mixing=Mixing(
            by_source=batches_by_source(recipe.data.batches, losses),
            weights=recipe.data.weights,
            temperature=recipe.data.mixing_temperature,
        ),
        cache=cache,
    )
    alone = [
        name
        for name, source in zip(data.names, sources, strict=True)
        if source.in_batch_negatives is False and no_in_batch_negatives(source)
    ]
    if alone:
        data.notes.append(f"{', '.join(alone)}: no in-batch negatives, as no_in_batch_neg in the path says")
    return data, losses
