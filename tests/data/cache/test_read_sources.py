"""The store of rows: built once, by any number of processes, opened again, and exact to the line in every piece."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from embedtrain.config.losses import BCEConfig, ContrastiveConfig, CoSENTConfig, TripletConfig
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRange, ScoreRequirement
from embedtrain.data.cache import row_store as stored
from embedtrain.data.cache.cache import Cache, cache_directory, json_digest
from embedtrain.data.cache.row_store import RowStore, read_sources
from embedtrain.data.rows import Example
from embedtrain.data.sources.reader import SourceReader
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from tests.data.files import write, write_table

PAIRS, TRIPLET = CoSENTConfig().row_requirements, TripletConfig().row_requirements
VECTORS = RowRequirements(documents=False, vectors=True, loss="distill_embeddings")


def row(i: int) -> dict[str, Any]:
    return {"query": f"q{i}", "pos": [f"p{i}", f"r{i}"], "neg": [f"n{i}.{j}" for j in range(i % 4)]}


def store_of(path: object, cache: Cache | None = None, **options: Any) -> RowStore:
    needs, on_error = options.pop("needs", RowRequirements()), options.pop("on_error", OnError.stop)
    return read_sources([TrainSource(path=str(path), **options)], on_error, needs, cache)[0]


def cached_files(directory: Path) -> dict[str, int]:
    """Every file of a cache and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 2 KB, so that small files are cut as large ones are."""
    monkeypatch.setattr(stored, "PIECE_BYTES", 2000)


# Found again


def test_a_second_run_builds_nothing_and_reports_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *map(row, range(50)), b"{\n", row(50))
    reported: list[tuple[str, int, int]] = []
    cache = Cache(directory=tmp_path / "cache", progress=lambda *what: reported.append(what))
    first = store_of(path, cache, on_error=OnError.skip)
    assert reported == [("reading a", 0, 1), ("reading a", 1, 1)]
    before = cached_files(tmp_path / "cache")
    second = store_of(path, cache, on_error=OnError.skip)
    assert cached_files(tmp_path / "cache") == before
    assert len(reported) == 2
    assert list(second) == list(first)
    assert str(second.report) == f"{first.report}; cached"
    assert f"1 bad rows skipped ({path}:51: broken JSON" in str(second.report)
    assert second.key == first.key


def test_another_format_of_the_cache_does_not_make_them_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mined folders have the key of their rows: it is the same, while the cached files are built again."""
    path, cache = write(tmp_path / "a.jsonl", *map(row, range(5))), Cache(directory=tmp_path / "cache")
    first = store_of(path, cache)
    monkeypatch.setattr(stored, "FORMAT", stored.FORMAT + 1)
    assert store_of(path, cache).key == first.key
    assert len(list((tmp_path / "cache").glob("rows-*"))) == 2


def test_skipped_rows_with_the_same_problem_are_reported_together(tmp_path: Path) -> None:
    """Over all pieces and files, with the number of rows and the first three of them, also from the cache."""
    bad, broken = b'{"query": "a", "pos": []}\n', b"{\n"
    cache = Cache(directory=tmp_path / "cache")
    first = write(tmp_path / "a.jsonl", row(0), bad, broken, *[bad, row(1)] * 4)
    second = write(tmp_path / "b.jsonl", bad, row(2))
    for _ in range(2):
        report = store_of(tmp_path / "*.jsonl", cache, on_error=OnError.skip).report
        empty, other = report.skipped
        assert re.fullmatch(rf'{first}:2, 4, 6 and 3 more: .*"pos".*', empty), empty
        assert other.startswith(f"{first}:3: broken JSON")
        assert report.rows.num_skipped == 7
        assert f"7 bad rows skipped ({empty}; {other})" in str(report)
    report = store_of(second, cache, on_error=OnError.skip).report
    assert report.skipped[0].startswith(f"{second}:1: ")


def test_changes_that_build_the_rows_again(tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    path = write(tmp_path / "a" / "a.jsonl", *map(row, range(1, 4)))

    def built(path: Path = path, **options: Any) -> bool:
        return not store_of(path, cache, **options).report.cached

    assert built()
    assert not built(negatives=1, weight=2.0, name="other")
    assert not built(needs=replace(RowRequirements(), loss="cached_infonce"))
    assert built(needs=TRIPLET)
    assert built(needs=PAIRS)
    assert built(on_error=OnError.skip)
    assert built(columns=["query", "pos"])
    assert built(score_scale=2.0)
    os.utime(path, (1, 1))
    assert not built()  # not one byte is another
    moved = (tmp_path / "a").rename(tmp_path / "b") / "a.jsonl"
    assert not built(moved)
    assert {example.location.file for example in store_of(moved, cache)} == {str(moved)}
    write(moved, *map(row, range(1, 3)))
    assert built(moved)
    data = moved.read_bytes()
    moved.write_bytes(data.replace(b"q1", b"Q1"))
    assert built(moved)
    moved.write_bytes(data)
    assert not built(moved)


# Another value of every field that decides about rows; the others are words of messages.
OTHER_NEEDS: dict[str, Any] = {
    "documents": False,
    "negatives": True,
    "scores": ScoreRequirement.pairs,
    "range": ScoreRange(high=3),
    "label": True,
    "vectors": True,
    "same_num_documents": True,
    "other_positives": True,
    "ranked": True,
    "positive_above": 0.5,
    "batch_negatives": 2,
}


def test_the_key_holds_everything_that_a_loss_needs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", row(1))

    def key(needs: RowRequirements) -> str:
        return json_digest(SourceReader(TrainSource(path=str(path)), "a", needs).content())

    needs = RowRequirements()
    assert OTHER_NEEDS.keys() == {field.name for field in fields(needs)} - {"loss", "without_negatives"}
    keys = [key(replace(needs, **{name: value})) for name, value in OTHER_NEEDS.items()]
    assert len({key(needs), *keys}) == len(OTHER_NEEDS) + 1
    assert key(replace(needs, loss="other", without_negatives="do this")) == key(needs)
    assert key(replace(needs, batch_negatives=1)) == key(replace(needs, batch_negatives=2))


def test_losses_that_share_a_file_but_not_its_rows(tmp_path: Path) -> None:
    """A row without positives is a list of documents to one, and not usable to the other."""
    cache = Cache(directory=tmp_path / "cache")
    path = write(tmp_path / "a.jsonl", row(1), {"query": "q2", "pos": [], "neg": ["n"]})
    pairs, lists = ContrastiveConfig().row_requirements, BCEConfig().row_requirements
    assert len(store_of(path, cache, needs=pairs, on_error=OnError.skip)) == 1
    assert len(store_of(path, cache, needs=lists, on_error=OnError.skip)) == 2
    assert len(store_of(path, cache, needs=lists)) == 2
    with pytest.raises(DataError, match=f'{path}:2: "pos" is empty'):
        store_of(path, cache, needs=pairs)


def test_a_damaged_cache_is_built_again(tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    path = write(tmp_path / "a.jsonl", *map(row, range(500)))
    rows = list(store_of(path, cache))
    (arrow,) = (tmp_path / "cache").rglob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-100])
    again = store_of(path, cache)
    assert list(again) == rows
    assert not again.report.cached


def test_open_rows_outlive_their_cache(tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    path = write(tmp_path / "a.jsonl", *map(row, range(9000)))
    rows, store = list(store_of(path, cache)), store_of(path, cache)
    shutil.rmtree(tmp_path / "cache")
    assert list(store) == rows
    assert store.num_negatives.tolist() == [len(one.negatives.texts) for one in rows]


def test_rows_without_a_cache_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = store_of(write(tmp_path / "a.jsonl", row(1)))
    assert list(tmp_path.glob("embedtrain-*"))
    assert store[0].query == "q1"
    del store
    assert not list(tmp_path.glob("embedtrain-*"))


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EMBEDTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory(None) == tmp_path / ".cache" / "embedtrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory(None) == Path("/x/embedtrain")
    monkeypatch.setenv("EMBEDTRAIN_CACHE", "~/y")
    assert cache_directory(None) == tmp_path / "y"
    assert cache_directory("~/z") == tmp_path / "z"
    assert json_digest({"a": 1, "b": [None, "ä"]}) == json_digest({"b": [None, "ä"], "a": 1}) != json_digest({"a": 1})


def test_a_disk_too_small_for_the_rows(tmp_path: Path, small_disk: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"query": f"q{i}", "pos": ["x" * 500]} for i in range(9000)))
    with pytest.raises(DataError, match=r" [01]\.\d MB free.* data\.cache_dir") as caught:
        store_of(path, Cache(directory=small_disk / "cache"))
    assert str(caught.value).startswith(f"{small_disk / 'cache'}/rows-")
    assert not [file for file in small_disk.rglob("*") if file.is_file() and file.stat().st_size]


# Pieces


def test_pieces_hold_the_rows_of_the_whole(tmp_path: Path, small_pieces: None) -> None:
    lines = [b"\n" if i % 7 == 3 else json.dumps(row(i)).encode() + b"\n" for i in range(400)]
    folder = write(tmp_path / "a" / "a.jsonl", *lines).parent
    write(folder / "b.jsonl.gz", *lines)
    write_table(folder.parent / "c.parquet", {"q": [f"q{i}" for i in range(300)], "p": [f"p{i}" for i in range(300)]})
    cache = Cache(directory=tmp_path / "cache")
    store = store_of(folder / "*", cache)
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) > 10
    expected = [(number + 1, *row(number).values()) for number in range(400) if number % 7 != 3]
    assert [(e.location.line, e.query, list(e.positives.texts), list(e.negatives.texts)) for e in store] == expected * 2
    assert {Path(e.location.file).name for e in list(store)[: len(expected)]} == {"a.jsonl"}
    assert {Path(e.location.file).name for e in list(store)[len(expected) :]} == {"b.jsonl.gz"}
    assert store.num_positives.tolist() == [2] * len(store)
    assert store.num_negatives.tolist() == [len(one[3]) for one in expected] * 2
    assert sorted(store.texts()) == sorted(t for e in store for t in (e.query, *e.positives.texts, *e.negatives.texts))
    table = store_of(tmp_path / "c.parquet", cache)
    assert [(e.location.line, e.query) for e in table] == [(i + 1, f"q{i}") for i in range(300)]


def test_bad_rows_keep_their_lines_and_their_order(tmp_path: Path, small_pieces: None) -> None:
    rows: list[object] = [row(i) for i in range(300)]
    for bad in (70, 150, 151, 290):
        rows[bad] = {"query": bad, "pos": ["x"]}
    path = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError) as caught:
        store_of(path)
    assert str(caught.value).startswith(f'{path}:71: "query" must be a text, not a number (70)')
    store = store_of(path, on_error=OnError.skip)
    assert store.report.rows.num_skipped == 4
    assert [problem.split(": ")[0] for problem in store.report.problems] == [f"{path}:{n}" for n in (71, 151, 152)]
    assert [e.location.line for e in store] == [n for n in range(1, 301) if n not in (71, 151, 152, 291)]


def test_vectors_have_one_dimension_in_all_pieces(tmp_path: Path, small_pieces: None) -> None:
    rows = [{"text": f"t{i}", "label": [float(i)] * (3 if i < 100 else 4)} for i in range(200)]
    path = write(tmp_path / "a.jsonl", *rows)
    for on_error in OnError:
        with pytest.raises(DataError, match=r"vector of \d .* 3") as caught:
            store_of(path, needs=VECTORS, on_error=on_error)
        assert str(caught.value).startswith(f"{path}:")
    assert len(store_of(write(path, *rows[:100]), needs=VECTORS)) == 100


def test_extra_columns_of_some_rows(tmp_path: Path) -> None:
    rows = [row(i) | ({"pos_id": ["x", "y"]} if i > 5000 else {}) for i in range(9000)]
    store = store_of(write(tmp_path / "a.jsonl", *rows))
    assert store.extra_columns == {"positive_ids"}
    assert [e.positives.ids for e in store] == [("x", "y") if i > 5000 else () for i in range(9000)]
    assert {e.instruction for e in store} == {None}
    assert store.max_negatives is None


def test_rows_with_instructions_and_limits_of_their_own(tmp_path: Path) -> None:
    rows = [row(3) | more for more in ({"prompt": "Find it"}, {"type": "only_1neg"}, {"prompt": ""}, {})]
    store = store_of(write(tmp_path / "a.jsonl", *rows))
    assert store.max_negatives is not None
    assert [-1 if e.max_negatives is None else e.max_negatives for e in store] == store.max_negatives.tolist()
    assert store[0].instruction == "Find it"
    assert store[3].instruction is None


def test_each_source_has_its_own_needs(tmp_path: Path) -> None:
    texts = write_table(tmp_path / "t.csv", {"text": ["a"], "label": [1]})
    rows = write(tmp_path / "a.jsonl", row(1), row(2))
    sources = [TrainSource(path=str(rows)), TrainSource(path=str(texts))]
    classes = RowRequirements(documents=False, label=True, same_num_documents=True, loss="batch_triplet")
    stores = read_sources(sources, OnError.stop, [RowRequirements(), classes])
    assert [len(store) for store in stores] == [2, 1]
    assert [e.location.source for store in stores for e in store] == [0, 0, 1]
    assert stores[1][0].label == 1
    same_num_documents = replace(RowRequirements(), same_num_documents=True)
    with pytest.raises(ConfigError, match="1 to 2 negatives"):
        read_sources(sources, OnError.stop, [same_num_documents, classes])


def test_vectors_have_one_dimension_in_all_sources_of_a_loss(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.jsonl", {"text": "t", "label": [1.0] * width}) for i, width in enumerate((3, 4, 3))]
    sources = [TrainSource(path=str(path)) for path in paths]
    assert len(read_sources(sources, OnError.stop, VECTORS, losses=[7, 2, 7])) == 3
    for losses in (None, [1, 1, 2]):
        with pytest.raises(DataError, match=r"vector of 4 .* 3") as caught:
            read_sources(sources, OnError.stop, VECTORS, losses=losses)
        assert str(caught.value).startswith(f"{paths[1]}:1: ")


# Documents by id


def corpus(folder: Path, count: int, **changes: Any) -> Path:
    documents = [{"docid": f"d{i}", "title": f"T{i}", "text": f"text {i}"} for i in range(count)]
    write(folder / "corpus" / "0.jsonl", *documents[: count // 2])
    write(folder / "corpus" / "1.jsonl", *documents[count // 2 :], *changes.get("more", []))
    rows = [
        {"query_id": f"{i}", "query_text": f"q{i}", "positive_document_ids": [f"d{i}"]}
        | {"negative_document_ids": [f"d{(i * 7 + 1) % count}"]}
        for i in range(count)
    ]
    return write(folder / "train.jsonl", *rows)


def test_documents_are_found_by_their_ids(tmp_path: Path) -> None:
    path = corpus(tmp_path, 10_000)
    cache = Cache(directory=tmp_path / "cache")
    store = store_of(path, cache, documents=str(tmp_path / "corpus"))
    assert [e.positives.texts for e in store] == [(f"T{i} text {i}",) for i in range(10_000)]
    assert store[3].negatives.texts == ("T22 text 22",)
    assert store_of(path, cache, documents=str(tmp_path / "corpus")).report.cached
    write(tmp_path / "corpus" / "0.jsonl", {"docid": "d0", "title": "", "text": "new"})
    with pytest.raises(DataError, match=r"train\.jsonl:1: .*d1"):
        store_of(path, cache, documents=str(tmp_path / "corpus"))


def test_a_repeated_id(tmp_path: Path) -> None:
    path = corpus(tmp_path, 6, more=[{"docid": "d1", "text": "again"}])
    with pytest.raises(DataError) as caught:
        store_of(path, documents=str(tmp_path / "corpus"))
    first, second = (tmp_path / "corpus" / f"{number}.jsonl" for number in (0, 1))
    assert str(caught.value) == f"{second}:4: the id 'd1' has another text already in {first}:2"


# Several processes


def read_there(world: World, paths: list[str], directory: str) -> list[list[Example]]:
    stored.PIECE_BYTES = 2000
    cache = Cache(directory=Path(directory))
    sources = [TrainSource(path=path) for path in paths]
    return [list(store) for store in read_sources(sources, OnError.stop, cache=cache)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_processes_build_the_same_as_one(tmp_path: Path, ranks: Any, num_ranks: int) -> None:
    paths = [str(write(tmp_path / f"{name}.jsonl", *map(row, range(count)))) for name, count in (("a", 300), ("b", 9))]
    (alone,) = ranks(1, read_there, paths, str(tmp_path / "one"))
    for rank in ranks(num_ranks, read_there, paths, str(tmp_path / "many")):
        assert rank == alone
    one, many = (
        {path.removeprefix(str(tmp_path / name)) for path in cached_files(tmp_path / name)} for name in ("one", "many")
    )
    assert one == many


def read_otherwise(world: World, path: str, directory: str) -> list[Example]:
    """A job of its own on every rank: other settings, the same cache."""
    stored.PIECE_BYTES = 2000
    on_error = OnError.skip if world.rank else OnError.stop
    return list(read_sources([TrainSource(path=path)], on_error, cache=Cache(directory=Path(directory)))[0])


def test_two_jobs_with_other_settings_at_once(tmp_path: Path, ranks: Any) -> None:
    path = str(write(tmp_path / "a.jsonl", *map(row, range(300))))
    first, second = ranks(2, read_otherwise, path, str(tmp_path / "cache"))
    assert first == second
    assert len(list((tmp_path / "cache").iterdir())) == 2


READ = """
import sys
from pathlib import Path
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache import row_store as stored
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
stored.PIECE_BYTES = 50_000
(store,) = read_sources([TrainSource(path=sys.argv[1])], OnError.stop, cache=Cache(directory=Path(sys.argv[2])))
print(len(store), sum(one.location.line for one in store))
"""


@pytest.mark.slow
def test_a_reader_that_is_killed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *map(row, range(40_000)))
    command = [sys.executable, "-c", READ, str(path), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    while not list((tmp_path / "cache").glob("*/rows-*")):
        time.sleep(0.01)
        assert all(process.poll() is None for process in processes)
    processes[0].send_signal(signal.SIGKILL)
    answers = [process.communicate(timeout=60)[0].strip() for process in processes[1:]]
    processes[0].wait()
    assert answers == [f"40000 {40_000 * 40_001 // 2}"] * 2
    assert len(store_of(path, Cache(directory=tmp_path / "cache"))) == 40_000


# Large files


@pytest.mark.slow
def test_a_column_that_the_900_000th_row_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"q": "a", "p": "b"}\n' * 899_999 + b'{"q": "a"}\n' + b'{"q": "a", "p": "b"}\n' * 1000)
    with pytest.raises(DataError) as caught:
        store_of(path)
    assert str(caught.value) == f'{path}:900000: no "p" in this row, which has: q'


PEAK = """
import sys, threading, time
from pathlib import Path
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.01)
thread = threading.Thread(target=watch)
thread.start()
(store,) = read_sources([TrainSource(path=sys.argv[1])], OnError.stop, cache=Cache(directory=Path(sys.argv[2])))
total = sum(len(store[i].query) for i in range(0, len(store), 100))
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for count in (30_000, 300_000):
        rows = [json.dumps({"query": f"q{i}", "pos": ["x" * 300], "neg": ["y" * 300]}).encode() for i in range(count)]
        path = tmp_path / f"{count}.jsonl"
        path.write_bytes(b"\n".join(rows))
        command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "cache")]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] < 1.25 * peaks[0] + 10_000, peaks  # KiB
