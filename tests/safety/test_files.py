"""Training data, evaluation sets and cached vectors made by an attacker: nothing in them is run or unpickled, and no
small file takes all memory or waits for ever."""

import gzip
import io
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from embedtrain.commands.mine.stats import MiningStats
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import COMPLETE, is_complete
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.retrieval import read_corpus
from embedtrain.evaluation.sets import read_set
from tests.safety.payloads import MARKER, Bomb, attempt, code, deep, plant_module, plant_pickle
from tests.small import save_guide, small_model, write_rows

ROWS = [{"query": f"alpha {i}", "positive": f"beta {i}"} for i in range(4)]


def script(folder: Path, marker: Path) -> None:
    """What `datasets` once ran: a module called like the folder."""
    write_rows(folder / "train.jsonl", 4)
    for name in (folder.name, "dataset", "__init__"):
        (folder / f"{name}.py").write_text(code(marker))
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\n")


def script_alone(folder: Path, marker: Path) -> None:
    (folder / f"{folder.name}.py").write_text(code(marker))
    (folder / "README.md").write_text("---\ndataset_info: {}\n---\n")


def tagged_card(folder: Path, marker: Path) -> None:
    write_rows(folder / "train.jsonl", 4)
    (folder / "README.md").write_text("---\nconfigs: !!python/object/apply:evil.Mod []\n---\n")


def pickled_files(folder: Path, marker: Path) -> None:
    plant_pickle(folder / "train.pkl", marker)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: train.pkl\n---\n")


def pickled_builder(folder: Path, marker: Path) -> None:
    """The builder that unpickles, requested by name in the card."""
    pickled_files(folder, marker)
    card = "---\nbuilder_name: pandas\nconfigs:\n- config_name: default\n  data_files: train.pkl\n---\n"
    (folder / "README.md").write_text(card)


def pickled_types(folder: Path, marker: Path) -> None:
    """An Arrow column of an extension type whose class was unpickled by pyarrow before version 14."""
    field = pa.field("query", pa.string(), metadata={
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Bomb(marker)),
    })  # fmt: skip
    schema = pa.schema([field, pa.field("positive", pa.string())])
    table = pa.table([[row["query"] for row in ROWS], [row["positive"] for row in ROWS]], schema=schema)
    with pa.OSFile(str(folder / "train.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_table(table)


def pickled_parquet(folder: Path, marker: Path) -> None:
    huge = {b"pandas": pickle.dumps(Bomb(marker)), b"huggingface": deep("[", "]").encode()}
    pq.write_table(pa.Table.from_pylist(ROWS).replace_schema_metadata(huge), folder / "train.parquet")


def odd_state(folder: Path, marker: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(folder))
    state = json.loads((folder / "state.json").read_text())
    state["_format_type"] = "evil.Mod"
    (folder / "state.json").write_text(json.dumps(state))


def deep_state(folder: Path, marker: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(str(folder))
    (folder / "state.json").write_text(deep("[", "]"))


def deep_rows(folder: Path, marker: Path) -> None:
    (folder / "train.jsonl").write_text(f'{{"query": "a", "pos": {deep("[", "]")}}}\n')


# What lies in a folder of training data, and words of the sentence; "" where its rows can be used all the same.
FOLDERS = {
    "script beside rows": (script, "Dataset scripts are no longer supported"),
    "script alone": (script_alone, "Dataset scripts are no longer supported"),
    "tagged card": (tagged_card, "could not determine a constructor for the tag"),
    "pickles": (pickled_files, "train.pkl"),
    "a builder that unpickles": (pickled_builder, "train.pkl"),
    "pickled types": (pickled_types, ""),
    "pickled metadata": (pickled_parquet, ""),
    "state of save_to_disk": (odd_state, "evil.Mod"),
    "deep state": (deep_state, "recursion"),
    "deep rows": (deep_rows, "JSON that cannot be read"),
}


ENDLESS = gzip.compress(b"x" * 2**20, 1) * 65  # one line of 65 MiB


def compressed(start: str) -> bytes:
    return gzip.compress(start.encode()) + ENDLESS


def arrow_stream(old: bytes = b"", new: bytes = b"") -> bytes:
    """Two rows whose bytes are changed."""
    table = pa.table({"query": ["aaaaaaaa", "bbbbbbbb"], "positive": ["cccccccc", "dddddddd"]})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    assert old in content
    return content.replace(old, new) if old else content


def arrow_columns() -> bytes:
    """One row of twenty thousand columns."""
    table = pa.table({f"c{i}": ["x"] for i in range(20_000)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


OFFSETS = struct.pack("<iii", 0, 8, 16)
NAMES = [f"c{i}" for i in range(100_000)]
# The content of a file, and words of the sentence of each reader.
FILES = {
    "line.jsonl.gz": (compressed('{"query": "'), "line.jsonl.gz:1: a line of more than 67.1 MB"),
    "line.csv.gz": (compressed('query,positive\na,"'), "line.csv.gz:2: a line of more than 67.1 MB"),
    "quote.csv.gz": (
        gzip.compress(b'query,positive\na,"' + (b"x" * 1023 + b"\n") * 2**16),
        "quote.csv.gz:2: a row of more than 67.1",
    ),
    "outside.arrow": (arrow_stream(OFFSETS, struct.pack("<iii", 0, 8, 2**31 - 1)), "cannot be read as Arrow"),
    "before.arrow": (arrow_stream(OFFSETS, struct.pack("<iii", -(2**30), 8, 16)), "cannot be read as Arrow"),
    "long.arrow": (arrow_stream(struct.pack("<q", 16), struct.pack("<q", 2**60)), "cannot be read as Arrow"),
    "columns.arrow": (arrow_columns(), "20,000 columns"),
    "names.csv": ("\n".join([",".join(NAMES), ",".join(["1"] * len(NAMES))]).encode(), "100,000 columns"),
    "twice.jsonl": (json.dumps(dict.fromkeys(NAMES)).replace('"c0"', '"c99999"').encode(), "twice"),
    "deep.jsonl": (f'{{"query": "a", "positive": {deep("[", "]", 900)}}}'.encode(), "deep.jsonl:1: "),
    "digits.jsonl": (
        f'{{"query": "a", "positive": {"1" * 10**6}}}'.encode(),
        "digits.jsonl:1: JSON that cannot be read",
    ),
}


def read_rows(path: Path) -> None:
    """Read all training rows; a bad row is an error."""
    reader = SourceReader(TrainSource(path=str(path)), "source", TEXTS_ONLY)
    layout = reader.detect_layout(OnError.stop)
    for piece in reader.pieces(2**20):
        for line, row in reader.rows(piece, layout):
            if isinstance(row, BadRow):
                raise DataError(f"{piece.part.location(line)}: {row}")


READERS = {
    "training": read_rows,
    "evaluation": lambda path: read_set(EvaluationSet(path=str(path))),
    "corpus": read_corpus,
}


@pytest.mark.parametrize("name", FILES)
def test_a_small_file_that_expands(tmp_path, name):
    content, words = FILES[name]
    (tmp_path / name).write_bytes(content)
    for reader in READERS.values():
        with pytest.raises(DataError) as caught:
            reader(tmp_path / name)
        assert name in str(caught.value)
        assert words in str(caught.value) or reader is not read_rows
        assert len(str(caught.value)) < 2000
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz"])
def test_pipes_and_devices_are_not_opened(tmp_path, suffix):
    pipe, device = tmp_path / f"pipe{suffix}", tmp_path / f"device{suffix}"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        for reader in READERS.values():
            with pytest.raises(DataError) as caught:
                reader(path)
            assert path.name in str(caught.value)
        with pytest.raises(DataError, match="a pipe, a socket or a device"):
            read_rows(path.with_name(f"{path.name[:3]}*"))


def test_a_document_of_ten_megabytes_and_three_hundred_columns(tmp_path):
    row = {"query": "a", "positive": "b " * 5_000_000, **{f"note{i}": "" for i in range(298)}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "rows.csv").write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    (tmp_path / "rows.arrow").write_bytes(arrow_stream())
    for name in ("rows.jsonl", "rows.csv"):
        reader = SourceReader(
            TrainSource(path=str(tmp_path / name), columns=["query", "positive"]), "source", TEXTS_ONLY
        )
        (piece,) = reader.pieces(2**30)
        ((_, texts),) = reader.rows(piece, reader.detect_layout(OnError.stop))
        assert "b " * 5_000_000 in str(texts)
    read_rows(tmp_path / "rows.arrow")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_guide(small_model("bert"), folder)
    write_rows(folder / "train.jsonl", 8)
    plant_module(folder, folder / MARKER)
    for name, (make, _) in FOLDERS.items():
        location = folder / name.replace(" ", "_")
        location.mkdir()
        make(location, folder / MARKER)
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_data(ranks, workshop, name):
    location = name.replace(" ", "_")
    (inspected,) = ranks(1, attempt, "inspect", workshop, [f"data={location}"])
    (evaluated,) = ranks(1, attempt, "evaluate", workshop, ["model=guide", f"sets=[{location}]", "output_dir=metrics"])
    for outcome in (inspected, evaluated):
        assert not outcome.ran
        assert "\n" not in outcome.message
    words = FOLDERS[name][1]
    assert words in inspected.message + " ".join(inspected.printed.split())
    assert inspected.kind in (("DataError", "exit 1") if words else ("",))
    assert evaluated.kind in (("DataError",) if words else ("", "DataError"))


def test_cached_vectors(ranks, workshop):
    """`vectors_dir`: object arrays and pickles beside stored vectors are ignored; altered vectors are encoded again."""
    (workshop / "beir" / "qrels").mkdir(parents=True)
    (workshop / "beir" / "corpus.jsonl").write_text('{"_id": "d", "text": "alpha beta"}\n')
    (workshop / "beir" / "queries.jsonl").write_text('{"_id": "q", "text": "alpha"}\n')
    (workshop / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    arguments = ["model=guide", "sets=[beir]", "output_dir=metrics", "vectors_dir=vectors"]
    (outcome,) = ranks(1, attempt, "evaluate", workshop, arguments)
    assert outcome.kind == ""
    (stored,) = (workshop / "vectors").glob("*/*.safetensors")
    np.save(stored.with_suffix(".npy"), np.array([Bomb(workshop / MARKER)], dtype=object), allow_pickle=True)
    plant_pickle(stored.with_suffix(".bin"), workshop / MARKER)
    (outcome,) = ranks(1, attempt, "evaluate", workshop, arguments)
    assert not outcome.ran
    assert outcome.kind == ""
    header = json.dumps({"__metadata__": {"chunks": deep("[", "]", 10_000)}}).encode()
    for content in ((2**60).to_bytes(8, "little") + b"{}", len(header).to_bytes(8, "little") + header):
        stored.write_bytes(content)
        (outcome,) = ranks(1, attempt, "evaluate", workshop, arguments)
        assert outcome.kind == "", outcome.message  # the texts are encoded again
        assert "damaged" in outcome.printed


def test_statistics_of_mined_rows(tmp_path):
    marker = tmp_path / MARKER
    np.savez(tmp_path / "block.npz", facts=np.array([Bomb(marker)], dtype=object))
    with pytest.raises(DataError, match="allow_pickle=False"):
        MiningStats.read(tmp_path / "block")
    (tmp_path / "block.npz").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(DataError, match="cannot be read"):
        MiningStats.read(tmp_path / "block")
    assert not marker.exists()


def test_the_data_cache(ranks, workshop):
    """Nothing in the cache is unpickled: arrays are numbers, and damaged metadata is built again."""
    arguments = ["data=train.jsonl", "model=guide", "cache_dir=cache"]
    (outcome,) = ranks(1, attempt, "inspect", workshop, arguments)
    assert outcome.kind == ""
    complete = list((workshop / "cache").rglob(COMPLETE))
    assert complete
    for path in complete:
        path.write_text(deep("[", "]"))
        assert not is_complete(path.parent)
    for folder in {path.parent for path in complete}:
        np.save(folder / "planted.npy", np.array([Bomb(workshop / MARKER)], dtype=object), allow_pickle=True)
        plant_pickle(folder / "facts.pkl", workshop / MARKER)
    (outcome,) = ranks(1, attempt, "inspect", workshop, arguments)
    assert not outcome.ran
    assert outcome.kind == ""
