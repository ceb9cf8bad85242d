"""From a global batch to what each rank computes, made ahead of its use."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from embedtrain.data.prefetch import Prefetcher
from embedtrain.data.rows import Documents, Example, RowLocation, text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch
from embedtrain.losses.types import BatchInfo
from embedtrain.training.rank_batch import ChunkOptions, Exchange, RankBatch, make_rank_batch, plan_exchange
from tests.small import batch, small_tokenizer, text, tokenised

TOKENIZER = TextTokenizer(small_tokenizer(), 16)


PIECES = ChunkOptions(10_000, pass_overhead_tokens=4)


def parts(rows: GlobalBatch, size: int, cutting: ChunkOptions) -> list[RankBatch]:
    return [make_rank_batch(tokenised(rows, TOKENIZER), rank, size, TOKENIZER, cutting) for rank in range(size)]


def texts_of(rows: Sequence[Example]) -> list[str]:
    return [row.query for row in rows] + [text for row in rows for text in row.documents.texts]


def tokens_of(part: RankBatch) -> list[list[int]]:
    """The tokens of each text that a rank encodes, by its number."""
    seen: dict[int, list[int]] = {}
    for chunk in part.chunks:
        assert chunk.ids.shape == chunk.mask.shape
        for index, ids, mask in zip(chunk.rows, chunk.ids, chunk.mask, strict=True):
            assert index not in seen
            seen[index] = ids[mask.bool()].tolist()
            assert (ids[~mask.bool()] == TOKENIZER.tokenizer.pad_token_id).all()
    return [seen[index] for index in range(len(seen))]


def at_home(all_parts: list[RankBatch], rank: int) -> list[list[int]]:
    """What a rank's rows get when every rank sends what it encoded: the same steps as Exchange, without ranks."""
    sent = []
    for part in all_parts:
        ordered = [tokens_of(part)[i] for i in part.exchanges[0].send_order.tolist()]
        start = sum(part.exchanges[0].num_sent[:rank])
        sent.append(ordered[start : start + part.exchanges[0].num_sent[rank]])
    rank_batch = all_parts[rank].exchanges[0]
    assert [len(block) for block in sent] == list(rank_batch.num_received)
    home: list[list[int]] = [[] for _ in rank_batch.received_rows]
    for index, ids in zip(rank_batch.received_rows.tolist(), (ids for block in sent for ids in block), strict=True):
        home[index] = ids
    return home


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "cutting", [ChunkOptions(10_000, pass_overhead_tokens=10_000), PIECES, ChunkOptions(40, pass_overhead_tokens=4)]
)
def test_all_texts_of_all_ranks_once_and_in_their_place(size, cutting):
    rows = batch(10)
    dealt = parts(rows, size, cutting)
    for rank, rank_batch in enumerate(dealt):
        share = rows.rows[rank::size]
        texts = texts_of(share)
        assert (rank_batch.num_queries, rank_batch.num_rows, rank_batch.step) == (len(share), 10, 0)
        assert all(chunk.ids.numel() <= cutting.chunk_tokens for chunk in rank_batch.chunks)
        assert at_home(dealt, rank) == TOKENIZER.ids(texts)
        assert rank_batch.real_tokens == sum(map(len, tokens_of(rank_batch))) <= rank_batch.computed_tokens
        assert (rank_batch.num_cached_graphs == len(rank_batch.chunks)) == (cutting.chunk_tokens == 10_000)
        documents = [text for row in share for text in row.documents.texts]
        assert [documents[index] for index in rank_batch.batch_info.positives.tolist()] == [
            row.documents.texts[0] for row in share
        ]
        assert rank_batch.batch_info.query_keys.equal(torch.from_numpy(text_keys([row.query for row in share])))
        assert rank_batch.batch_info.document_keys.equal(torch.from_numpy(text_keys(documents)))
    assert (
        max(len(rank_batch.chunks) for rank_batch in dealt) - min(len(rank_batch.chunks) for rank_batch in dealt) <= 1
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_have_as_much_to_compute(size):
    """Rank 0's rows are the long ones: their texts are dealt all the same."""
    rows = tuple(Example(text(i, 2), Documents((text(i, 40 if i % size == 0 else 3),))) for i in range(60 * size))
    dealt = parts(GlobalBatch(0, rows), size, PIECES)
    assert max(part.computed_tokens for part in dealt) <= 1.02 * min(part.computed_tokens for part in dealt)


def test_pieces_save_padding():
    """A share that fits is cut all the same, and less is computed than in one pass."""
    long, short = " ".join(["alpha"] * 14), "beta"
    rows = GlobalBatch(0, tuple(Example(short, Documents((long,))) for _ in range(8)))
    (one,), (several,) = parts(rows, 1, ChunkOptions(10_000, pass_overhead_tokens=10_000)), parts(rows, 1, PIECES)
    assert len(one.chunks) == 1 < len(several.chunks)
    assert several.num_cached_graphs == len(several.chunks)
    assert several.computed_tokens == several.real_tokens == one.real_tokens < one.computed_tokens


def test_what_does_not_fit_is_cut_by_the_budget():
    (tight,) = parts(batch(12), 1, ChunkOptions(64, pass_overhead_tokens=8))
    assert max(chunk.ids.numel() for chunk in tight.chunks) <= 64
    assert tight.num_cached_graphs == 1  # the longest texts, as many as fit beside each other
    (more,) = parts(batch(12), 1, ChunkOptions(64, 190, pass_overhead_tokens=8))
    sizes = [chunk.ids.numel() for chunk in more.chunks]
    assert sizes == [chunk.ids.numel() for chunk in tight.chunks]
    assert sum(sizes[: more.num_cached_graphs]) <= 190 < sum(sizes[: more.num_cached_graphs + 1])
    assert parts(batch(12), 1, ChunkOptions(64, 0, pass_overhead_tokens=8))[0].num_cached_graphs == 0


def test_a_rank_without_rows():
    rank_batch = parts(batch(2), 4, ChunkOptions(100))[3]
    assert (rank_batch.num_queries, rank_batch.exchanges[0].num_received) == (0, [0, 0, 0, 0])
    assert (
        rank_batch.batch_info.positives.dtype
        == rank_batch.batch_info.query_keys.dtype
        == rank_batch.batch_info.document_keys.dtype
        == torch.int64
    )
    assert rank_batch.num_rows == 2
    assert rank_batch.to(torch.device("cpu")).num_rows == 2


def test_more_ranks_than_texts():
    rows = GlobalBatch(0, (Example("alpha", Documents(("beta",))),))
    dealt = parts(rows, 4, PIECES)
    assert at_home(dealt, 0) == TOKENIZER.ids(["alpha", "beta"])
    assert [at_home(dealt, rank) for rank in (1, 2, 3)] == [[], [], []]


def test_ids_are_a_sources_own():
    rows = [
        Example("a", Documents(("b",), ids=("7",)), location=RowLocation(0, "rows.jsonl", 1)),
        Example("a", Documents(("c",), ids=("7",)), location=RowLocation(1, "rows.jsonl", 1)),
        Example("a", Documents(("d", "e"), ids=("8", "7")), location=RowLocation(0, "rows.jsonl", 1)),
        Example("a", Documents(("f",)), location=RowLocation(1, "rows.jsonl", 1)),
    ]
    (rank_batch,) = parts(GlobalBatch(0, tuple(rows)), 1, PIECES)
    ids = rank_batch.batch_info.document_ids
    assert ids[0] == ids[3] != ids[1]
    assert len(set(ids.tolist())) == 4
    assert ids[4] == text_keys(["f"])[0]


def empty(step: int) -> RankBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    batch_info = BatchInfo(owners=nothing, query_keys=nothing, document_keys=nothing)
    exchange = Exchange(nothing, (), (), nothing, None)
    return RankBatch(
        step,
        (),
        0,
        batch_info,
        0,
        num_cached_graphs=0,
        num_passes=0,
        max_documents=0,
        exchanges=(exchange,),
    )


def making(slow: float = 0.0, breaks: int | None = None) -> tuple[Callable[[int], RankBatch], list[int]]:
    built: list[int] = []

    def make(step: int) -> RankBatch:
        assert threading.current_thread().name.startswith("prefetch")
        time.sleep(slow)
        if step == breaks:
            raise ValueError(f"row of step {step}")
        built.append(step)
        return empty(step)

    return make, built


def settle(built: list[int]) -> list[int]:
    time.sleep(0.2)
    return list(built)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 5), (4, 5), (5, 5), (6, 5)])
def test_prefetched_in_order(start, stop):
    make, built = making()
    assert [made_ahead.step for made_ahead in Prefetcher(make, start, stop)] == list(range(start, stop))
    assert built == list(range(start, stop))


def test_made_ahead_but_not_further():
    make, built = making()
    batches = iter(Prefetcher(make, 0, 100, ahead=2))
    next(batches)
    assert settle(built) == [0, 1, 2]
    next(batches)
    assert settle(built) == [0, 1, 2, 3]
    batches.close()
    assert settle(built) == [0, 1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_an_error_while_making_reaches_the_loop_at_its_step():
    make, built = making(breaks=3)
    seen = []
    with pytest.raises(ValueError, match="row of step 3"):
        seen.extend(made_ahead.step for made_ahead in Prefetcher(make, 0, 10))
    assert seen == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    assert len(settle(built)) <= 5


def test_waiting_is_measured():
    make, built = making(slow=0.5)
    batches = Prefetcher(make, 0, 2)
    waits = []
    for made in batches:
        waits.append(batches.pop_wait_seconds())
        while made.step == 0 and len(built) < 2:
            time.sleep(0.01)
    assert waits[0] >= 0.49
    assert waits[1] < 0.49


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_workers_do_not_change_the_order(workers):
    def make(step: int) -> RankBatch:
        time.sleep(0.01 * (step % 3))  # whoever is quicker
        return empty(step)

    assert [built.step for built in Prefetcher(make, 2, 30, workers=workers)] == list(range(2, 30))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_of_texts_arrive_in_the_order_of_the_texts(ragged):
    """All ranks in one process: texts with any number of rows reach the rank of their batch row, and return."""
    size, random = 3, np.random.default_rng(ragged)
    encoder_ranks, row_ranks = random.integers(0, size, 40), random.integers(0, 2, 40)  # rank 2 has no row
    sizes = random.integers(0, 5, 40) if ragged else np.ones(40, dtype=np.int64)
    rows_of = [np.stack([np.full(n, text), np.arange(n)], axis=1) for text, n in enumerate(sizes)]
    encoded = [random.permutation(np.flatnonzero(encoder_ranks == rank)) for rank in range(size)]
    exchanges = [
        plan_exchange(encoder_ranks, row_ranks, rank, size, encoded[rank], sizes if ragged else None)
        for rank in range(size)
    ]
    empty = np.zeros((0, 2), dtype=np.int64)
    local = [torch.from_numpy(np.concatenate([empty, *(rows_of[text] for text in texts)])) for texts in encoded]
    sent = [rows[e.send_order].split(e.num_sent) for rows, e in zip(local, exchanges, strict=True)]
    for rank, exchange in enumerate(exchanges):
        received = torch.cat([sent[other][rank] for other in range(size)])
        assert exchange.num_received == [len(sent[other][rank]) for other in range(size)]
        owned = torch.empty_like(received).index_copy_(0, exchange.received_rows, received)
        expected = [empty, *(rows_of[text] for text in np.flatnonzero(row_ranks == rank))]
        assert owned.tolist() == np.concatenate(expected).tolist()
