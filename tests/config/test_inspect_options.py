"""The command line of inspect: paths in every notation, or the options of a recipe."""

import pytest

from embedtrain.commands.inspect import compose as compose_inspect
from embedtrain.config.losses import CoSENTConfig
from embedtrain.config.recipe import TrainSource
from embedtrain.errors import ConfigError

MODEL = "model.path=m"


@pytest.mark.parametrize(
    ("argument", "paths"),
    [
        ("data=a b,c.jsonl", ["a b,c.jsonl"]),
        ("data='/some where/x'", ["/some where/x"]),
        ('data="/some where/x"', ["/some where/x"]),
        ("++data=/x", ["/x"]),
        ("data={path: x}", ["x"]),
        ("data=[x,'y z',{path: w}]", ["x", "y z", "w"]),
        ("data=[0-9]*.jsonl", ["[0-9]*.jsonl"]),
        ("data=rows/{a,b}.jsonl", ["rows/{a,b}.jsonl"]),
        ("data.train=[x]", ["x"]),
    ],
)
def test_paths_in_every_notation(argument, paths):
    recipe, _ = compose_inspect([argument])
    assert [source.path for source in recipe.data.train] == paths


def test_options_of_a_source():
    recipe, options = compose_inspect(["data={path: x, columns: [a, b], negatives: null}", "examples=0"])
    assert recipe.data.train == [TrainSource(path="x", columns=["a", "b"], negatives=None)]
    assert (recipe.model.path, options.examples) == (None, 0)


@pytest.mark.parametrize(
    "argument", [MODEL, "name=mine", "loss=cosent", "loss.temperature=0.1", "train.steps=3", "optim.lr=1e-3", "seed=1"]
)
def test_an_option_of_a_recipe_selects_its_data(argument):
    recipe, options = compose_inspect([argument, "data.train=[x]", "+problems=3", "examples=7"])
    assert recipe.name == {"name=mine": "mine", MODEL: "m"}.get(argument, "inspect")
    assert [source.path for source in recipe.data.train] == ["x"]
    assert recipe.model.path == ("m" if argument == MODEL else None)
    assert recipe.train.epochs == (None if argument == "train.steps=3" else 1.0)
    assert isinstance(recipe.loss, CoSENTConfig) == (argument == "loss=cosent")
    assert (options.data, options.examples, options.problems) == (None, 7, 3)


def test_display_options_apply_to_a_recipe():
    recipe, options = compose_inspect(["recipe=quickstart", "examples=3", "data.train=[x]"])
    assert (recipe.name, options.examples, options.problems) == ("quickstart", 3, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no data"),
        (["data="], "no data"),
        (["data={a: x}"], "data[0] has no `path`"),
        (["++data=7"], "data=7 "),
        (["data=x", "optim.lr=1"], "data=x cannot be combined with optim.lr=1"),
        (["recipe=quickstart", "data=[x]"], "write data.train=[PATH,...]"),
        (["recipe=quickstart", "examples=few"], "examples=few"),
        (["recipe=quickstart", "examples=-1"], "examples=-1"),
        (["recipe=quickstart", "data.train.x=a"], "data.train.x=a: data.train is a list"),
        (["data=x", "examples=1,2", "-m"], "multirun (-m) is for training"),
        (["data=[x,{path: y, weight: 0}]"], "data.train, y: weight=0"),
        (["data=x", "for_loss=cosen"], "did you mean cosent?"),
    ],
)
def test_a_mistake_is_named_with_option_and_value(arguments, message):
    with pytest.raises(ConfigError) as caught:
        compose_inspect(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
