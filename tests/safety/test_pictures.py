"""Pictures made by an attacker, or by mistake, in rows: each refuses its row by file and line, alike on all ranks.

Memory and time are bounded."""

import json
import os
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.images.files import PICTURES, decode_picture
from embedtrain.data.images.item import MARK, item_parts
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError
from tests.commands import call
from tests.data.images.test_files import bomb
from tests.data.sources.test_pictures import encoded, header_of_png

_TAGS = ((256, 4, 8), (257, 3, 8), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (278, 3, 8), (279, 4, 64))


def tiff(frames: int, *, in_a_circle: bool = False, width: int = 8) -> bytes:
    """Grey frames of 8 x 8 pixels, which share their pixels; the last one is followed by the first, or by none."""
    size = 2 + 12 * len(_TAGS) + 4
    content = bytearray(b"II*\0" + struct.pack("<I", 72) + bytes(64))
    for frame in range(frames):
        following = 72 + size * (frame + 1) if frame + 1 < frames else 72 * in_a_circle
        tags = (struct.pack("<HHII", tag, kind, 1, width if tag == 256 else value) for tag, kind, value in _TAGS)
        content += struct.pack("<H", len(_TAGS)) + b"".join(tags) + struct.pack("<I", following)
    return bytes(content)


def refused(folder: Path) -> dict[str, str]:
    """Writes files; returns values of rows, and words of the sentences that refuse them."""
    files = {
        "bomb.png": (header_of_png(60_000, 60_000), "more than the 178,956,970 pixels that Pillow opens"),
        "pixels.png": (header_of_png(12_000, 12_000), "144,000,000 pixels, more than the 89,478,485 allowed"),
        "bomb.jpg": (bomb("JPEG"), "pixels"),
        "bomb.webp": (bomb("WEBP"), "pixels"),
        "bomb.tif": (tiff(1, width=1 << 30), "pixels"),
        "no_pixels.tif": (tiff(1, width=0), "no picture"),
        "a.svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "a drawing (SVG)"),
        "empty.png": (b"", "empty"),
        "new\nline.png": (b"no", "no picture"),
        f"mark{MARK}0000000000000001 8x8{MARK}.png": (b"no", "no picture"),
        "html.jpg": (b"<!doctype html>", "a web page (HTML)"),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "lost.png").symlink_to("nowhere.png")
    (folder / "circle.png").symlink_to("circle.png")
    return {name: words for name, (_, words) in files.items()} | {
        "folder.png": "a folder or a device",
        "pipe.png": "a folder or a device",
        "zero.png": "a folder or a device",
        "lost.png": "does not exist",
        "circle.png": "symbolic links",
        "../good.png": "outside of",
        "a/../../good.png": "outside of",
        "/etc/passwd": "outside of",
        "file:///etc/passwd": "not downloaded",
        "x" * 5000 + ".png": "name too long",
        "data:image/png;base64,iVBORw0KGgo=": "no picture",
    }


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, list[str]]:
    """Rows with pictures that can be used and that cannot, and words of the sentence about each of the latter."""
    folder = tmp_path / "data"
    folder.mkdir()
    words = refused(folder)
    for name, content in {
        "good.png": encoded(1),
        "frames.tif": tiff(20_000),
        "circle.tif": tiff(3, in_a_circle=True),
    }.items():
        (folder / name).write_bytes(content)
    (tmp_path / "good.png").write_bytes(encoded(1))
    (folder / "link.png").symlink_to(tmp_path / "good.png")
    names = ["good.png", "frames.tif", "circle.tif", "link.png", *words]
    rows = [json.dumps({"query": f"q{i}", "pos": [{"image": name}]}) for i, name in enumerate(names)]
    (folder / "rows.jsonl").write_text("".join(row + "\n" for row in rows))
    return folder / "rows.jsonl", list(words.values())


def prepare(world: World, path: Path) -> tuple[list[Any], list[str], str, float, float]:
    """What the ranks of a training read: items, problems, the error without on_error=skip; MiB and seconds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    cache = Cache.of_world(path.parent / "cache", world)
    (store,) = read_sources([TrainSource(path=str(path))], OnError.skip, cache=cache)
    try:
        with world.fail_together("reading rows"):
            read_sources([TrainSource(path=str(path))], OnError.stop, cache=cache)
    except EmbedtrainError as error:  # of another rank
        message = str(error).partition("DataError: ")[2] or str(error)
    found = [item_parts(row.positives.texts[0])[0] for row in store]
    sizes = [decode_picture(PICTURES.place(picture), picture).size for picture in found]
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.process_time() - start
    return [*map(str, found), sizes], list(store.report.problems), message, *used


def test_rows_on_two_ranks(ranks, data):
    path, _ = data
    (one, problems, message, *used), (other, *rest, _, _) = ranks(2, prepare, path)
    assert one == other and [problems, message] == rest
    assert one[-1] == [(10, 11), (8, 8), (8, 8), (10, 11)]
    assert message.startswith(f"{path}:5: ") and "pixels" in message
    assert all(MARK not in problem and "\n" not in problem for problem in (*problems, message))
    assert used[0] < 100 and used[1] < 10, "MiB and seconds"


def test_inspect_lists_each(data):
    path, words = data
    printed = call("inspect", f"data={path}", f"cache_dir={path.parent / 'cache'}", "problems=100", code=1)
    assert MARK not in printed
    assert f"{len(words)} rows that cannot be used" in printed
    for line, expected in enumerate(words, 5):
        (problem,) = [shown for shown in printed.splitlines() if f"{path}:{line}: " in shown]
        assert expected in problem, problem


def test_columns_of_parquet(tmp_path):
    """Bytes that are no picture, in a column of pictures and in a declared one, and null."""
    image = [{"bytes": content, "path": None} for content in (encoded(1), b"nothing", b"", None)]
    for name in ("image", "scan"):
        table = pa.table(
            {"caption": list("abcd"), name: image if name == "image" else [each["bytes"] for each in image]}
        )
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path)
        source = TrainSource(path=str(path), image_columns=["scan"] if name == "scan" else None)
        (store,) = read_sources([source], OnError.skip, cache=Cache(directory=tmp_path / "cache"))
        assert len(store) == 1
        shown = " ".join(store.report.problems)
        assert f"{name}.parquet: row 2: " in shown and "a file of 7 bytes, and it is no picture" in shown
        assert store.report.rows.num_skipped == 3


@pytest.mark.slow
def test_a_hundred_thousand_pictures(ranks, tmp_path):
    """4,000 different ones, whose names are links; both ranks read headers."""
    (tmp_path / "data").mkdir()
    rows = tmp_path / "data" / "rows.jsonl"
    with rows.open("w") as file:
        for i in range(100_000):
            path = tmp_path / "data" / f"{i:06}.png"
            if i < 4000:
                path.write_bytes(encoded(i % 400) + i.to_bytes(2, "big"))
            else:
                path.hardlink_to(tmp_path / "data" / f"{i % 4000:06}.png")
            file.write(json.dumps({"caption": f"caption {i}", "image": path.name}) + "\n")
    counts = ranks(2, prepare_many, rows)
    assert all(count == (100_000, 4000) for count, *_ in counts)
    assert all(memory < 150 and seconds < 60 for _, memory, seconds in counts), counts
    printed = call("inspect", f"data={rows}", f"cache_dir={tmp_path / 'cache'}", f"pictures={tmp_path / 'page.html'}")
    assert "4,000 different pictures" in printed
    assert (tmp_path / "page.html").read_text().count("<img") == 60


def prepare_many(world: World, path: Path) -> tuple[tuple[int, int], float, float]:
    """Rows and different pictures; MiB and CPU seconds of this rank."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    (store,) = read_sources(
        [TrainSource(path=str(path))], OnError.stop, cache=Cache.of_world(path.parent / "cache", world)
    )
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.process_time() - start
    return (len(store), store.report.num_pictures), *used
