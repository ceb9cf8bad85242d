"""Sources that are edited while they are read: rejected by every process, and never cached as they were before."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache import row_store as stored
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from tests.data.files import write


def rows(word: str, count: int = 60) -> list[dict[str, Any]]:
    return [{"query": f"{word} query {i}", "pos": [f"{word} document {i}"]} for i in range(count)]


def edit(path: Path, *, new_time: bool, word: str = "new") -> None:
    """Write other rows of the same size; unless `new_time`, with the same modification time as before."""
    before = path.stat()
    write(path, *rows(word))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9 * new_time))


def queries(path: Path, cache: Path, progress: Callable[[str, int, int], None] = lambda *_: None) -> list[str]:
    (store,) = read_sources(
        [TrainSource(path=str(path))], OnError.stop, cache=Cache(directory=cache, progress=progress)
    )
    return [example.query for example in store]


@pytest.mark.parametrize("new_time", [True, False])
@pytest.mark.parametrize("when", [0, 1, -1])
def test_a_file_that_is_edited_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_time: bool, when: int
) -> None:
    monkeypatch.setattr(stored, "PIECE_BYTES", 1000)
    path, reported = write(tmp_path / "a.jsonl", *rows("old")), list[int]()

    def progress(phase: str, done: int, total: int) -> None:
        reported.append(done)
        if done == when % (total + 1):
            edit(path, new_time=new_time)

    with pytest.raises(DataError) as caught:
        queries(path, tmp_path / "cache", progress)
    assert str(caught.value) == (
        f"{path}: was changed after its rows were read: start again, and do not change it meanwhile"
    )
    if new_time and when >= 0:
        assert max(reported) == when  # the next piece reports it
    assert queries(path, tmp_path / "cache") == [row["query"] for row in rows("new")]
    edit(path, new_time=True, word="old")
    assert queries(path, tmp_path / "cache") == [row["query"] for row in rows("old")]


def test_a_file_that_is_touched_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "PIECE_BYTES", 1000)
    path = write(tmp_path / "a.jsonl", *rows("old"))
    texts = queries(path, tmp_path / "cache", lambda phase, done, total: os.utime(path, (done, done)))
    assert texts == [row["query"] for row in rows("old")]


def test_a_file_that_is_deleted_while_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "d" / "a.jsonl", *rows("old")).parent
    path = write(folder / "b.jsonl", *rows("old"))
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read: No such file"):
        queries(folder, tmp_path / "cache", lambda phase, done, total: path.unlink(missing_ok=True))


def test_a_corpus_that_is_edited_while_it_is_read(tmp_path: Path) -> None:
    def documents(word: str) -> list[dict[str, str]]:
        return [{"docid": f"d{i}", "title": "", "text": f"{word} document {i}"} for i in range(9)]

    corpus = write(tmp_path / "corpus.jsonl", *documents("old"))
    judged = [{"query_id": f"{i}", "query_text": f"q{i}", "positive_document_ids": [f"d{i}"]} for i in range(9)]
    source = TrainSource(path=str(write(tmp_path / "train.jsonl", *judged)))

    def read(when: int | None) -> list[tuple[str, ...]]:
        def progress(phase: str, done: int, total: int) -> None:
            if phase.startswith("reading documents") and done == when:
                before = corpus.stat().st_mtime_ns
                write(corpus, *documents("new"))
                os.utime(corpus, ns=(before, before))

        cache = Cache(directory=tmp_path / "cache", progress=progress)
        return [example.positives.texts for example in read_sources([source], OnError.stop, cache=cache)[0]]

    for when in (0, 1):
        write(corpus, *documents("old"))
        with pytest.raises(DataError, match=r"corpus\.jsonl: was changed after"):
            read(when)
        assert not list((tmp_path / "cache").rglob("*.arrow"))
        write(corpus, *documents("old"))
    assert read(None) == [(f"old document {i}",) for i in range(9)]


def read_an_edited_file(world: World, name: str, directory: str) -> str:
    stored.PIECE_BYTES = 1000
    path = Path(name)
    try:
        queries(path, Path(directory), lambda phase, done, total: edit(path, new_time=False) if done == total else None)
    except DataError as error:
        return str(error)
    return "nothing"


def test_all_processes_reject_an_edited_file(tmp_path: Path, ranks: Any) -> None:
    path = write(tmp_path / "a.jsonl", *rows("old"))
    for error in ranks(3, read_an_edited_file, str(path), str(tmp_path / "cache")):
        assert error.startswith(f"{path}: was changed after its rows were read")
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    edit(path, new_time=True, word="old")
    assert queries(path, tmp_path / "cache") == [row["query"] for row in rows("old")]
