"""Fixtures of pages: what their commands and blocks find."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.stand_ins import StandIns


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    """Puts small models and files of the names of a page into a folder."""
    return StandIns(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture
def page_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The current folder, and the home, of a page's reader; modules in it are imported, and forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]
