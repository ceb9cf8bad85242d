"""A source as it is read: digests of its content, pieces, line numbers, and rows that are read again."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.losses import CoSENTConfig
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.rows import Example
from embedtrain.data.sources.files import BLOCK_BYTES, MAX_FULL_DIGEST_BYTES
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.reader import Document, SourceReader, open_sources
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import DataError
from tests.data.files import line, write, write_table

ROW = {"query": "q", "pos": ["p"], "neg": ["n"]}
SIZES = (1, 7, 64, 1000, 1 << 30)


def reading(path: object, needs: RowRequirements = TEXTS_ONLY, **options: Any) -> SourceReader:
    (one,) = open_sources([TrainSource(path=str(path), **options)], ["name"], [needs])
    return one


def all_rows(source: SourceReader, piece_bytes: int) -> list[tuple[int, Example | str]]:
    """Every row and problem with its line in the file, piece by piece."""
    layout = source.detect_layout(OnError.skip)
    numbered: list[tuple[int, Example | str]] = []
    lines = dict.fromkeys(source.parts, 0)
    for piece in source.pieces(piece_bytes):
        before = source.lines_before(piece)
        assert before == lines[piece.part]
        rows = source.rows(piece, layout)
        for number, row in rows:
            numbered.append((before + number, str(row) if isinstance(row, BadRow) else row))
        lines[piece.part] += rows.lines
    return numbered


def odd_lines() -> list[bytes]:
    """Rows of all lengths, blank lines, line ends of two kinds, a mark at the beginning, no line end at the end."""
    draw = random.Random(3)
    lines = [b"\xef\xbb\xbf" + line(ROW)]
    for i in range(120):
        row = line({"query": f"{i} é\u2028", "pos": ["x" * draw.randrange(1, 60)] if i % 11 else []})
        lines.append(row.replace(b"\n", b"\r\n") if i % 5 == 0 else row)
        lines.extend([b"\n", b"  \r\n"] * (i % 7 == 0))
    return [*lines, b"\n", line(ROW)[:-1]]


def test_pieces_of_jsonl_are_its_lines_each_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *odd_lines())
    whole = all_rows(reading(path), 1 << 40)
    texts = path.read_bytes().decode("utf-8-sig").split("\n")
    assert [number for number, _ in whole] == [i for i, text in enumerate(texts, 1) if text.strip()]
    assert sum(isinstance(row, str) for _, row in whole) == 11
    for size in SIZES:
        assert all_rows(reading(path), size) == whole
    assert len(reading(path).pieces(1000)) == -(-path.stat().st_size // 1000)
    assert len(reading(path.rename(tmp_path / "b.jsonl")).pieces(1000)) > 1


def test_blank_lines_at_the_end_are_counted(tmp_path: Path) -> None:
    source = reading(write(tmp_path / "a.jsonl", ROW, b"\n\n", ROW, b"\n\n\n"))
    (piece,) = source.pieces(1 << 20)
    rows = source.rows(piece, source.detect_layout(OnError.stop))
    assert [number for number, _ in rows] == [1, 4]
    assert rows.lines == 7


@pytest.mark.parametrize("name", ["a.jsonl.gz", "packed.jsonl", "a.csv", "a.json"])
def test_parts_that_cannot_be_split_are_one_piece(tmp_path: Path, name: str) -> None:
    match name:
        case "a.csv":
            path = write_table(tmp_path / name, {"a": ["q"] * 50, "b": ["p"] * 50})
        case "a.json":
            path = tmp_path / name
            path.write_text(json.dumps([ROW] * 50, indent=1))
        case "packed.jsonl":
            path = write(tmp_path / "a.jsonl.gz", *[ROW] * 50).rename(tmp_path / name)
        case _:
            path = write(tmp_path / name, *[ROW] * 50)
    source = reading(path)
    (piece,) = source.pieces(10)
    assert (piece.start, piece.stop, source.lines_before(piece)) == (0, None, 0)
    rows = source.rows(piece, source.detect_layout(OnError.stop))
    assert len(list(rows)) == 50


def test_pieces_of_tables(tmp_path: Path) -> None:
    table = pa.table({"a": [f"q{i}" for i in range(1000)], "b": [f"p{i}" if i != 777 else "" for i in range(1000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=64)
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    import datasets

    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    for name in ("t.parquet", "t.arrow", "s.arrow", "saved"):
        source = reading(tmp_path / name)
        whole = all_rows(source, 1 << 40)
        assert [number for number, _ in whole] == list(range(1, 1001))
        assert whole[777] == (778, 'column "b" is an empty text')
        assert all_rows(source, 3000) == whole
        assert 4 <= len(source.pieces(3000)) <= 16


def test_empty_files_are_a_piece_without_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b"")
    write(tmp_path / "b.jsonl", ROW)
    source = reading(tmp_path)
    assert [len(list(source.rows(piece, source.detect_layout(OnError.skip)))) for piece in source.pieces(10)][:2] == [
        0,
        1,
    ]
    with pytest.raises(DataError, match=r"a\.jsonl: holds no rows"):
        source.detect_layout(OnError.stop)


def test_layout_detection_names_the_first_bad_row(tmp_path: Path) -> None:
    source = reading(write(tmp_path / "a.jsonl", b"\n", b"{\n", [1], ROW))
    with pytest.raises(DataError, match=r"a\.jsonl:2: broken JSON"):
        source.detect_layout(OnError.stop)
    assert source.detect_layout(OnError.skip).describe() == "FlagEmbedding rows"
    source = reading(write(tmp_path / "a.jsonl", b"{\n", {"x": 1}))
    with pytest.raises(DataError, match=r"2 rows skipped, .*:1: broken JSON"):
        source.detect_layout(OnError.skip)


# Content


def test_content_changes_with_what_determines_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.jsonl", ROW)
    write(tmp_path / "d" / "b.jsonl", {**ROW, "query": "r"})
    before = reading(tmp_path / "d").content()
    assert json.loads(json.dumps(before)) == before
    assert str(tmp_path) not in json.dumps(before)
    (tmp_path / "d").rename(tmp_path / "e")
    folder = tmp_path / "e"
    assert reading(folder).content() == before
    assert reading(folder, RowRequirements(loss="gist")).content() == before
    assert reading(folder, negatives=2, weight=3.0).content() == before
    os.utime(folder / "a.jsonl", (1, 1))
    assert reading(folder).content() == before  # small files are read whole
    for options in ({"columns": ["query", "pos"]}, {"score_scale": 2.0}):
        assert reading(folder, **options).content() != before
    assert reading(folder, CoSENTConfig().row_requirements).content() != before
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    assert reading(folder).content() != before  # another order of rows
    (folder / "c.jsonl").rename(folder / "a.jsonl")
    assert reading(folder).content() == before
    write(folder / "b.jsonl", {**ROW, "query": "s"})
    assert reading(folder).content() != before


def test_content_holds_the_corpus_and_all_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"query": "q", "positive_document_ids": ["1"]})
    corpus = write(tmp_path / "corpus.jsonl", {"docid": "1", "text": "one"})
    before = reading(path).content()
    source = reading(path)
    assert [part.name for part in source.document_parts] == [str(corpus)]
    assert source.documents is not None
    (piece,) = source.documents.pieces(1 << 20)
    assert list(source.documents.documents(piece)) == [(1, Document("1", "", "one"))]
    write(corpus, {"docid": "1", "text": "two"})
    assert reading(path).content() != before
    folder = tmp_path / "beir"
    for name in ("corpus", "queries"):
        write(folder / f"{name}.jsonl", {"_id": "1", "text": name})
    write(folder / "qrels" / "train.tsv", b"1\t1\t1\n")
    contents = [reading(folder).content()]
    for name in ("corpus.jsonl", "queries.jsonl"):
        write(folder / name, {"_id": "1", "text": "other"})
        contents.append(reading(folder).content())
    write(folder / "qrels" / "train.tsv", b"1\t1\t2\n")
    contents.append(reading(folder).content())
    assert len({json.dumps(content) for content in contents}) == 4


def test_large_files_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(line(ROW) * 20)
        file.truncate(MAX_FULL_DIGEST_BYTES + 5 * BLOCK_BYTES)  # the rest takes no room on disk
    before = reading(path).content()
    assert reading(path).content() == before
    time = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(time, time))
    changed = reading(path).content()
    assert changed != before
    os.utime(path, ns=(time, time + 1))
    assert reading(path).content() not in (before, changed)


def test_content_of_a_saved_data_set(tmp_path: Path) -> None:
    import datasets

    for name, query in (("a", "q"), ("b", "q"), ("c", "r")):
        datasets.Dataset.from_dict({"query": [query], "pos": [["p"]]}).save_to_disk(str(tmp_path / name))
    a, b, c = (reading(tmp_path / name).content() for name in "abc")
    assert a == b != c


# Files that change or are deleted


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet", "a.arrow"])
def test_a_file_deleted_before_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.arrow":
        table = pa.table({"query": ["q"], "pos": [["p"]]})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        write_table(path, {"query": ["q"], "pos": ["p" if name == "a.csv" else ["p"]]})
    source = reading(path)
    layout = source.detect_layout(OnError.stop)
    (piece,) = source.pieces(1 << 20)
    path.unlink()
    calls: list[Any] = [source.content, lambda: source.detect_layout(OnError.skip)]
    calls.append(lambda: list(source.rows(piece, layout)))
    for call in calls:
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value).startswith(f"{path}: ") and "No such file" in str(caught.value)
