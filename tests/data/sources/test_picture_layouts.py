"""Layouts of data sets with pictures as they are published: one small set of each, with its own names of fields."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embedtrain.config.recipe import OnError
from embedtrain.data.images.files import PICTURES, decode_picture
from embedtrain.data.images.item import Picture
from embedtrain.data.in_memory import FOLDER, InMemoryData
from embedtrain.errors import DataError
from tests.data.sources.test_pictures import encoded, folder, items, picture, read, write_rows

__all__ = ["folder"]  # a fixture
ONE, TWO, THREE = picture(1), picture(2), picture(3)


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_img2dataset(folder):
    """Members of a tar file are read in place: no copy in the cache."""
    fields = {"caption": "one", "url": "https://example.org/1", "key": "000000000", "status": "success", "width": 10}
    members = {
        "000000000.jpg": encoded(1),
        "000000000.json": json.dumps(fields).encode(),
        "000000000.txt": b"one",
        "000000001.json": json.dumps({**fields, "status": "failed_to_download"}).encode(),
        "000000002.jpg": encoded(2),
        "000000002.json": json.dumps(fields).encode(),
        "000000002.txt": "zwei \u00fc".encode(),
    }
    path = write_tar(folder / "00000.tar", members)
    store = read(path, OnError.skip)
    assert items(store) == [[["one"], [ONE]], [["zwei \u00fc"], [TWO]]]
    assert "row 2: the sample '000000001' has the status 'failed_to_download', not success" in store.report.problems[0]
    place = PICTURES.place(TWO)
    assert place.file == str(path) and decode_picture(place, TWO).size == (10, 12)
    assert not list((folder / "cache").rglob("pictures.bin"))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst"])
def test_compressed_tar_files(folder, name):
    (folder / "shards").mkdir()
    (folder / "shards" / name).write_bytes(b"")
    for path in (folder / "shards" / name, folder / "shards"):
        with pytest.raises(DataError, match=r"a\.t.*: pictures in a compressed tar file .*decompress it to a \.tar"):
            read(path)


def test_broken_tar_files(folder):
    path = write_tar(
        folder / "a.tar",
        {f"{n}.{kind}": encoded(1) if kind == "png" else b"a" for n in range(9) for kind in ("png", "txt")},
    )
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"a\.tar: after row \d+: cannot be read as a tar file"):
        read(path)
    link = tarfile.TarInfo("1.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(folder / "link.tar", "w") as tar:
        tar.addfile(link)
    with pytest.raises(DataError, match=r"'1\.png' is a link or a device"):
        read(folder / "link.tar")


def test_mmeb(folder):
    """VLM2Vec's training set: pictures by path beside texts in which `<|image_1|>` is their place."""
    rows = [
        {
            "qry": "<|image_1|>\nWhat is it?",
            "qry_image_path": "1.png",
            "pos_text": "a cat",
            "pos_image_path": "",
            "neg_text": "",
            "neg_image_path": "",
        },
        {
            "qry": "Find it",
            "qry_image_path": "",
            "pos_text": "<|image_1|>\nRepresent it.",
            "pos_image_path": "2.png",
            "neg_text": "<|image_1|>",
            "neg_image_path": "3.png",
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    assert items(read(folder / "rows.parquet", image_dir=str(folder / "photos"))) == [
        [[ONE, "\nWhat is it?"], ["a cat"]],
        [["Find it"], [TWO, "\nRepresent it."], [THREE]],
    ]


def message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_ms_swift(folder):
    row = {
        "messages": message("<image>What is it?"),
        "images": ["photos/1.png"],
        "positive_messages": [message("<image>and<image>")],
        "positive_images": [["photos/2.png", "photos/3.png"]],
        "negative_messages": [message("text"), message([{"type": "image", "image": "photos/1.png"}])],
        "negative_images": [[], []],
    }
    path = write_rows(folder / "rows.jsonl", [row])
    assert items(read(path)) == [[[ONE, "What is it?"], [TWO, "and", THREE], ["text"], [ONE]]]
    write_rows(path, [{**row, "images": []}, {**row, "positive_images": [["photos/2.png"]]}])
    with pytest.raises(DataError, match=r":2: .*<image> 2 times, and 1 picture"):
        read(path)


def test_tevatron(folder):
    corpus = [{"docid": "a", "text": "", "image": "photos/1.png"}, {"docid": "b", "text": "t", "image": None}]
    write_rows(folder / "corpus.jsonl", corpus)
    row = {
        "query_id": "1",
        "query_text": "q",
        "query_image": "photos/2.png",
        "positive_document_ids": ["a"],
        "negative_document_ids": ["b"],
    }
    assert items(read(write_rows(folder / "rows.jsonl", [row]))) == [[[TWO, "q"], [ONE], ["t"]]]
    passages = {
        "query": "q",
        "positive_passages": [{"docid": "a", "title": "T", "text": "t", "image": "photos/1.png"}],
        "negative_passages": [],
    }
    assert items(read(write_rows(folder / "passages.jsonl", [passages]))) == [[["q"], [ONE, "T t"]]]


def test_nemo(folder):
    """The corpus is Parquet with bytes, from which the cache of the documents copies them."""
    images = [{"bytes": encoded(1), "path": None}, {"bytes": encoded(2), "path": None}]
    table = {"id": ["a", "b"], "text": ["", "t"], "image": images, "nr_ocr": ["", ""]}
    pq.write_table(pa.table(table), folder / "corpus.parquet")
    row = {"question_id": "1", "question": "q", "corpus_id": "c", "pos_doc": [{"id": "a"}], "neg_doc": [{"id": "b"}]}
    for _ in range(2):
        assert items(read(write_rows(folder / "rows.jsonl", [row]))) == [[["q"], [ONE], [TWO, "t"]]]
        assert decode_picture(PICTURES.place(TWO), TWO).size == (10, 12)


def test_colpali(folder):
    """The columns of vidore/colpali_train_set, written by `datasets`."""
    names = ("image_filename", "answer", "source", "options", "page", "model", "prompt", "answer_type")
    rows = {
        "image": [Image.open(io.BytesIO(encoded(n))) for n in (1, 2)],
        "query": ["a", "b"],
        **{name: ["x", "y"] for name in names},
    }
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(folder / "rows.parquet")
    assert [[text] for text in "ab"] == [row[0] for row in items(read(folder / "rows.parquet"))]
    assert [len(row) for row in items(read(folder / "rows.parquet"))] == [2, 2]


@pytest.mark.parametrize("as_dataset", [False, True])
def test_objects_in_python(folder, as_dataset):
    """Pictures of Pillow, and a Dataset whose files are taken as they are."""
    data = InMemoryData(folder)
    opened = [Image.open(folder / "photos" / f"{n}.png") for n in (1, 2)]
    rows: Any = [{"anchor": "a", "positive": opened[0], "negative": {"text": "t", "image": opened[1]}}]
    if as_dataset:
        rows = datasets.Dataset.from_dict({"anchor": ["a"], "positive": [str(folder / "photos/1.png")]})
        rows = rows.cast_column("positive", datasets.Image()).map(lambda row: row)
    (source,) = data.sources([{"rows": rows}] if as_dataset else [rows], "data.train")
    data.write(folder)
    store = read(Path(source["path"]))
    ((query, positive, *negatives),) = items(store)
    (found,) = positive
    assert query == ["a"] and isinstance(found, Picture) and (found.width, found.height) == (10, 11)
    assert decode_picture(PICTURES.place(found), found).tobytes() == opened[0].tobytes()
    assert (
        [part if isinstance(part, str) else part.height for part in negatives[0]] == [12, "t"]
        if negatives
        else as_dataset
    )
    assert (folder / FOLDER / "images").is_dir()


def test_arrays_and_bytes_in_python(folder):
    """Pixels as uint8 arrays, height x width x channels, and bytes of files under names of pictures."""
    data = InMemoryData(folder)
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    rows = [{"query": "a", "pos": [pixels, pixels[:, :, :1]], "neg": [{"image": encoded(1)}]}]
    (source,) = data.sources([rows], "data.train")
    data.write(folder)
    ((_, (colour,), (grey,), negative),) = items(read(Path(source["path"])))
    assert (colour.width, colour.height, negative) == (7, 5, [ONE])
    assert decode_picture(PICTURES.place(colour), colour).tobytes() == pixels.tobytes()
    assert decode_picture(PICTURES.place(grey), grey).tobytes() == pixels[:, :, [0, 0, 0]].tobytes()
    with pytest.raises(DataError, match=r"data.train\[0\].*an array of 3 x 5 x 7 float32 is no picture: uint8"):
        InMemoryData(folder).sources([[{"query": "a", "pos": np.zeros((3, 5, 7), dtype=np.float32)}]], "data.train")
