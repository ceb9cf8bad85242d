"""Options of adapters that cannot work: one sentence each, before a model is opened."""

import pytest

from embedtrain.config.compose import compose_recipes
from embedtrain.errors import ConfigError

BASE = ["name=t", "model.path=somewhere", "model.pooling=last", "data.train=[x.jsonl]", "train.steps=1"]
CASES = [
    ("model.lora.rank=0", "model.lora.rank=0: at least 1"),
    ("model.lora.rank=4 model.lora.alpha=0", "model.lora.alpha=0.0: must be above 0"),
    ("model.lora.rank=4 model.lora.dropout=1", "model.lora.dropout=1.0: from 0 to below 1"),
    ("model.lora.rank=4 model.lora.targets=[]", r"model.lora.targets=\[\]: write all-linear, or names of layers"),
    ("model.lora.rank=4 model.lora.targets=[all-linear,q_proj]", "all-linear is all of them"),
    (
        "model.lora.targets=[q_proj]",
        r"model.lora.targets=\['q_proj'\] has no use without adapters: set model.lora.rank",
    ),
    ("model.lora.base_dtype=bf16", "model.lora.base_dtype=bf16 has no use without adapters"),
    ("model.lora.path=x model.lora.rank=4", "the adapter brings its own; leave one out"),
    ("model.lora.rank=4 model.lora.revision=v1", "write model.lora.path=ID"),
    ("model.lora.rank=x", "model.lora.rank"),
    ("model.lora.rnak=4", "model.lora.rnak.*rank"),
    ("export.formats=[adapter]", "there is no adapter to export; set model.lora.rank"),
    (
        "model.lora.rank=4 model.lora.modules_to_save=[dense] export.formats=[adapter]",
        "an adapter of PEFT's has no place for heads behind the pooling",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), CASES)
def test_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence) as told:
        compose_recipes([*BASE, *arguments.split()])
    assert "\n" not in str(told.value)


def test_a_name_is_a_target_as_well_as_a_list():
    for written in ("all-linear", "q_proj", "[q_proj,v_proj]"):
        (recipe,) = compose_recipes([*BASE, "model.lora.rank=4", f"model.lora.targets={written}"])
        assert recipe.model.lora.on
