"""Which options of a stage are inputs, whose content counts."""

from pathlib import Path

import pytest

from embedtrain.pipeline.digests import input_paths, options_of
from embedtrain.pipeline.registry import KINDS
from embedtrain.pipeline.types import Stage


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name in ("encoder", "first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows.jsonl").write_text('{"query": "a", "pos": ["b"]}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stage(kind: str, folder: Path, *arguments: str) -> Stage:
    return Stage(kind, KINDS[kind], list(arguments), KINDS[kind].compose(list(arguments)), folder / "out" / kind, ())


def test_texts_are_no_paths(folder):
    """A prompt that looks like a pattern, or is the name of a file, counts as it is written."""
    prompts = ("query_prompt='what/is it? '", "document_prompt=first")
    mined = stage("mine", folder, "model=encoder", "data=[rows.jsonl]", f"output_dir={folder / 'out'}", *prompts)
    assert input_paths(mined) == {"model": "encoder", "data[0].path": "rows.jsonl"}
    assert options_of(mined)["query_prompt"] == "what/is it? "


def test_relative_paths_are_inputs(folder):
    loss = ("loss=distill_similarities", "loss.teachers=[first,second]", "model.config=encoder")
    trained = stage("train", folder, "name=t", "train.steps=1", "data.train=[rows.jsonl]", *loss, "model.pooling=mean")
    assert input_paths(trained) == {
        "model.config": "encoder",
        "data.train[0].path": "rows.jsonl",
        "loss.teachers[0]": "first",
        "loss.teachers[1]": "second",
    }
