"""Training sources -> a store of checked rows for each, and what was found in it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import Cache, allow_open_files
from embedtrain.data.cache.row_requirements import check_equal_counts, check_sources
from embedtrain.data.cache.row_store import CachedRows
from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.cache.shared_build import build, is_complete
from embedtrain.data.cache.source_report import SourceReport
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.reader import open_sources
from embedtrain.data.sources.resolve import source_names
from embedtrain.errors import ConfigError, DataError

__all__ = ["SourceReport", "read_sources"]


def read_sources(
    sources: Sequence[TrainSource],
    on_error: OnError,
    needs: RowRequirements | Sequence[RowRequirements] = TEXTS_ONLY,
    cache: Cache | None = None,
    *,
    losses: Sequence[int] | None = None,
) -> list[RowStore]:
    """Read every row of every source, so that what is wrong with any is known before training.

    What the cache holds is not read again. All processes that call this alike share the work.

    Args:
        sources: `data.train`.
        on_error: stop at the first row that cannot be used, or pass over such rows and count them.
        needs: what the loss asks of every row; one for all sources, or one for each.
        cache: where rows are kept; default: a temporary folder that lasts as long as the stores.
        losses: which loss each source has, as a number that is the same for sources of one loss; default: all one.

    Returns:
        For each source its rows.

    Raises:
        DataError: a row that cannot be used (`path:line: what is wrong`), a file that cannot be read as a
            whole whatever `on_error` says, a source without a usable row, or a cache that cannot be written.
        ConfigError: options of a source that contradict each other or the loss, or no source.
    """
    if not sources:
        raise ConfigError("data.train is empty: name at least one file, folder or Hub data set to train on")
    each = [needs] * len(sources) if isinstance(needs, RowRequirements) else list(needs)
    check_sources(sources, each)
    temporary = None
    if cache is None:
        temporary = tempfile.TemporaryDirectory(prefix="embedtrain-", ignore_cleanup_errors=True)
        cache = Cache(directory=Path(temporary.name))
    readings = open_sources(sources, source_names(sources), each)
    wanted = [CachedRows(reading, on_error, cache) for reading in readings]
    new = [one for one in wanted if not is_complete(one.directory)]
    build([one.documents for one in new if one.documents is not None])
    build([one.build for one in new])
    allow_open_files(sum(one.num_files() for one in wanted))
    stores = [one.open(number, temporary, cached=one not in new) for number, one in enumerate(wanted)]
    for loss in dict.fromkeys(losses or [0]):
        of_loss = [one for i, one in enumerate(wanted) if losses is None or losses[i] == loss]
        _check_widths([one.first_vector() for one in of_loss])
    for one in dict.fromkeys(each):
        check_equal_counts(one, [store.report.counts() for store, its in zip(stores, each, strict=True) if its == one])
    return stores


def _check_widths(vectors: Sequence[tuple[int, str] | None]) -> None:
    """Refuse a teacher's vectors of several widths, of different sources of one loss."""
    found = [vector for vector in vectors if vector is not None]
    for width, place in found[1:]:
        if width != found[0][0]:
            raise DataError(f"{place}: a vector of {width} numbers, where those before have {found[0][0]}")
