"""Training data as the loop uses it: global batch k, its positives and hard negatives drawn, prompts known."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from embedtrain.config.losses import LossConfig
from embedtrain.config.recipe import DataConfig, OnError, Recipe, TrainSource, WeightMode
from embedtrain.config.row_requirements import RowRequirements, row_requirements
from embedtrain.config.source_losses import distinct_losses, source_loss, uses_batches_by_source
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.open_sources import read_sources
from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.cache.token_store import TokenStore, Wanted, prepare_all
from embedtrain.data.drawn import Given, SelectedRows, SelectedTokens
from embedtrain.data.sampling.draw import draw
from embedtrain.data.sampling.mixing import rows_per_source_of_epoch
from embedtrain.data.sampling.plan import BatchPlan
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.resolve import expand_sources, no_in_batch_negatives
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch

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
        given: for each source, what a batch takes of its rows and puts around their texts.
        notes: lines for the user about what was found.
    """

    def __init__(self, stores: Sequence[RowStore], plan: BatchPlan, given: Sequence[Given], notes: list[str]) -> None:
        self.stores, self.plan, self.given, self.notes = list(stores), plan, list(given), notes
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
            Wanted(
                rows=store,
                query_prompt=given.query_prompt,
                document_prompt=given.document_prompt,
                instruction_format=given.instruction_format,
                query_max_length=given.query_max_length,
                document_max_length=given.document_max_length,
            )
            for store, given in zip(self.stores, self.given, strict=True)
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
            SelectedRows(self.stores, self.given, planned, drawn),
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
        option, own = self.given[source].negatives, self.stores[source].most_negatives
        limit = np.full(len(rows), -1 if option is None else option, dtype=np.int64)
        if own is None:
            return limit
        limits = own[rows]
        return np.where(limits < 0, limit, np.where(limit < 0, limits, np.minimum(limit, limits)))


def load_train_data(
    sources: Sequence[TrainSource],
    *,
    on_error: OnError = OnError.stop,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
    instruction_format: str = DataConfig.instruction_format,
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
        query_prompt: the model's, for sources that name none of their own.
        document_prompt: the model's, likewise.
        instruction_format: how a row's own instruction is put around its texts, likewise.
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
    given = [
        Given(
            query_prompt=_first_given(source.query_prompt, query_prompt),
            document_prompt=_first_given(source.document_prompt, document_prompt),
            instruction_format=source.instruction_format or instruction_format,
            query_max_length=source.query_max_length,
            document_max_length=source.document_max_length,
            negatives=source.negatives,
        )
        for source in sources
    ]
    notes = [str(store.report) for store in stores]
    notes += _instructions(stores, given)
    notes.append(_epoch(stores, rows, plan, mixing))
    return TrainData(stores, plan, given, notes)


def _instructions(stores: Sequence[RowStore], given: Sequence[Given]) -> list[str]:
    """How sources' own instructions stand around their texts."""
    sources: dict[str, list[str]] = {}
    for store, each in zip(stores, given, strict=True):
        if {"instruction", "document_instruction"} & store.beside:
            sources.setdefault(each.instruction_format, []).append(store.report.name)
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


def _first_given(*prompts: str | None) -> str:
    return next((prompt for prompt in prompts if prompt is not None), "")


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
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
        instruction_format=recipe.data.instruction_format,
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
