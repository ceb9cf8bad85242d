"""Blocks of rows that are searched and written together, from which an interrupted run resumes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedtrain.mining.pool import IntArray


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one source with one document format, which are searched and written together."""

    source: int  # its number
    format: int  # number of the document format
    number: int  # of the block, from 0, among those of its source and format
    rows: IntArray  # ascending

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.source:05}-{self.format:05}-{self.number:07}"


def row_blocks(format_of: Sequence[IntArray], size: int) -> list[RowBlock]:
    """Cut the rows of all sources into blocks of at most `size`; `format_of` is that of `MiningInputs`."""
    blocks: list[RowBlock] = []
    for source, formats in enumerate(format_of):
        for document_format in np.unique(formats).tolist():
            rows = np.flatnonzero(formats == document_format)
            for number, start in enumerate(range(0, len(rows), size)):
                blocks.append(RowBlock(source, document_format, number, rows[start : start + size]))
    return blocks
