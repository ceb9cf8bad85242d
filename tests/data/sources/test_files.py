"""Kinds of files with training rows: compressed, one JSON value, Arrow; and broken files."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.sources.files import read_blocks, read_lines
from embedtrain.data.sources.resolve import expand_sources, no_in_batch_negatives, resolve_parts, source_names
from embedtrain.data.sources.table_rows import parquet_rows
from embedtrain.data.sources.text_rows import is_json_list, json_list_rows
from embedtrain.errors import ConfigError, DataError
from tests.data.files import assert_error, error_of, line, read, write, write_table

ROW = {"query": "q", "pos": ["p"], "neg": ["n"]}
TABLE = {"query": ["q1", "q2", "q3"], "pos": [["p"], ["o"], ["r"]]}


def zstd(path: Path, data: bytes) -> Path:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(data)
    return path


def many(count: int) -> bytes:
    draw = random.Random(0)
    return b"".join(line({"query": draw.randbytes(40).hex(), "pos": ["b"]}) for _ in range(count))


# zstd


def test_zstd_files_of_every_kind_of_text(tmp_path: Path) -> None:
    path = zstd(tmp_path / "a.jsonl.zst", line(ROW) * 2)
    examples, report = read(path)
    assert [e.location.line for e in examples] == [1, 2]
    assert str(report).startswith("a: FlagEmbedding rows, 2 rows from a.jsonl.zst")
    assert read(path.rename(tmp_path / "a.jsonl"))[0][1].query == "q"  # what it is counts, not its name
    assert len(read(zstd(tmp_path / "b.csv.zst", b"a,b\nq,p\n"))[0]) == 1
    frames = tmp_path / "two.jsonl.zst"
    frames.write_bytes((tmp_path / "a.jsonl").read_bytes() * 2)  # frame after frame, as `cat` and pzstd leave them
    assert len(read(frames)[0]) == 4
    frames.write_bytes(b"\x50\x2a\x4d\x18\x02\0\0\0xx" + (tmp_path / "a.jsonl").read_bytes())  # pzstd's first frame
    assert len(read(frames)[0]) == 2
    assert "is named .zst but is not a zstd file" in error_of(write(tmp_path / "c.jsonl.zst", ROW))


@pytest.mark.parametrize("on_error", list(OnError))
def test_a_truncated_zstd_file(tmp_path: Path, on_error: OnError) -> None:
    whole = zstd(tmp_path / "a.jsonl.zst", many(8_000)).read_bytes()
    for name, data in (("half", whole[: len(whole) // 2]), ("tail", whole[:-4]), ("more", whole + b"and more")):
        path = tmp_path / f"{name}.jsonl.zst"
        path.write_bytes(data)
        error = error_of(path, on_error=on_error)
        assert "the zstd file is damaged or truncated" in error
        assert int(error.removeprefix(f"{path}:").split(":")[0]) > 3000


# One JSON value


@pytest.mark.parametrize("layout", ["list", "indented", "data", "data after other keys", "packed", "mark"])
def test_json_files_of_one_value(tmp_path: Path, layout: str) -> None:
    rows = [{**ROW, "query": f"q{i}"} for i in range(3)]
    path = tmp_path / ("a.json.zst" if layout == "packed" else "a.json")
    text = {
        "indented": json.dumps(rows, indent=1),
        "data": json.dumps({"data": rows}),
        "data after other keys": json.dumps({"version": [1], "data": rows, "end": 0}, indent=1),
        "mark": "\ufeff" + json.dumps(rows),
    }.get(layout, json.dumps(rows))
    zstd(path, text.encode()) if layout == "packed" else path.write_text(text)
    examples, report = read(path)
    assert [e.query for e in examples] == ["q0", "q1", "q2"]
    assert "FlagEmbedding rows, 3 rows" in str(report)
    if layout == "indented":
        assert [e.location.line for e in examples] == [1, 2, 3]  # elements


BROKEN_JSON = {
    '[{"query": "a", "pos": ["b"]},3]': ": element 2: a row must be a JSON object {...}, not a number (3)",
    '[{"query": "a", "pos": ["b"]}, {"query": "a", "query": "b"}]': ': element 2: this row has "query" twice',
    '[{"query": "a", "pos": ["b"]},\n{"query": "a"': ":2: broken JSON: Expecting ',' delimiter",
    '[{"query": "a", "pos": ["b"]}\n{"query": "a"}]': ":2: broken JSON: a comma or ] is missing",
    '[{"query": "a", "pos": ["b"]}': ":1: broken JSON: a comma or ] is missing",
    '{\n"rows": [],\n"more": {}}': ': is one JSON object without a list of rows under "data" (it has: rows, more)',
    '{\n"rows": [': ":2: broken JSON",
    "[]": ": holds no rows",
    "[": ":1: broken JSON: Expecting value",
}


@pytest.mark.parametrize(("text", "message"), BROKEN_JSON.items(), ids=list(BROKEN_JSON))
def test_broken_json_values(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert error_of(path).startswith(f"{path}{message}")


def test_one_row_in_a_json_file_is_jsonl(tmp_path: Path) -> None:
    assert len(read(write(tmp_path / "a.json", ROW))[0]) == 1


# Arrow


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "stream.arrow"])
def test_arrow_files(tmp_path: Path, name: str) -> None:
    table = pa.table(TABLE)
    path = tmp_path / name
    new = pa.ipc.new_stream if name == "stream.arrow" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    examples, report = read(path)
    assert [(e.query, e.location.line) for e in examples] == [("q1", 1), ("q2", 2), ("q3", 3)]
    assert "FlagEmbedding rows" in str(report)
    assert read(path, columns=["query", "pos"])[0][2].positives.texts == ("r",)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert error_of(path).startswith(f"{path}: cannot be read as Arrow: ")
    path.write_bytes(b"")
    assert error_of(path).startswith(f"{path}: cannot be read as Arrow: ")


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.table([["q"], ["p"], ["r"]], names=["a", "b", "b"])
    pq.write_table(table, tmp_path / "t.parquet")
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("t.parquet", "t.arrow"):
        assert_error(f"^{tmp_path / name}: two columns .*'b'", tmp_path / name)
    path = write(tmp_path / "a.jsonl", ROW, b'{"query": "a", "pos": ["b"], "query": "c"}\n')
    assert_error(f'^{path}:2: .*"query" twice', path)


# Errors


BAD = {
    '{"query": "a", "pos": ["b"], "ne': "broken JSON: Unterminated string at column 30: '",
    '{"query": "a", "pos": ""}': "\"pos\" must be a list of texts, not a text (''): put it in brackets",
    '{"query": "a", "pos": []}': '"pos" is empty: a row needs at least one positive',
    '{"query": 7, "pos": ["b"]}': '"query" must be a text, not a number (7)',
    '{"query": "a", "pos": [["b"]]}': 'element 1 of "pos" is a list inside a list',
    '{"query": "a", "pos": [null]}': 'element 1 of "pos" must be a text, not nothing (null)',
    '{"query": "a", "pos": null}': '"pos" must be a list of texts, not nothing (null)',
    '{"query": "a", "pos": ["\\udc00"]}': 'element 1 of "pos" holds half a character (a lone surrogate)',
    '{"query": "a", "pos": ["b"], "prompt": "\\ud800"}': '"prompt" holds half a character (a lone surrogate)',
    '{"query": ["\\ud800", "a"], "pos": ["b"]}': '"query" holds half a character (a lone surrogate)',
    "null": "a row must be a JSON object {...}, not nothing (null)",
    '{"query": "a", "pos": ["b\x00"]}': "broken JSON: Invalid control character at column 26: '",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=list(BAD))
def test_bad_rows(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", ROW, b"\n", text.encode() + b"\n", ROW)
    assert error_of(path).startswith(f"{path}:3: {message}")
    assert [e.location.line for e in read(path, OnError.skip)[0]] == [1, 4]


def test_a_truncated_last_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, line(ROW)[:20])
    assert error_of(path).startswith(f"{path}:2: broken JSON")


def test_text_in_other_encodings(tmp_path: Path) -> None:
    text = '{"query": "café", "pos": ["b"]}\n'
    path = write(tmp_path / "a.jsonl", ROW, text.encode("latin-1"))
    assert error_of(path).startswith(f"{path}:2: not UTF-8 (byte 0xe9 in ")
    for encoding in ("utf-16", "utf-16-be"):
        path.write_bytes("\ufeff".encode(encoding) * (encoding == "utf-16-be") + text.encode(encoding))
        assert_error(f"^{path}: .*UTF-16.*UTF-8", path, on_error=OnError.skip)
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le"):  # without a mark
        path.write_bytes(text.encode(encoding))
        assert_error(f"^{path}: .*UTF-16.*UTF-8", path, on_error=OnError.skip)


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl"])
def test_a_column_that_a_later_file_or_row_lacks(tmp_path: Path, name: str) -> None:
    if name == "t.jsonl":
        path = write(tmp_path / name, *[{"a": "q", "b": "p"}] * 3000, {"a": "q", "c": "p"})
        assert_error(f'^{path}:3001: no "b" .*a, c$', path)
        return
    for i, column in enumerate(("b", "c")):
        pq.write_table(pa.table({"a": ["q"], column: ["p"]}), tmp_path / f"{i}.parquet")
    assert_error(f'^{tmp_path}/1.parquet: row 1: no "b" .*a, c$', tmp_path)


def test_folders_named_like_files_and_links(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    assert "this folder holds no training files" in error_of(tmp_path / "a.jsonl")
    good = write(tmp_path / "d" / "a.jsonl", ROW)
    link = tmp_path / "d" / "b.jsonl"
    link.symlink_to(tmp_path / "gone.jsonl")
    for path in (link, tmp_path / "d", tmp_path / "d" / "*.jsonl"):
        assert_error(f"^{link}: .*link to {tmp_path / 'gone.jsonl'}", path)
    link.unlink()
    link.symlink_to(good)
    assert len(read(tmp_path / "d")[0]) == 2
    link.unlink()
    folder = tmp_path / "e"
    folder.mkdir()
    (folder / "d").symlink_to(tmp_path / "d")
    (folder / "circle").symlink_to(folder)
    assert len(read(folder)[0]) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_read_permission(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW)
    path.chmod(0)
    assert_error(f"^{path}: .*Permission denied", path)


# Splits by the names of files

# Files of a folder by the split that is asked for; the others are left out.
SPLITS: dict[tuple[str, ...], dict[str, list[str]]] = {
    ("train.jsonl", "test.jsonl"): {"train": ["train.jsonl"], "test": ["test.jsonl"]},
    ("nq.jsonl", "nq-dev.jsonl", "more_train.jsonl"): {
        "train": ["more_train.jsonl", "nq.jsonl"],
        "validation": ["nq-dev.jsonl"],
        "dev": ["nq-dev.jsonl"],
    },
    ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "validation-00000-of-00001.jsonl"): {
        "train": ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    },
    ("data/train/a.jsonl", "data/test/a.jsonl", "eval/train.jsonl"): {
        "train": ["data/train/a.jsonl", "eval/train.jsonl"],
        "test": ["data/test/a.jsonl"],
    },
    ("german.jsonl", "french.jsonl", "contest.jsonl"): {
        "train": ["contest.jsonl", "french.jsonl", "german.jsonl"],
        "german": ["german.jsonl"],
    },
}


@pytest.mark.parametrize("files", SPLITS)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv.gz", ".parquet", ".arrow"])
def test_names_of_files_choose_the_split(tmp_path: Path, files: tuple[str, ...], suffix: str) -> None:
    for name in files:
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        write_table(tmp_path / "a" / name.replace(".jsonl", suffix), {"query": [f"q {name}"], "positive": ["p"]})
    for split, expected in SPLITS[files].items():
        examples, report = read(tmp_path / "a", split=split)
        assert [example.query for example in examples] == [f"q {name}" for name in expected]
        left_out = {Path(name).name.replace(".jsonl", suffix) for name in files if name not in expected}
        assert {Path(name).name for name in report.left_out} >= left_out - {Path(n).name for n in report.files}
        assert ("another split by name" in str(report)) == (len(expected) < len(files))
        every = expand_sources([TrainSource(path=str(tmp_path / "a"), split=split, each_file=True)])
        assert len(read_sources(every, OnError.stop)) == len(expected)
    corpus = resolve_parts(TrainSource(path=str(tmp_path / "a")), every_split=True)
    assert len(corpus) == len(files)
    pattern = tmp_path / "a" / "**" / f"*{suffix}"
    assert len(read(pattern)[0]) == len(files)


def test_a_folder_without_the_split(tmp_path: Path) -> None:
    for name in ("test.jsonl", "dev.jsonl"):
        write(tmp_path / "a" / name, ROW)
    assert_error(f"^{tmp_path}/a: .*{tmp_path}/a/dev.jsonl, .*no split train, only test, validation", tmp_path / "a")
    assert_error(f"^{tmp_path}/a: .*no split x, only test, validation", tmp_path / "a", split="x")
    assert len(read(tmp_path / "a" / "test.jsonl")[0]) == 1


# One source per file, and FlagEmbedding's no_in_batch_neg


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path / "data" / "a.jsonl", ROW)
    write(tmp_path / "data" / "b-no_in_batch_neg.jsonl.gz", ROW)
    write(tmp_path / "data" / "c-no_in_batch_neg" / "a.jsonl", ROW)
    yield tmp_path / "data"


def test_each_file_is_a_source(marked: Path) -> None:
    source = TrainSource(path=str(marked), each_file=True, weight=0.5, negatives=2)
    files = ["a.jsonl", "b-no_in_batch_neg.jsonl.gz", "c-no_in_batch_neg/a.jsonl"]
    expanded = expand_sources([source, TrainSource(path=str(marked / "a.jsonl"))])
    assert [source.path for source in expanded] == [*(str(marked / file) for file in files), str(marked / "a.jsonl")]
    neighbour = "c-no_in_batch_neg/a"
    assert source_names(expanded) == ["data/a", "b-no_in_batch_neg", neighbour, "data/a-2"]
    named = source_names(expand_sources([replace(source, name="x"), source]))
    assert named == ["x-data/a", "x-b-no_in_batch_neg", f"x-{neighbour}", "data/a", "b-no_in_batch_neg", neighbour]
    assert [(source.weight, source.negatives, source.each_file) for source in expanded[:3]] == [(0.5, 2, False)] * 3
    assert [no_in_batch_negatives(source) for source in expanded] == [False, True, True, False]
    assert len(read_sources(expanded, OnError.stop)) == 4
    (named, *_) = expand_sources([TrainSource(path=str(marked / "*.jsonl"), each_file=True, name="x")])
    assert named.name == "x-a"
    with pytest.raises(ConfigError, match=r"each_file=true .* Hub"):
        expand_sources([TrainSource(path="owner/name", each_file=True)])


def test_files_of_which_only_some_are_marked(marked: Path) -> None:
    for path in (marked, marked / "*.jsonl*"):
        with pytest.raises(DataError, match=r"b-no_in_batch_neg\.jsonl\.gz .*a\.jsonl is not.*each_file: true"):
            expand_sources([TrainSource(path=str(path))])
    assert len(expand_sources([TrainSource(path=str(marked), in_batch_negatives=True)])) == 1
    assert no_in_batch_negatives(TrainSource(path=str(marked / "c-no_in_batch_neg")))
    assert no_in_batch_negatives(TrainSource(path=str(marked / "*neg*")))
    assert not no_in_batch_negatives(TrainSource(path=str(marked / "a.jsonl")))
    assert not no_in_batch_negatives(TrainSource(path="owner/name"))


def test_each_file_next_to_a_corpus(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", {"query": name, "positive_document_ids": ["1"]})
    write(tmp_path / "corpus.jsonl", {"docid": "1", "text": "one"})
    expanded = expand_sources([TrainSource(path=str(tmp_path), each_file=True)])
    assert [Path(source.path).name for source in expanded] == ["a.jsonl", "b.jsonl"]
    stores: Any = read_sources(expanded, OnError.stop)
    assert [store[0].positives.texts for store in stores] == [("one",), ("one",)]


def test_folders_of_flagembedding(shared_data: Path) -> None:
    folder = shared_data / "flagembedding-examples" / "embedder"
    with pytest.raises(DataError, match="each_file: true"):
        expand_sources([TrainSource(path=str(folder))])
    expanded = expand_sources([TrainSource(path=str(folder), each_file=True)])
    names = source_names(expanded)
    marks = {name: no_in_batch_negatives(source) for name, source in zip(names, expanded, strict=True)}
    assert [name for name, mark in marks.items() if mark] == [
        "AmazonClassification",
        "Banking77Classification",
        "arXiv_title",
        "bioRXiv_title",
    ]
    assert len(marks) == 8


# Small files that expand


def test_values_longer_than_a_block(tmp_path: Path) -> None:
    """A value may continue in the next block anywhere: in a number, an escape, a character of several bytes."""
    rows = [{"query": f'q{i} \u4e2d\U0001f600\\" \n' * 900, "pos": ["b" * i], "id": 10**15 + i} for i in range(40)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": "x" * 70_000, "data": rows}, indent=1, ensure_ascii=False))
    assert is_json_list(str(path))
    assert [row for _, row in json_list_rows(str(path))] == rows
    path.write_text(json.dumps(rows))
    assert [row for _, row in json_list_rows(str(path))] == rows
    path.write_bytes(path.read_bytes()[:-100] + b"\n\xff")
    with pytest.raises(DataError, match=rf"{path}:2: .*UTF-8"):
        list(json_list_rows(str(path)))


def test_small_files_that_expand_are_rejected(tmp_path: Path) -> None:
    lines = b'{"query": "a", "pos": ["b"]}\n' * (1 << 15)
    expands = f"{tmp_path / 'a.jsonl.zst'}: the zstd file expands to more than 67.*decompress it"
    path = tmp_path / "a.jsonl.zst"
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        for _ in range((80 << 20) // len(lines)):
            file.write(lines)
    with pytest.raises(DataError, match=expands):
        for _ in read_blocks(str(path)):
            pass
    blank = zstd(tmp_path / "blank.jsonl.zst", b"\n" * 1_000_100)
    with pytest.raises(DataError, match=rf"{blank}:\d+: more than 1,000,000 blank lines"):
        list(read_lines(blank))


def test_parquet_files_that_expand_are_rejected(tmp_path: Path) -> None:
    def column(text: str, count: int) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array([text], pa.large_string()))

    path = tmp_path / "cells.parquet"
    pq.write_table(
        pa.table({"query": ["q"] * 1024, "positive": column("x" * (65 << 20), 1024)}), path, compression="zstd"
    )
    with pytest.raises(DataError, match=rf"{path}: row 1: .* 67"):
        list(parquet_rows(path, None))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"query": column("q", 2_000_000)}), path, row_group_size=2_000_000, compression="zstd")
    with pytest.raises(DataError, match=rf"{path}: 2,000,000 rows in "):
        list(parquet_rows(path, None))
