"""The committed reference has every option with the type, default and meaning that the source has."""

import dataclasses
import re
from enum import Enum
from pathlib import Path

import pytest

from embedtrain.config.losses import LossConfig
from tests.docs.pages import load_hook

reference = load_hook("reference")
PAGES = sorted(reference.PAGES.glob("*.md"))


def option_dataclasses() -> list[type]:
    """Dataclasses of options are keyword-only and not frozen; others are only used by checks."""
    kinds = [
        kind
        for kind in reference.option_dataclasses()
        if not kind.__dataclass_params__.frozen and all(field.kw_only for field in dataclasses.fields(kind))
    ]
    assert len(kinds) > 30
    return kinds


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.name)
def test_the_committed_page_has_the_options_of_the_dataclasses(page):
    text = page.read_text(encoding="utf-8")
    assert text == reference.generate(text), "write the pages again: python docs/hooks/reference.py"


def test_the_committed_types_of_keywords_are_those_of_the_dataclasses():
    written = reference.KEYWORDS.read_text(encoding="utf-8")
    assert written == reference.keyword_types(), "write them again: python docs/hooks/reference.py"


def test_every_option_is_in_the_reference():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for kind in option_dataclasses():
        for option in reference.options_of(kind):
            if option.name == "name" and issubclass(kind, LossConfig) and kind is not LossConfig:
                continue  # its heading
            if any(map(dataclasses.is_dataclass, option.classes)) and option.name != "loss":
                heading = rf"^##+ ([\w.]+\.)?{option.name}$"
                assert re.search(heading, text, re.MULTILINE), f"{kind.__name__}.{option.name}"
                continue
            # Several dataclasses may have an option of this name: type, default and meaning must be those of this one.
            row = reference.row(option, "", "").partition("`</span>")[2]
            assert f"{option.name}`</span>{row}" in text, f"{kind.__name__}.{option.name}"
    assert len(re.findall('class="option"', text)) > 250
    for page in PAGES:
        ids = re.findall(r'<span id="([^"]+)"', page.read_text(encoding="utf-8"))
        assert len(ids) == len(set(ids)), page.name


def test_every_option_has_a_comment():
    without_comment = [
        f"{kind.__module__}.{kind.__name__}.{option.name}"
        for kind in option_dataclasses()
        for option in reference.options_of(kind)
        if not reference.meaning(option)
        and not (option.name == "name" and issubclass(kind, LossConfig))
        and not any(map(dataclasses.is_dataclass, option.classes))
    ]
    assert without_comment == []


def test_rows_have_comment_type_default_and_choices(tmp_path, monkeypatch):
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
    assert "<br>`red \\| blue \\| null`, default `null` | What it is" in table
    assert ", default `[a, b]` |" in table
    assert "`integer`, default `3` | in bytes |" in table
    assert "of a \\| whole" in table
    assert 'id="option.paint.share"' in table
    assert issubclass(made_up.Colour, Enum)
    assert Path(made_up.__file__).parent == tmp_path
