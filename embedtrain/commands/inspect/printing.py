"""Print inspected training data: what each source holds, lengths, duplicates, and rows as the model receives them.

Pictures are one HTML file without external resources, a contact sheet.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from embedtrain import __version__
from embedtrain.commands.inspect.sources import Duplicates, ExtraColumns, InspectedData, InspectedSource, Overlap
from embedtrain.commands.inspect.texts import Cost, Lengths, PictureSizes, ShownText, TextStatistics
from embedtrain.config.recipe import TrainConfig
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.images.item import Picture
from embedtrain.data.sampling.plan import BatchPlan
from embedtrain.data.train_data import TrainData
from embedtrain.errors import DataError
from embedtrain.report.page import content_hash, page_file, template
from embedtrain.report.sample import thumbnail
from embedtrain.tracking.pages import Page
from embedtrain.utils.files import atomic_write
from embedtrain.utils.formatting import format_bytes, format_count

MANY_UNKNOWN = 0.01  # fraction of tokens at which another model may be better
_FILES, _INSTRUCTIONS, _LABELS = 8, 3, 8  # maximal number shown of each source
_SIDE = 192  # pixels of a copy, twice that of the report: one tells whether a page is turned or blank


def print_source(
    page: Page, inspected: InspectedSource, extra: ExtraColumns, problems: Sequence[str], num_empty: int, read_for: str
) -> None:
    """What was recognised, and what cannot be used.

    Args:
        problems: invalid rows and files to list.
        num_empty: number of empty files.
        read_for: the option that names the loss.
    """
    assert inspected.data is not None
    store, settings = inspected.store, inspected.data.settings[inspected.number]
    report = store.report
    page.heading(inspected.name)
    if inspected.error and inspected.loss is not None:
        page.facts([("✗", inspected.error)], "red")
        page.note(f"shown below as read with {read_for}={inspected.loss.name}", "bold yellow")
    facts = [("recognised as", report.layout), ("files", _files(report.files))]
    if report.left_out:
        facts.append(("left out", f"{_files(report.left_out)} (another split by name)"))
    facts.append(("rows", f"{report.rows.num_rows:,}"))
    if not report.rows.one_text:
        facts.append(("positives", _counts(store.num_positives)))
        facts.append(("negatives", _negatives(store, settings.negatives)))
    facts += _extra_facts(extra)
    facts += [
        (label, repr(prompt))
        for label, prompt in (
            ("query prompt", settings.text_format.query_prompt),
            ("document prompt", settings.text_format.document_prompt),
        )
        if prompt
    ]
    if inspected.source.in_batch_negatives is not None:
        negation = "" if inspected.source.in_batch_negatives else "no "
        facts.append(("in a batch", f"rows are {negation}negatives of each other"))
    if settings.batch_negatives:
        drawn = format_count(settings.batch_negatives, "document")
        facts.append(("in a batch", f"each row gets {drawn} of other rows as further negatives"))
    if report.rows.num_dropped:
        dropped = format_count(report.rows.num_dropped, "negative")
        facts.append(("left out", f"{dropped} that equal a positive or repeat another"))
    if report.rows.num_unscored:
        facts.append(
            ("without scores", f"{format_count(report.rows.num_unscored, 'row')}: positives count 1, negatives 0")
        )
    if report.rows.ignored:
        facts.append(("not used", ", ".join(report.rows.ignored)))
    page.facts(facts)
    if report.rows.num_skipped:
        page.subheading(num_refused(report.rows.num_skipped, num_empty))
        more = report.rows.num_skipped - len(problems)
        page.facts([("✗", problem) for problem in problems] + [("", f"... and {more:,} more")] * (more > 0), "red")


def print_unusable(page: Page, inspected: InspectedSource) -> None:
    """A source that cannot be read, and why."""
    page.heading(inspected.name)
    page.facts([("path", inspected.source.path)])
    page.facts([("✗", inspected.error)], "red")


def print_not_combined(page: Page, inspected_data: InspectedData) -> None:
    """Why all sources together cannot be trained on."""
    if inspected_data.error:
        page.facts([("✗", inspected_data.error)], "red")
        return
    broken = [source.name for source in inspected_data.sources if source.error]
    note = f"{', '.join(broken[:_FILES])}{', ...' * (len(broken) > _FILES)}"
    page.facts([("✗", f"{note} cannot be trained on: correct or remove the sources above")], "red")


def print_cache_size(page: Page, directory: Path, datasets: Sequence[TrainData]) -> None:
    """The directory and size of rows and tokens on disk."""
    num_bytes = sum(store.num_bytes for data in datasets for store in data.stores)
    for tokens in (tokens for data in datasets for tokens in data.tokens or []):
        num_bytes += sum(array.nbytes for array in (tokens.offsets, tokens.row_starts, tokens.keys, tokens.values))
    page.subheading("cached on disk")
    page.facts([("directory", str(directory)), ("size", f"{format_bytes(num_bytes)} of this data")])


def print_lengths(page: Page, statistics: TextStatistics) -> None:
    """A table of the lengths of texts by role, and the fraction of unknown tokens."""
    shown = {role: lengths for role, lengths in statistics.lengths.items() if len(lengths.values)}
    with_limit = any(lengths.limit is not None for lengths in shown.values())
    page.subheading(f"length in {statistics.unit}")
    page.table(
        ["", "texts", "min", "median", "mean", "90 %", "99 %", "max", *["limit", "cut"] * with_limit],
        [[role, *_length_cells(lengths, with_limit=with_limit)] for role, lengths in shown.items()],
    )
    if not all(lengths.is_exact for lengths in shown.values()):
        page.note("~ estimated from a sample of texts", "dim")
    if statistics.pictures is not None:
        _print_pictures(page, statistics.pictures)
    if statistics.num_unknown:
        fraction = statistics.num_unknown / statistics.num_tokens
        note = f"{fraction:.1%} of all tokens are" if fraction >= 0.001 else f"{statistics.num_unknown:,} tokens are"
        page.note(f"{note} unknown to the vocabulary", "bold yellow" if fraction >= MANY_UNKNOWN else "dim")


def _print_pictures(page: Page, pictures: PictureSizes) -> None:
    """Sizes of the different pictures, and what the model computes of each."""
    page.subheading(f"{num_pictures(pictures)}, in pixels")
    header, *rows = picture_table(pictures)
    page.table(header, rows)


def num_pictures(pictures: PictureSizes) -> str:
    """In words."""
    return format_count(len(pictures.keys), "different picture")


def picture_table(pictures: PictureSizes) -> list[list[str]]:
    """A header, and a row for each of width, height, and what the model computes."""
    columns = {"width": pictures.sizes[:, 0], "height": pictures.sizes[:, 1]}
    if pictures.num_tokens is not None:
        columns["tokens, or patches"] = pictures.num_tokens
    lengths = {name: Lengths(values.astype(np.int32), None, 0, len(values)) for name, values in columns.items()}
    header = ["", "pictures", "min", "median", "mean", "90 %", "99 %", "max"]
    return [header, *([name, *_length_cells(of_name, with_limit=False)] for name, of_name in lengths.items())]


def num_refused(num_skipped: int, num_empty: int) -> str:
    """Rows and files that cannot be used, in words; "" for none."""
    rows = num_skipped - num_empty
    note = [f"{format_count(rows, 'row')} that cannot be used"] * (rows > 0)
    return " and ".join(note + [format_count(num_empty, "empty file")] * (num_empty > 0))


def print_duplicates(page: Page, duplicates: Duplicates) -> None:
    """Texts and rows that occur more than once."""
    repetitions = {
        "rows with all texts equal": duplicates.rows,
        "equal queries": duplicates.queries,
        "equal positives": duplicates.positives,
    }
    if duplicates.documents != duplicates.positives:
        repetitions["equal documents, positives or negatives"] = duplicates.documents
    conflicts = {
        "documents positive in one row, negative in another": duplicates.both,
        "... of the same query": duplicates.contradictions,
    }
    rows = [
        [what, f"{item.distinct:,}", f"{item.occurrences:,}"] for what, item in repetitions.items() if item.distinct
    ]
    rows += [[what, f"{count:,}", ""] for what, count in conflicts.items() if count]
    page.subheading("duplicates")
    if rows:
        page.table(["", "distinct", "occurrences"], rows)
    else:
        page.note("none: no text occurs in two rows")


def print_overlaps(page: Page, overlaps: Sequence[Overlap]) -> None:
    """A line for each evaluation set: its texts that are in training rows as well."""
    page.subheading("evaluation sets, and their texts that are also queries or positives of the rows")
    page.table(
        ["set", "queries", "in the rows", "relevant documents", "in the rows"],
        [
            [
                overlap.name,
                f"{overlap.queries:,}",
                f"{overlap.trained_queries:,}",
                f"{overlap.documents:,}",
                f"{overlap.trained_documents:,}",
            ]
            for overlap in overlaps
        ],
    )


def print_example(page: Page, location: str, texts: Sequence[ShownText], num_left_out: int, label: int | None) -> None:
    """One row as the model receives it: some texts, and the number of documents left out."""
    page.subheading(f"as the model sees it: {location}" + (f", class {label}" if label is not None else ""))
    page.texts([(_role(text), _size(text), text.text) for text in texts])
    if num_left_out:
        page.note(f"... and {num_left_out:,} more document{'s' * (num_left_out > 1)}", "dim")


def print_total(page: Page, stores: Sequence[RowStore], num_empty: Sequence[int], epoch: Sequence[int] | None) -> None:
    """A line for each source, given its number of empty files and, if there is a recipe, its rows of an epoch."""
    rows = []
    skipped = [store.report.rows.num_skipped - empty for store, empty in zip(stores, num_empty, strict=True)]
    for i, store in enumerate(stores):
        row = [store.report.name, f"{len(store):,}", f"{skipped[i]:,}"]
        if epoch is not None:
            row += [f"{epoch[i]:,}", f"{epoch[i] / len(store):.2f}", f"{epoch[i] / sum(epoch):.1%}"]
        rows.append(row)
    total = ["total", f"{sum(map(len, stores)):,}", f"{sum(skipped):,}"]
    rows.append(total if epoch is None else [*total, f"{sum(epoch):,}", "", "100.0%"])
    more = [] if epoch is None else ["rows an epoch", "passes", "fraction"]
    page.table(["source", "rows", "cannot be used", *more], rows)


def print_run(page: Page, plan: BatchPlan, train: TrainConfig) -> None:
    """The length of an epoch and of the run."""
    batches = plan.total_steps(train.steps, train.epochs)
    steps = batches if train.steps is not None else -(-batches // train.gradient_accumulation_steps)
    epochs = steps * train.gradient_accumulation_steps / plan.steps_per_epoch
    mixing = ", of one source each" if plan.by_source else ", of all sources mixed"
    if plan.by_source and plan.mixed_rows:
        mixing += f" but for up to {plan.mixed_rows:,} of all sources"
    of_step = format_count(train.gradient_accumulation_steps, "batch", "batches")
    page.subheading("the run")
    page.facts(
        [
            ("an epoch", f"{plan.rows_per_epoch:,} rows, {format_count(plan.steps_per_epoch, 'batch', 'batches')}"),
            ("a batch", f"up to {format_count(plan.global_batch_size, 'row')}{mixing * (len(plan.sizes) > 1)}"),
            ("all of it", f"{format_count(steps, 'step')} of {of_step}, {_epochs(epochs)}"),
        ]
    )


def print_costs(page: Page, costs: Mapping[str, Cost], chunk_tokens: int) -> None:
    """The cost of a batch by machine."""
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


def _files(files: Sequence[str]) -> str:
    names = [Path(file).name for file in files]
    shown = ", ".join(names[:_FILES]) + ", ..." * (len(names) > _FILES)
    return f"{len(names):,} ({shown})" if len(names) > 1 else files[0]


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
    if store.max_negatives is not None:
        limited = int(np.count_nonzero(store.max_negatives >= 0))
        note += f"; {format_count(limited, 'row')} with a limit of {'its' if limited == 1 else 'their'} own"
    return note


def _extra_facts(extra: ExtraColumns) -> list[tuple[str, str]]:
    facts = []
    if extra.scores is not None:
        count, low, high, total = extra.scores
        mean = f"{total / count:.3g} in the mean"
        facts.append(("scores", f"{low:g} to {high:g}, {mean}, of {format_count(count, 'document')}"))
    if extra.labels:
        common = ", ".join(f"{label}: {count:,}" for label, count in extra.labels.most_common(_LABELS))
        more = ", ..." * (len(extra.labels) > _LABELS)
        facts.append(("classes", f"{len(extra.labels):,} ({common}{more} rows)"))
    if extra.width is not None:
        facts.append(("vectors", f"{extra.width:,} dimensions"))
    for label, counter in (
        ("instructions", extra.instructions),
        ("instructions of documents", extra.document_instructions),
    ):
        facts += _instructions(label, counter, many=extra.more_instructions > 0)
    return facts


def _instructions(label: str, counter: Counter[str], *, many: bool) -> list[tuple[str, str]]:
    shown = counter.most_common(_INSTRUCTIONS)
    facts = [
        (label if i == 0 else "", f"{text!r} ({format_count(rows, 'row')})") for i, (text, rows) in enumerate(shown)
    ]
    left = len(counter) - len(shown)
    return facts + [("", f"... and {'more than ' * many}{format_count(left, 'other')}")] * (left > 0)


def _length_cells(lengths: Lengths, *, with_limit: bool) -> list[str]:
    values, about = lengths.values, "" if lengths.is_exact else "~"
    median, ninety, ninety_nine = np.percentile(values, (50, 90, 99))
    cells = [f"{lengths.num_texts:,}", f"{values.min():,}", f"{median:,.0f}", f"{values.mean():,.1f}"]
    cells += [f"{ninety:,.0f}", f"{ninety_nine:,.0f}", f"{about}{values.max():,}"]
    if with_limit:
        limit = "" if lengths.limit is None else f"{lengths.limit:,}"
        cut = lengths.num_truncated / len(values)
        cells += [limit, f"{about}{cut * lengths.num_texts:,.0f} ({cut:.1%})" if lengths.num_truncated else "0"]
    return cells


def _epochs(epochs: float) -> str:
    return f"{epochs:,.3g} epoch{'s' * (epochs != 1)}" if epochs < 100 else f"{epochs:,.0f} epochs"


def _role(text: ShownText) -> str:
    score = "" if text.score is None else f" ({text.score:g})"
    return f"{text.role} {text.number or ''}".rstrip() + score


def _size(text: ShownText) -> str:
    if text.num_tokens is None:
        return f"{len(text.text):,}"
    whole = text.num_tokens if text.num_untruncated is None else text.num_untruncated
    size = f"{text.num_tokens:,}" + f" of {whole:,}" * (whole > text.num_tokens)
    return size if text.num_vectors in (None, text.num_tokens) else f"{size}, {text.num_vectors:,} vectors"


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture, in words; its copy, or why there is none."""

    file: str  # "" if many pictures are in one file
    row: str  # its location
    size: str  # in pixels, and in what the model computes
    thumbnail: str  # a data URI
    problem: str

    @classmethod
    def of(cls, picture: Picture, file: str, row: str, size: str) -> "ShownPicture":
        """Decodes the picture."""
        try:
            return cls(file, row, size, thumbnail(picture, _SIDE), "")
        except DataError as error:
            return cls(file, row, size, "", str(error))


@dataclass(frozen=True, slots=True)
class ShownSource:
    """The pictures of a source."""

    name: str
    sizes: Sequence[Sequence[str]]  # a table with its header
    num_refused: str  # in words; "" for none
    refused: Sequence[str]  # rows that cannot be used, some of them
    num_pictures: str  # different ones, in words
    pictures: Sequence[ShownPicture]


def write_contact_sheet(path: Path, sources: Sequence[ShownSource], note: str) -> None:
    """Write the page atomically; `note` says how the pictures were chosen."""
    style = page_file("page.css")
    content = template("pictures.html").render(
        sources=sources,
        note=note,
        created=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
        style=Markup(style),  # noqa: S704  # our own file
        style_hash=content_hash(style),
    )
    with atomic_write(path) as temporary:
        # A name of a file need not be UTF-8.
        temporary.write_bytes(content.encode("utf-8", errors="replace"))
