"""Dataclasses from JSON: types are checked in depth, and errors name the entry."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from embedtrain.utils.records import read_record


class Colour(str, Enum):
    red = "red"


@dataclass
class Inner:
    count: int


@dataclass
class Outer:
    name: str
    number: float | None = None
    colour: Colour = Colour.red
    flag: bool = False
    items: Sequence[Inner] = ()
    by_name: dict[str, list[int]] = field(default_factory=dict)
    anything: Any = None


def test_entries_become_fields():
    values = {"name": "x", "number": 2, "items": [{"count": 1, "more": 2}], "by_name": {"a": [3]}, "unknown": [1]}
    assert read_record(Outer, values) == Outer("x", 2, items=[Inner(1)], by_name={"a": [3]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "it is not a JSON object"),
        ({}, "name is missing"),
        ({"name": None}, "name=None is not a text"),
        ({"name": "x", "number": float("nan")}, "number=nan is not a number"),
        ({"name": "x", "number": True}, "number=True is not a number"),
        ({"name": "x", "number": 10**400}, "number=1000"),
        ({"name": "x", "colour": ["red"]}, "colour=['red'] is not one of red"),
        ({"name": "x", "flag": 1}, "flag=1 is not true or false"),
        ({"name": "x", "items": {"count": 1}}, "items={'count': 1} is not a list"),
        ({"name": "x", "items": [{"count": -1}]}, "count=-1 is not a count"),
        ({"name": "x", "by_name": {"a": [2**60]}}, "by_name=1152921504606846976 is not a count"),
        ({"name": "x", "by_name": [1]}, "by_name=[1] is not an object"),
    ],
)
def test_other_types_are_rejected(values, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_record(Outer, values)
    assert len(str(error.value)) < 100
