"""Pictures among cached tokens: slots, which survive selection, the token store, and plans of encoding."""

import numpy as np
import pytest

from embedtrain.data.images.item import Picture, join_parts
from embedtrain.data.images.layout import BLANK, PictureLayout
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import NOT_POOLED, PICTURE, SLOT, TextRole, Tokens
from embedtrain.errors import ModelError
from embedtrain.inference.encoding_plan import PromptedTexts, plan_encoding
from tests.small import small_tokenizer

PICTURES = [Picture(0, 1, 1), Picture((1 << 63) - 1, 65535, 3), Picture(0x7FFFFFFF_80000000, 30, 3000), BLANK]


class Two(PictureLayout):
    """A tower for texts, and one for pictures, of which each has as many tokens as its height."""

    num_towers = 2
    further_limits = (200,)

    def __init__(self, tokenizer):
        super().__init__(tokenizer, "two")

    def tokenize(self, texts, limit, prompts="", role=TextRole.document):
        return Tokens.of_parts(self.parts(texts, limit))

    def towers(self, are_queries, tokens):
        return np.minimum(tokens(np.arange(len(are_queries))).count(PICTURE), 1)

    def num_tokens(self, tokens):
        slots = tokens.slots()
        expanded = np.bincount(slots.owners, slots.sizes[:, 1] - SLOT, len(tokens))
        return tokens.lengths + expanded.astype(np.int64)

    def further_costs(self, tokens):
        slots = tokens.slots()
        return np.bincount(slots.owners, slots.sizes[:, 1], len(tokens)).astype(np.int64)[:, None]

    @property
    def dummies(self):
        return [("a", TextRole.document), (str(BLANK), TextRole.document)]


def test_slots_hold_any_picture() -> None:
    items = [[PICTURES[0]], [[5, 6], PICTURES[1], [7], PICTURES[2]], [[8]], [PICTURES[3], PICTURES[1]]]
    tokens = Tokens.of_parts(items)
    assert tokens.lengths.tolist() == [SLOT, 3 + 2 * SLOT, 1, 2 * SLOT]
    slots = tokens.slots()
    assert slots.pictures() == [PICTURES[i] for i in (0, 1, 2, 3, 1)]
    assert slots.owners.tolist() == [0, 1, 1, 3, 3]
    assert slots.starts.tolist() == [0, SLOT + 2, 2 * SLOT + 3, 3 * SLOT + 4, 4 * SLOT + 4]
    taken = Tokens.concatenated([tokens.take([3, 2]), tokens.take([1])])
    assert taken.slots().pictures() == [PICTURES[i] for i in (3, 1, 1, 2)]
    assert taken.ids[taken.flags == 0].tolist() == [8, 5, 6, 7]
    assert len(Tokens.of_parts([[[1, 2]]]).slots()) == len(Tokens.of([]).slots()) == 0
    assert not (tokens.flags & NOT_POOLED).any()


def test_a_model_of_texts_refuses_pictures() -> None:
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    with pytest.raises(ModelError, match="the model reads texts alone"):
        tokenizer.tokens(["a text", f"see {PICTURES[1]}"])


def plan(world):
    heights = np.random.default_rng(0).integers(1, 90, 60).tolist()
    pictures = [str(Picture(key + 1, 20, height)) for key, height in enumerate(heights)]
    texts = ["alpha " * (i % 9 + 1) + str(i % 31) for i in range(50)]
    items = [item for pair in zip(pictures, [*texts, *pictures[:10]], strict=True) for item in pair]
    tokenizer = TextTokenizer(small_tokenizer(), 16, Two(small_tokenizer()), packed=True)
    made = plan_encoding(PromptedTexts(items), tokenizer, None, 64, world)
    remaining = [number for number in range(len(made)) if number % 5]
    dealt = made.dealt(remaining, world.size)
    tokenized = made.exchange_tokens(dealt, world)
    local = []
    for number in dealt[world.rank :: world.size]:
        if number >= 0:
            tokens = tokenized.take(made.chunk(number))
            assert (tokens.count(PICTURE) > 0).all() == bool(made.towers[number])
            pictures_of_chunk = tokens.slots().pictures()
            assert len(pictures_of_chunk) in (0, len(tokens))
            assert len(tokens) == 1 or sum(picture.height for picture in pictures_of_chunk) <= 200
            local.append((number, made.towers[number], [str(picture) for picture in pictures_of_chunk]))
    return made.cuts, made.order.tolist(), list(made.towers), dealt, local


def test_ranks_encode_a_tower_at_a_time(ranks) -> None:
    """Chunks have one tower, depend on no number of ranks, and a pass computes the same tower on all ranks."""
    by_size = {size: ranks(size, plan) for size in (1, 3)}
    (cuts, order, towers, _, alone), *_ = by_size[1]
    assert sorted(set(towers)) == [0, 1]
    for of_rank in by_size[3]:
        assert of_rank[:3] == (cuts, order, towers)
    dealt = by_size[3][0][3]
    passes = [dealt[start : start + 3] for start in range(0, len(dealt), 3)]
    assert all(part[0] >= 0 and len({towers[number] for number in part if number >= 0}) == 1 for part in passes)
    assert any(-1 in part for part in passes)
    assert sorted(chunk for of_rank in by_size[3] for chunk in of_rank[4]) == sorted(alone)
    assert str(join_parts([BLANK])) == str(BLANK)
