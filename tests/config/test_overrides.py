"""Options of Python become exactly the values of the command line."""

import numpy as np
import pytest

from embedtrain.config.compose import compose_recipe
from embedtrain.config.overrides import flatten, to_overrides
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
    recipe = compose({"data": {"train": sources}, "tracking.wandb_tags": TEXTS, "model": {"query_prompt": TEXTS[3]}})
    assert [source.document_prompt for source in recipe.data.train] == TEXTS
    assert recipe.tracking.wandb_tags == TEXTS and recipe.model.query_prompt == TEXTS[3]


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
