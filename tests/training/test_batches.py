"""From a global batch to what each rank computes, made ahead of its use."""

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, Row
from embedtrain.losses.types import LossInput
from embedtrain.training.batches import Prefetcher, RankBatch, cut, text_keys
from tests.small import batch, small_tokenizer

TOKENIZER = TextTokenizer(small_tokenizer(), 16)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("chunk_tokens", "least"), [(10_000, 10_000), (10_000, 20), (40, 20)])
def test_all_texts_of_all_ranks_once_and_in_their_place(size, chunk_tokens, least):
    rows = batch(10)
    for rank in range(size):
        mine = cut(rows, rank, size, TOKENIZER, chunk_tokens, least=least)
        share = rows.rows[rank::size]
        texts = [row.query for row in share] + [text for row in share for text in row.documents]
        assert (mine.num_queries, mine.num_rows, mine.step) == (len(share), 10, 0)
        seen: dict[int, list[int]] = {}
        for chunk in mine.chunks:
            assert chunk.ids.numel() <= chunk_tokens
            assert chunk.ids.shape == chunk.mask.shape
            for place, ids, mask in zip(chunk.rows, chunk.ids, chunk.mask, strict=True):
                assert place not in seen
                seen[place] = ids[mask.bool()].tolist()
        assert [seen[place] for place in range(len(texts))] == TOKENIZER.ids(texts)
        assert mine.real_tokens == sum(len(ids) for ids in seen.values()) <= mine.computed_tokens
        assert (mine.kept == len(mine.chunks)) == (chunk_tokens == 10_000)
        documents = [text for row in share for text in row.documents]
        assert [documents[place] for place in mine.known.positives.tolist()] == [row.documents[0] for row in share]
        assert mine.known.query_keys.equal(text_keys([row.query for row in share]))
        assert mine.known.document_keys.equal(text_keys(documents))


def test_pieces_save_padding():
    """A share that fits is cut all the same, and less is computed than in one pass."""
    long, short = " ".join(["alpha"] * 14), "beta"
    rows = GlobalBatch(0, tuple(Row(short, (long,)) for _ in range(8)))
    one, several = cut(rows, 0, 1, TOKENIZER, 10_000), cut(rows, 0, 1, TOKENIZER, 10_000, least=1)
    assert len(one.chunks) == 1 < len(several.chunks)
    assert several.kept == len(several.chunks)
    assert several.computed_tokens == several.real_tokens == one.real_tokens < one.computed_tokens


def test_what_does_not_fit_is_cut_by_the_budget():
    tight = cut(batch(12), 0, 1, TOKENIZER, 64, least=8)
    assert max(chunk.ids.numel() for chunk in tight.chunks) <= 64
    assert tight.kept == 1  # the longest texts, as many as fit beside each other
    more = cut(batch(12), 0, 1, TOKENIZER, 64, 190, least=8)
    sizes = [chunk.ids.numel() for chunk in more.chunks]
    assert sizes == [chunk.ids.numel() for chunk in tight.chunks]
    assert sum(sizes[: more.kept]) <= 190 < sum(sizes[: more.kept + 1])
    assert cut(batch(12), 0, 1, TOKENIZER, 64, 0, least=8).kept == 0


def test_a_rank_without_rows():
    mine = cut(batch(2), 3, 4, TOKENIZER, 100)
    assert (mine.num_queries, mine.chunks, mine.real_tokens) == (0, (), 0)
    assert mine.known.positives.dtype == mine.known.query_keys.dtype == mine.known.document_keys.dtype == torch.int64
    assert mine.num_rows == 2
    assert mine.to(torch.device("cpu")).num_rows == 2


def test_keys():
    texts = ["a", "b", "", "ä", "a", "\ud800", "a "]
    keys = text_keys(texts)
    assert keys.dtype == torch.int64
    assert (keys >= 0).all()
    assert keys[0] == keys[4]
    assert len(set(keys.tolist())) == 6
    assert text_keys([]).shape == (0,)
    assert keys[0] == int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest(), "big") >> 1
    # Python's own hash differs between processes; these must not.
    program = "from embedtrain.training.batches import text_keys; print(text_keys(['a', 'ä']).tolist())"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == str([keys[0].item(), keys[3].item()])


def empty(step: int) -> RankBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    known = LossInput(owners=nothing, query_keys=nothing, document_keys=nothing)
    return RankBatch(step, (), 0, known, 0, kept=0)


def making(slow: float = 0.0, breaks: int | None = None) -> tuple[Callable[[int], RankBatch], list[int]]:
    made: list[int] = []

    def make(step: int) -> RankBatch:
        assert threading.current_thread().name.startswith("batches")
        time.sleep(slow)
        if step == breaks:
            raise ValueError(f"row of step {step}")
        made.append(step)
        return empty(step)

    return make, made


def settle(made: list[int]) -> list[int]:
    time.sleep(0.2)
    return list(made)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 5), (4, 5), (5, 5), (6, 5)])
def test_prefetched_in_order(start, stop):
    make, made = making()
    assert [made_ahead.step for made_ahead in Prefetcher(make, start, stop)] == list(range(start, stop))
    assert made == list(range(start, stop))


def test_made_ahead_but_not_further():
    make, made = making()
    batches = iter(Prefetcher(make, 0, 100, ahead=2))
    next(batches)
    assert settle(made) == [0, 1, 2]
    next(batches)
    assert settle(made) == [0, 1, 2, 3]
    batches.close()
    assert settle(made) == [0, 1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_an_error_while_making_reaches_the_loop_at_its_step():
    make, made = making(breaks=3)
    seen = []
    with pytest.raises(ValueError, match="row of step 3"):
        seen.extend(made_ahead.step for made_ahead in Prefetcher(make, 0, 10))
    assert seen == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    assert len(settle(made)) <= 5


def test_waiting_is_measured():
    make, _ = making(slow=0.1)
    slow = Prefetcher(make, 0, 3)
    waits = [slow.take_waited() for _ in slow]
    assert waits[0] >= 0.09
    make, _ = making()
    fast = Prefetcher(make, 0, 4)
    for _ in fast:
        time.sleep(0.05)
    assert fast.take_waited() < 0.15
