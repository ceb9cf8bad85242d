"""The sources of a recipe as far as they can be read: one that cannot be used hides none of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import OnError, Recipe, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.sources.sources import source_names
from embedtrain.data.train_data import TrainData, chosen_data, chosen_sources
from embedtrain.errors import ConfigError, DataError

# Losses that have a use for what lies beside texts, and what: tried where the loss asked for has none.
_OTHERS = {"cosent": "positive_scores", "batch_triplet": "label", "distill_embeddings": "vectors"}


@dataclass(frozen=True, slots=True)
class Looked:
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
class LookedAt:
    """All sources of a recipe.

    Attributes:
        sources: each of them, file by file where that is asked for.
        data: all of them together; None where they cannot be trained on.
        error: why not, where each could be trained on alone.
    """

    sources: list[Looked]
    data: TrainData | None = None
    error: str = ""

    @property
    def datas(self) -> list[TrainData]:
        """What the sources are parts of, each once."""
        return list({id(one.data): one.data for one in self.sources if one.data is not None}.values())


def look_at(recipe: Recipe, prompts: Mapping[str, str], cache: Cache) -> LookedAt:
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
        sources, _ = chosen_sources(recipe)
        parts = enumerate(zip(sources, data.names, losses, strict=True))
        return LookedAt([Looked(source, name, data, i, loss) for i, (source, name, loss) in parts], data)
    except (DataError, ConfigError) as error:
        found = _expanded(recipe)
        sources = [replace(source, name=name) for source, name in zip(found, source_names(found), strict=True)]
        looked = [_alone(recipe, source, prompts, cache) for source in sources]
        if len(looked) == 1 and looked[0].data is None:
            raise
        return LookedAt(looked, error="" if any(one.error for one in looked) else str(error))


def _read(recipe: Recipe, prompts: Mapping[str, str], cache: Cache) -> tuple[TrainData, list[LossConfig]]:
    """All rows that can be used, checked; the others counted."""
    try:
        return chosen_data(recipe, prompts, cache)  # first as training does, so that it finds what is cached here
    except DataError:
        return chosen_data(recipe, prompts, cache, OnError.skip)


def _expanded(recipe: Recipe) -> list[TrainSource]:
    found: list[TrainSource] = []
    for source in recipe.data.train:
        try:
            found += chosen_sources(_with(recipe, [source]))[0]
        except (DataError, ConfigError):  # told when it is read
            found.append(source)
    return found


def _alone(recipe: Recipe, source: TrainSource, prompts: Mapping[str, str], cache: Cache) -> Looked:
    """One source by itself: for the recipe's loss, else for another that has a use for what its rows hold."""
    assert source.name is not None
    try:
        data, (loss, *_) = _read(_with(recipe, [source]), prompts, cache)
        return Looked(source, source.name, data, 0, loss)
    except (DataError, ConfigError) as error:
        told = str(error)
    plain = replace(source, loss=None, temperature=None)
    for name, what in _OTHERS.items():
        other = _with(replace(recipe, loss=LOSSES[name]()), [plain])
        try:
            data, (loss, *_) = chosen_data(other, prompts, cache, OnError.skip)
        except (DataError, ConfigError):
            continue
        report = data.stores[0].report
        if what in data.stores[0].beside and report.num_unscored < report.num_rows:
            return Looked(plain, source.name, data, 0, loss, told)
    return Looked(source, source.name, error=told)


def _with(recipe: Recipe, sources: Sequence[TrainSource]) -> Recipe:
    return replace(recipe, data=replace(recipe.data, train=list(sources)))
