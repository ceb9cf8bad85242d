"""The sources of a recipe, read as far as possible: one that cannot be used does not hide the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from embedtrain.config.columns import parse_columns
from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import OnError, Recipe, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.document_store import DocumentStore, documents_build
from embedtrain.data.cache.row_checks import RowCheck
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.shared_build import build
from embedtrain.data.sources.part_reader import PartReader, Piece
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.resolve import find_parts, source_names
from embedtrain.data.sources.values import BadRow
from embedtrain.data.train_data import TrainData, load_recipe_data, resolve_sources
from embedtrain.errors import ConfigError, DataError

# Losses that use an extra column, tried if the recipe's loss cannot read a source.
_FALLBACK_LOSSES = {"cosent": "positive_scores", "batch_triplet": "label", "distill_embeddings": "vectors"}


@dataclass(frozen=True, slots=True)
class InspectedSource:
    """One source, read as far as possible."""

    source: TrainSource
    name: str
    data: TrainData | None = None  # which it is part of; None if it cannot be read
    number: int = 0  # its index in `data`
    loss: LossConfig | None = None  # that its rows were read for
    error: str = ""  # why it cannot be trained on with the recipe

    @property
    def store(self) -> RowStore:
        """Its rows."""
        assert self.data is not None
        return self.data.stores[self.number]


@dataclass(frozen=True, slots=True)
class InspectedData:
    """All sources of a recipe."""

    sources: list[InspectedSource]  # split into files if requested
    data: TrainData | None = None  # all sources together; None if they cannot be trained on
    error: str = ""  # why not, if each could be trained on alone

    @property
    def datasets(self) -> list[TrainData]:
        """The distinct `data` of the sources."""
        return list({id(source.data): source.data for source in self.sources if source.data is not None}.values())


def inspect_sources(recipe: Recipe, prompts: Mapping[str, str], cache: Cache) -> InspectedData:
    """Read all valid rows as training does: all sources together, or else each alone.

    The prompts are the model's by name, `query` and `document`. A DataError or ConfigError if there is only one source
    and it cannot be read.
    """
    try:
        data, losses = _load_valid_rows(recipe, prompts, cache)
        sources, _ = resolve_sources(recipe)
        parts = enumerate(zip(sources, data.names, losses, strict=True))
        return InspectedData([InspectedSource(source, name, data, i, loss) for i, (source, name, loss) in parts], data)
    except (DataError, ConfigError) as error:
        expanded = _expand_sources(recipe)
        sources = [replace(source, name=name) for source, name in zip(expanded, source_names(expanded), strict=True)]
        inspected = [_inspect_alone(recipe, source, prompts, cache) for source in sources]
        if len(inspected) == 1 and inspected[0].data is None:
            raise
        return InspectedData(inspected, error="" if any(source.error for source in inspected) else str(error))


def _load_valid_rows(recipe: Recipe, prompts: Mapping[str, str], cache: Cache) -> tuple[TrainData, list[LossConfig]]:
    """All valid rows; invalid rows are counted."""
    try:  # as training does, so that training finds these rows in the cache
        return load_recipe_data(recipe, prompts, cache)
    except DataError:
        return load_recipe_data(recipe, prompts, cache, OnError.skip)


def _expand_sources(recipe: Recipe) -> list[TrainSource]:
    expanded: list[TrainSource] = []
    for source in recipe.data.train:
        try:
            expanded += resolve_sources(_with_sources(recipe, [source]))[0]
        except (DataError, ConfigError):  # reported when the source is read
            expanded.append(source)
    return expanded


def _inspect_alone(recipe: Recipe, source: TrainSource, prompts: Mapping[str, str], cache: Cache) -> InspectedSource:
    """One source alone: for the recipe's loss, else for another loss that uses its extra columns."""
    assert source.name is not None
    try:
        data, (loss, *_) = _load_valid_rows(_with_sources(recipe, [source]), prompts, cache)
        return InspectedSource(source, source.name, data, 0, loss)
    except (DataError, ConfigError) as error:
        message = str(error)
    plain = replace(source, loss=None, temperature=None)
    for name, column in _FALLBACK_LOSSES.items():
        other = _with_sources(replace(recipe, loss=LOSSES[name]()), [plain])
        try:
            data, (loss, *_) = load_recipe_data(other, prompts, cache, OnError.skip)
        except (DataError, ConfigError):
            continue
        report = data.stores[0].report
        if column in data.stores[0].extra_columns and report.rows.num_unscored < report.rows.num_rows:
            return InspectedSource(plain, source.name, data, 0, loss, message)
    return InspectedSource(source, source.name, error=message)


def _with_sources(recipe: Recipe, sources: Sequence[TrainSource]) -> Recipe:
    return replace(recipe, data=replace(recipe.data, train=list(sources)))


_WHOLE_FILE_BYTES = 2**62  # bytes of a piece: no part is cut, so that lines are counted from its beginning


def first_bad_rows(source: TrainSource, name: str, needs: RowRequirements, limit: int, cache: Cache) -> list[str]:
    """The first `limit` invalid rows in order, each as `path:line: problem`; the cache is for documents named by id.

    Raises:
        DataError: a part cannot be read at all.
    """
    reading = SourceReader(source, name, needs)
    layout, documents = reading.detect_layout(OnError.skip), None
    if reading.documents is not None:
        corpus = documents_build(reading.documents, OnError.skip, cache)
        build([corpus])
        documents = DocumentStore(corpus.directory)
    problems: list[str] = []
    for piece in reading.pieces(_WHOLE_FILE_BYTES):
        check, is_empty = RowCheck(needs), True
        rows = reading.rows(piece, layout, documents)
        for line, row in rows:
            is_empty = False
            try:
                if isinstance(row, BadRow):
                    raise row
                check(row)
            except BadRow as bad:
                problems.append(f"{piece.part.location(line)}: {bad}")
            if len(problems) >= limit:
                return problems
        if is_empty and not rows.left_out:
            problems.append(f"{piece.part.name}: holds no rows")
            if len(problems) >= limit:
                return problems
    return problems


def num_empty_files(source: TrainSource, store: RowStore) -> int:
    """Number of files of a source that have no rows, valid or not; a DataError if a file cannot be read."""
    with_rows = {row_range.part for row_range in store.row_ranges}
    columns = parse_columns(source.columns)
    reader = PartReader(subset=source.subset, split=source.split, columns=None if columns is None else columns.names)
    others = [part for number, part in enumerate(find_parts(source).parts) if number not in with_rows]
    return sum(all(line.row is None for line in reader.lines(Piece(part))) for part in others)
