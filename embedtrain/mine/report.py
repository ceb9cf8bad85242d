"""Prints the summary of mining: negatives of each source, distributions of scores, and labels that may be wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from embedtrain.mine.options import MarginReference, MineOptions
from embedtrain.tracking.pages import Page

_MAX_SHOWN = 3  # suspects of each kind; the summary has more


def print_summary(page: Page, summary: Mapping[str, Any], options: MineOptions) -> None:
    """Print what `Miner.finish` returned."""
    output_dir = options.output_dir
    for name, stats in summary["sources"].items():
        page.heading(name)
        page.facts(_facts(stats, summary, f"{output_dir}/{stats['file']}"))
        if stats["rows_without_negatives"] * 4 > stats["rows"]:
            page.note(f"many rows got no negative: {_advice(options)}", "yellow")
        _print_quantiles(page, stats, options.rank_max)
    false_negatives = summary["suspected_false_negatives"]
    limit = "above what the margin allows" if _has_margin(options) else "above the positive"
    for written, outcome in (False, "are not among the negatives"), (True, "are written as negatives"):
        _print_suspects(
            page,
            f"candidates that score {limit} and {outcome}: perhaps they answer the query",
            [suspect for suspect in false_negatives if suspect["written"] is written],
        )
    printed = [_texts(suspect) for suspect in false_negatives]
    _print_suspects(
        page,
        f"positives that are not among the {summary['rank_max']} best: perhaps they do not answer the query",
        [suspect for suspect in summary["suspected_wrong_labels"] if _texts(suspect) not in printed],
    )
    page.subheading(f"{output_dir}/summary.json has all of this, and more suspects")


def _has_margin(options: MineOptions) -> bool:
    return options.relative_margin is not None or options.absolute_margin is not None


def _texts(suspect: Mapping[str, Any]) -> tuple[str, str, str]:
    return suspect["query"], suspect["positive"], suspect["document"]


def _advice(options: MineOptions) -> str:
    """Options that give more negatives."""
    lowest = options.margin_reference is MarginReference.lowest and _has_margin(options)
    ways = ["margin_reference=highest"] if lowest else []
    ways.append(f"rank_max={4 * options.rank_max}")
    if options.relative_margin is not None:
        ways.append(f"relative_margin={options.relative_margin / 2:g} or null")
    if options.absolute_margin is not None:
        ways.append(f"absolute_margin={options.absolute_margin / 2:g} or null")
    ways += [f"another {name}" for name in ("max_score", "min_score") if getattr(options, name) is not None]
    if options.rank_min:
        ways.append("a smaller rank_min")
    return f"write {', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else f"write {ways[0]}, or give a corpus="


def _facts(stats: Mapping[str, Any], summary: Mapping[str, Any], path: str) -> list[tuple[str, str]]:
    rows, max_negatives = stats["rows"], summary["negatives_wanted"]
    facts = [("rows", f"{rows:,} in {path}"), ("negatives", f"{stats['negatives']:,}, at most {max_negatives} per row")]
    fewer, none = stats["rows_with_fewer_negatives"], stats["rows_without_negatives"]
    if fewer:
        facts.append(("", f"{_with_percentage(fewer, rows)} of rows have fewer, {_with_percentage(none, rows)} none"))
    candidates = stats["candidates"]
    for key, description in (
        ("candidates_above_margin", "above the margin: they are not selected, and may be false negatives"),
        ("candidates_above_positive", "above the positive itself"),
    ):
        if stats[key]:
            facts.append(("candidates", f"{_with_percentage(stats[key], candidates)} {description}"))
    beyond = stats["positives_beyond_rank_max"]
    if beyond:
        text = f"{_with_percentage(beyond, stats['positives'])} not among the {summary['rank_max']} best"
        facts.append(("positives", text))
    return facts


def _print_quantiles(page: Page, stats: Mapping[str, Any], rank_max: int) -> None:
    labels = (
        ("positive scores", "positive_scores", ".4f"),
        ("negative scores", "negative_scores", ".4f"),
        (f"positive ranks, of those among the best {rank_max}", "positive_ranks", ".0f"),
        ("negative ranks", "negative_ranks", ".0f"),
        ("negatives per row", "negatives_a_row", ".0f"),
    )
    available = [(label, stats[key], spec) for label, key, spec in labels if stats[key] is not None]
    rows = [[label, *(format(value, spec) for value in values.values())] for label, values, spec in available]
    if rows:
        page.table(["", *available[0][1]], rows)


def _print_suspects(page: Page, title: str, suspects: Sequence[Mapping[str, Any]]) -> None:
    if not suspects:
        return
    page.subheading(title)
    for suspect in suspects[:_MAX_SHOWN]:
        page.texts(
            [
                ("query", "", suspect["query"]),
                ("positive", f"{suspect['positive_score']:.4f}", suspect["positive"]),
                ("candidate", f"{suspect['score']:.4f}", suspect["document"]),
            ]
        )


def _with_percentage(part: int, total: int) -> str:
    return f"{part:,} ({part / max(1, total):.1%})"
