"""The rows of a source that cannot be used, by reading it again: the report of a source keeps the first few alone."""

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.documents import DocumentStore, documents_build
from embedtrain.data.cache.row_requirements import RowCheck
from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.cache.shared_build import build
from embedtrain.data.sources.part_reader import PartReader, Piece
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.resolve import find_parts
from embedtrain.data.sources.values import BadRow

_WHOLE_FILE_BYTES = 2**62  # bytes of a piece: no part is cut, so that lines are counted from its beginning


def first_bad_rows(source: TrainSource, name: str, needs: RowRequirements, most: int, cache: Cache) -> list[str]:
    """The first `most` rows that cannot be used, each as `path:line: what is wrong`, in order.

    Args:
        source: an element of `data.train`.
        name: its name in messages.
        needs: what the loss asks of every row.
        most: no more are looked for.
        cache: where the corpus is kept, if rows name documents by id.

    Raises:
        DataError: as Reading, and where a part cannot be read as a whole.
    """
    reading = SourceReader(source, name, needs)
    layout, documents = reading.detect_layout(OnError.skip), None
    if reading.documents is not None:
        corpus = documents_build(reading.documents, OnError.skip, cache)
        build([corpus])
        documents = DocumentStore(corpus.directory)
    found: list[str] = []
    for piece in reading.pieces(_WHOLE_FILE_BYTES):
        check, is_empty = RowCheck(needs), True
        for line, row in reading.rows(piece, layout, documents):
            is_empty = False
            try:
                if isinstance(row, BadRow):
                    raise row
                check(row)
            except BadRow as bad:
                found.append(f"{piece.part.location(line)}: {bad}")
            if len(found) >= most:
                return found
        if is_empty:
            found.append(f"{piece.part.name}: holds no rows")
            if len(found) >= most:
                return found
    return found


def num_empty_files(source: TrainSource, store: RowStore) -> int:
    """How many files of a source hold no row at all, not even one that cannot be used.

    Args:
        source: an element of `data.train`.
        store: its rows.

    Raises:
        DataError: a file is gone or cannot be read.
    """
    with_rows, opened = (
        {stretch.part for stretch in store.row_ranges},
        PartReader(subset=source.subset, split=source.split, columns=source.columns),
    )
    others = [part for number, part in enumerate(find_parts(source).parts) if number not in with_rows]
    return sum(all(line.row is None for line in opened.lines(Piece(part))) for part in others)
