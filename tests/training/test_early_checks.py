"""Mistakes that show without the Hub and without weights are reported before either is opened."""

import json

import pytest

from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import TrainSource
from embedtrain.data.rows import TextFormat
from embedtrain.data.train_data import load_train_data
from embedtrain.errors import EmbedtrainError
from embedtrain.formats.source import open_model_source
from embedtrain.training.inputs import check_dimensions, check_local_inputs, instruction_warnings
from embedtrain.utils.hub import is_local_path
from tests.small import small_model

# The model is on the Hub, which must not be asked: these tests have no network, and would fail with its name.
ON_HUB = "model.path=owner/model"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"query": "a", "pos": ["b"]}\n')
    (tmp_path / "dev").mkdir()
    (tmp_path / "runs").mkdir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train=[none.jsonl]"], r"^none\.jsonl: no such file"),
        (["data.train=[none/*.jsonl]"], r"none/\*\.jsonl"),
        (["data.train=[runs/mined]"], r"^runs/mined: no such file or folder"),
        (["data.train=[{path: rows.jsonl, documents: runs/corpus}]"], "^runs/corpus: no such file or folder"),
        (["evaluation.sets=[runs/dev]"], "^runs/dev: no such file or folder"),
        (["evaluation.sets=[{path: dev, candidates: none.trec}]"], r"candidates=none\.trec: no such file"),
        (["evaluation.sets=[dev, owner/dev]"], "both called 'dev'"),
        (["evaluation.sets=[owner/dev]", "checkpoint.best_metric=other/ndcg@10"], "best_metric=other/ndcg@10 .*: dev$"),
        (["model.path=runs/model"], "^model.path=runs/model: no such folder"),
        (["model.path=../model"], r"^model.path=\.\./model: no such folder"),
        (["model.tokenizer=runs/tokenizer"], "^model.tokenizer=runs/tokenizer: no such folder"),
        (["model.lora.path=runs/adapter"], "^model.lora.path=runs/adapter: no such folder"),
        (["loss.guide=runs/guide"], "^loss.guide=runs/guide: no such folder"),
    ],
)
def test_before_the_hub_is_asked(arguments, message):
    good = ["name=t", "train.steps=1", "data.train=[rows.jsonl]", ON_HUB]
    (recipe,) = compose_recipes([*good, *arguments])
    with pytest.raises(EmbedtrainError, match=message):
        check_local_inputs(recipe)


def test_what_may_be_on_the_hub_passes():
    (recipe,) = compose_recipes(
        ["name=t", "train.steps=1", ON_HUB, "data.train=[owner/rows]", "evaluation.sets=[owner/dev,name]"]
    )
    check_local_inputs(recipe)
    assert not is_local_path("owner/model")
    assert is_local_path("runs/model")


def test_dimensions_before_weights(tmp_path):
    from embedtrain.formats.source import open_model_source
    from tests.small import save_small, small_model

    save_small(small_model("bert"), tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    options = ["name=t", "train.steps=1", "data.train=[rows.jsonl]", "model.path=model", "model.pooling=mean"]
    (recipe,) = compose_recipes([*options, "loss.matryoshka.dims=[4096,8]"])
    with pytest.raises(EmbedtrainError, match=r"matryoshka\.dims=\[4096, 8\]"):
        check_dimensions(recipe, open_model_source(recipe.model))


def test_instructions_in_other_words_than_the_templates(tmp_path):
    rows = [{"query": "a", "pos": ["b"]}, {"query": "c", "pos": ["d"], "prompt": "Find it."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = small_model("qwen3", kind="cross_encoder", pooling=None, pair_template="qwen3")
    source = open_model_source(model)

    def warnings(**text_format: str) -> list[str]:
        options = TextFormat(**text_format)
        sources = [TrainSource(path=str(tmp_path / "rows.jsonl"))]
        data = load_train_data(sources, text_format=options, seed=0, global_batch_size=2)
        return instruction_warnings(source, data)

    (warning,) = warnings()
    assert "rows" in warning
    assert repr("<Instruct>: {instruction}\n<Query>: {text}") in warning
    assert not warnings(instruction_format="<Instruct>: {instruction}\n<Query>: {text}")
