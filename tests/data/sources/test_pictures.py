"""Pictures in rows of files of users: which values are pictures, what is refused, and what is written of an item."""

import base64
import io
import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embedtrain.config.parsing import parse_corpus
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache import row_store
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import RowStore, read_sources
from embedtrain.data.cache.token_store import TokenRequest, prepare_all
from embedtrain.data.images.files import PICTURES, content_key, decode_picture
from embedtrain.data.images.item import MARK, Picture, item_parts, join_parts
from embedtrain.data.rows import TextFormat
from embedtrain.data.sources.pictures import shown_item, written_item
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.readers.retrieval import read_any_corpus
from embedtrain.mining.pool import all_documents, corpus_parts
from tests.commands import call
from tests.small import small_tokenizer


def encoded(seed: int, **options: object) -> bytes:
    """The file of a picture of 10 x (10 + seed) pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (10 + seed, 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, **{"format": "PNG", **options})
    return file.getvalue()


def picture(seed: int) -> Picture:
    return Picture(content_key(encoded(seed)), 10, 10 + seed)


def header_of_png(width: int, height: int) -> bytes:
    """The beginning of a PNG of this size, which is all that is read of it."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (chunk, data))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures, one with a name without a suffix and one of another format."""
    (tmp_path / "photos").mkdir()
    for seed in range(4):
        (tmp_path / "photos" / (f"{seed}.png" if seed else "zero")).write_bytes(encoded(seed))
    return tmp_path


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def cache_of(folder: Path) -> Cache:
    return Cache(directory=folder / "cache")


def read(path: Path, on_error: OnError = OnError.stop, **options: object) -> RowStore:
    """The rows of a file, from a cache beside it."""
    source = TrainSource(path=str(path), **options)  # type: ignore[arg-type]
    return read_sources([source], on_error, cache=cache_of(path.parent))[0]


def items(store: RowStore) -> list[list[list[str | Picture]]]:
    return [[item_parts(text) for text in row.texts] for row in store]


def test_values_of_rows_in_json_lines(folder):
    rows = [
        {"query": "a", "pos": [{"image": "photos/1.png"}], "neg": [{"text": "b", "image": "photos/zero"}]},
        {"query": {"text": "c", "images": ["photos/1.png", "photos/2.png"]}, "pos": ["photos/1.png"]},
        {
            "query": "d",
            "pos": [{"content": [{"type": "text", "text": "e"}, {"type": "image", "image": "photos/3.png"}]}],
        },
    ]
    store = read(write_rows(folder / "rows.jsonl", rows))
    assert items(store) == [
        [["a"], [picture(1)], [picture(0), "b"]],
        [[picture(1), picture(2), "c"], ["photos/1.png"]],  # in a column of texts
        [["d"], ["e", picture(3)]],
    ]
    assert "4 pictures" in str(store.report)
    assert read(write_rows(folder / "rows.jsonl", rows)).report.cached


@pytest.mark.parametrize(
    ("header", "query"), [("filepath\ttitle", 1), ("image,caption", 1), ("text,image_path", 0), ("query,file_name", 0)]
)
def test_columns_of_names(folder, header, query):
    """The text is the query, wherever it stands; a name without a suffix is a picture, too."""
    delimiter = "\t" if "\t" in header else ","
    cells = [["photos/1.png", "one"], ["photos/zero", "zero"]]
    lines = [delimiter.join(row if query else row[::-1]) for row in cells]
    path = folder / ("rows.tsv" if delimiter == "\t" else "rows.csv")
    path.write_text("\n".join([header, *lines]))
    assert items(read(path)) == [[["one"], [picture(1)]], [["zero"], [picture(0)]]]


def test_texts_beside_pictures_that_are_not_used(folder):
    """A column of links in data of texts changes nothing, and no mark of a text becomes a picture."""
    reference = str(picture(1))
    rows = [{"query": f"a{reference}", "passage": "b", "image": "https://example.org/1.jpg"}] * 2
    (row, _) = read(write_rows(folder / "rows.jsonl", rows))
    assert row.texts == (f"a{reference}".replace(MARK, "\ufffd"), "b")


def test_texts_lose_the_mark_in_every_spelling(folder):
    """Also where single bytes of a line show that it has neither objects nor the mark."""
    reference = "0000000000000001 8x8"
    marks = ("\ufdd0", "\\ufdd0", "\\uFdD0")
    lines = [f'{{"query": "a", "pos": ["{mark}{reference}{mark}"]}}' for mark in marks]
    lines += [f' {{"query": "a", "pos": [{{"text": "{mark}{reference}{mark}"}}]}}' for mark in marks]
    (folder / "rows.jsonl").write_text(
        "\n".join([*lines, '{"query": "a", "pos": ["\uff5b { \u00e9"]}']), encoding="utf-8"
    )
    texts = [row.positives.texts for row in read(folder / "rows.jsonl")]
    assert texts == [(f"\ufffd{reference}\ufffd",)] * 6 + [("\uff5b { \u00e9",)]


def test_images_in_parquet(folder):
    """Bytes are copied once into a file of the cache, which is read without the Parquet file and where it was moved."""
    images = [{"bytes": encoded(seed), "path": "x.png"} for seed in (1, 2, 1)] + [
        {"bytes": None, "path": "photos/3.png"}
    ]
    features = {"image": {"_type": "Image"}, "query_image": {"_type": "Image"}}
    table = pa.table({"query": ["a", "b", "c", "d"], "image": images, "answer": ["x"] * 4, "image_filename": ["y"] * 4})
    table = table.append_column("other", pa.array([encoded(0)] * 4))
    path = folder / "rows.parquet"
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), path)
    store = read(path)
    assert items(store) == [[[text], [picture(seed)]] for text, seed in zip("abcd", (1, 2, 1, 3), strict=True)]
    places = [PICTURES.place(picture(seed)) for seed in (1, 2)]
    assert places[0].file == places[1].file and Path(places[0].file).stat().st_size == sum(
        p.length or 0 for p in places
    )
    moved = folder.parent / f"{folder.name}-moved"
    shutil.move(folder, moved)
    store = read(moved / "rows.parquet")
    assert store.report.cached
    for seed in (1, 3):
        place = PICTURES.place(picture(seed))
        assert str(moved) in place.file
        assert decode_picture(place, picture(seed)).size == (10, 10 + seed)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("photos/9.png", "does not exist"),
        ("notes.jpg", "no picture"),
        ("../outside.png", "outside of"),
        ("/etc/passwd", "outside of"),
        ("https://example.org/a.png", "not downloaded"),
        ("data:image/png;base64,AAAA", "a file of 3 bytes, and it is no picture"),
        ("data:image/png;base64,A", "is damaged Base64"),
        ("data:,picture", "is a data URI"),
        ("photos", "folder"),
        ("a\0.png", "null character"),
        ("drawing.svg", "a drawing (SVG)"),
        ("bomb.png", "144,000,000 pixels, more than"),
        ("new\nline.png", r"'new\nline.png'"),
    ],
)
def test_bad_pictures_refuse_their_row(folder, value, problem):
    (folder / "notes.jpg").write_text("some notes")
    (folder / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>")
    (folder / "bomb.png").write_bytes(header_of_png(12_000, 12_000))
    (folder.parent / "outside.png").write_bytes(encoded(1))
    rows = [{"query": "a", "pos": [{"image": "photos/1.png"}]}, {"query": "b", "pos": [{"image": value}]}]
    path = write_rows(folder / "rows.jsonl", rows)
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:2: ") and problem in str(error.value) and "\n" not in str(error.value)
    store = read(path, OnError.skip)
    assert items(store) == [[["a"], [picture(1)]]] and store.report.rows.num_skipped == 1


def test_bytes_that_are_no_picture(folder):
    rows = {"query": ["a", "b"], "image": [{"bytes": encoded(1), "path": None}, {"bytes": b"nothing", "path": None}]}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    with pytest.raises(DataError, match=r"row 2: .*7 bytes, and it is no picture"):
        read(folder / "rows.parquet")


def test_links_of_pictures_alone_are_refused(folder):
    rows = [{"caption": "a", "image": "https://example.org/a.png"}]
    with pytest.raises(DataError, match=r"'image' names pictures by URL, which are not downloaded.*img2dataset"):
        read(write_rows(folder / "rows.jsonl", rows))


def test_image_dir(folder):
    path = write_rows(folder / "rows.jsonl", [{"caption": "a", "image": "1.png"}])
    assert items(read(path, image_dir=str(folder / "photos"))) == [[["a"], [picture(1)]]]


def test_declared_columns(folder):
    """Of any name, with names of files or bytes, also as keys of objects, and in lists; undeclared ones are texts."""
    rows = [
        {"caption": "a", "scan": "1.png"},
        {"caption": "b", "scan": ["2.png", "3.png"]},
        {"caption": "c", "scan": {"text": "t", "scan": "1.png"}},
    ]
    path = write_rows(folder / "rows.jsonl", rows)
    options = {"columns": ["caption", "scan"], "image_dir": str(folder / "photos")}
    with pytest.raises(DataError, match=r"jsonl:1: column \"scan\" names 'photos/1\.png' in image_dir=.*not exist"):
        read(
            write_rows(folder / "rows.jsonl", [{"caption": "a", "scan": "photos/1.png"}]),
            image_columns=["scan"],
            **options,
        )
    write_rows(path, rows)
    assert items(read(path, image_columns=["scan"], **options)) == [
        [["a"], [picture(1)]],
        [["b"], [picture(2)], [picture(3)]],
        [["c"], [picture(1), "t"]],
    ]
    path = write_rows(folder / "texts.jsonl", rows[:2])
    assert items(read(path, **options)) == [[["a"], ["1.png"]], [["b"], ["2.png"], ["3.png"]]]
    assert items(read(path, image_columns=["scan"], **options))[0] == [["a"], [picture(1)]], "another key of the cache"
    assert items(read(path, image_columns=["scan"], image_dir=options["image_dir"]))[0] == [["a"], [picture(1)]]
    with pytest.raises(DataError, match=r"texts\.jsonl: image_columns: there is no 'scans', only caption, scan"):
        read(path, image_columns=["scans"])
    pq.write_table(pa.table({"caption": ["a"], "content": [encoded(1)]}), folder / "rows.parquet")
    assert items(read(folder / "rows.parquet", image_columns=["content"])) == [[["a"], [picture(1)]]]
    with pytest.raises(DataError, match=r"row 1: column \"content\" must be a text, not binary.*write image_columns"):
        read(folder / "rows.parquet", columns=["caption", "content"])
    with pytest.raises(DataError, match=r"there is no 'other', only caption, content"):
        read(folder / "rows.parquet", image_columns=["content", "other"])


def test_pieces_that_several_processes_read(folder, monkeypatch):
    """A file of names of pictures is cut 64 times as often as one of texts."""
    rows = [{"query": "a", "pos": [{"image": f"photos/{1 + i % 3}.png"}]} for i in range(39)]
    path = write_rows(folder / "rows.jsonl", rows)
    monkeypatch.setattr(row_store, "PIECE_BYTES", path.stat().st_size * 8)
    store = read(path)
    assert len(list((folder / "cache").glob("*/rows-0*"))) == 9
    assert items(store) == [[["a"], [picture(1 + i % 3)]] for i in range(39)] and store.report.num_pictures == 3
    assert [decode_picture(PICTURES.place(picture(i)), picture(i)).height for i in (1, 2, 3)] == [11, 12, 13]


def test_base64(folder):
    """Alone or as a data URI, also broken into lines and as a part of a message; the bytes are in the cache."""
    coded, alone = (base64.b64encode(encoded(seed)).decode() for seed in (1, 2))
    uri = f"data:image/png;base64,{coded}"
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "t"}]
    rows = [
        {"query": "a", "pos": [{"image": uri}], "neg": [{"image": f"{alone[:76]}\n{alone[76:]}"}]},
        {"query": uri, "pos": [{"content": content}]},
    ]
    store = read(write_rows(folder / "rows.jsonl", rows))
    assert items(store) == [[["a"], [picture(1)], [picture(2)]], [[uri], [picture(1), "t"]]]
    (copies,) = (folder / "cache").rglob("pictures.bin")
    assert copies.read_bytes() == encoded(1) + encoded(2), "each once"
    place = PICTURES.place(picture(2))
    assert Path(place.file) == copies and decode_picture(place, picture(2)).size == (10, 12)


def test_the_limit_of_pixels(folder):
    """An option of the source; a cache with another limit is another one."""
    rows = [{"query": "a", "pos": [{"image": f"photos/{seed}.png"}]} for seed in (1, 2)]
    path = write_rows(folder / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"jsonl:2: .* 10 x 12 = 120 pixels, more than the 110 allowed: resize it, or "):
        read(path, max_image_pixels=110)
    assert len(read(path, OnError.skip, max_image_pixels=110)) == 1
    assert len(read(path)) == 2
    (folder / "scan.png").write_bytes(header_of_png(12_000, 12_000))
    path = write_rows(folder / "scans.jsonl", [{"query": "a", "pos": [{"image": "scan.png"}]}])
    scan = items(read(path, max_image_pixels=150_000_000))[0][1][0]
    assert (scan.width, scan.height) == (12_000, 12_000)
    (corpus,) = parse_corpus({"path": str(path), "max_image_pixels": 10})
    with pytest.raises(DataError, match=r"more than the 10 allowed"):
        read_any_corpus(path, pictures=corpus)
    with pytest.raises(ConfigError, match=r"corpus\[0\]\.max_image_pixels=200000000"):
        parse_corpus({"path": "a", "max_image_pixels": 200_000_000})
    (folder / "scan.png").write_bytes(header_of_png(50_000, 50_000))
    with pytest.raises(DataError, match=r"scans\.jsonl:1: .*more than the 178,956,970 pixels that Pillow opens"):
        read(path, max_image_pixels=150_000_000)


def test_a_corpus_of_its_own(folder):
    """`corpus` of mine, filter, trim and search, `data` of calibrate: options of DataPath as those of a source."""
    (folder / "photos" / "9.png").write_bytes(encoded(9))  # which no other test has: this process remembers its place
    path = write_rows(folder / "corpus.jsonl", [{"_id": "1", "scan": "9.png"}, {"_id": "2", "text": "t"}])
    value = {"path": str(path), "image_dir": str(folder / "photos"), "image_columns": ["scan"]}
    (corpus,) = parse_corpus(value)
    parts = corpus_parts([corpus])
    documents = [text for batch in all_documents([], parts, lambda *_: None) for text in batch.texts]
    assert list(map(item_parts, documents)) == [[picture(9)], ["t"]]
    assert read_any_corpus(path, pictures=corpus).texts == documents
    rows = write_rows(folder / "rows.jsonl", [{"question": "q", "scan": "9.png"}])
    assert read_any_corpus(rows, pictures=corpus).texts == documents[:1]
    with pytest.raises(DataError, match=r"image_columns: there is no 'page', only _id, scan, text"):
        corpus_parts(parse_corpus([value | {"image_columns": ["page"]}]))
    with pytest.raises(DataError, match=r"corpus\.jsonl:1: .*'9\.png'"):
        corpus_of = corpus_parts(parse_corpus([value | {"image_dir": None}]))
        list(all_documents([], corpus_of, lambda *_: None))


def test_a_replaced_picture_is_read_again(folder):
    path = write_rows(folder / "rows.jsonl", [{"caption": "a", "image": "photos/1.png"}])
    assert items(read(path)) == [[["a"], [picture(1)]]]
    (folder / "photos" / "1.png").write_bytes(encoded(2))
    assert items(read(path)) == [[["a"], [picture(2)]]]


def test_pictures_of_a_corpus(folder):
    """By id, with a title, a text and a picture."""
    write_rows(
        folder / "corpus.jsonl",
        [{"id": "1", "image": "photos/1.png"}, {"id": "2", "text": "t", "image": "photos/2.png"}],
    )
    path = write_rows(folder / "rows.jsonl", [{"question": "a", "pos_doc": [{"id": "1"}], "neg_doc": [{"id": "2"}]}])
    for _ in range(2):
        store = read(path)
        assert items(store) == [[["a"], [picture(1)], [picture(2), "t"]]]
        assert store.report.num_pictures == 2
        shutil.rmtree(next((folder / "cache").glob("documents-*")))  # which the pictures of the rows need


def test_animated_pictures_are_counted(folder):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "a.gif", save_all=True, append_images=frames[1:])
    store = read(write_rows(folder / "rows.jsonl", [{"caption": "a", "image": "a.gif"}]))
    assert "the first frame of 1 animated picture is used" in str(store.report)


def test_written_items_are_read_as_the_same(folder):
    """Named where they are, linked from another folder, or copied out of the cache."""
    images = [{"bytes": encoded(seed), "path": None} for seed in (1, 2)]
    pq.write_table(pa.table({"query": ["a", "b"], "image": images}), folder / "rows.parquet")
    stored = read(folder / "rows.parquet")
    write_rows(folder / "named.jsonl", [{"query": "c", "image": "photos/3.png"}])
    named = read(folder / "named.jsonl")
    one, two, three = stored[0].texts[1], stored[1].texts[1], named[0].texts[1]
    assert written_item(three, folder) == {"image": "photos/3.png"}
    wanted = [
        "text",
        one,
        f"{three}text",
        f"{one}{two}",
        join_parts(["a ", *item_parts(three), " b ", *item_parts(one)]),
    ]
    for output in (folder, folder / "output"):
        output.mkdir(exist_ok=True)
        values = [written_item(item, output) for item in wanted]
        assert values[0] == "text"
        path = write_rows(output / "written.jsonl", [{"query": "q", "pos": [value]} for value in values])
        assert [row.texts[1] for row in read(path)] == wanted
    assert (folder / "output/images" / f"{picture(3).key:016x}.png").is_symlink()


def test_shown_items(folder):
    path = write_rows(folder / "rows.jsonl", [{"caption": "a", "image": "photos/1.png"}])
    item = read(path)[0].texts[1] + " text"
    assert shown_item(item) == f"[picture 10x11 {folder}/photos/1.png] text"
    assert shown_item(f"{Picture(5, 2, 3)}") == "[picture 2x3]"


def test_cached_rows_are_planned_without_their_pictures(folder):
    """A picture that is no longer one ends what decodes it, and what starts after that prepares the data again."""
    path = write_rows(folder / "rows.jsonl", [{"caption": "a", "image": "photos/1.png"}])
    first = items(read(path))
    file = folder / "photos" / "1.png"
    status = file.stat()
    file.write_bytes(bytes(status.st_size))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    store = read(path)
    assert store.report.cached and items(store) == first
    with pytest.raises(DataError, match=r"1\.png: it has changed since the data was prepared"):
        decode_picture(PICTURES.place(picture(1)), picture(1))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*photos/1\.png.* is no picture"):
        read(path)


def test_a_model_of_texts_refuses_pictures(folder):
    path = write_rows(folder / "rows.jsonl", [{"caption": "a", "image": "photos/1.png"}])
    with pytest.raises(ConfigError, match="rows: its rows have 1 picture, and the model reads texts alone"):
        prepare_all([TokenRequest(read(path), TextFormat())], TextTokenizer(small_tokenizer(), 16), cache_of(folder))


def test_split_rows_and_beir_folders(folder, tmp_path):
    """What `split` writes elsewhere is read as the same items, also a BEIR folder with queries of pictures."""
    rows = [
        {"query": {"image": f"photos/{n}.png", "text": "q"}, "pos": [{"image": f"photos/{n % 3 + 1}.png"}]}
        for n in (1, 2, 3)
    ]
    path = write_rows(folder / "rows.jsonl", rows)
    output = tmp_path / "split"
    call("split", f"data=[{path}]", f"output_dir={output}", "dev=1", f"cache_dir={folder / 'cache'}")
    before = [row.texts for row in read(path)]
    train = [row.texts for row in read(output / "train.jsonl")]
    for _ in range(2):
        source = TrainSource(path=str(output / "dev"), split="test")
        (dev,) = read_sources([source], OnError.stop, cache=cache_of(folder))
        assert sorted([*train, *(row.texts for row in dev)]) == sorted(before)


@pytest.mark.parametrize("value", [5, {"bytes": "AAAA", "path": None}])
def test_values_that_are_no_pictures(folder, value):
    """A text beside one is not trained on alone."""
    path = write_rows(folder / "rows.jsonl", [{"query": "a", "pos": [{"text": "b", "image": value}]}])
    with pytest.raises(DataError, match=r'rows\.jsonl:1: "image" of element 1 of "pos" must be the name of a picture'):
        read(path)


def test_two_columns_of_pictures_are_not_texts(folder):
    path = write_rows(folder / "rows.jsonl", [{"image1": "photos/1.png", "image2": "photos/2.png"}])
    with pytest.raises(DataError, match="the columns image1 and image2 may each be the positive"):
        read(path)
    assert items(read(path, columns=["image1", "image2"])) == [[[picture(1)], [picture(2)]]]
