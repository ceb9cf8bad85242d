"""`inspect` of rows with pictures: their sizes, what the model computes of them, and files that are refused."""

import json
import re

import pytest
from PIL import Image

from embedtrain.data.images.item import MARK
from tests.commands import call
from tests.image_text.models import picture_item, save_image_text
from tests.small import text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Captions of six pictures, each twice, and a row whose picture is a web page."""
    folder = tmp_path_factory.mktemp("inspect")
    save_image_text("siglip2", folder)
    for seed in range(6):
        picture_item(folder, seed)
    rows = [{"query": text(i, 2 + i % 3), "pos": [{"image": f"picture_{i % 6}.png"}]} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "page.png").write_text("<html>")
    bad = {"query": "alpha", "pos": [{"image": "page.png"}]}
    (folder / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, bad]))
    return folder


def lines(printed: str) -> dict[str, list[str]]:
    """The cells of each line by the first one."""
    assert MARK not in printed
    cells = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines() if line.strip())
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize("with_model", [False, True])
def test_sizes_and_patches(folder, with_model):
    more = ["kind=image_text", f"model={folder / 'siglip2'}"] if with_model else []
    printed = call("inspect", f"data={folder / 'rows.jsonl'}", f"cache_dir={folder / 'cache'}", *more)
    found = lines(printed)
    sizes = [Image.open(folder / f"picture_{seed}.png").size for seed in range(6)]
    assert "6 different pictures, in pixels" in printed
    for name, values in zip(("width", "height"), zip(*sizes, strict=True), strict=True):
        assert (found[name][0], found[name][1], found[name][-1]) == ("6", str(min(values)), str(max(values)))
    assert ("tokens, or patches" in found) is with_model
    shown = f"[picture {sizes[0][0]}x{sizes[0][1]} {folder}/picture_0.png]"
    assert shown in printed
    if with_model:
        assert 1 <= int(found["tokens, or patches"][1]) <= int(found["tokens, or patches"][-1]) <= 16
        assert found["positives"][-2:] == ["16", "0"], "the limit is that of texts"
    else:
        assert set(found["positives"][1:]) == {"0", "0.0"}, "characters of a picture"


def test_refused_files(folder):
    printed = call("inspect", f"data={folder / 'bad.jsonl'}", f"cache_dir={folder / 'cache'}", code=1)
    assert MARK not in printed
    assert "1 row that cannot be used" in printed
    assert re.search(r"bad\.jsonl:13: .*page\.png.* it is a web page \(HTML\)", printed)
