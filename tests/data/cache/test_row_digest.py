"""What rows are, in one number: the same by every way that rows come in, another for every other row or order."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from embedtrain.config.losses import CoSENTConfig
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache import row_store
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import EXTRA_COLUMNS, TEXTS, RowDigest, read_sources, value_of
from embedtrain.data.rows import Documents, Example
from embedtrain.distributed.world import World
from tests.data.files import write, write_table

ROW = Example("q", Documents(("p", "r")), Documents(("n",)))


def digest(*rows: Example) -> str:
    row_digest = RowDigest()
    add(row_digest, rows)
    return str(row_digest)


def add(row_digest: RowDigest, rows: Sequence[Example]) -> None:
    texts = [pa.array([value_of(name)(row) for row in rows], type=TEXTS[name]) for name in row_store.TEXT_NAMES]
    row_digest.add(texts, {name: [value_of(name)(row) for row in rows] for name in EXTRA_COLUMNS})


def row(i: int) -> dict[str, Any]:
    return {"query": f"q{i}", "pos": [f"p{i}", f"ü{i}"], "neg": [f"n{i}.{j}" for j in range(i % 4)]}


def content(path: Path, needs: RowRequirements | None = None, cache: Cache | None = None, **options: Any) -> str:
    on_error = options.pop("on_error", OnError.stop)
    return read_sources([TrainSource(path=str(path), **options)], on_error, needs or RowRequirements(), cache)[
        0
    ].content


def test_the_digest_depends_on_every_value_and_its_position() -> None:
    changed = [
        replace(ROW, query="Q"),
        replace(ROW, positives=Documents(("r", "p"))),
        replace(ROW, positives=Documents(("p",)), negatives=Documents(("r", "n"))),
        replace(ROW, positives=Documents(("pr",))),
        replace(ROW, positives=Documents(("p", "", "r"))),
        Example(""),
        Example("qprn"),
        replace(ROW, positives=Documents(("p", "r"), (1.0, 0.5)), negatives=Documents(("n",), (0.0,))),
        replace(ROW, positives=Documents(("p", "r"), (1.0, 0.25)), negatives=Documents(("n",), (0.0,))),
        replace(ROW, positives=Documents(("p", "r"), ids=("p", "r"))),
        replace(ROW, negatives=Documents(("n",), ids=("n",))),
        replace(ROW, label=1),
        replace(ROW, label=0),
        replace(ROW, vectors=((1.0, 2.0),)),
        replace(ROW, vectors=((1.0,), (2.0,))),
        replace(ROW, instruction=""),
        replace(ROW, document_instruction=""),
        replace(ROW, instruction="1"),
        replace(ROW, max_negatives=1),
    ]
    digests = [digest(one) for one in (ROW, *changed)]
    assert len(set(digests)) == len(digests)
    assert digest(ROW, changed[0]) != digest(changed[0], ROW) != digest(ROW) != digest(ROW, ROW) != digest()
    assert digest(replace(ROW, negatives=replace(ROW.negatives, num_dropped=3))) == digest(ROW)
    # As it is row_store, in float32.
    assert digest(replace(ROW, vectors=((0.1,),))) == digest(replace(ROW, vectors=((0.10000000149011612,),)))


def test_digests_are_those_of_earlier_versions() -> None:
    """Runs compare them with what they recorded when they began."""
    documents = Documents(("p", "r"), (0.5, 0.25), ("a", "b")), Documents(("n",), (0.125,), ("c",))
    columns = {"label": 1, "vectors": ((1.0, 2.0),) * 4, "instruction": "i", "document_instruction": "d"}
    full = replace(ROW, positives=documents[0], negatives=documents[1], max_negatives=1, **columns)
    assert digest(full) == "00b030c46f5dabb4ddd97b9ad3bc76f0"


def test_joined_pieces_equal_the_whole() -> None:
    rows = [replace(ROW, query=f"q{i}") for i in range(20)]
    for cuts in ((0, 7, 20), (0, 1, 1, 19, 20), (0, 20, 20)):
        whole = RowDigest()
        for start, stop in pairwise(cuts):
            piece = RowDigest()
            add(piece, rows[start:stop])
            whole.join(RowDigest(piece.value), stop - start)
        assert str(whole) == digest(*rows)


def as_it_is(folder: Path, lines: list[bytes]) -> Path:
    return write(folder / "a.jsonl", *lines)


def packed(folder: Path, lines: list[bytes]) -> Path:
    return write(folder / "a.jsonl.gz", *lines)


def in_two_files(folder: Path, lines: list[bytes]) -> Path:
    write(folder / "d" / "a.jsonl", *lines[:100])
    return write(folder / "d" / "b.jsonl", *lines[100:]).parent


def with_blank_lines(folder: Path, lines: list[bytes]) -> Path:
    return write(folder / "a.jsonl", *(b"\n" + line for line in lines))


def as_one_array(folder: Path, lines: list[bytes]) -> Path:
    return write(folder / "a.json", b"[" + b",".join(lines) + b"]")


@pytest.mark.parametrize("how", [as_it_is, packed, in_two_files, with_blank_lines, as_one_array])
def test_the_digest_does_not_depend_on_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Path, list[bytes]], Path]
) -> None:
    lines = [json.dumps(row(i), ensure_ascii=False).encode() + b"\n" for i in range(300)]
    whole = content(write(tmp_path / "whole.jsonl", *lines))
    path = how(tmp_path, lines)
    monkeypatch.setattr(row_store, "PIECE_BYTES", 2000)
    monkeypatch.setattr(row_store, "ROWS_PER_BATCH", 13)
    assert content(path) == content(path, on_error=OnError.skip) == whole
    if how is as_it_is:
        cache = Cache(directory=tmp_path / "cache")
        assert content(path, cache=cache) == content(path, cache=cache) == whole
        assert content(path, replace(RowRequirements(), loss="gist"), negatives=1) == whole
        assert content(path, columns=["query", "pos"]) != whole
    lines[150] = lines[150].replace(b"q150", b"q15O")
    assert content(how(tmp_path / "changed", lines)) != whole


def test_extra_columns_have_the_same_digest_in_any_format(tmp_path: Path) -> None:
    table: dict[str, list[Any]] = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "score": [0.1, 0.7]}
    pairs = CoSENTConfig().row_requirements
    names = ("a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz")
    assert len({content(write_table(tmp_path / name, table), pairs) for name in names}) == 1
    table["score"][1] = 0.75
    assert content(write_table(tmp_path / "b.csv", table), pairs) != content(tmp_path / "a.csv", pairs)


def content_there(world: World, path: str, directory: str) -> str:
    row_store.PIECE_BYTES = 1000
    return content(Path(path), cache=Cache(directory=Path(directory)))


def test_several_processes_compute_the_same_digest_as_one(tmp_path: Path, ranks: Any) -> None:
    path = write(tmp_path / "a.jsonl", *map(row, range(300)))
    assert set(ranks(2, content_there, str(path), str(tmp_path / "cache"))) == {content(path)}
