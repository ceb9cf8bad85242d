"""`inspect` of rows with pictures: their sizes, what the model computes of them, and files that are refused."""

import base64
import io
import json
import re
from html.parser import HTMLParser

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
    (folder / "texts.jsonl").write_text(json.dumps({"query": "a", "pos": ["b"]}))
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


class Sheet(HTMLParser):
    """What stands in the elements of a page, and its pictures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts, self.tags, self.pictures = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "img":
            (source,) = [value for name, value in attributes if name == "src"]
            kind, _, data = source.partition(",")
            assert kind == "data:image/jpeg;base64"
            self.pictures.append(Image.open(io.BytesIO(base64.b64decode(data, validate=True))))

    def handle_data(self, data):
        self.texts.append(data)


def test_refused_files_and_the_page_of_pictures(folder):
    """Names of files and rows are texts on the page; a picture that cannot be decoded is shown as such."""
    (folder / "<b>.png").write_bytes((folder / "picture_0.png").read_bytes() + b"another key")
    (folder / "cut.png").write_bytes((folder / "picture_1.png").read_bytes()[:-30])
    rows = [*(folder / "bad.jsonl").read_text().splitlines()]
    rows += [json.dumps({"query": "beta", "pos": [{"image": name}]}) for name in ("<b>.png", "cut.png")]
    (folder / "more.jsonl").write_text("\n".join(rows))
    path = folder / "pages" / "a,b=c.html"
    arguments = ("inspect", f"data={folder / 'more.jsonl'}", f"cache_dir={folder / 'cache'}", f"pictures={path}")
    model = ("kind=image_text", f"model={folder / 'siglip2'}")
    printed = call(*arguments, *model, code=1)
    assert MARK not in printed
    assert "1 row that cannot be used" in printed and f"pictures: {path}" in printed
    refused = r"more\.jsonl:13: .*page\.png.* it is a web page \(HTML\)"
    assert re.search(refused, printed)
    page = path.read_text()
    sheet = Sheet(page)
    assert [picture.size for picture in sheet.pictures[:6]] == [
        Image.open(folder / f"picture_{seed}.png").size for seed in range(6)
    ]
    assert len(sheet.pictures) == 7, "all but the one that is cut off"
    shown = " ".join(sheet.texts)
    assert re.search(refused, shown) and "its pixels cannot be decoded" in shown
    assert "<b>.png" in shown and "b" not in sheet.tags and "script" not in sheet.tags
    assert f"{folder}/more.jsonl:15" in shown
    assert "8 different pictures" in shown and re.search(r"\d+ x \d+, \d+ tokens, or patches", shown)
    assert MARK not in page and "default-src 'none'" in page
    first = path.stat().st_mtime_ns
    printed = call(*arguments[:1], "data=" + json.dumps([str(folder / "texts.jsonl")]), *arguments[2:])
    assert "pictures: none in this data" in printed and path.stat().st_mtime_ns == first
    printed = call(*arguments[:3], f"pictures={folder}", code=1)
    assert f"pictures={folder}: is a directory" in printed
