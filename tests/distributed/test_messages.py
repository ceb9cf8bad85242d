"""Values that ranks exchange arrive with their types, others are rejected by the sender; nothing is unpickled."""

import json
import math
import pickle
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from embedtrain.distributed import messages
from embedtrain.distributed.messages import decode, encode
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError
from tests.safety.payloads import MARKER, Bomb


class Colour(str, Enum):
    red = "red"
    blue = "blue"


@dataclass(frozen=True, slots=True)
class Ball:
    radius: float
    colour: Colour
    marks: tuple[int, ...] = ()


@dataclass
class Beach:
    balls: list[Ball]


TYPES = (Ball, Beach, Colour, signal.Signals)
VALUES = [
    None, True, False, 0, -1, 10**30, 0.1, -0.0, math.inf, 1, "", "ä€𝄞\0\n", "caf\udce9.jsonl", b"", b"\x80\x04",
    [], [1, None, "a"], [[1], (2, 3)], (), (1, [2], ({},)), set(), {1, "a"},
    {"dict": [], "x": {1: (2,)}, (1, 2): b"ab"},
    {"tuple": 1}, [b"one", [b"two"], (b"three",)], Ball(0.5, Colour.red, (1, 2)), Beach([Ball(1.0, Colour.blue)]),
    signal.SIGTERM, [Colour.red], np.float32(0.1), np.int64(-5), np.bool_(True),
]  # fmt: skip
ARRAYS = [np.arange(6).reshape(2, 3), np.zeros((0, 4), dtype=np.float32), np.array([True, False]), np.array(2.5)]


def types_of(value: object) -> object:
    """The types of a value and of everything in it."""
    if isinstance(value, (list, tuple, set)):
        return type(value), [types_of(item) for item in value]
    if isinstance(value, dict):
        return dict, [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, (Ball, Beach)):
        return type(value), [types_of(getattr(value, name)) for name in value.__dataclass_fields__]
    return type(value)


@pytest.mark.parametrize("value", VALUES)
def test_values_and_types_survive(value):
    received = decode(encode(value, TYPES), TYPES)
    assert received == value
    assert types_of(received) == types_of(value)
    assert not isinstance(value, float) or math.copysign(1, received) == math.copysign(1, value)


@pytest.mark.parametrize("array", ARRAYS)
def test_arrays_survive(array):
    (received,) = decode(encode([array]))
    assert received.dtype == array.dtype
    assert received.shape == array.shape
    assert (received == array).all()
    received[...] = 0  # not a view of the message


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        Path("x"), object(), torch.zeros(1), Name("a"), ValueError("a"), np.array(["a"]), np.array([None]), 1j,
        Ball(1.0, Colour.red), Colour.red, frozenset({1}), range(3), dict.fromkeys, [[{"a": Path("x")}]],
        {Path("x"): 1},
    ],
)  # fmt: skip
def test_other_values_are_rejected_by_the_sender(value):
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        encode(value)


def message(head: str, blocks: bytes = b"") -> bytes:
    text = head.encode()
    return len(text).to_bytes(8, "little") + text + blocks


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff" * 40, message("{"), message("{}"), message('{"Ball": [1]}'), message('{"Path": ["x"]}'),
        message('{"Colour": "green"}'), message('{"array": ["O", [1]]}', b"12345678"), message('{"bytes": 9}', b"1"),
        message('{"array": ["<i8", [99999999999]]}', b"1"), message('{"array": ["<i8", [-1]]}', b"1"),
        message('{"bytes": -1}'), message('{"dict": [[[]], [1]]}'), message('{"dict": 1}'), message("[" * 100_000),
        message('{"tuple": 1}'), message('{"set": [[1]]}'), message('{"a": 1, "b": 2}'),
        message('{"array": [[["a", "O"]], [1]]}', b"12345678"), message('{"__reduce__": ["os.system", "true"]}'),
    ],
    ids=lambda content: repr(content[8:40]),
)  # fmt: skip
def test_other_messages_are_rejected_in_one_sentence(content):
    with pytest.raises(EmbedtrainError, match=r"^a message of another rank .*$"):
        decode(content, TYPES)


def test_ten_thousand_texts_are_as_small_as_json():
    texts = ["ä" * 100] * 10_000
    assert len(encode(texts)) < 1.01 * len(json.dumps(texts, ensure_ascii=False).encode())


def send_a_bomb(world: World, marker: Path) -> str:
    """The error of a rank when another sends a pickle that creates `marker`."""
    real = messages.encode
    if world.rank == 1:
        messages.encode = lambda *_: pickle.dumps(Bomb(marker))
    try:
        return str(world.gather("text"))
    except EmbedtrainError as error:
        return str(error)
    finally:
        messages.encode = real


def test_a_rank_that_sends_a_pickle_executes_nothing(ranks, tmp_path):
    errors = ranks(2, send_a_bomb, tmp_path / MARKER)
    assert all("a message of another rank cannot be read" in error for error in errors)
    assert not (tmp_path / MARKER).exists()
