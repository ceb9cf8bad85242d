"""The reference lists every option there is, with its meaning, as the source says it."""

import dataclasses
import importlib.util
import re
import sys
from enum import Enum
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("mkdocs")


def _hook(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_hooks_{name}", ROOT / "docs" / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _hook("reference")
MARKS = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)


def listed() -> dict[str, str]:
    """What each mark of the pages becomes."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    return {name: reference.section(name) for name in MARKS.findall(text)}


# Dataclasses of embedtrain/config that hold no options: what checks reckon with.
NOT_OPTIONS = {"Translation", "Range", "Needs"}


def test_every_field_of_every_dataclass_of_options_stands_in_the_reference():
    told = "\n".join(listed().values())
    kinds = [kind for kind in reference.dataclasses_of_config() if kind.__name__ not in NOT_OPTIONS]
    assert len(kinds) > 30
    for kind in kinds:
        for field in dataclasses.fields(kind):
            assert re.search(rf'class="option">`([\w.]+\.)?{field.name}`', told), f"{kind.__name__}.{field.name}"
    assert len(re.findall('class="option"', told)) > 250
    ids = re.findall(r'<span id="([^"]+)"', told)
    assert len(ids) == len(set(ids))


def test_every_option_says_what_it_means():
    silent = [
        f"{kind.__module__}.{kind.__name__}.{option.name}"
        for kind in reference.dataclasses_of_config()
        if kind.__name__ not in NOT_OPTIONS
        for option in reference.options_of(kind)
        if not reference.meaning(option) and not (option.name == "name" and kind.__name__ != "Recipe")
    ]
    assert silent == [], "a field without a comment: write what it means beside it"


def test_comments_types_defaults_and_choices_are_those_of_the_source(tmp_path, monkeypatch):
    (tmp_path / "made_up.py").write_text(
        '''"""Options made up."""
from dataclasses import dataclass, field
from enum import Enum

class Colour(str, Enum):
    """What it is painted."""

    red = "red"  # as a rose
    blue = "blue"

@dataclass(kw_only=True)
class Base:
    """Of all."""
    size: int = 3  # in bytes

@dataclass(kw_only=True)
class Paint(Base):
    """A wall."""
    # Said above,
    # on two lines.
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    colour: Colour | None = None
    share: float | None = (
        None  # of a | whole
    )
    silent: bool = True
''',
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import made_up

    options = {option.name: option for option in reference.options_of(made_up.Paint)}
    assert list(options) == ["size", "names", "colour", "share", "silent"]
    assert options["size"].comment == "in bytes"
    assert options["names"].comment == "Said above, on two lines."
    assert reference.meaning(options["colour"]) == "What it is painted. `red`: as a rose"
    assert reference.meaning(options["silent"]) == ""
    table = reference.table(made_up.Paint, "paint.")
    assert "| `red \\| blue \\| null` | `null` |" in table
    assert '`["a", "b"]`' in table or "`[a, b]`" in table
    assert "of a \\| whole" in table
    assert 'id="option.paint.share"' in table
    assert issubclass(made_up.Colour, Enum)
    assert Path(made_up.__file__).parent == tmp_path
