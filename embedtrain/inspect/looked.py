"""The sources of a recipe as far as they can be read: one that cannot be used hides none of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import OnError, Recipe, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.sources.resolve import source_names
from embedtrain.data.train_data import TrainData, load_recipe_data, resolve_sources
from embedtrain.errors import ConfigError, DataError

# Losses that have a use for what lies beside texts, and what: tried where the loss asked for has none.
_FALLBACK_LOSSES = {"cosent": "positive_scores", "batch_triplet": "label", "distill_embeddings": "vectors"}


@dataclass(frozen=True, slots=True)
class InspectedSource:
    """One source, read as far as it can be.

    Attributes:
        source: its options.
        name: its name in messages.
        data: what it is a part of; None where nothing can be read of it.
        number: which source of `data` it is.
        loss: what its rows were read for.
        error: why it cannot be trained on as the recipe says; "" where it can.
    """

    source: TrainSource
    name: str
    data: TrainData | None = None
    number: int = 0
    loss: LossConfig | None = None
    error: str = ""

    @property
    def store(self) -> RowStore:
        """Its rows."""
        assert self.data is not None
        return self.data.stores[self.number]


@dataclass(frozen=True, slots=True)
class InspectedData:
    """All sources of a recipe.

    Attributes:
        sources: each of them, file by file where that is asked for.
        data: all of them together; None where they cannot be trained on.
        error: why not, where each could be trained on alone.
    """

    sources: list[InspectedSource]
    data: TrainData | None = None
    error: str = ""

    @property
    def datasets(self) -> list[TrainData]:
        """What the sources are parts of, each once."""
        return list({id(one.data): one.data for one in self.sources if one.data is not None}.values())


def look_at(recipe: Recipe, prompts: Mapping[str, str], cache: Cache) -> InspectedData:
    """Read all rows that can be used, as training would: all sources together, or else each by itself.

    Args:
        recipe: what is inspected.
        prompts: the model's, by name: `query` and `document`.
        cache: where rows are kept.

    Raises:
        DataError, ConfigError: there is one source, and nothing of it can be shown.
    """
    try:
        data, losses = _read(recipe, prompts, cache)
        sources, _ = resolve_sources(recipe)
        parts = enumerate(zip(sources, data.names, losses, strict=True))
        return InspectedData([InspectedSource(source, name, data, i, loss) for i, (source, name, loss) in parts], data)
    except (DataError, ConfigError) as error:
        found = _expanded(recipe)
        sources = [replace(source, name=name) for source, name in zip(found, source_names(found), strict=True)]
        looked = [_alone(recipe, source, prompts, cache) for source in sources]
        if len(looked) == 1 and looked[0].data is None:
            raise
        return InspectedData(looked, error="" if any(one.error for one in looked) else str(error))


def _read(recipe: Recipe, prompts: Mapping[str, str], cache: Cache) -> tuple[TrainData, list[LossConfig]]:
    """All rows that can be used, checked; the others counted."""
    try:
        return load_recipe_data(recipe, prompts, cache)  # first as training does, so that it finds what is cached here
    except DataError:
        return load_recipe_data(recipe, prompts, cache, OnError.skip)


def _expanded(recipe: Recipe) -> list[TrainSource]:
    found: list[TrainSource] = []
    for source in recipe.data.train:
        try:
            found += resolve_sources(_with(recipe, [source]))[0]
        except (DataError, ConfigError):  # told when it is read
            found.append(source)
    return found


def _alone(recipe: Recipe, source: TrainSource, prompts: Mapping[str, str], cache: Cache) -> InspectedSource:
    """One source by itself: for the recipe's loss, else for another that has a use for what its rows hold."""
    assert source.name is not None
    try:
        data, (loss, *_) = _read(_with(recipe, [source]), prompts, cache)
        return InspectedSource(source, source.name, data, 0, loss)
    except (DataError, ConfigError) as error:
        told = str(error)
    plain = replace(source, loss=None, temperature=None)
    for name, what in _FALLBACK_LOSSES.items():
        other = _with(replace(recipe, loss=LOSSES[name]()), [plain])
        try:
            data, (loss, *_) = load_recipe_data(other, prompts, cache, OnError.skip)
        except (DataError, ConfigError):
            continue
        report = data.stores[0].report
        if what in data.stores[0].beside and report.num_unscored < report.num_rows:
            return InspectedSource(plain, source.name, data, 0, loss, told)
    return InspectedSource(source, source.name, error=told)


def _with(recipe: Recipe, sources: Sequence[TrainSource]) -> Recipe:
    return replace(recipe, data=replace(recipe.data, train=list(sources)))
