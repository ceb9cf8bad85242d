"""Options of Python become exactly the values of the command line."""

import numpy as np
import pytest

from embedtrain.config.command_line import flatten, to_overrides
from embedtrain.config.compose import compose_recipe, compose_recipes
from embedtrain.config.recipe import Precision, Recipe
from embedtrain.errors import ConfigError

TEXTS = [
    "query: ", "a,b", "${name}", "\\${name}", "\\\\${oc.env:HOME}", "it's \"so\"", '\\"', "\\", "a\\", "line\nnew\ttab",
    "{a: b}", "[x]", "", "null", "True", "1e5", "nan", "$", "a=b", "ü😀", "~x", "a#b", "a: b",
]  # fmt: skip


def compose(*options: dict) -> Recipe:
    return compose_recipe(to_overrides(flatten(Recipe, *options)))


def test_texts_are_exact():
    sources = [{"path": "x", "document_prompt": text} for text in TEXTS]
    recipe = compose(
        {"data": {"train": sources}, "tracking.wandb_init": {"tags": TEXTS}, "model": {"query_prompt": TEXTS[3]}}
    )
    assert [source.document_prompt for source in recipe.data.train] == TEXTS
    assert recipe.tracking.wandb_init["tags"] == TEXTS and recipe.model.query_prompt == TEXTS[3]


def test_values_are_exact():
    recipe = compose(
        {"optim": {"betas": (0.9, 1e-3)}, "optim.lr": np.float32(0.5), "train": {"steps": np.int64(7), "epochs": None}},
        {"parallel": {"precision": Precision.fp32, "compile": True}, "model.config": {"a": [1, None, {"b": "true"}]}},
    )
    assert (recipe.optim.betas, recipe.optim.lr, recipe.train.steps, recipe.train.epochs) == ([0.9, 1e-3], 0.5, 7, None)
    assert recipe.parallel.precision is Precision.fp32 and recipe.parallel.compile is True
    assert recipe.model.config == {"a": [1, None, {"b": "true"}]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": {"stepz": 1}}, r"train\.stepz.*steps"),
        ({"train": {"steps": "many"}}, r"train\.steps=many"),
        ({"train": {"steps": object()}}, r"train\.steps=<object"),
        ({"train": {"steps": 1}, "train.steps": 2}, r"train\.steps is given twice: 1 and 2"),
        ({"model.config": {"a b": 1}}, r"model\.config: 'a b'"),
        ({1: 2}, "1 is not the name of an option"),
    ],
    ids=["unknown", "type", "object", "twice", "key", "name"],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ConfigError, match=message):
        compose(options)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("café", "café"),
        ("为这个句子生成表示：", "为这个句子生成表示："),
        ("what's new, in short", None),  # a list for -m, as without the apostrophe
        ("l'été", "l'été"),
        ("查询: ", "查询: "),
        ("what is <this> & that!?", "what is <this> & that!?"),
        ("${seed}-é", "7-é"),
        ("\\,é\\\\", ",é\\"),
        ("Zeile\né", "Zeile\né"),
        ('"é, ${seed}"', "é, 7"),
    ],
)
def test_texts_without_quotes_that_the_grammar_has_no_characters_for(written, value):
    if value is None:
        with pytest.raises(ConfigError, match="-m starts a run for each value"):
            compose_recipe([f"model.query_prompt={written}"])
        return
    assert compose_recipe(["seed=7", f"model.query_prompt={written}"]).model.query_prompt == value


def test_such_texts_in_lists_mappings_and_sweeps():
    (recipe,) = compose_recipes(["model.path=m", "data.train=[数据.jsonl, {path: é/a:b, columns: [问题, 'a, é', x]}]"])
    first, second = recipe.data.train
    assert (first.path, second.path, second.columns) == ("数据.jsonl", "é/a:b", ["问题", "a, é", "x"])
    sweep = compose_recipes(["model.path=m", "data.train=[x]", "-m", "name=é,à b,c"])
    assert [recipe.output_dir for recipe in sweep] == ["runs/é", "runs/à b", "runs/c"]
