"""Blocks: rows of one source whose documents are seen alike, mined and written together.

R rows of a source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from embedtrain.errors import DataError
from embedtrain.mine.relation import IntArray


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a source.

    Attributes:
        source: which.
        wording: how their documents are seen.
        number: among those of its source and wording, from 0.
        rows: int64 [Q], ascending.
    """

    source: int
    wording: int
    number: int
    rows: IntArray

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.source:05}-{self.wording:05}-{self.number:07}"


def row_blocks(format_of: Sequence[IntArray], size: int) -> list[RowBlock]:
    """All blocks, source by source.

    Args:
        format_of: for each source, int64 [R], the wording of each row's documents.
        size: rows of a block at most.
    """
    blocks: list[RowBlock] = []
    for source, wordings in enumerate(format_of):
        for wording in np.unique(wordings).tolist():
            rows = np.flatnonzero(wordings == wording)
            for number, start in enumerate(range(0, len(rows), size)):
                blocks.append(RowBlock(source, wording, number, rows[start : start + size]))
    return blocks


def merge_in_row_order(wordings: IntArray, lines: dict[int, Iterator[str]]) -> Iterator[str]:
    """The lines of a source's rows in the order of its rows.

    Args:
        wordings: int64 [R], of each row.
        lines: by wording those of its rows.

    Raises:
        DataError: there are fewer lines than rows.
    """
    for done, wording in enumerate(wordings.tolist()):
        line = next(lines[wording], None)
        if line is None:
            raise DataError(
                f"mined rows are missing after the first {done:,} of {len(wordings):,}: delete the folder .mining "
                "below output_dir=, and mine again"
            )
        yield line
