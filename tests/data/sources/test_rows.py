"""Training rows of every kind of file, and the errors of files and rows."""

import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedtrain.config.recipe import DataFormat, OnError, TrainSource
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.rows import Example
from embedtrain.data.sources.parts import may_be_hub_id, stem_of
from embedtrain.data.sources.resolve import source_names
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from tests.data.files import assert_error, error_of, line, read, write, write_table

GOOD = {"query": "what is rust", "pos": ["a language"], "neg": ["iron oxide", "a game"]}


def texts(examples: list[Example]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(e.query, e.positives.texts, e.negatives.texts) for e in examples]


# Rows


def test_flagembedding_rows_with_location(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, b"\n", {"query": "2", "pos": ["x", "y"]}, {**GOOD, "neg": None})
    examples, report = read(path)
    assert texts(examples) == [
        ("what is rust", ("a language",), ("iron oxide", "a game")),
        ("2", ("x", "y"), ()),
        ("what is rust", ("a language",), ()),
    ]
    assert [(e.location.file, e.location.line, e.location.source) for e in examples] == [
        (str(path), n, 0) for n in (1, 3, 4)
    ]
    assert str(report) == "a: FlagEmbedding rows, 3 rows from a.jsonl; 0 to 2 negatives a row"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_byte_order_mark_line_ends_and_no_last_line_end(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"\xef\xbb\xbf" + line(GOOD).replace(b"\n", b"\r\n"), line(GOOD)[:-1])
    assert len(read(path)[0]) == 2


def test_compression_is_detected_by_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", GOOD).rename(tmp_path / "a.jsonl")
    assert len(read(path)[0]) == 1


def test_line_separators_within_a_text_do_not_split_the_line(tmp_path: Path) -> None:
    examples, _ = read(write(tmp_path / "a.jsonl", {"query": "a\u2028b\u0085c", "pos": ["d"]}))
    assert examples[0].query == "a\u2028b\u0085c"


def test_folder_and_glob_are_sorted_and_hidden_folders_left_out(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl.gz", "c.jsonl", ".cache/x.jsonl"):
        write(tmp_path / name, {"query": name, "pos": ["x"]})
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "settings.json").write_text("{}")
    examples, report = read(tmp_path)
    assert [e.query for e in examples] == ["a/z.jsonl.gz", "b.jsonl", "c.jsonl"]
    assert "3 rows from 3 files (z.jsonl.gz, b.jsonl, c.jsonl)" in str(report)
    assert [e.query for e in read(tmp_path / "*.jsonl")[0]] == ["b.jsonl", "c.jsonl"]
    assert [e.query for e in read(tmp_path / "**" / "*.jsonl*")[0]] == ["a/z.jsonl.gz", "b.jsonl", "c.jsonl"]


@pytest.mark.parametrize("folder", ["retrieval", "sts"])
def test_examples_of_flagembedding(shared_data: Path, folder: str) -> None:
    path = shared_data / "flagembedding-examples" / "embedder" / folder
    examples, report = read(path)
    rows = [json.loads(text) for file in sorted(path.glob("*.jsonl")) for text in file.open(encoding="utf-8")]
    assert [e.query for e in examples] == [row["query"] for row in rows]
    assert [list(e.positives.texts) for e in examples] == [row["pos"] for row in rows]
    for example, row in zip(examples, rows, strict=True):
        assert list(example.negatives.texts) == [n for n in dict.fromkeys(row["neg"]) if n not in row["pos"]]
    assert "FlagEmbedding rows" in str(report)
    assert "7 drawn each epoch" in str(report)
    assert "instructions" in str(report)
    assert {e.instruction for e in examples} == {row["prompt"] for row in rows}


def test_pretraining_rows_of_flagembedding_are_rejected(shared_data: Path) -> None:
    path = shared_data / "flagembedding-examples" / "llara" / "pretrain"
    assert 'no "query" in this row' in error_of(path, format=DataFormat.flagembedding)


def test_scored_tables_are_rejected_and_bitexts_read(shared_data: Path) -> None:
    assert "'score' makes these scored pairs" in error_of(shared_data / "stsb" / "en" / "dev.tsv")
    assert "'label' makes these scored pairs" in error_of(shared_data / "pawsx-zh" / "dev.tsv")
    examples, report = read(shared_data / "tatoeba" / "deu-eng.tsv")
    assert len(examples) == 1000
    assert "columns deu = query, eng = positive" in str(report)
    chosen, _ = read(shared_data / "stsb" / "en" / "dev.tsv", columns=["sentence2", "sentence1"])
    plain, _ = read(shared_data / "stsb" / "en" / "dev.tsv", columns=["sentence1", "sentence2"])
    assert [(e.query, e.positives.texts) for e in chosen] == [(e.positives.texts[0], (e.query,)) for e in plain]
    assert len(chosen) == 1500


# Columns by order


TABLE = {"anchor": ["q1", "q2"], "positive": ["p1", "p2"], "negative": ["n1", None], "negative_2": ["m1", "m2"]}
TABLE_TEXTS = [("q1", ("p1",), ("n1", "m1")), ("q2", ("p2",), ("m2",))]


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.jsonl.gz", "t.csv", "t.csv.gz", "t.tsv", "t.tsv.gz"])
def test_columns_by_order_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, TABLE)
    examples, report = read(path)
    assert texts(examples) == TABLE_TEXTS
    assert "columns anchor = query, positive = positive, negative + negative_2 = negatives" in str(report)
    swapped, report = read(path, columns=["positive", "anchor"])
    assert texts(swapped) == [("p1", ("q1",), ()), ("p2", ("q2",), ())]
    assert "no negatives" in str(report)
    assert "'lost'" in error_of(path, columns=["anchor", "lost"])
    with pytest.raises(ConfigError, match="at least two"):
        read(path, columns=["anchor"])
    with pytest.raises(ConfigError, match=r"columns .*format=flagembedding"):
        read(path, columns=["anchor", "positive"], format=DataFormat.flagembedding)


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl"])
def test_columns_of_lists_and_flagembedding_rows_in_any_file(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, {"q": ["a"], "p": [["b", "c"]], "n": [["d", "e", "b"]]})
    examples, report = read(path)
    assert texts(examples) == [("a", ("b", "c"), ("d", "e"))]
    assert "1 negatives left out that equal a positive" in str(report)
    other = write_table(tmp_path / f"f-{name}", {"query": ["a"], "pos": [["b"]], "neg": [["d"]], "id": [7]})
    examples, report = read(other)
    assert texts(examples) == [("a", ("b",), ("d",))]
    assert "FlagEmbedding rows" in str(report)
    assert "not used: id" in str(report)


def test_csv_quotes_and_tsv_does_not(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('a,b\n"x, ""y""\nz",p\nq,r\n')
    examples, _ = read(tmp_path / "t.csv")
    assert texts(examples) == [('x, "y"\nz', ("p",), ()), ("q", ("r",), ())]
    assert [e.location.line for e in examples] == [2, 4]  # where they begin
    (tmp_path / "t.tsv").write_text('a\tb\n"x\t"y" z\n')
    assert texts(read(tmp_path / "t.tsv")[0]) == [('"x', ('"y" z',), ())]


def test_long_cells(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\nq," + "x" * 300_000 + "\n")
    assert len(read(tmp_path / "t.csv")[0][0].positives.texts[0]) == 300_000


def test_a_pandas_index_is_not_a_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["q"], "b": ["p"], "__index_level_0__": [0]}), tmp_path / "t.parquet")
    assert texts(read(tmp_path / "t.parquet")[0]) == [("q", ("p",), ())]
    (tmp_path / "t.csv").write_text(",a,b\n0,q,p\n")
    assert texts(read(tmp_path / "t.csv")[0]) == [("q", ("p",), ())]
    (tmp_path / "t.csv").write_text("a,,b\nq,x,p\n")
    assert "t.csv:2: column 2 of the header has no name, and this row has 'x'" in error_of(tmp_path / "t.csv")
    assert texts(read(tmp_path / "t.csv", columns=["a", "b"])[0]) == [("q", ("p",), ())]


def test_local_folder_as_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "pairs"
    (folder / "data").mkdir(parents=True)
    write_table(folder / "data" / "train-0.parquet", TABLE)
    write_table(
        folder / "data" / "test-0.parquet", {"anchor": ["t"], "positive": ["u"], "negative": ["v"], "negative_2": ["w"]}
    )
    card = (
        "---\nconfigs:\n- config_name: triplets\n  data_files:\n"
        "  - {split: train, path: data/train-*}\n  - {split: test, path: data/test-*}\n---\n"
    )
    (folder / "README.md").write_text(card)
    examples, report = read(folder, subset="triplets")
    assert texts(examples) == TABLE_TEXTS
    assert [e.location.line for e in examples] == [1, 2]
    assert "columns anchor = query" in str(report)
    assert texts(read(folder, split="test")[0]) == [("t", ("u",), ("v", "w"))]
    assert "split none" in error_of(folder, split="none")
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(TABLE)}).save_to_disk(str(saved))
    assert texts(read(saved, columns=["anchor", "positive"])[0]) == [("q1", ("p1",), ()), ("q2", ("p2",), ())]
    error = error_of(saved, split="validation")
    assert "has no split validation, but train; write {path: " in error
    assert "KeyError" not in error


def test_a_split_of_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_table(tmp_path / "d" / "train.csv", {"a": ["q"], "b": ["p"]})
    write_table(tmp_path / "d" / "test.csv", {"a": ["t"], "b": ["u"]})
    examples, report = read(tmp_path / "d")
    assert texts(examples) == [("q", ("p",), ())]
    assert "1 rows from train.csv; left out: test.csv (another split by name)" in str(report)
    assert texts(read(tmp_path / "d", split="test")[0]) == [("t", ("u",), ())]
    with pytest.raises(ConfigError, match="split=test choose"):
        read(tmp_path / "d" / "train.csv", split="test")
    with pytest.raises(ConfigError, match="subset=x"):
        read(tmp_path / "d" / "*.csv", subset="x")
    with pytest.raises(ConfigError, match="negatives=-1"):
        read(tmp_path / "d", negatives=-1)


# Errors


BAD_LINES = {
    b'{"query": "a", "pos": ["b"]\n': "broken JSON",
    b"not json\n": "broken JSON",
    line([GOOD]): "must be a JSON object {...}, not a list",
    line("text"): "must be a JSON object {...}, not a text",
    line({"query": 7, "pos": ["b"]}): '"query" must be a text, not a number (7)',
    line({"query": True, "pos": ["b"]}): '"query" must be a text, not a truth value',
    line({"query": None, "pos": ["b"]}): '"query" must be a text, not nothing (null)',
    line({"query": ["a"], "pos": ["b"]}): "\"query\" must be a text, not a list (['a'])",
    line({"query": "a", "pos": [["b", "c", "d"]]}): 'element 1 of "pos" is a list inside a list',
    line({"query": "a", "pos": ["b"], "neg": ["c", 4]}): 'element 2 of "neg" must be a text, not a number (4)',
    line({"query": "a", "pos": ["b"], "neg": {"c": 4}}): '"neg" must be a list of texts, not an object',
    line({"query": "a", "pos": "b"}): "\"pos\" must be a list of texts, not a text ('b'): put it in brackets",
    line({"query": "a", "pos": None}): '"pos" must be a list of texts, not nothing (null)',
    line({"query": "a", "pos": []}): "needs at least one positive",
    line({"query": "", "pos": ["b"]}): '"query" is an empty text',
    line({"query": "a", "pos": ["b", " \t\n"]}): 'element 2 of "pos" is an empty text',
    line({"query": "a", "neg": ["b"]}): 'no "pos" in this row, which has: query, neg',
    line({"pos": ["b"]}): 'no "query" in this row',
    b'{"query": "caf\xe9", "pos": ["b"]}\n': "not UTF-8 (byte 0xe9 in ",
    b'{"query": "a\\ud83d", "pos": ["b"]}\n': "half a character (a lone surrogate)",
    b'{"query": ' + b"[" * 200_000 + b"\n": "JSON that cannot be read",
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(("bad", "message"), BAD_LINES.items(), ids=list(BAD_LINES.values()))
def test_bad_row_in_the_middle(tmp_path: Path, bad: bytes, message: str, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", GOOD, GOOD, bad, GOOD)
    error = error_of(path)
    assert error.startswith(f"{path}:3: ")
    assert message in error
    assert len(error) < len(str(path)) + 200
    examples, report = read(path, OnError.skip)
    assert [e.location.line for e in examples] == [1, 2, 4]
    assert f"1 bad rows skipped ({path}:3: " in str(report)
    assert message in str(report)


def test_a_first_row_without_positives_is_not_taken_for_columns(tmp_path: Path) -> None:
    assert 'no "pos"' in error_of(write(tmp_path / "a.jsonl", {"query": "a", "neg": ["b"]}))


def test_a_column_that_a_later_row_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": "a", "p": "b"}, {"q": "a", "passage": "b"})
    assert_error(f'^{path}:2: no "p" .*q, passage$', path)


def test_skipped_rows_are_counted_and_the_first_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[b"{\n"] * 5, GOOD)
    _, report = read(path, OnError.skip)
    assert report.rows.num_skipped == 5
    assert len(report.problems) == 3
    assert str(report).count("broken JSON") == 1
    assert f"{path}:1, 2, 3 and 2 more: broken JSON" in str(report)


@pytest.mark.parametrize("on_error", list(OnError))
def test_unreadable_files_stop_with_any_on_error(tmp_path: Path, on_error: OnError) -> None:
    draw = random.Random(0)
    whole = gzip.compress(b"".join(line({"query": draw.randbytes(40).hex(), "pos": ["b"]}) for _ in range(2000)))

    def error(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return error_of(tmp_path / name, on_error=on_error)

    cut = error("cut.jsonl.gz", whole[: len(whole) // 2])
    assert "damaged or truncated" in cut
    assert int(cut.split(":")[1]) > 500
    assert "damaged or truncated" in error("tail.jsonl.gz", whole[:-8])
    assert "damaged or truncated" in error("crc.jsonl.gz", whole[:-8] + b"\0" * 8)
    assert "damaged or truncated" in error("header.jsonl.gz", whole[:2] + b"\xff" + whole[3:])
    packer = zlib.compressobj(wbits=31)
    block = packer.compress(line(GOOD) * 100) + packer.flush(zlib.Z_FULL_FLUSH)
    assert "damaged or truncated" in error("body.jsonl.gz", block + b"\xff" * 200)  # no such kind of block
    assert "is not a gzip file" in error("plain.jsonl.gz", line(GOOD))
    assert "is UTF-16" in error("a.jsonl", '{"query": "a", "pos": ["b"]}\n'.encode("utf-16"))
    assert "cannot be read as Parquet" in error("a.parquet", b"PAR1 and no more")
    assert "holds no rows" in error("empty.jsonl", b"") or on_error == OnError.skip
    assert "no row" in error("empty.jsonl.gz", b"") or on_error == OnError.stop
    assert "kind of file" in error("a.txt", b"text")
    assert "no such file" in error_of(tmp_path / "missing.jsonl", on_error=on_error)
    assert "no such file" in error_of(tmp_path / "missing", on_error=on_error)
    assert "no file matches" in error_of(tmp_path / "no*.jsonl", on_error=on_error)
    (tmp_path / "bare").mkdir()
    assert "holds no training files" in error_of(tmp_path / "bare", on_error=on_error)


@pytest.mark.parametrize(
    ("path", "may_be"),
    [("owner/name", True), ("name", True), ("owner/set.v2", True), ("中文/数据", True)]
    + [(path, False) for path in ("a/b/c", "/a", "a/", "./a", "~/a", "", "a b", "a.tsv", "owner/a.JSONL.gz")],
)
def test_paths_that_may_be_hub_ids(path: str, may_be: bool) -> None:
    assert may_be_hub_id(path) == may_be


def test_stem_removes_only_suffixes_of_data_files() -> None:
    names = ["a.jsonl", "b/a.v2.TSV.gz", "a.parquet.gz", "set.v2", ".tsv", "a.json.json"]
    assert [stem_of(Path(name)) for name in names] == ["a", "a.v2", "a.parquet.gz", "set.v2", ".tsv", "a.json"]


def test_unknown_hub_data_set() -> None:
    error = error_of("nobody-at-all/no-such-data")
    assert error.startswith("nobody-at-all/no-such-data: neither a local file nor a data set that can be opened")


def test_mixed_folder_and_source_without_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    write_table(tmp_path / "b.csv", TABLE)
    assert "holds CSV and JSONL files" in error_of(tmp_path)
    path = write(tmp_path / "bad.jsonl", b"{\n")
    error = error_of(path, on_error=OnError.skip)
    assert "no row that can be trained on (1 row skipped, the first: " in error


def test_empty_files_are_counted_separately_from_bad_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    message = "no row that can be trained on ({} skipped, the first: "
    assert message.format("1 empty file") in error_of(tmp_path, on_error=OnError.skip)
    write(tmp_path / "b.jsonl", b"{\n", b"{\n")
    assert message.format("2 rows and 1 empty file") in error_of(tmp_path, on_error=OnError.skip)


def test_an_empty_file_among_others(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b"")
    write(tmp_path / "b.jsonl", GOOD)
    assert_error(f"^{tmp_path / 'a.jsonl'}: holds no rows", tmp_path)
    examples, report = read(tmp_path, OnError.skip)
    assert len(examples) == 1
    assert f"1 bad rows skipped ({tmp_path / 'a.jsonl'}: holds no rows)" in str(report)


def test_bad_rows_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,b\nq,p\nq\nq,p,x\nq,caf\xe9\n,p\nq,\nq,p\n")
    assert_error(f"^{path}:3: 1 cell .*header has 2", path)
    examples, report = read(path, OnError.skip)
    assert [e.location.line for e in examples] == [2, 8]
    assert report.rows.num_skipped == 5
    assert report.problems[2].startswith(rf"{path}:5: not UTF-8 (byte 0xe9 in 'q,caf\xe9')")
    path.write_text("a,a\nq,p\n")
    assert "names a column twice" in error_of(path)
    path.write_text("a\nq\n")
    assert "rows need a query and a positive" in error_of(path)
    path.write_text("a,b\n")
    assert "holds no rows" in error_of(path)

    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": ["q", "q"], "b": ["p", None]}), path)
    assert_error(f'^{path}: row 2: column "b" .*null', path)
    pq.write_table(pa.table({"a": ["q"], "b": [1.5]}), path)
    assert_error(f'^{path}: row 1: column "b" .*1.5', path)
    latin = pa.array([b"good", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"a": ["q", "q"], "b": latin}), path)
    assert error_of(path).startswith(f"{path}: row 2: not UTF-8")
    assert len(read(path, OnError.skip)[0]) == 1


# Many sources, many rows


def test_sources_keep_their_rows_and_distinct_names(tmp_path: Path) -> None:
    sources = [
        TrainSource(path=str(write(tmp_path / "one" / "train.jsonl.gz", GOOD, GOOD))),
        TrainSource(path=str(write(tmp_path / "two" / "train.jsonl", GOOD))),
        TrainSource(path=str(tmp_path / "two" / "*.jsonl"), name="named"),
    ]
    stores = read_sources(sources, OnError.stop)
    assert [[e.location.source for e in store] for store in stores] == [[0, 0], [1], [2]]
    assert [store.report.name for store in stores] == ["one/train", "two/train", "named"]
    assert source_names([TrainSource(path="a/b/*.jsonl"), TrainSource(path="org/set"), TrainSource(path="./d/")]) == [
        "b",
        "set",
        "d",
    ]
    assert str(stores[1].report).startswith("two/train: FlagEmbedding rows")
    # A name that is given stays, whatever the end of a path before it.
    assert source_names([TrainSource(path="a/b.tsv"), TrainSource(path="x", name="b")]) == ["b-2", "b"]
    with pytest.raises(ConfigError, match="empty"):
        read_sources([], OnError.stop)


def test_many_rows_take_little_more_than_their_texts(tmp_path: Path) -> None:
    rows = [line({"query": f"q{i}", "pos": [f"p{i} " * 10], "neg": [f"n{i}", "x" * 20]}) for i in range(1000)]
    path = write(tmp_path / "a.jsonl", *rows * 50)
    before = pa.total_allocated_bytes()
    (store,) = read_sources([TrainSource(path=str(path))], OnError.stop)
    assert len(store) == 50_000
    assert store[49_999].location.line == 50_000
    assert store[23_456].query == "q456"
    num_characters = sum(map(len, store.texts()))
    # Offsets and line numbers: some 40 bytes a row. As Python objects these rows take about 600 bytes each.
    assert store.num_bytes < num_characters + 50_000 * 50
    assert pa.total_allocated_bytes() - before < 0.1 * store.num_bytes  # they lie on disk


def read_and_report(world: World, path: str) -> tuple[str, str]:
    try:
        read_sources([TrainSource(path=path)], OnError.stop)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", f"rank {world.rank} read it"


def test_every_rank_raises_the_same_error(tmp_path: Path, ranks: Any) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, {"query": 3, "pos": ["b"]}, GOOD)
    answers = ranks(2, read_and_report, str(path))
    assert (
        answers[0]
        == answers[1]
        == ("DataError", f'{path}:2: "query" must be a text, not a number (3): write it as a text, in quotation marks')
    )
