"""How mined rows are told of: what each source got, how its scores lie, and which labels may be wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from embedtrain.mine.options import MarginReference, MineOptions
from embedtrain.tracking.pages import Page

_SHOWN = 3  # suspects of each kind; the summary has more


def print_mined(page: Page, summary: Mapping[str, Any], options: MineOptions) -> None:
    """Tell what was mined.

    Args:
        page: where to print.
        summary: what `embedtrain.mine.finished.finish` returns.
        options: of the door.
    """
    to = options.output_dir
    for name, figures in summary["sources"].items():
        page.heading(name)
        page.facts(_facts(figures, summary, f"{to}/{figures['file']}"))
        if figures["rows_without_negatives"] * 4 > figures["rows"]:
            page.note(f"many rows got no negative: {_advice(options)}", "yellow")
        _print_quantiles(page, figures, options.rank_max)
    near = summary["suspected_false_negatives"]
    limit = "above what the margin allows" if _has_margin(options) else "above the positive"
    for written, what in (False, "are not among the negatives"), (True, "are written as negatives"):
        _print_suspects(
            page,
            f"candidates that score {limit} and {what}: perhaps they answer the query",
            [suspect for suspect in near if suspect["written"] is written],
        )
    told = [_texts(suspect) for suspect in near]
    _print_suspects(
        page,
        f"positives that are not among the {summary['rank_max']} best: perhaps they do not answer the query",
        [suspect for suspect in summary["suspected_wrong_labels"] if _texts(suspect) not in told],
    )
    page.subheading(f"{to}/summary.json has all of this, and more suspects")


def _has_margin(options: MineOptions) -> bool:
    return options.relative_margin is not None or options.absolute_margin is not None


def _texts(suspect: Mapping[str, Any]) -> tuple[str, str, str]:
    return suspect["query"], suspect["positive"], suspect["document"]


def _advice(options: MineOptions) -> str:
    """What to write to get more negatives."""
    ways = (
        ["margin_reference=highest"]
        if options.margin_reference is MarginReference.lowest and _has_margin(options)
        else []
    )
    ways.append(f"rank_max={4 * options.rank_max}")
    if options.relative_margin is not None:
        ways.append(f"relative_margin={options.relative_margin / 2:g} or null")
    if options.absolute_margin is not None:
        ways.append(f"absolute_margin={options.absolute_margin / 2:g} or null")
    ways += [f"another {name}" for name in ("max_score", "min_score") if getattr(options, name) is not None]
    if options.rank_min:
        ways.append("a smaller rank_min")
    return f"write {', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else f"write {ways[0]}, or give a corpus="


def _facts(figures: Mapping[str, Any], summary: Mapping[str, Any], path: str) -> list[tuple[str, str]]:
    rows, wanted = figures["rows"], summary["negatives_wanted"]
    facts = [("rows", f"{rows:,} in {path}"), ("negatives", f"{figures['negatives']:,}, {wanted} a row wanted")]
    fewer, none = figures["rows_with_fewer_negatives"], figures["rows_without_negatives"]
    if fewer:
        facts.append(("", f"{_share(fewer, rows)} of rows have fewer, {_share(none, rows)} none"))
    candidates = figures["candidates"]
    for key, what in (
        ("candidates_above_margin", "above the margin: they are not taken, and may be false negatives"),
        ("candidates_above_positive", "above the positive itself"),
    ):
        if figures[key]:
            facts.append(("candidates", f"{_share(figures[key], candidates)} {what}"))
    lost = figures["positives_beyond_rank_max"]
    if lost:
        facts.append(("positives", f"{_share(lost, figures['positives'])} not among the {summary['rank_max']} best"))
    return facts


def _print_quantiles(page: Page, figures: Mapping[str, Any], rank_max: int) -> None:
    kinds = (
        ("positive scores", "positive_scores", ".4f"),
        ("negative scores", "negative_scores", ".4f"),
        (f"positive ranks, of those among the best {rank_max}", "positive_ranks", ".0f"),
        ("negative ranks", "negative_ranks", ".0f"),
        ("negatives a row", "negatives_a_row", ".0f"),
    )
    there = [(what, figures[key], form) for what, key, form in kinds if figures[key] is not None]
    rows = [[what, *(format(value, form) for value in values.values())] for what, values, form in there]
    if rows:
        page.table(["", *there[0][1]], rows)


def _print_suspects(page: Page, title: str, suspects: Sequence[Mapping[str, Any]]) -> None:
    if not suspects:
        return
    page.subheading(title)
    for suspect in suspects[:_SHOWN]:
        page.texts(
            [
                ("query", "", suspect["query"]),
                ("positive", f"{suspect['positive_score']:.4f}", suspect["positive"]),
                ("candidate", f"{suspect['score']:.4f}", suspect["document"]),
            ]
        )


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / max(1, whole):.1%})"
