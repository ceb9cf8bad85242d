"""Marks of parametrized tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[Any], of: Iterable[Any]) -> list[Any]:
    """The parameters `of`, of which all but `kept` are slow tests."""
    return [each if each in kept else pytest.param(each, marks=pytest.mark.slow) for each in of]
