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
from embedtrain.config.row_requirements import RowRequirements, row_requirements
from embedtrain.config.source_losses import distinct_losses, source_loss, uses_batches_by_source
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.read_sources import read_sources
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.token_store import TokenRequest, TokenStore, prepare_all
from embedtrain.data.sampling.draw import Selection, draw
from embedtrain.data.sampling.mixing import rows_per_source_of_epoch
from embedtrain.data.sampling.plan import BatchPlan, PlannedBatch
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.resolve import expand_sources, no_in_batch_negatives
from embedtrain.data.text_format import TextFormat
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Example, GlobalBatch, Row

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What holds for all rows of a source.

    Attributes:
        text_format: prompts and maximal lengths.
        negatives: hard negatives of a row that one step uses; None: all.
    """

    text_format: TextFormat
    negatives: int | None = None

    def row(self, example: Example, positive: int, negatives: Sequence[int]) -> Row:
        """One positive and some hard negatives of `example`, by their numbers.

        A row with fewer negatives has fewer documents: none is repeated and nothing is padded, since a
        negative given twice would weigh twice in the loss.
        """

        def drawn(of_positives: Sequence[T], of_negatives: Sequence[T]) -> tuple[T, ...]:
            return (of_positives[positive], *[of_negatives[i] for i in negatives]) if of_positives else ()

        documents = drawn(example.positives, example.negatives)
        vectors = example.vectors * (1 + len(documents))  # where one stands for all texts
        if len(example.vectors) > 1:
            first_negative = 1 + len(example.positives)
            vectors = example.vectors[:1] + drawn(example.vectors[1:first_negative], example.vectors[first_negative:])
        return Row(
            example.query,
            documents,
            scores=drawn(example.positive_scores, example.negative_scores),
            ids=drawn(*_all_ids(example)),
            label=example.label,
            vectors=vectors,
            source=example.source,
        )


def _all_ids(example: Example) -> tuple[Sequence[str], Sequence[str]]:
    positives, negatives = example.positive_ids, example.negative_ids
    if not positives and not negatives:
        return (), ()
    return positives or [""] * len(example.positives), negatives or [""] * len(example.negatives)


class SelectedRows(Sequence[Row]):
    """The rows of a global batch, each made when it is asked for."""

    def __init__(
        self, stores: Sequence[RowStore], settings: Sequence[SourceSettings], planned: PlannedBatch, drawn: Selection
    ) -> None:
        self._stores, self._settings, self._planned, self._drawn = stores, settings, planned, drawn
        self._starts = np.cumsum(drawn.counts) - drawn.counts

    def __len__(self) -> int:
        return len(self._planned.rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, place: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(place, slice):
            return tuple(self._row(i) for i in range(len(self))[place])
        return self._row(range(len(self))[place])

    def _row(self, place: int) -> Row:
        source = int(self._planned.sources[place])
        start, count = self._starts[place], self._drawn.counts[place]
        return self._settings[source].row(
            self._stores[source][int(self._planned.rows[place])],
            int(self._drawn.positive[place]),
            self._drawn.negatives[start : start + count].tolist(),
        )


class SelectedTokens:
    """The tokens of a global batch's texts; see BatchTokens.

    Args:
        stores: of each source.
        planned: the rows.
        drawn: which positive and negatives of each.
        num_positives: int64 [B], that each row has.
    """

    def __init__(
        self, stores: Sequence[TokenStore], planned: PlannedBatch, drawn: Selection, num_positives: NDArray[np.int64]
    ) -> None:
        self._stores = stores
        firsts = np.empty(len(planned.rows), dtype=np.int64)
        for source in np.unique(planned.sources):
            here = planned.sources == source
            firsts[here] = stores[source].first[planned.rows[here]]
        answered = drawn.positive >= 0
        self.num_documents = answered + drawn.counts
        # The places of documents among all documents: each row's positive, then its negatives.
        starts = np.cumsum(self.num_documents) - self.num_documents
        documents = np.empty(int(self.num_documents.sum()), dtype=np.int64)
        documents[starts[answered]] = (firsts + 1 + drawn.positive)[answered]
        within = np.arange(len(drawn.negatives)) - (np.cumsum(drawn.counts) - drawn.counts)[drawn.owners]
        documents[(starts + answered)[drawn.owners] + within] = (firsts + 1 + num_positives)[
            drawn.owners
        ] + drawn.negatives
        self._texts = np.concatenate([firsts, documents])
        self._sources = np.concatenate([planned.sources, np.repeat(planned.sources, self.num_documents)])
        self.lengths, self.keys = (np.empty(len(self._texts), dtype=np.int64) for _ in range(2))
        for source in np.unique(planned.sources):
            here = self._sources == source
            self.lengths[here] = stores[source].lengths(self._texts[here])
            self.keys[here] = stores[source].keys[self._texts[here]]

    def ids(self, texts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens of these texts, one after the other."""
        sources = np.unique(self._sources[texts])
        if len(sources) == 1:
            return self._stores[int(sources[0])].ids(self._texts[texts])
        lengths = self.lengths[texts]
        owners = np.repeat(self._sources[texts], lengths)
        found: NDArray[np.int32] = np.empty(int(lengths.sum()), dtype=np.int32)
        for source in sources:
            found[owners == source] = self._stores[int(source)].ids(self._texts[texts[self._sources[texts] == source]])
        return found


# What lies beside the texts of a row and goes into a loss.
LOSS_COLUMNS = frozenset({"positive_scores", "negative_scores", "positive_ids", "negative_ids", "label", "vectors"})


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How sources are mixed; see DataConfig."""

    by_source: bool = False
    weights: WeightMode = WeightMode.epochs
    temperature: float = 1.0


class TrainData:
    """All training rows and the order they are seen in.

    Args:
        stores: the rows of each source.
        plan: the global order.
        settings: of each source.
        notes: lines for the user about what was found.
    """

    def __init__(
        self, stores: Sequence[RowStore], plan: BatchPlan, settings: Sequence[SourceSettings], notes: list[str]
    ) -> None:
        self.stores, self.plan, self.settings, self.notes = list(stores), plan, list(settings), notes
        self.tokens: list[TokenStore] | None = None

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    @property
    def names(self) -> list[str]:
        """The sources' names."""
        return [store.report.name for store in self.stores]

    def prepare(self, tokenizer: TextTokenizer, cache: Cache) -> list[str]:
        """Have every text tokenised, as far as that has not been done before; batches hold tokens from here on.

        Processes that call this at the same time share the work.

        Returns:
            Lines for the user.

        Raises:
            DataError: the tokens cannot be written.
        """
        wanted = [
            TokenRequest(store, settings.text_format)
            for store, settings in zip(self.stores, self.settings, strict=True)
        ]
        self.tokens = prepare_all(wanted, tokenizer, cache)
        return [note for one in wanted for note in one.notes(tokenizer)]

    def batch(self, k: int) -> GlobalBatch:
        """Global batch k, counted from 0: the same on every rank, whatever was asked for before.

        Its rows are made when they are asked for: a rank pays for its share alone.
        """
        planned = self.plan.batch(k)
        positives, negatives, most = (np.empty(len(planned.rows), dtype=np.int64) for _ in range(3))
        for source in np.unique(planned.sources):
            store, here = self.stores[source], planned.sources == source
            rows = planned.rows[here]
            positives[here], negatives[here] = store.num_positives[rows], store.num_negatives[rows]
            most[here] = self._most(int(source), rows)
        places = planned.first + np.arange(len(planned.rows))
        drawn = draw(positives, negatives, most, places, self.plan.seed)
        sources = [planned.source] if planned.source is not None else range(len(self.stores))
        return GlobalBatch(
            k,
            SelectedRows(self.stores, self.settings, planned, drawn),
            source=planned.source,
            tokens=None if self.tokens is None else SelectedTokens(self.tokens, planned, drawn, positives),
            beside=any(self.stores[source].beside & LOSS_COLUMNS for source in sources),
        )

    def teacher_dimension(self, source: int) -> int | None:
        """How many dimensions the teacher's vectors have that rows of a source hold; None where they hold none."""
        vectors = self.stores[source][0].vectors
        return len(vectors[0]) if vectors else None

    def texts(self) -> Iterator[str]:
        """All queries and documents without prompts, for training a vocabulary."""
        for store in self.stores:
            yield from store.texts()

    def _most(self, source: int, rows: np.ndarray) -> np.ndarray:
        """How many hard negatives may be used of each row, -1 for all."""
        option, own = self.settings[source].negatives, self.stores[source].most_negatives
        limit = np.full(len(rows), -1 if option is None else option, dtype=np.int64)
        if own is None:
            return limit
        limits = own[rows]
        return np.where(limits < 0, limit, np.where(limit < 0, limits, np.minimum(limit, limits)))


def load_train_data(
    sources: Sequence[TrainSource],
    *,
    on_error: OnError = OnError.stop,
    text_format: TextFormat | None = None,
    seed: int,
    global_batch_size: int,
    needs: RowRequirements | Sequence[RowRequirements] = TEXTS_ONLY,
    losses: Sequence[int] | None = None,
    mixing: Mixing | None = None,
    cache: Cache | None = None,
) -> TrainData:
    """Read all sources of `data.train`, check every row, and plan the batches.

    Args:
        sources: `data.train`.
        on_error: stop at the first bad row, or skip bad rows and say so in the notes.
        text_format: prompts and instruction format of sources without their own; default: no prompts.
        seed: the run's seed: rows, positives and negatives are drawn with it.
        global_batch_size: rows of a step over all ranks.
        needs: what the loss asks of every row, of all sources or of each; default: a query and a positive.
        losses: which loss each source has, by any numbers; default: all one. Only rows of one loss must agree.
        mixing: how sources are mixed; default: by their sizes, into each batch.
        cache: where checked rows are kept; default: a folder that goes with the data.

    Raises:
        DataError: a row or file that cannot be used; the text names file and line.
        ConfigError: options of a source, or the batch size, that cannot work, or not with this loss.
    """
    mixing = mixing or Mixing()
    stores = read_sources(sources, on_error, needs, cache, losses=losses)
    sizes = [len(store) for store in stores]
    rows = rows_per_source_of_epoch(
        sizes,
        [source.weight for source in sources],
        most=[source.max_rows for source in sources],
        kind=mixing.weights,
        temperature=mixing.temperature,
    )
    plan = BatchPlan(sizes, rows, global_batch_size, seed, by_source=mixing.by_source)
    text_format = text_format or TextFormat()
    settings = [SourceSettings(TextFormat.of(source, text_format), source.negatives) for source in sources]
    notes = [str(store.report) for store in stores]
    notes += _instructions(stores, settings)
    notes.append(_epoch(stores, rows, plan, mixing))
    return TrainData(stores, plan, settings, notes)


def _instructions(stores: Sequence[RowStore], settings: Sequence[SourceSettings]) -> list[str]:
    """How sources' own instructions stand around their texts."""
    sources: dict[str, list[str]] = {}
    for store, its_settings in zip(stores, settings, strict=True):
        if {"instruction", "document_instruction"} & store.beside:
            sources.setdefault(its_settings.text_format.instruction_format, []).append(store.report.name)
    return [
        f"{', '.join(names)}: instructions of {'its' if len(names) == 1 else 'their'} rows go before texts as {form!r}"
        for form, names in sources.items()
    ]


def _epoch(stores: Sequence[RowStore], rows: Sequence[int], plan: BatchPlan, mixing: Mixing) -> str:
    told = f"an epoch: {plan.rows_per_epoch:,} rows in {_counted(plan.steps_per_epoch, 'step')} of "
    if mixing.by_source and len(stores) > 1:
        told += f"up to {plan.global_batch_size:,}, each of one source"
    else:
        told += f"{-(-plan.rows_per_epoch // plan.steps_per_epoch):,}"  # all are as large, or smaller by one
    if any(count != len(store) for store, count in zip(stores, rows, strict=True)):
        shares = (f"{store.report.name} {count:,}" for store, count in zip(stores, rows, strict=True))
        told += f" ({', '.join(list(shares)[:8])}{', ...' * (len(stores) > 8)})"
    return told


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def resolve_sources(recipe: Recipe) -> tuple[list[TrainSource], list[LossConfig]]:
    """The sources of `data.train`, file by file where that is asked for, and the loss of each.

    Raises:
        DataError: a source is not there, or only some of its files are to have in-batch negatives.
        ConfigError: a source's own options do not go with its loss.
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
    """All rows of a recipe, checked, and the loss of each source.

    Args:
        recipe: what is asked for.
        prompts: the model's, by name: `query` and `document`.
        cache: where rows are kept.
        on_error: instead of the recipe's.

    Raises:
        DataError, ConfigError: see `load_train_data`.
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
        needs=[row_requirements(loss) for loss in losses],
        losses=distinct_losses(losses)[1],
        mixing=Mixing(
            by_source=uses_batches_by_source(recipe.data.batches, losses),
            weights=recipe.data.weight_mode,
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
