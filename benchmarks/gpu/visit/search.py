"""Encoding beside sentence-transformers, and exact search: equal to exact arithmetic, and its speed."""

from functools import partial

from benchmarks.gpu.inference import (
    SEARCH_HEADER,
    SEARCHES,
    SMALL_SEARCH,
    encoding_header,
    encoding_row,
    search_row,
)
from benchmarks.gpu.visit.checks import check
from benchmarks.gpu.visit.entries import Entry, Values, Visit
from embedtrain.config.evaluation import ScanDtype
from embedtrain.distributed.world import World
from tests.gpu import test_search

PLACES = (("device", None), ("host", None), ("host", ScanDtype.int8), ("host", ScanDtype.bf16))


def encoding(name: str, world: World, visit: Visit) -> Values:
    """Texts of the quickstart, tokenization included."""
    return dict(zip(encoding_header(), encoding_row(world, name, small=visit.small), strict=True))


def search(number: int, place: str, scan: ScanDtype | None, world: World, visit: Visit) -> Values:
    """Search beside products of matrices with torch.topk."""
    sizes = SMALL_SEARCH if visit.small else SEARCHES[number]
    return dict(zip(SEARCH_HEADER, search_row(world, place, *sizes, scan), strict=True))


ENTRIES = (
    Entry(name="rankings are exact", measure=check(test_search.test_search_is_exact, 1)),
    Entry(name="rankings of vectors in bf16 are exact", measure=check(test_search.test_vectors_in_bf16), varied=True),
    *(
        Entry(
            name=f"search {number + 1}, {place}{'' if scan is None else f', {scan.value}'}",
            measure=partial(search, number, place, scan),
            varied=number > 0,
        )
        for number in range(2)
        for place, scan in PLACES
    ),
    *(
        Entry(name=f"encoding, {name}", measure=partial(encoding, name), varied=name != "XLM-R-large", unpretended=True)
        for name in ("XLM-R-large", "Qwen3-0.6B")
    ),
)
