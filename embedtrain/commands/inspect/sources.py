"""The sources of a recipe, read as far as possible: one that cannot be used does not hide the others."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedtrain.config.columns import parse_columns
from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import OnError, Recipe, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import Cache, build
from embedtrain.data.cache.document_store import MappedCorpus, documents_build
from embedtrain.data.cache.row_checks import RowCheck
from embedtrain.data.cache.row_store import EXTRA_COLUMNS, RowStore
from embedtrain.data.sampling.permutation import random_bits
from embedtrain.data.sources.part_reader import PartPiece, PartReader
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.resolve import find_parts, source_names
from embedtrain.data.sources.values import BadRow
from embedtrain.data.train_data import TrainData, load_recipe_data, resolve_sources
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.types import ClassificationSet, ClusteringSet, EvaluationData, RetrievalSet

MAX_INSTRUCTIONS = 1_000  # distinct instructions that are counted


@dataclass(slots=True)
class ExtraColumns:
    """Statistics of the extra columns of a source."""

    scores: tuple[int, float, float, float] | None = None  # number, minimum, maximum, sum
    labels: Counter[int] = field(default_factory=Counter)  # rows of each class
    instructions: Counter[str] = field(default_factory=Counter)  # rows with each instruction for queries
    document_instructions: Counter[str] = field(default_factory=Counter)
    more_instructions: int = 0  # rows with further instructions, beyond MAX_INSTRUCTIONS
    width: int | None = None  # dimension of a teacher's vectors


def summarise_extra_columns(store: RowStore) -> ExtraColumns:
    """Statistics of the extra columns of a source."""
    extra = ExtraColumns()
    if "vectors" in store.extra_columns:
        vectors = store[0].vectors
        extra.width = len(vectors[0]) if vectors else None
    if not store.extra_columns & (EXTRA_COLUMNS.keys() - {"vectors", "max_negatives"}):
        return extra
    for batch in batches_of(store):
        names = set(batch.schema.names)
        if "positive_scores" in names:
            parts = [batch.column(name).flatten() for name in ("positive_scores", "negative_scores") if name in names]
            values = np.concatenate([part.to_numpy(zero_copy_only=False) for part in parts])
            extra.scores = _scores(extra.scores, values)
        if "label" in names:
            extra.labels.update(batch.column("label").drop_null().to_pylist())
        for name, counter in (
            ("instruction", extra.instructions),
            ("document_instruction", extra.document_instructions),
        ):
            if name in names:
                extra.more_instructions += _count(counter, batch.column(name))
    return extra


def batches_of(store: RowStore) -> Iterator[pa.RecordBatch]:
    """All rows in batches of columns."""
    for number in range(len(store.rows.batch_starts) - 1):
        yield store.rows.batch(number)


def _scores(
    before: tuple[int, float, float, float] | None, values: NDArray[np.float32]
) -> tuple[int, float, float, float] | None:
    if not len(values):
        return before
    now = (len(values), float(values.min()), float(values.max()), float(values.sum(dtype=np.float64)))
    if before is None:
        return now
    return before[0] + now[0], min(before[1], now[1]), max(before[2], now[2]), before[3] + now[3]


def _count(counter: Counter[str], column: pa.Array) -> int:
    """Count the instructions of some rows; returns the number of rows with an instruction beyond the limit."""
    left_out = 0
    for item in pc.value_counts(column.drop_null()).to_pylist():
        if item["values"] in counter or len(counter) < MAX_INSTRUCTIONS:
            counter[item["values"]] += item["counts"]
        else:
            left_out += item["counts"]
    return left_out


_QUERY, _POSITIVE, _NEGATIVE, _PAIR = 1, 2, 3, 4  # kinds of keys, hashed with them


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The keys of the texts of rows; see `text_keys` in data/rows.py."""

    queries: NDArray[np.int64]  # [R]
    positives: NDArray[np.int64]  # [P]
    negatives: NDArray[np.int64]  # [N]
    num_positives: NDArray[np.integer]  # [R]
    num_negatives: NDArray[np.integer]  # [R]

    @classmethod
    def join(cls, parts: Sequence["RowKeys"]) -> "RowKeys":
        """The concatenated rows of several sources."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, key.name) for part in parts]) for key in fields(cls)))


@dataclass(frozen=True, slots=True)
class Repetition:
    """Items that occur more than once: the number of distinct items, and of their occurrences."""

    distinct: int
    occurrences: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Texts and rows that occur several times."""

    queries: Repetition
    positives: Repetition
    documents: Repetition  # positives and negatives
    rows: Repetition  # with all texts equal, in any order of documents
    both: int  # documents that are a positive in one row and a negative in another
    contradictions: int  # pairs of query and document that are positive in one row and negative in another


def duplicates_in(keys: RowKeys) -> Duplicates:
    """Texts and rows that occur several times in these rows."""
    return Duplicates(
        queries=_count_repetitions(keys.queries),
        positives=_count_repetitions(keys.positives),
        documents=_count_repetitions(np.concatenate([keys.positives, keys.negatives])),
        rows=_count_repetitions(_row_keys(keys)),
        both=_in_both(keys.positives, keys.negatives),
        contradictions=_in_both(
            _pairs(keys.queries, keys.positives, keys.num_positives),
            _pairs(keys.queries, keys.negatives, keys.num_negatives),
        ),
    )


def _count_repetitions(keys: NDArray[np.generic]) -> Repetition:
    ordered = np.sort(keys)
    same = ordered[1:] == ordered[:-1]
    distinct = int(np.count_nonzero(same[1:] > same[:-1])) + int(bool(len(same) and same[0]))
    return Repetition(distinct, int(np.count_nonzero(same)) + distinct)


def _in_both(first: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    return len(np.intersect1d(first, other)) if len(first) and len(other) else 0


def _row_keys(keys: RowKeys) -> NDArray[np.uint64]:
    """A key of all texts of each row: a sum of hashes, so the order of a row's documents does not matter."""
    return (
        random_bits(_QUERY, keys.queries)
        + _sums(random_bits(_POSITIVE, keys.positives), keys.num_positives)
        + _sums(random_bits(_NEGATIVE, keys.negatives), keys.num_negatives)
    )


def _sums(hashes: NDArray[np.uint64], counts: NDArray[np.integer]) -> NDArray[np.uint64]:
    """The sum of each row's hashes, modulo 2^64."""
    running = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(hashes, dtype=np.uint64)])
    ends = np.cumsum(counts, dtype=np.int64)
    sums: NDArray[np.uint64] = running[ends] - running[ends - counts]
    return sums


def _pairs(queries: NDArray[np.int64], documents: NDArray[np.int64], counts: NDArray[np.integer]) -> NDArray[np.uint64]:
    """A key of each document together with its row's query."""
    return random_bits(_PAIR, np.repeat(queries, counts), documents)


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many texts of an evaluation set are queries or positives of training rows."""

    name: str
    queries: int  # different ones
    trained_queries: int
    documents: int  # relevant to a query
    trained_documents: int


def overlaps(sets: Sequence[EvaluationData], stores: Sequence[RowStore]) -> list[Overlap]:
    """Compare the texts of evaluation sets with those of training rows, without case and surrounding whitespace.

    Of a retrieval set these are the judged queries and the documents with a gain, of pairs their two texts. Texts
    of other sets count as queries. Instructions of rows and prompts are not part of the texts.
    """
    texts = [tuple(_bare(pa.array(side, pa.large_string())).unique() for side in _sides_of(data)) for data in sets]
    every = pa.chunked_array([side for of_set in texts for side in of_set], pa.large_string()).unique()
    found = np.zeros(len(every), dtype=np.bool_)
    for store in stores:
        for batch in batches_of(store):
            for column in (batch.columns[0], batch.columns[1].flatten()):
                indices = pc.index_in(_bare(column.cast(pa.large_string())), value_set=every).drop_null()
                found[indices.to_numpy(zero_copy_only=False)] = True
    trained = every.filter(pa.array(found))
    counts = [[(len(side), pc.sum(pc.is_in(side, trained)).as_py() or 0) for side in of_set] for of_set in texts]
    return [Overlap(data.name, *queries, *documents) for data, (queries, documents) in zip(sets, counts, strict=True)]


def _bare(texts: pa.Array) -> pa.Array:
    return pc.utf8_lower(pc.utf8_trim_whitespace(texts))


def _sides_of(data: EvaluationData) -> tuple[Sequence[str], Sequence[str]]:
    """The queries and the relevant documents of a set."""
    match data:
        case RetrievalSet():
            relevant = {name for gains in data.judgements.values() for name, gain in gains.items() if gain > 0}
            documents = zip(data.documents.ids, data.documents.texts, strict=True)
            return [data.queries[name] for name in data.judged_queries], [
                text for name, text in documents if name in relevant
            ]
        case ClassificationSet() | ClusteringSet():
            return data.texts, []
        case _:
            return data.first, data.second


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
    plain = replace(source, loss=None)
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
        documents = MappedCorpus(corpus.directory, reading.documents)
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
    return sum(all(line.row is None for line in reader.lines(PartPiece(part))) for part in others)
