"""The training data of a recipe: its rows, the order of batches, and what a batch takes of each row.

B: rows of a batch; T: texts of a batch, all queries and then all documents, row by row, each row's positive first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.losses import LossConfig
from embedtrain.config.recipe import OnError, Recipe, TrainSource, WeightMode
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.config.source_losses import (
    distinct_losses,
    source_loss,
    source_requirements,
    uses_batches_by_source,
)
from embedtrain.config.validation import TEXT_ALONE
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.known_answers import KnownAnswers, prepare_answers
from embedtrain.data.cache.row_store import RowStore, read_sources
from embedtrain.data.cache.token_store import TokenRequest, TokenStore, prepare_all, tokenise_queries
from embedtrain.data.images.item import item_parts
from embedtrain.data.rows import Example, TextFormat, text_keys
from embedtrain.data.sampling.plan import (
    NO_LIMIT,
    BatchDocuments,
    BatchNegatives,
    BatchPlan,
    PlannedBatch,
    Selection,
    draw,
    draw_batch_negatives,
    rows_per_source_of_epoch,
    without_words,
)
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.resolve import expand_sources, no_in_batch_negatives
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import BatchTokens, GlobalBatch, Tokens, gather_ranges, no_answers
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import format_count

T = TypeVar("T")

# Extra columns of rows that losses use.
ID_COLUMNS = frozenset({"positive_ids", "negative_ids"})
LOSS_COLUMNS = ID_COLUMNS | {"positive_scores", "negative_scores", "label", "vectors"}


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of all rows of a source."""

    text_format: TextFormat
    negatives: int | None = None  # hard negatives of a row that one step uses; None: all
    other_positives: bool = False  # whether a step uses other positives of a row like its negatives
    batch_negatives: int = 0  # documents of other rows that each row gets as further negatives
    text_as_positive: bool = False  # whether the positive of a row is its query
    delete_words: float = 0.0  # share of the words that queries lack


class SelectedRows(Sequence[Example]):
    """The rows of a global batch, each read when it is accessed.

    `deleted` is the share of words that the query of each row lacks, drawn by `seed`: float64 [B].
    """

    def __init__(
        self,
        stores: Sequence[RowStore],
        planned: PlannedBatch,
        selection: Selection,
        deleted: NDArray[np.float64],
        seed: int,
    ) -> None:
        self._stores, self._planned, self._selection = stores, planned, selection
        self._deleted, self._seed = deleted, seed
        self._negative_starts = np.cumsum(selection.counts) - selection.counts

    def __len__(self) -> int:
        return len(self._planned.rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        if isinstance(index, slice):
            return tuple(self._row(i) for i in range(len(self))[index])
        return self._row(range(len(self))[index])

    def query(self, index: int) -> tuple[str, str | None]:
        """The query of a row, with the words that are left, and its instruction."""
        example = self._example(index)
        return self._query(index, example.query), example.instruction

    def id_keys(self) -> NDArray[np.int64]:
        """Hashes of the ids of all documents that the rows hold, row by row, -1 without an id. Reads every row.

        Ids are compared within a source: "7" of another source is another document.
        """
        ids: list[str] = []
        for index, source in enumerate(self._planned.sources.tolist()):
            example = self._example(index)
            names = (*example.positives.all_ids, *example.negatives.all_ids)
            ids += [name and f"{source} {name}" for name in names]
        return np.where([bool(name) for name in ids], text_keys(ids), -1)

    def _example(self, index: int) -> Example:
        return self._stores[int(self._planned.sources[index])][int(self._planned.rows[index])]

    def _query(self, index: int, query: str) -> str:
        share = float(self._deleted[index])
        position = self._planned.first_position + index
        return without_words(query, share, position, self._seed) if share else query

    def _row(self, index: int) -> Example:
        start, count = self._negative_starts[index], self._selection.counts[index]
        negatives = self._selection.negatives[start : start + count].tolist()
        row = self._example(index).selected(int(self._selection.positive[index]), negatives)
        return replace(row, query=self._query(index, row.query)) if self._deleted[index] else row


class SelectedTokens:
    """The tokens of a global batch from the stores of its sources: implements BatchTokens.

    `num_positives` are those of each row: int64 [B].
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        planned: PlannedBatch,
        selection: Selection,
        num_positives: NDArray[np.int64],
    ) -> None:
        self._stores, self._planned = stores, planned
        query_texts = np.empty(len(planned.rows), dtype=np.int64)  # of each row, the index of its query in the store
        for source in np.unique(planned.sources):
            of_source = planned.sources == source
            query_texts[of_source] = stores[source].row_starts[planned.rows[of_source]]
        self.num_documents = (selection.positive >= 0) + selection.counts
        self._texts = np.concatenate([query_texts, _document_texts(query_texts, num_positives, selection)])
        self._sources = np.concatenate([planned.sources, np.repeat(planned.sources, self.num_documents)])
        self.lengths, self.keys = (np.empty(len(self._texts), dtype=np.int64) for _ in range(2))
        for source in np.unique(planned.sources):
            of_source = self._sources == source
            self.lengths[of_source] = stores[source].lengths(self._texts[of_source])
            self.keys[of_source] = stores[source].keys[self._texts[of_source]]

    def documents(self, ids: NDArray[np.int64] | None, answers: NDArray[np.int64]) -> BatchDocuments:
        """The documents that the rows hold; `ids` are those of `SelectedRows.id_keys`, None if no row has any."""
        num_rows = len(self.num_documents)
        queries, counts = self._texts[:num_rows], np.empty(num_rows, dtype=np.int64)
        for source in np.unique(self._planned.sources):
            of_source = self._planned.sources == source
            counts[of_source] = self._stores[source].row_starts[self._planned.rows[of_source] + 1]
        counts -= queries + 1
        first = np.cumsum(counts) - counts  # of each row among the documents that all rows hold
        keys = np.empty(int(counts.sum()), dtype=np.int64)
        owners = np.repeat(self._planned.sources, counts)
        for source in np.unique(self._planned.sources):
            of_source = self._planned.sources == source
            keys[owners == source] = gather_ranges(self._stores[source].keys, queries[of_source] + 1, counts[of_source])
        rows = np.repeat(np.arange(num_rows), self.num_documents)
        used = first[rows] + self._texts[num_rows:] - queries[rows] - 1
        return BatchDocuments(
            query_keys=self.keys[:num_rows], keys=keys, ids=ids, counts=counts, used=used, known_answers=answers
        )

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        """The tokens of these texts."""
        sources = np.unique(self._sources[texts])
        if len(sources) == 1:
            return self._stores[int(sources[0])].tokens(self._texts[texts])
        lengths = self.lengths[texts]
        owners = np.repeat(self._sources[texts], lengths)
        tokens = Tokens.plain(np.empty(int(lengths.sum()), dtype=np.int32), lengths)
        for source in sources:
            of_source = self._stores[int(source)].tokens(self._texts[texts[self._sources[texts] == source]])
            tokens.ids[owners == source], tokens.flags[owners == source] = of_source.ids, of_source.flags
        return tokens


def _document_texts(
    query_texts: NDArray[np.int64], num_positives: NDArray[np.int64], selection: Selection
) -> NDArray[np.int64]:
    """The indices of all selected documents in the stores: of each row its positive, then its negatives.

    A row with 2 positives and 3 negatives whose query is text 10 of its store has positives 11 and 12 and negatives 13,
    14 and 15. If positive 1 and negatives 0 and 2 are selected, its documents are 12, 13 and 15.
    """
    has_positive = selection.positive >= 0
    num_documents = has_positive + selection.counts
    row_starts = np.cumsum(num_documents) - num_documents  # of each row in the result
    documents = np.empty(int(num_documents.sum()), dtype=np.int64)
    documents[row_starts[has_positive]] = (query_texts + 1 + selection.positive)[has_positive]
    first_negatives = query_texts + 1 + num_positives
    negative_starts = np.cumsum(selection.counts) - selection.counts
    index_in_row = np.arange(len(selection.negatives)) - negative_starts[selection.owners]
    negatives = first_negatives[selection.owners] + selection.negatives
    documents[(row_starts + has_positive)[selection.owners] + index_in_row] = negatives
    return documents


class ExtendedTokens:
    """The tokens of a batch whose rows also have documents of other rows, after their own: implements BatchTokens."""

    def __init__(self, tokens: BatchTokens, negatives: BatchNegatives) -> None:
        self._tokens = tokens
        num_rows, own = len(tokens.num_documents), len(tokens.keys) - len(tokens.num_documents)
        self.num_documents = tokens.num_documents + negatives.counts
        owners = np.concatenate(
            [np.repeat(np.arange(num_rows), counts) for counts in (tokens.num_documents, negatives.counts)]
        )
        documents = np.concatenate([np.arange(own), negatives.documents])[np.argsort(owners, kind="stable")]
        self._texts = np.concatenate([np.arange(num_rows), num_rows + documents])
        self.lengths, self.keys = tokens.lengths[self._texts], tokens.keys[self._texts]

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        """The tokens of these texts."""
        return self._tokens.tokens(self._texts[texts])


class ShortenedTokens:
    """The tokens of a batch in which some queries lack words: implements BatchTokens.

    The keys are those of the whole texts: what is a duplicate does not depend on the words that were drawn.

    Args:
        tokens: of the whole texts.
        rows: int64 [n], the rows whose queries lack words.
        shortened: the tokens of their queries.
    """

    def __init__(self, tokens: BatchTokens, rows: NDArray[np.int64], shortened: Tokens) -> None:
        self._tokens, self._shortened = tokens, shortened
        self.num_documents, self.keys, self.lengths = tokens.num_documents, tokens.keys, tokens.lengths.copy()
        self.lengths[rows] = shortened.lengths
        self._numbers = np.full(len(self.keys), -1, dtype=np.int64)
        self._numbers[rows] = np.arange(len(rows))

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        """The tokens of these texts."""
        numbers = self._numbers[texts]
        whole, short = np.flatnonzero(numbers < 0), np.flatnonzero(numbers >= 0)
        parts = [self._tokens.tokens(texts[whole]), self._shortened.take(numbers[short])]
        return Tokens.concatenated(parts).take(np.argsort(np.concatenate([whole, short])))


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How sources are mixed, as the options of DataConfig."""

    by_source: bool = False
    mixed_share: float = 0.0
    weights: WeightMode = WeightMode.epochs
    temperature: float = 1.0
    losses: Sequence[int] | None = None  # a number per source, equal for sources with the same loss; None: one loss


class TrainData:
    """All training rows and their order, with notes for the user."""

    def __init__(
        self, stores: Sequence[RowStore], plan: BatchPlan, settings: Sequence[SourceSettings], notes: list[str]
    ) -> None:
        self.stores, self.plan, self.settings, self.notes = list(stores), plan, list(settings), notes
        self.tokens: list[TokenStore] | None = None
        self.answers: KnownAnswers | None = None
        self._tokenizer: TextTokenizer | None = None

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    @property
    def warnings(self) -> list[str]:
        """What may be a mistake in the sources."""
        return [warning for store in self.stores for warning in store.report.warnings()]

    @property
    def names(self) -> list[str]:
        """The sources' names."""
        return [store.report.name for store in self.stores]

    @property
    def texts_per_row(self) -> int:
        """Query and documents of a row, in the source whose rows have the most."""
        counts = [store.report.negative_counts() for store in self.stores]
        return max(1 if count.one_text else 2 + count.most for count in counts)

    def prepare(self, tokenizer: TextTokenizer, cache: Cache) -> list[str]:
        """Tokenise all texts that are not in the cache; batches have tokens afterwards. Returns notes for the user.

        Processes that call this at the same time share the work.

        Raises:
            DataError: the tokens cannot be written.
            ConfigError: `delete_words` of a source with pictures.
        """
        for store, of_source in zip(self.stores, self.settings, strict=True):
            if of_source.delete_words and store.report.num_pictures:
                raise ConfigError(
                    f"{store.report.name}: delete_words={of_source.delete_words:g} deletes words of texts, and rows "
                    "of this source have pictures; leave it out"
                )
        requests = [
            TokenRequest(store, settings.text_format)
            for store, settings in zip(self.stores, self.settings, strict=True)
        ]
        self.tokens, self._tokenizer = prepare_all(requests, tokenizer, cache), tokenizer
        self.answers = prepare_answers(self.stores, self.tokens, cache)
        return [note for request in requests for note in request.notes(tokenizer)]

    def batch(self, k: int) -> GlobalBatch:
        """Global batch k, counted from 0: a function of k, the same on every rank.

        Its rows are read when they are accessed: a rank reads only its own.
        """
        planned = self.plan.batch(k)
        positives, negatives, limits = (np.empty(len(planned.rows), dtype=np.int64) for _ in range(3))
        for source in np.unique(planned.sources):
            store, of_source = self.stores[source], planned.sources == source
            rows = planned.rows[of_source]
            positives[of_source], negatives[of_source] = store.num_positives[rows], store.num_negatives[rows]
            limits[of_source] = self._max_negatives(int(source), rows)
        positions = planned.first_position + np.arange(len(planned.rows))
        uses_others = np.array([settings.other_positives for settings in self.settings])
        other_positives = uses_others[planned.sources] if uses_others.any() else None
        selection = draw(positives, negatives, limits, positions, self.plan.seed, other_positives)
        sources = [planned.source] if planned.source is not None else range(len(self.stores))
        deleted = np.array([settings.delete_words for settings in self.settings])[planned.sources]
        rows = SelectedRows(self.stores, planned, selection, deleted, self.plan.seed)
        has_ids = any(self.stores[source].extra_columns & ID_COLUMNS for source in sources)
        tokens: BatchTokens | None = None
        drawn: BatchNegatives | None = None
        answers = no_answers()
        if self.tokens is not None and self.answers is not None:
            tokens = selected = SelectedTokens(self.tokens, planned, selection, positives)
            answers = self.answers.among(tokens.keys[: len(rows)], tokens.keys[len(rows) :])
            num_drawn = np.array([settings.batch_negatives for settings in self.settings])[planned.sources]
            if num_drawn.any():
                documents = selected.documents(rows.id_keys() if has_ids else None, answers)
                drawn = draw_batch_negatives(documents, num_drawn, self.plan.seed, k)
            if deleted.any():
                tokens = self._without_words(selected, rows, planned.sources, deleted)
            if drawn is not None:
                tokens = ExtendedTokens(tokens, drawn)
        return GlobalBatch(
            k,
            rows,
            source=planned.source,
            row_sources=planned.sources if planned.source is None and len(self.stores) > 1 else None,
            tokens=tokens,
            has_loss_columns=any(self.stores[source].extra_columns & LOSS_COLUMNS for source in sources),
            has_ids=has_ids,
            num_batch_negatives=None if drawn is None else drawn.counts,
            known_answers=answers,
        )

    def _without_words(
        self, tokens: BatchTokens, rows: SelectedRows, sources: NDArray[np.int64], deleted: NDArray[np.float64]
    ) -> BatchTokens:
        """The tokens with those of queries that lack words, of all rows: every rank has to know their lengths."""
        assert self._tokenizer is not None, "tokens are there"
        for source in np.unique(sources[deleted > 0]):
            of_source = np.flatnonzero(sources == source)
            queries = [rows.query(row) for row in of_source.tolist()]
            shortened = tokenise_queries(queries, self.settings[source].text_format, self._tokenizer)
            tokens = ShortenedTokens(tokens, of_source, shortened)
        return tokens

    def teacher_dimension(self, source: int) -> int | None:
        """The dimension of the teacher's vectors in the rows of a source; None if there are none."""
        vectors = self.stores[source][0].vectors
        return len(vectors[0]) if vectors else None

    def texts(self) -> Iterator[str]:
        """The texts of all queries and documents without prompts and pictures, for training a vocabulary."""
        for store in self.stores:
            for item in store.texts():
                yield from (part for part in item_parts(item) if isinstance(part, str))

    def _max_negatives(self, source: int, rows: np.ndarray) -> np.ndarray:
        """The maximal number of hard negatives of each row, NO_LIMIT for all."""
        option, row_limits = self.settings[source].negatives, self.stores[source].max_negatives
        limits = np.full(len(rows), NO_LIMIT if option is None else option, dtype=np.int64)
        if row_limits is None:
            return limits
        stored = row_limits[rows].astype(np.int64)  # -1 for all
        return np.minimum(limits, np.where(stored < 0, NO_LIMIT, stored))


def load_train_data(
    sources: Sequence[TrainSource],
    *,
    on_error: OnError = OnError.stop,
    text_format: TextFormat | None = None,
    seed: int,
    global_batch_size: int,
    needs: RowRequirements | Sequence[RowRequirements] = TEXTS_ONLY,
    mixing: Mixing | None = None,
    cache: Cache | None = None,
) -> TrainData:
    """Read all sources of `data.train`, check every row, and plan the batches.

    Args:
        on_error: stop at the first invalid row, or skip invalid rows and report them in the notes.
        text_format: prompts and instruction format of sources without their own; default: no prompts.
        seed: determines the order of rows and the selection of positives and negatives.
        needs: what the loss requires of rows, for all sources or per source; default: a query and a positive.
        mixing: how sources are mixed; default: in proportion to their sizes, in every batch.
        cache: the cache of checked rows; default: a temporary directory.

    Raises:
        DataError: an invalid row or file, with file and line.
        ConfigError: invalid options of a source or batch size, or options that do not fit the loss.
    """
    mixing = mixing or Mixing()
    stores = read_sources(sources, on_error, needs, cache, losses=mixing.losses)
    sizes = [len(store) for store in stores]
    rows = rows_per_source_of_epoch(
        sizes,
        [source.weight for source in sources],
        max_rows=[source.max_rows for source in sources],
        mode=mixing.weights,
        temperature=mixing.temperature,
    )
    plan = BatchPlan(sizes, rows, global_batch_size, seed, by_source=mixing.by_source, mixed_share=mixing.mixed_share)
    text_format = text_format or TextFormat()
    source_needs = [needs] * len(sources) if isinstance(needs, RowRequirements) else needs
    settings = [
        SourceSettings(
            TextFormat.of(source, text_format),
            source.negatives,
            row_needs.other_positives,
            row_needs.batch_negatives,
            text_as_positive=source.text_as_positive,
            delete_words=source.delete_words,
        )
        for source, row_needs in zip(sources, source_needs, strict=True)
    ]
    notes = [str(store.report) for store in stores]
    notes += _instructions(stores, settings)
    notes += _batch_negatives(stores, settings)
    notes += [
        f"{store.report.name}: each word of a query is deleted with the probability {of_source.delete_words:g} "
        "(delete_words)"
        for store, of_source in zip(stores, settings, strict=True)
        if of_source.delete_words
    ]
    notes.append(_epoch(stores, rows, plan, mixing))
    return TrainData(stores, plan, settings, notes)


def _instructions(stores: Sequence[RowStore], settings: Sequence[SourceSettings]) -> list[str]:
    """Notes on the format of instructions in rows."""
    sources: dict[str, list[str]] = {}
    for store, source_settings in zip(stores, settings, strict=True):
        if {"instruction", "document_instruction"} & store.extra_columns:
            sources.setdefault(source_settings.text_format.instruction_format, []).append(store.report.name)
    return [
        f"{', '.join(names)}: instructions of {'its' if len(names) == 1 else 'their'} rows "
        + ("are not used" if form == TEXT_ALONE else f"go before texts as {form!r}")
        for form, names in sources.items()
    ]


def _batch_negatives(stores: Sequence[RowStore], settings: Sequence[SourceSettings]) -> list[str]:
    """Notes on documents of other rows as negatives."""
    drawn = [source_settings.batch_negatives for source_settings in settings]
    if not any(drawn):
        return []
    without = [store.report.name for store, count in zip(stores, drawn, strict=True) if not count]
    names = f"; rows of {', '.join(without)} get none, because of in_batch_negatives=false" * bool(without)
    return [
        f"data.batch_negatives={max(drawn)}: each row gets {format_count(max(drawn), 'document')} of other rows of its "
        f"batch as further negatives, whose label is 0{names}"
    ]


def _epoch(stores: Sequence[RowStore], rows: Sequence[int], plan: BatchPlan, mixing: Mixing) -> str:
    total, batches, size = plan.rows_per_epoch, plan.steps_per_epoch, plan.global_batch_size
    note = f"an epoch: {format_count(total, 'row')} in {format_count(batches, 'batch', 'batches')} of "
    if mixing.by_source and len(stores) > 1:
        note += f"up to {format_count(size, 'row')}, each of one source"
        note += f" but for up to {plan.mixed_rows:,} of all sources" * bool(plan.mixed_rows)
        is_divided = not any(count % size for count in rows)
    else:
        smallest, largest = total // batches, -(-total // batches)
        note += f"{smallest:,} or " * (smallest < largest) + format_count(largest, "row")
        is_divided = total % size == 0
    if batches == 1 and not is_divided:
        note += f" (fewer than train.global_batch_size={size})"
    elif not is_divided:
        note += (
            f" (train.global_batch_size={size} does not divide the number of rows: batches are made smaller, and no "
            "row is dropped or added to fill one)"
        )
    if any(count != len(store) for store, count in zip(stores, rows, strict=True)):
        counts = (f"{store.report.name} {count:,}" for store, count in zip(stores, rows, strict=True))
        note += f" ({', '.join(list(counts)[:8])}{', ...' * (len(stores) > 8)})"
    return note


def resolve_sources(recipe: Recipe) -> tuple[list[TrainSource], list[LossConfig]]:
    """The sources of `data.train`, split into files if requested, and the loss of each.

    Raises:
        DataError: a source does not exist, or its files disagree on in-batch negatives.
        ConfigError: options of a source that do not fit its loss.
    """
    sources = [
        replace(source, in_batch_negatives=False)
        if source.in_batch_negatives is None and no_in_batch_negatives(source)
        else source
        for source in expand_sources(recipe.data.train)
    ]
    return sources, [source_loss(source, recipe.loss) for source in sources]


def load_recipe_data(
    recipe: Recipe, prompts: Mapping[str, str], cache: Cache, on_error: OnError | None = None
) -> tuple[TrainData, list[LossConfig]]:
    """The checked rows of a recipe, and the loss of each source; the errors are those of `load_train_data`.

    Args:
        prompts: the model's prompts by name, `query` and `document`.
        on_error: overrides the recipe's.
    """
    sources, losses = resolve_sources(recipe)
    data = load_train_data(
        sources,
        on_error=on_error or recipe.data.on_error,
        text_format=TextFormat(
            query_prompt=prompts.get("query", ""),
            document_prompt=prompts.get("document", ""),
            instruction_format=recipe.data.instruction_format,
        ),
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        needs=[source_requirements(source, loss, recipe) for source, loss in zip(sources, losses, strict=True)],
        mixing=Mixing(
            by_source=uses_batches_by_source(recipe.data, losses),
            mixed_share=recipe.data.mixed_share,
            weights=recipe.data.weight_mode,
            temperature=recipe.data.mixing_temperature,
            losses=distinct_losses(losses)[1],
        ),
        cache=cache,
    )
    without_in_batch = [
        name
        for name, source in zip(data.names, sources, strict=True)
        if source.in_batch_negatives is False and no_in_batch_negatives(source)
    ]
    if without_in_batch:
        data.notes.append(f"{', '.join(without_in_batch)}: no in-batch negatives, as no_in_batch_neg in the path says")
    return data, losses
