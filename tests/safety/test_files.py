"""Training data, evaluation sets and cached vectors made by an attacker: nothing in them is run or unpickled."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from embedtrain.data.cache.shared_build import COMPLETE, is_complete
from embedtrain.errors import DataError
from embedtrain.mine.stats import MiningStats
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
    """`vectors_dir`: object arrays and pickles beside what was stored are ignored; what was altered is reported."""
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
        assert outcome.kind == "DataError"
        assert "not a file of stored vectors" in outcome.message


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
