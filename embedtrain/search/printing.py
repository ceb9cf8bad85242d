"""How the answers to a search look on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_answers(query: str, answers: Sequence[tuple[float, str, str]], console: Console | None = None) -> None:
    """Print one line an answer, best first.

    Args:
        query: what was looked for.
        answers: (score, id, text).
        console: where to print; standard output unless given.
    """
    console = console or Console(highlight=False)
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(style="bold", no_wrap=True, max_width=32, overflow="ellipsis")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for score, name, text in answers:
        table.add_row(f"{score:.3f}", Text(name), Text(" ".join(text.split())))
    console.print(Text(f"\n{query}", style="bold"))
    console.print(table)
