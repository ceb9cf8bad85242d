"""Rows keep which language model wrote their query through every command, and the model card names it."""

import json

import pytest
import yaml

from embedtrain import mine, train
from embedtrain.commands.split import compose as compose_split
from embedtrain.commands.split import run as run_split
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.rows import format_row
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.errors import DataError
from tests.small import WORDS, save_small, small_model
from tests.synthesize.scripted import read_rows

ORIGIN = {"synthetic": True, "synthetic_model": "a/model", "synthetic_prompt": "0123456789ab", "kind": "question"}


def row(number: int, **more) -> dict:
    text = f"{WORDS[number % 13]} {WORDS[number % 7]} b {WORDS[number % 11]}"
    return {"query": f"{WORDS[number % 13]} {WORDS[number % 7]} a", "pos": [text], "pos_id": [f"d{number}"], **more}


def rows() -> list[dict]:
    """Twenty by a model, of which half are graded 5, five by another one, and six of people."""
    by_model = [row(number, **ORIGIN, grade=3 + number % 2 * 2, language="en") for number in range(20)]
    other = [row(number, synthetic=True) for number in range(20, 25)]
    return [*by_model, *other, *(row(number) for number in range(25, 31))]


def store_of(path, folder, **options):
    sources = [TrainSource(path=str(path), **options)]
    return read_sources(sources, OnError.stop, TEXTS_ONLY, Cache(directory=folder))[0]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def test_rows_that_are_read_and_written_again_keep_their_origin(path, tmp_path):
    store = store_of(path, tmp_path / "cache")
    written = [json.loads(format_row(each, (), (), None)) for each in store]
    assert [{key: value for key, value in each.items() if key != "neg"} for each in written] == rows()
    report = str(store.report)
    assert "synthetic queries" in report
    assert "not used" not in report
    assert store.query_writers() == {"a/model": 20, "an unknown model": 5}


def test_where_chooses_synthetic_rows(path, tmp_path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:20]))
    graded = store_of(path, tmp_path / "cache", where="grade >= 4")
    assert [row.positives.ids for row in graded] == [(f"d{number}",) for number in range(1, 20, 2)]
    assert "grade" not in str(graded.report).partition("not used")[2]
    assert len(store_of(path, tmp_path / "cache", where="synthetic == 1")) == 20
    with pytest.raises(DataError, match="leaves out"):
        store_of(path, tmp_path / "cache", where="synthetic != 1")


def test_split_mine_and_training_keep_it_and_the_card_names_it(path, tmp_path):
    run_split(compose_split([f"data={path}", f"output_dir={tmp_path / 'split'}", "dev=4"]))
    kept = read_rows(tmp_path / "split" / "train.jsonl")
    assert all(each == {**rows()[int(each["pos_id"][0][1:])], "neg": []} for each in kept)
    save_small(small_model("xlm-roberta"), tmp_path / "model")
    more = {"negatives": 2, "relative_margin": None, "pooling": "mean"}
    mined = mine(tmp_path / "model", str(path), tmp_path / "mined", options=more, quiet=True)
    of_mined = read_rows(mined.files[0])
    assert [{key: each[key] for key in (*ORIGIN, "grade") if key in each} for each in of_mined] == [
        {key: each[key] for key in (*ORIGIN, "grade") if key in each} for each in rows()
    ]
    options = {"train": {"steps": 1, "global_batch_size": 4}, "model.pooling": "mean", "tracking.report": False}
    run = train(
        model=tmp_path / "model",
        data=[str(file) for file in mined.files],
        output_dir=tmp_path / "run",
        options=options,
        quiet=True,
    )
    card = (run.model_dir / "README.md").read_text()
    assert "Language models wrote 25 queries of the training data: 20 by `a/model`, 5 by `an unknown model`." in card
    assert "synthetic" in yaml.safe_load(card.split("---")[1])["tags"]
    of_people = tmp_path / "people.jsonl"
    of_people.write_text("".join(json.dumps(row) + "\n" for row in rows()[25:]))
    run = train(
        model=tmp_path / "model", data=str(of_people), output_dir=tmp_path / "other", options=options, quiet=True
    )
    assert "ynthetic" not in (run.model_dir / "README.md").read_text()
