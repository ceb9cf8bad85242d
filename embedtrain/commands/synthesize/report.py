"""What `synthesize` has written, as one HTML file without external resources: figures, lengths, samples."""

import collections
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from embedtrain import __version__
from embedtrain.commands.synthesize.checks import TITLES, Tally, words_of
from embedtrain.commands.synthesize.types import Draft
from embedtrain.data.rows import text_key
from embedtrain.mining.folder import QUANTILES, quantiles
from embedtrain.report.chart import element
from embedtrain.report.page import content_hash, page_file, template
from embedtrain.report.sample_section import shorten
from embedtrain.utils.files import atomic_write

REPORT_FILE = "report.html"
SAMPLES = 5  # of each kind
_QUERY_LENGTH, _DOCUMENT_LENGTH = 300, 400  # characters of a text that is shown
_MAX_BINS = 24
# Of a picture, in the units of the page's other ones.
_WIDTH, _HEIGHT, _BOTTOM, _LEFT, _RIGHT = 380.0, 150.0, 128.0, 8.0, 372.0


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row in words."""

    query: str
    documents: Sequence[str]
    negatives: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class ShownChart:
    """A histogram."""

    title: str
    picture: Markup  # SVG


@dataclass(kw_only=True)
class Written:
    """Lengths and samples of the rows that are written, gathered while they pass."""

    lengths: dict[str, collections.Counter[int]] = field(default_factory=dict)  # of queries by kind, and of documents
    _documents: collections.Counter[int] = field(default_factory=collections.Counter)
    _seen: set[int] = field(default_factory=set)
    _samples: dict[str, list[tuple[int, int, Draft]]] = field(default_factory=dict)
    _number: int = 0

    def watch(self, drafts: Iterable[Draft]) -> Iterator[Draft]:
        """The same drafts."""
        for draft in drafts:
            self._number += 1
            self.lengths.setdefault(draft.kind, collections.Counter())[len(words_of(draft.query))] += 1
            for text in draft.positives:
                if (key := text_key(text)) not in self._seen:
                    self._seen.add(key)
                    self._documents[len(words_of(text))] += 1
            # Those with the smallest hashes are a random sample, whatever the number of rows.
            samples, place = self._samples.setdefault(draft.kind, []), -text_key(draft.query)
            if len(samples) < SAMPLES:
                heappush(samples, (place, self._number, draft))
            elif place > samples[0][0]:
                heapreplace(samples, (place, self._number, draft))
            yield draft

    @property
    def documents(self) -> collections.Counter[int]:
        """How many different documents have each number of words."""
        return self._documents

    def samples(self) -> list[tuple[str, list[ShownRow]]]:
        """Some rows of each kind, in the order of the rows."""
        return [
            (kind, [_shown(draft) for _, _, draft in sorted(samples, key=lambda sample: sample[1])])
            for kind, samples in sorted(self._samples.items())
        ]


def _shown(draft: Draft) -> ShownRow:
    notes = [f"instruction: {shorten(draft.instruction, _QUERY_LENGTH)}"] if draft.instruction else []
    notes += [f"language: {draft.language}"] if draft.language else []
    notes += [f"grade: {draft.grade}"] if draft.grade is not None else []
    return ShownRow(
        shorten(draft.query, _QUERY_LENGTH),
        [shorten(text, _DOCUMENT_LENGTH) for text in draft.sources],
        [shorten(text, _DOCUMENT_LENGTH) for text in draft.negatives],
        notes,
    )


def write_report(
    path: Path, summary: Mapping[str, Any], lost: Mapping[str, str], tally: Tally, written: Written
) -> None:
    """Write the page atomically.

    Args:
        summary: the content of synthesis.json.
        lost: what the page calls queries that were asked for and never written, by their key in `summary["lost"]`.
        tally: of the checks, with samples.
        written: of the rows.
    """
    style = page_file("page.css")
    asked = summary["asked"]
    content = template("synthesis.html").render(
        name=path.resolve().parent.name,
        rows=f"{summary['rows']:,}",
        share=f"{_percent(summary['rows'], asked)} of {asked:,} queries that were asked for",
        facts=_facts(summary),
        steps=_steps(summary, lost),
        kinds=_kinds(tally),
        lengths=_length_table(written),
        charts=[_histogram("queries", _sum(written.lengths.values())), _histogram("documents", written.documents)],
        kept=written.samples(),
        rejected=[(TITLES.get(check, check), _rejected(tally, check)) for check in TITLES if check in tally.samples],
        model=summary["model"],
        prompts=f"Prompts: {', '.join(f'{kind} {digest}' for kind, digest in summary['prompts'].items())}.",
        created=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
        style=Markup(style),  # noqa: S704  # our own file
        style_hash=content_hash(style),
    )
    with atomic_write(path) as temporary:
        # A document may have lone surrogates, which have no bytes in UTF-8.
        temporary.write_bytes(content.encode("utf-8", errors="replace"))


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("documents", f"{summary['documents']['documents']:,}"), ("model", str(summary["model"]))]
    names = {"requests": "requests", "tokens": "tokens", "price": "price"}
    usage = summary["usage"]
    for name, title in names.items():
        if usage.get(name):
            facts.append((title, f"{usage[name]:,.2f}" if isinstance(usage[name], float) else f"{usage[name]:,}"))
    if summary["repaired_answers"]:
        facts.append(("answers that were repaired", f"{summary['repaired_answers']:,}"))
    return facts


def _steps(summary: Mapping[str, Any], lost: Mapping[str, str]) -> list[tuple[str, str, str, Markup]]:
    """What was asked for, what became of it, and a bar for each."""
    asked, checks = summary["asked"], summary["checks"]
    steps = [("asked for", asked)]
    steps += [(lost.get(name, name), -count) for name, count in summary["lost"].items()]
    steps.append(("written", checks["written"]))
    steps += [(TITLES.get(name, name), -count) for name, count in checks["rejected"].items()]
    steps.append(("rows", summary["rows"]))
    return [
        (title, f"{count:+,}" if count < 0 else f"{count:,}", _percent(abs(count), asked), _bar(count, asked))
        for title, count in steps
    ]


def _bar(count: int, total: int) -> Markup:
    width = 160 * min(1.0, abs(count) / max(1, total))
    bar = element("rect", x=0, y=2, width=f"{width:.1f}", height=8, fill="currentColor")
    return element(
        "svg", bar, viewBox="0 0 160 12", width=160, height=12, class_="c1" if count < 0 else "c0", aria_hidden="true"
    )


def _kinds(tally: Tally) -> list[list[str]]:
    checks = [check for check in TITLES if check in tally.rejected]
    table = [["kind", "written", "kept", *(TITLES[check] for check in checks)]]
    for kind, count in sorted(tally.written.items()):
        rejected = [tally.rejected[check][kind] for check in checks]
        kept = count - sum(rejected)
        shares = [f"{number:,} ({_percent(number, count)})" for number in (kept, *rejected)]
        table.append([kind, f"{count:,}", *shares])
    return table


def _rejected(tally: Tally, check: str) -> list[dict[str, str]]:
    return [
        {
            "query": shorten(sample.query, _QUERY_LENGTH),
            "why": shorten(sample.why, _QUERY_LENGTH),
            "document": shorten(sample.document, _DOCUMENT_LENGTH),
        }
        for sample in tally.samples[check]
    ]


def _length_table(written: Written) -> list[list[str]]:
    table = [["", *QUANTILES]]
    named = {f"queries: {kind}": lengths for kind, lengths in sorted(written.lengths.items())}
    for name, lengths in {**named, "documents": written.documents}.items():
        values = quantiles(np.repeat(list(lengths.keys()), list(lengths.values()))) if lengths else None
        table.append([name, *(f"{value:,.0f}" for value in (values or {}).values())])
    return table


def _sum(counters: Iterable[collections.Counter[int]]) -> collections.Counter[int]:
    total: collections.Counter[int] = collections.Counter()
    for counter in counters:
        total.update(counter)
    return total


def _histogram(title: str, lengths: collections.Counter[int]) -> ShownChart:
    """How many texts have each number of words; the longest percent is in the last bin."""
    values = np.repeat(list(lengths.keys()), list(lengths.values())) if lengths else np.zeros(0, dtype=np.int64)
    longest = int(np.quantile(values, 0.99, method="higher")) if len(values) else 1
    size = max(1, -(-(longest + 1) // _MAX_BINS))
    counts = np.bincount(np.minimum(values, longest) // size, minlength=1)
    step = (_RIGHT - _LEFT) / len(counts)
    shapes = [element("path", d=f"M{_LEFT:g} {_BOTTOM:g}H{_RIGHT:g}", class_="grid")]
    for number, count in enumerate(counts.tolist()):
        height = (_BOTTOM - 10) * count / max(1, int(counts.max()))
        first, last = number * size, (number + 1) * size - 1
        words = f"{first} words" if first == last else f"{first} to {last} words"
        bar = {"x": f"{_LEFT + number * step + 0.5:.1f}", "y": f"{_BOTTOM - height:.1f}", "width": f"{step - 1:.1f}"}
        label = element("title", f"{words}: {count:,}")
        shapes.append(element("rect", label, **bar, height=f"{height:.1f}", fill="currentColor"))
    for number in sorted({0, len(counts) // 2, len(counts) - 1}):
        anchor = "start" if number == 0 else "end" if number == len(counts) - 1 else "middle"
        x = _LEFT + (number if anchor == "start" else number + 1 if anchor == "end" else number + 0.5) * step
        more = "+" if number == len(counts) - 1 and len(values) and int(values.max()) > longest else ""
        shapes.append(element("text", f"{number * size}{more}", x=f"{x:.1f}", y=_BOTTOM + 16, text_anchor=anchor))
    text = f"{len(values):,} {title} by their number of words"
    picture = element(
        "svg", element("desc", text), *shapes,
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", role="img", aria_label=text, class_="c0",
    )  # fmt: skip
    return ShownChart(text, picture)


def _percent(part: int, total: int) -> str:
    return f"{part / max(1, total):.1%}"
