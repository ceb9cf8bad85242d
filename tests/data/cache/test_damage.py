"""Flipped bits in cached rows, tokens and documents: every one is detected and repaired, or changes nothing."""

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache import cache as cache_files
from embedtrain.data.cache import row_store as stored
from embedtrain.data.cache import token_store as token_files
from embedtrain.data.cache.cache import Cache, Verification, build
from embedtrain.data.cache.document_store import MappedCorpus, documents_build
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.cache.token_store import TokenRequest, prepare_all
from embedtrain.data.rows import TextFormat
from embedtrain.data.sources.parts import part_of_file
from embedtrain.data.sources.reader import DocumentReader
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import DataError, UnreadableError
from embedtrain.utils.files import Checksums
from tests.data.files import write
from tests.small import small_tokenizer, text


class Data:
    """Sources of rows with texts and with ids of documents, and everything that a run reads of them."""

    def __init__(self, folder: Path) -> None:
        rows = [
            {"query": text(i, 4), "pos": [text(3 * i, 5)], "neg": [text(i + 9, 6)], "prompt": ""} for i in range(60)
        ]
        path = write(folder / "rows.jsonl", *rows)
        corpus = [{"_id": f"d{i}", "title": "", "text": text(5 * i, 9)} for i in range(50)]
        self.corpus = write(folder / "beir" / "corpus.jsonl", *corpus)
        write(folder / "beir" / "queries.jsonl", *({"_id": f"q{i}", "text": text(i, 3)} for i in range(20)))
        judgements = ["query-id\tcorpus-id\tscore\n", *(f"q{i}\td{i * 2}\t1\n" for i in range(20))]
        (folder / "beir" / "qrels").mkdir()
        (folder / "beir" / "qrels" / "train.tsv").write_text("".join(judgements))
        self.sources = [TrainSource(path=str(path)), TrainSource(path=str(folder / "beir"))]
        self.tokenizer = TextTokenizer(small_tokenizer(), 16)
        self.directory = folder / "cache"

    def contents(self) -> list[Any]:
        """All rows, tokens and documents, read through the cache."""
        cache = Cache(directory=self.directory)
        reader = DocumentReader([part_of_file(str(self.corpus))], "corpus")
        corpus = documents_build(reader, OnError.stop, cache)
        build([corpus])
        documents = MappedCorpus(corpus.directory, reader)
        stores = read_sources(self.sources, OnError.stop, RowRequirements(), cache)
        contents: list[Any] = [[list(texts) for texts in documents.unique()], [documents.text("d7")]]
        for rows, tokens in zip(stores, self.tokens(stores, cache), strict=True):
            contents.append([(row.query, row.positives.texts, row.negatives.texts, row.location.line) for row in rows])
            contents.append([array.tolist() for array in vars(tokens).values() if isinstance(array, np.ndarray)])
            contents.append(str(rows.report).replace("; cached", ""))
        return contents

    def tokens(self, stores: Any, cache: Cache) -> Any:
        return prepare_all([TokenRequest(store, TextFormat()) for store in stores], self.tokenizer, cache)

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(self.directory.rglob("*")) if path.is_file()}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Data]:
    monkeypatch.setattr(stored, "PIECE_BYTES", 2000)
    monkeypatch.setattr(token_files, "ROWS_PER_PART", 20)
    yield Data(tmp_path)


def flip_bits(data: Data, count: int, seed: int, capsys: pytest.CaptureFixture[str]) -> Counter[str]:
    """Flip one bit at a time; everything that is read stays equal, and so do the files once they are repaired."""
    draw = random.Random(seed)
    expected = data.contents()
    original = data.files()
    paths = [path for path, content in original.items() if content]
    outcomes: Counter[str] = Counter()
    for number in range(count):
        path = paths[number % len(paths)]
        damaged, bit = bytearray(original[path]), draw.randrange(8 * len(original[path]))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        is_interrupted = draw.random() < 0.3 and path.name != "complete.json"
        if is_interrupted:  # before the results were joined, or before the folder was marked as complete
            folder = data.directory / path.relative_to(data.directory).parts[0]
            (folder / "complete.json").unlink()
            if draw.random() < 0.5 and "joined" not in str(path) and (folder / "rows-00000").exists():
                shutil.rmtree(folder / "joined")
        capsys.readouterr()
        assert data.contents() == expected, (path, bit)
        lines = capsys.readouterr().err.splitlines()
        repaired = {file: content for file, content in data.files().items() if file != path}
        assert repaired == {file: content for file, content in original.items() if file != path}, (path, bit)
        if path.read_bytes() == original[path]:
            folder = data.directory / path.relative_to(data.directory).parts[0]
            assert len(lines) <= 1 and all(line.startswith(str(folder)) for line in lines), lines
            outcomes["built again, one line" if lines else "written again"] += 1
        else:
            assert path.parent.name == "checksums", path  # they are read only if the folder is damaged
            outcomes["not read"] += 1
            path.write_bytes(original[path])
    return outcomes


def test_a_flipped_bit_is_repaired_or_changes_nothing(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = flip_bits(data, 25, 1, capsys)
    assert outcomes["built again, one line"] > 5


@pytest.mark.slow
def test_many_flipped_bits(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = flip_bits(data, 1000, 2, capsys)
    with capsys.disabled():
        print(dict(outcomes))
    assert outcomes["built again, one line"] > 300


def test_damage_beyond_what_is_verified_at_once(
    data: Data, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread detects it: the run ends with one sentence, and the next one builds the file again."""
    expected = data.contents()
    original = data.files()
    monkeypatch.setattr(cache_files, "VERIFIED_BYTES", 0)
    path = next(path for path in original if path.match("tokens-*/joined/values.bin"))
    path.write_bytes(bytes([original[path][0] ^ 1]) + original[path][1:])
    errors: list[str] = []
    for rank in range(2):  # of two ranks on this host, one reads the damaged block
        cache = Cache(directory=data.directory, verification=Verification(local_rank=rank, local_size=2))
        data.tokens(read_sources(data.sources, OnError.stop, RowRequirements(), cache), cache)
        try:
            cache.verification.wait()
        except DataError as error:
            errors.append(str(error))
            with pytest.raises(DataError):
                cache.verification.check()
    assert errors == [f"{path} is damaged in the cache: start the same command again, and it is built again"]
    monkeypatch.undo()
    assert data.contents() == expected
    assert f"{path}: damaged in the cache, and built again" in capsys.readouterr().err
    assert data.files() == original


def test_a_folder_is_verified_that_is_added_while_the_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_files, "VERIFIED_BYTES", 0)
    for name in ("intact", "damaged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "values").write_text("1")
        Checksums.of(tmp_path / name).write(tmp_path / name / cache_files.COMPLETE)
    (tmp_path / "damaged" / "values").write_text("2")
    ending = threading.Event()

    def end_slowly(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is Verification._verify.__code__:
            ending.set()
            time.sleep(0.3)

    threading.setprofile(end_slowly)
    try:
        verified = Verification()
        verified.add(tmp_path / "intact")
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert ending.wait(10)
    verified.add(tmp_path / "damaged")
    with pytest.raises(DataError, match="damaged/values is damaged"):
        verified.wait()


def test_an_error_of_the_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "VERIFIED_BYTES", 0)
    (tmp_path / "values").write_text("1")
    Checksums.of(tmp_path).write(tmp_path / cache_files.COMPLETE)
    (tmp_path / "values").unlink()
    (tmp_path / "values").symlink_to("/proc/self/mem")  # reading it fails with EIO
    verified = Verification()
    verified.add(tmp_path)
    with pytest.raises(UnreadableError, match=r"values cannot be read \(Input/output error\)"):
        verified.wait()
    assert (tmp_path / cache_files.COMPLETE).exists()


def test_rows_are_read_from_the_cache_only(data: Data) -> None:
    """A source that is truncated or deleted after the start changes nothing."""
    cache = Cache(directory=data.directory)
    stores = read_sources(data.sources, OnError.stop, RowRequirements(), cache)
    rows = [list(store) for store in stores]
    Path(data.sources[0].path).write_bytes(b"")
    shutil.rmtree(data.sources[1].path)
    assert [list(store) for store in stores] == rows
