"""The reference lists every option there is, with its meaning, as the source says it."""

import dataclasses
import re
from enum import Enum
from pathlib import Path

import pytest

from embedtrain.config.losses import LossConfig
from tests.conftest import ROOT
from tests.docs.pages import load_hook

pytest.importorskip("mkdocs")


reference = load_hook("reference")
MARKS = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)


def listed() -> dict[str, str]:
    """What each mark of the pages becomes."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    return {name: reference.section(name) for name in MARKS.findall(text)}


def kinds_of_options() -> list[type]:
    """Options are given by name alone, and may be changed; dataclasses that checks reckon with are not like that."""
    found = [
        kind
        for kind in reference.dataclasses_of_config()
        if not kind.__dataclass_params__.frozen and all(field.kw_only for field in dataclasses.fields(kind))
    ]
    assert len(found) > 30
    return found


def test_every_field_of_every_dataclass_of_options_stands_in_the_reference():
    told = "\n".join(listed().values())
    for kind in kinds_of_options():
        for option in reference.options_of(kind):
            if option.name == "name" and issubclass(kind, LossConfig) and kind is not LossConfig:
                continue  # its heading
            if any(map(dataclasses.is_dataclass, option.classes)) and option.name != "loss":
                assert re.search(rf"^##+ ([\w.]+\.)?{option.name}$", told, re.MULTILINE), (
                    f"{kind.__name__}.{option.name}"
                )
                continue
            # The same name may be an option of several: its own type, default and meaning must be there.
            row = reference.row(option, "", "").partition("`</span>")[2]
            assert f"{option.name}`</span>{row}" in told, f"{kind.__name__}.{option.name}"
    assert len(re.findall('class="option"', told)) > 250
    ids = re.findall(r'<span id="([^"]+)"', told)
    assert len(ids) == len(set(ids))


def test_every_option_says_what_it_means():
    silent = [
        f"{kind.__module__}.{kind.__name__}.{option.name}"
        for kind in kinds_of_options()
        for option in reference.options_of(kind)
        if not reference.meaning(option)
        and not (option.name == "name" and issubclass(kind, LossConfig))
        and not any(map(dataclasses.is_dataclass, option.classes))
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
    assert "<br>`red | blue | null`, default `null` | What it is" in table
    assert ", default `[a, b]` |" in table
    assert "`integer`, default `3` | in bytes |" in table
    assert "of a \\| whole" in table
    assert 'id="option.paint.share"' in table
    assert issubclass(made_up.Colour, Enum)
    assert Path(made_up.__file__).parent == tmp_path
