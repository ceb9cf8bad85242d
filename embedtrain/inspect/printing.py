"""How inspected training data looks: what each source holds, its lengths, duplicates, and rows as they are seen."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from embedtrain.config.recipe import TrainConfig
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.source_report import SourceReport
from embedtrain.data.sampling.plan import BatchPlan
from embedtrain.data.train_data import TrainData
from embedtrain.inspect.costs import Cost
from embedtrain.inspect.rows import Duplicates, ExtraColumns
from embedtrain.inspect.sources import InspectedData, InspectedSource
from embedtrain.inspect.texts import Lengths, ShownText, TextStatistics
from embedtrain.tracking.pages import Page

MANY_UNKNOWN = 0.01  # a share of tokens at which another model may serve better
_FILES, _INSTRUCTIONS, _LABELS = 8, 3, 8  # named of each source


def print_source(
    page: Page, inspected: InspectedSource, beside: ExtraColumns, problems: Sequence[str], num_empty: int, read_for: str
) -> None:
    """What was recognised, and what cannot be used.

    Args:
        page: where to print.
        looked: the source.
        beside: what lies beside its texts.
        problems: rows and files that cannot be used, as many as are named.
        num_empty: how many of its files are empty.
        read_for: the option that says what rows are read for.
    """
    assert inspected.data is not None
    store, settings = inspected.store, inspected.data.settings[inspected.number]
    report = store.report
    page.heading(inspected.name)
    if inspected.error and inspected.loss is not None:
        page.facts([("✗", inspected.error)], "red")
        page.note(f"shown below as read with {read_for}={inspected.loss.name}", "bold yellow")
    facts = [("recognised as", report.layout), ("files", _files(report)), ("rows", f"{report.num_rows:,}")]
    if not report.one_text:
        facts.append(("positives", _counts(store.num_positives)))
        facts.append(("negatives", _negatives(store, settings.negatives)))
    facts += _beside(beside)
    facts += [
        (label, repr(prompt))
        for label, prompt in (
            ("query prompt", settings.text_format.query_prompt),
            ("document prompt", settings.text_format.document_prompt),
        )
        if prompt
    ]
    if inspected.source.in_batch_negatives is not None:
        says = "" if inspected.source.in_batch_negatives else "no "
        facts.append(("in a batch", f"rows are {says}negatives of each other"))
    if report.num_dropped:
        which = "that equal a positive or repeat another"
        facts.append(("left out", f"{_counted(report.num_dropped, 'negative')} {which}"))
    if report.num_unscored:
        facts.append(("without scores", f"{_counted(report.num_unscored, 'row')}: positives count 1, negatives 0"))
    if report.ignored:
        facts.append(("not used", ", ".join(report.ignored)))
    page.facts(facts)
    if report.num_skipped:
        rows = report.num_skipped - num_empty
        note = [f"{_counted(rows, 'row')} that cannot be used"] * (rows > 0)
        page.subheading(" and ".join(note + [_counted(num_empty, "empty file")] * (num_empty > 0)))
        more = report.num_skipped - len(problems)
        page.facts([("✗", problem) for problem in problems] + [("", f"... and {more:,} more")] * (more > 0), "red")


def print_unusable(page: Page, inspected: InspectedSource) -> None:
    """A source of which nothing can be read, and why."""
    page.heading(inspected.name)
    page.facts([("path", inspected.source.path)])
    page.facts([("✗", inspected.error)], "red")


def print_not_combined(page: Page, inspected_data: InspectedData) -> None:
    """Why all sources together cannot be trained on."""
    if inspected_data.error:
        page.facts([("✗", inspected_data.error)], "red")
        return
    broken = [one.name for one in inspected_data.sources if one.error]
    note = f"{', '.join(broken[:_FILES])}{', ...' * (len(broken) > _FILES)}"
    page.facts([("✗", f"{note} cannot be trained on: correct or remove the sources above")], "red")


def print_cache_size(page: Page, directory: Path, datasets: Sequence[TrainData]) -> None:
    """Where rows and tokens lie on disk, and how much they take."""
    kept = sum(store.num_bytes for data in datasets for store in data.stores)
    for tokens in (tokens for data in datasets for tokens in data.tokens or []):
        kept += sum(array.nbytes for array in (tokens.offsets, tokens.first, tokens.keys, tokens.values))
    page.subheading("kept on disk")
    page.facts([("place", str(directory)), ("size", f"{size(kept)} of this data")])


def print_lengths(page: Page, statistics: TextStatistics) -> None:
    """A table of how long the texts of each role are, and how much of them the vocabulary lacks."""
    shown = {role: lengths for role, lengths in statistics.lengths.items() if len(lengths.values)}
    with_limit = any(lengths.limit is not None for lengths in shown.values())
    page.subheading(f"length in {statistics.unit}")
    page.table(
        ["", "texts", "min", "median", "mean", "90 %", "99 %", "max", *["limit", "cut"] * with_limit],
        [[role, *_length_cells(lengths, with_limit=with_limit)] for role, lengths in shown.items()],
    )
    if not all(lengths.is_exact for lengths in shown.values()):
        page.note("~ by a sample of texts", "dim")
    if statistics.num_unknown:
        share = statistics.num_unknown / statistics.num_tokens
        note = f"{share:.1%} of all tokens are" if share >= 0.001 else f"{statistics.num_unknown:,} tokens are"
        page.note(f"{note} unknown to the vocabulary", "bold yellow" if share >= MANY_UNKNOWN else "dim")


def print_duplicates(page: Page, found: Duplicates) -> None:
    """What occurs more than once, as far as anything does."""
    rows = [
        ("rows with all texts equal", found.rows),
        ("equal queries", found.queries),
        ("equal positives", found.positives),
    ]
    if found.documents != found.positives:
        rows.append(("equal documents, positives or negatives", found.documents))
    note = [[what, f"{one.different:,}", f"{one.places:,}"] for what, one in rows if one.different]
    for what, count in (
        ("documents positive in one row, negative in another", found.both),
        ("... of the same query", found.contradictions),
    ):
        if count:
            note.append([what, f"{count:,}", ""])
    page.subheading("duplicates")
    if note:
        page.table(["", "different", "places"], note)
    else:
        page.note("none: no text stands in two rows")


def print_example(page: Page, place: str, texts: Sequence[ShownText], num_left_out: int, label: int | None) -> None:
    """One row as the model sees it.

    Args:
        page: where to print.
        place: its file and line.
        texts: those that are shown of it.
        num_left_out: documents of it that are not.
        label: its class, if it has one.
    """
    page.subheading(f"as the model sees it: {place}" + (f", class {label}" if label is not None else ""))
    page.texts([(_role(text), _size(text), text.text) for text in texts])
    if num_left_out:
        page.note(f"... and {num_left_out:,} more document{'s' * (num_left_out > 1)}", "dim")


def print_total(page: Page, stores: Sequence[RowStore], num_empty: Sequence[int], epoch: Sequence[int] | None) -> None:
    """A row for each source.

    Args:
        page: where to print.
        stores: their rows.
        num_empty: how many files of each are empty.
        epoch: the rows that an epoch has of each, where there is a recipe.
    """
    rows = []
    skipped = [store.report.num_skipped - empty for store, empty in zip(stores, num_empty, strict=True)]
    for place, store in enumerate(stores):
        row = [store.report.name, f"{len(store):,}", f"{skipped[place]:,}"]
        if epoch is not None:
            row += [f"{epoch[place]:,}", f"{epoch[place] / len(store):.2f}", f"{epoch[place] / sum(epoch):.1%}"]
        rows.append(row)
    total = ["total", f"{sum(map(len, stores)):,}", f"{sum(skipped):,}"]
    rows.append(total if epoch is None else [*total, f"{sum(epoch):,}", "", "100.0%"])
    more = [] if epoch is None else ["rows an epoch", "times seen", "share"]
    page.table(["source", "rows", "cannot be used", *more], rows)


def print_run(page: Page, plan: BatchPlan, train: TrainConfig) -> None:
    """How long an epoch and the run are."""
    batches = plan.total_steps(train.steps, train.epochs)
    steps = batches if train.steps is not None else -(-batches // train.gradient_accumulation_steps)
    epochs = steps * train.gradient_accumulation_steps / plan.steps_per_epoch
    made = "" if len(plan.sizes) == 1 else ", of one source each" if plan.by_source else ", of all sources mixed"
    of_step = _counted(train.gradient_accumulation_steps, "batch", "es")
    page.subheading("the run")
    page.facts(
        [
            ("an epoch", f"{plan.rows_per_epoch:,} rows, {_counted(plan.steps_per_epoch, 'batch', 'es')}"),
            ("a batch", f"up to {_counted(plan.global_batch_size, 'row')}{made}"),
            ("all of it", f"{_counted(steps, 'step')} of {of_step}, {_counted(epochs, 'epoch')}"),
        ]
    )


def print_costs(page: Page, costs: Mapping[str, Cost], chunk_tokens: int) -> None:
    """What a batch costs on several machines, by their names."""
    page.subheading(f"a batch, in chunks of up to {chunk_tokens:,} tokens")
    page.table(
        ["on", "tokens", "tokens a rank", "chunks a rank", "padding", "busiest rank over mean"],
        [
            [
                name,
                f"{cost.tokens:,.0f}",
                f"{cost.tokens / cost.ranks:,.0f}",
                f"{cost.chunks:,.1f}",
                f"{cost.padding:.1%}",
                f"{cost.imbalance:.3f}",
            ]
            for name, cost in costs.items()
        ],
    )
    page.note("of batches from all over an epoch; the fewer tokens a rank has, the more it pads to save passes", "dim")


def size(num_bytes: float) -> str:
    """Bytes in the largest unit of which there is one."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes, units = num_bytes / 1000, units[1:]
    return f"{num_bytes:,.0f} {units[0]}" if units[0] == "bytes" else f"{num_bytes:,.1f} {units[0]}"


def _files(report: SourceReport) -> str:
    names = [Path(file).name for file in report.files]
    shown = ", ".join(names[:_FILES]) + ", ..." * (len(names) > _FILES)
    return f"{len(names):,} ({shown})" if len(names) > 1 else report.files[0]


def _counts(counts: np.ndarray) -> str:
    smallest, largest = int(counts.min()), int(counts.max())
    if smallest == largest:
        return f"{largest:,} per row"
    return f"{smallest:,} to {largest:,} per row, {counts.mean():.1f} on average"


def _negatives(store: RowStore, option: int | None) -> str:
    if not store.num_negatives.any():
        return "none"
    limit = int(store.num_negatives.max())
    note = _counts(store.num_negatives)
    if option is not None and option < limit:
        note += f"; {option:,} drawn each epoch" if option else "; none used (negatives=0)"
    if store.most_negatives is not None:
        limited = int(np.count_nonzero(store.most_negatives >= 0))
        note += f"; {_counted(limited, 'row')} with a limit of {'its' if limited == 1 else 'their'} own"
    return note


def _beside(beside: ExtraColumns) -> list[tuple[str, str]]:
    facts = []
    if beside.scores is not None:
        count, low, high, total = beside.scores
        facts.append(
            ("scores", f"{low:g} to {high:g}, {total / count:.3g} in the mean, of {_counted(count, 'document')}")
        )
    if beside.labels:
        common = ", ".join(f"{label}: {count:,}" for label, count in beside.labels.most_common(_LABELS))
        more = ", ..." * (len(beside.labels) > _LABELS)
        facts.append(("classes", f"{len(beside.labels):,} ({common}{more} rows)"))
    if beside.width is not None:
        facts.append(("vectors", f"{beside.width:,} dimensions"))
    for label, counter in (
        ("instructions", beside.instructions),
        ("instructions of documents", beside.document_instructions),
    ):
        facts += _instructions(label, counter, many=beside.more_instructions > 0)
    return facts


def _instructions(label: str, counter: Counter[str], *, many: bool) -> list[tuple[str, str]]:
    shown = counter.most_common(_INSTRUCTIONS)
    facts = [
        (label if not place else "", f"{text!r} ({_counted(rows, 'row')})") for place, (text, rows) in enumerate(shown)
    ]
    left = len(counter) - len(shown)
    return facts + [("", f"... and {'more than ' * many}{_counted(left, 'other')}")] * (left > 0)


def _length_cells(lengths: Lengths, *, with_limit: bool) -> list[str]:
    values, about = lengths.values, "" if lengths.is_exact else "~"
    median, ninety, ninety_nine = np.percentile(values, (50, 90, 99))
    cells = [f"{lengths.num_texts:,}", f"{values.min():,}", f"{median:,.0f}", f"{values.mean():,.1f}"]
    cells += [f"{ninety:,.0f}", f"{ninety_nine:,.0f}", f"{about}{values.max():,}"]
    if with_limit:
        limit = "" if lengths.limit is None else f"{lengths.limit:,}"
        share = lengths.num_truncated / len(values)
        cells += [limit, f"{about}{share * lengths.num_texts:,.0f} ({share:.1%})" if lengths.num_truncated else "0"]
    return cells


def _counted(count: float, what: str, plural: str = "s") -> str:
    note = f"{count:,}" if isinstance(count, int) else f"{count:,.3g}" if count < 100 else f"{count:,.0f}"
    return f"{note} {what}{plural * (count != 1)}"


def _role(text: ShownText) -> str:
    score = "" if text.score is None else f" ({text.score:g})"
    return f"{text.role} {text.number or ''}".rstrip() + score


def _size(text: ShownText) -> str:
    if text.num_tokens is None or text.num_untruncated is None:
        return f"{len(text.text):,}"
    return (
        f"{text.num_tokens:,} of {text.num_untruncated:,}"
        if text.num_untruncated > text.num_tokens
        else f"{text.num_tokens:,}"
    )
