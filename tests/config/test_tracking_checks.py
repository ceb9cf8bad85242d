"""Options of `tracking` that cannot work are refused in a sentence that names them."""

import pytest

from embedtrain.config.checks import check_recipe
from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import WandbMode
from embedtrain.errors import ConfigError

BASE = ["name=t", "model.path=somewhere", "data.train=[rows.jsonl]", "train.steps=20"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("tracking.wandb_artifacts=true", "tracking.wandb=true as well"),
        ("tracking.wandb_mode=sometimes", "online"),
        ("tracking.profile=[0]", "counted from 1"),
        ("tracking.profile=[5,21]", r"tracking.profile=\[5, 21\]: train.steps=20 is the last step"),
        (f"tracking.profile={list(range(1, 12))}".replace(" ", ""), "at most 10"),
        ("tracking.profile_ranks=[]", "null is all of them"),
        ("tracking.profile_ranks=[-1]", "counted from 0"),
    ],
)
def test_what_cannot_work_is_refused(option, said):
    with pytest.raises(ConfigError, match=said):
        compose_recipes([*BASE, option])


def test_what_can_work_is_taken():
    asked = [
        "wandb=true", "wandb_artifacts=true", "wandb_mode=offline", "wandb_tags=[a,b]", "profile=[20,3]",
        "profile_ranks=null", "tensorboard=true", "geometry=false",
    ]  # fmt: skip
    (recipe,) = compose_recipes([*BASE, *(f"tracking.{option}" for option in asked)])
    assert check_recipe(recipe).tracking.profile == [20, 3]
    assert recipe.tracking.profile_ranks is None
    assert recipe.tracking.wandb_mode is WandbMode.offline
    assert recipe.tracking.wandb_tags == ["a", "b"]
