"""Training rows under URLs: the same rows as from files here, in pieces as well, and plain words for what fails."""

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.sources.reader import SourceReader, open_sources
from embedtrain.data.sources.resolve import expand_sources, source_names
from embedtrain.errors import ConfigError
from tests.data.files import assert_error, error_of, line, read, write, write_table

ROWS = [{"query": f"q{i} é", "pos": ["p" * (i % 9 + 1)]} for i in range(50)]


def reading(path: str, **options: Any) -> SourceReader:
    (one,) = open_sources([TrainSource(path=path, **options)], ["name"], [RowRequirements()])
    return one


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of rows in every kind of file."""
    folder = tmp_path / "rows"
    write(folder / "a.jsonl", *ROWS)
    write(folder / "deep" / "b.jsonl.gz", *ROWS)
    with pa.CompressedOutputStream(str(folder / "c.jsonl.zst"), "zstd") as file:
        file.write(b"".join(line(row) for row in ROWS))
    columns = {"query": [row["query"] for row in ROWS], "pos": [row["pos"] for row in ROWS]}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet", row_group_size=10)
    with (
        pa.OSFile(str(tmp_path / "e.arrow"), "wb") as file,
        pa.ipc.new_stream(file, pa.table(columns).schema) as writer,
    ):
        writer.write_table(pa.table(columns), max_chunksize=10)
    write_table(tmp_path / "f.csv", {"a": ["q"], "b": ["p"]})
    return tmp_path


@pytest.fixture
def memory(files: Path) -> Iterator[str]:
    """The same files in fsspec's file system in memory."""
    system = fsspec.filesystem("memory")
    system.put(str(files) + "/", "/train/", recursive=True)
    yield "memory://train"
    system.rm("/train", recursive=True)


@pytest.fixture
def served(files: Path) -> Iterator[str]:
    """The same files behind a web server that knows no ranges, as plain ones do."""
    pytest.importorskip("aiohttp", reason="fsspec reads https:// with aiohttp, which is not installed")
    handler = functools.partial(_Silent, directory=str(files))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


NAMES = ["rows/a.jsonl", "rows/deep/b.jsonl.gz", "rows/c.jsonl.zst", "d.parquet", "e.arrow", "f.csv"]


@pytest.mark.parametrize("where", ["memory", "served", "file"])
def test_every_kind_of_file(files: Path, where: str, request: pytest.FixtureRequest) -> None:
    root = f"file://{files}" if where == "file" else request.getfixturevalue(where)
    for name in NAMES:
        here, report = read(files / name)
        there, same_report = read(f"{root}/{name}")
        assert [(e.query, e.positives.texts, e.location.line) for e in there] == [
            (e.query, e.positives.texts, e.location.line) for e in here
        ]
        assert str(same_report) == str(report)
        assert there[0].location.file.endswith(name)


def test_folders_patterns_and_pieces(memory: str) -> None:
    source = reading(f"{memory}/rows")
    assert [part.name.rpartition("/")[2] for part in source.parts] == ["a.jsonl", "c.jsonl.zst", "b.jsonl.gz"]
    assert len(reading(f"{memory}/rows/*.jsonl*").parts) == 2
    assert len(reading(f"{memory}/rows/**/*.jsonl*").parts) == 3
    layout = source.detect_layout(OnError.stop)
    pieces = [piece for piece in source.pieces(200) if piece.part.name.endswith("a.jsonl")]
    assert len(pieces) > 5
    lines = []
    for piece in pieces:
        start = source.lines_before(piece)  # not while rows are read: the memory file system has one position per file
        lines += [start + number for number, _ in source.rows(piece, layout)]
    assert lines == list(range(1, 51))
    tables = reading(f"{memory}/d.parquet")
    assert len(tables.pieces(1)) == 5
    assert tables.lines_before(tables.pieces(1)[2]) == 20
    assert source_names([TrainSource(path=f"{memory}/rows"), TrainSource(path="https://x.org/a.jsonl.gz?x=1")]) == [
        "rows",
        "a",
    ]
    expanded = expand_sources([TrainSource(path=f"{memory}/rows", each_file=True)])
    assert source_names(expanded) == ["a", "c", "b"]


def test_content_of_remote_files(memory: str) -> None:
    before = reading(f"{memory}/rows").content()
    assert reading(f"{memory}/rows").content() == before
    fsspec.filesystem("memory").pipe("/train/rows/a.jsonl", line(ROWS[0]))
    assert reading(f"{memory}/rows").content() != before


def test_corpora_and_beir_folders(memory: str) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/train/ids/train.jsonl", line({"query": "q", "positive_document_ids": ["1"]}))
    system.pipe("/train/ids/corpus.jsonl", line({"docid": "1", "text": "one"}))
    for path in ("ids/train.jsonl", "ids"):
        assert read(f"{memory}/{path}")[0][0].positives.texts == ("one",)
    system.pipe("/train/beir/corpus.jsonl", line({"_id": "1", "title": "a", "text": "one"}))
    system.pipe("/train/beir/queries.jsonl", line({"_id": "7", "text": "seven"}))
    system.pipe("/train/beir/qrels/train.tsv", b"query-id\tcorpus-id\tscore\n7\t1\t1\n")
    (example,), _ = read(f"{memory}/beir")
    assert (example.query, example.positives.texts, example.location.line) == ("seven", ("a one",), 2)


def test_errors_of_remote_files(memory: str) -> None:
    assert_error(f"^{memory}/none.jsonl: no such file", f"{memory}/none.jsonl")
    assert_error(rf"^{memory}/none\*.jsonl: no file matches", f"{memory}/none*.jsonl")
    fsspec.filesystem("memory").pipe("/train/cut.jsonl.gz", b"\x1f\x8b\x08\x00")
    assert "the gzip file is damaged or truncated" in error_of(f"{memory}/cut.jsonl.gz")
    fsspec.filesystem("memory").pipe("/train/bad.parquet", b"PAR1")
    assert "bad.parquet: cannot be read as Parquet" in error_of(f"{memory}/bad.parquet")
    fsspec.filesystem("memory").pipe("/train/bad.jsonl", b"\n{\n")
    assert "bad.jsonl:2: broken JSON" in error_of(f"{memory}/bad.jsonl")
    fsspec.filesystem("memory").pipe("/train/a.txt", b"text")
    assert "kind of file" in error_of(f"{memory}/a.txt")
    assert "subset=x" in error_of(f"{memory}/rows/a.jsonl", ConfigError, subset="x")
    assert error_of("nothing://a/b.jsonl").startswith("nothing://a/b.jsonl: no file system is known for nothing://")
    assert_error("^file:///no/such.jsonl: no such file", "file:///no/such.jsonl")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # how Python knows that there is none, where there is one
    assert_error("^s3://bucket/a.jsonl: .*pip install s3fs", "s3://bucket/a.jsonl")


def test_a_server_that_does_not_answer(served: str, files: Path) -> None:
    assert_error(f"^{served}/none.jsonl: no such file", f"{served}/none.jsonl")
    assert "127.0.0.1:1/a.jsonl: cannot be read (" in error_of("http://127.0.0.1:1/a.jsonl")
    assert len(read(f"{served}/rows/a.jsonl?download=true")[0]) == 50
    source = reading(f"{served}/rows/a.jsonl")
    before = source.content()
    assert reading(f"{served}/rows/a.jsonl").content() == before
    write(files / "rows" / "a.jsonl", *ROWS[:3])
    assert reading(f"{served}/rows/a.jsonl").content() != before
