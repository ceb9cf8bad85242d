"""The sources of a recipe, read as far as possible: one that cannot be used does not hide the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import OnError, Recipe, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.documents import DocumentStore, documents_build
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.shared_build import build
from embedtrain.data.cache.source_report import RowCheck
from embedtrain.data.sources.part_reader import PartReader, Piece
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.resolve import find_parts, source_names
from embedtrain.data.sources.values import BadRow
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
        if what in data.stores[0].extra_columns and report.num_unscored < report.num_rows:
            return InspectedSource(plain, source.name, data, 0, loss, told)
    return InspectedSource(source, source.name, error=told)


def _with(recipe: Recipe, sources: Sequence[TrainSource]) -> Recipe:
    return replace(recipe, data=replace(recipe.data, train=list(sources)))


_WHOLE_FILE_BYTES = 2**62  # bytes of a piece: no part is cut, so that lines are counted from its beginning


def first_bad_rows(source: TrainSource, name: str, needs: RowRequirements, most: int, cache: Cache) -> list[str]:
    """The first `most` rows that cannot be used, each as `path:line: what is wrong`, in order.

    Args:
        source: an element of `data.train`.
        name: its name in messages.
        needs: what the loss asks of every row.
        most: no more are looked for.
        cache: where the corpus is kept, if rows name documents by id.

    Raises:
        DataError: as Reading, and where a part cannot be read as a whole.
    """
    reading = SourceReader(source, name, needs)
    layout, documents = reading.detect_layout(OnError.skip), None
    if reading.documents is not None:
        corpus = documents_build(reading.documents, OnError.skip, cache)
        build([corpus])
        documents = DocumentStore(corpus.directory)
    found: list[str] = []
    for piece in reading.pieces(_WHOLE_FILE_BYTES):
        check, is_empty = RowCheck(needs), True
        for line, row in reading.rows(piece, layout, documents):
            is_empty = False
            try:
                if isinstance(row, BadRow):
                    raise row
                check(row)
            except BadRow as bad:
                found.append(f"{piece.part.location(line)}: {bad}")
            if len(found) >= most:
                return found
        if is_empty:
            found.append(f"{piece.part.name}: holds no rows")
            if len(found) >= most:
                return found
    return found


def num_empty_files(source: TrainSource, store: RowStore) -> int:
    """How many files of a source hold no row at all, not even one that cannot be used.

    Args:
        source: an element of `data.train`.
        store: its rows.

    Raises:
        DataError: a file is gone or cannot be read.
    """
    with_rows, opened = (
        {stretch.part for stretch in store.row_ranges},
        PartReader(subset=source.subset, split=source.split, columns=source.columns),
    )
    others = [part for number, part in enumerate(find_parts(source).parts) if number not in with_rows]
    return sum(all(line.row is None for line in opened.lines(Piece(part))) for part in others)
