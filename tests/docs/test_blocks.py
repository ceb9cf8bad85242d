"""Blocks of YAML, JSON and Python in the pages are valid."""

import json
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from embedtrain.config.compose import compose_recipes, to_recipe
from embedtrain.config.recipe import Recipe
from tests.conftest import ROOT
from tests.docs.pages import blocks, pages

ALL = [block for page in pages() for block in blocks(page)]


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in ALL if block.language in languages]


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", of("json"))
def test_json_parses(block):
    if block.excused:
        pytest.skip("shown only")
    for line in block.text.strip().splitlines() if block.text.startswith("{") else [block.text]:
        try:
            json.loads(line)
        except ValueError:
            json.loads(block.text)  # one object over several lines
            break


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_recipe_or_a_part_of_one(block, tmp_path, monkeypatch):
    if block.excused:
        pytest.skip("shown only")
    keys = yaml.safe_load(block.text)
    if "@package _global_" in block.text:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "recipe").mkdir()
        (tmp_path / "recipe" / "block.yaml").write_text(block.text, encoding="utf-8")
        (recipe,) = compose_recipes(["--config-dir", str(tmp_path), "recipe=block"])
        assert recipe.name == keys["name"]
    elif block.title is not None:
        assert isinstance(keys, dict), "a file that a command of the page takes: test_commands.py tries it"
    else:
        assert set(keys) <= set(vars(Recipe())), "a part of a recipe"
        to_recipe(OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.create(keys)))


def test_the_pages_have_blocks():
    assert sum(block.language == "yaml" for block in ALL) >= 4
    assert {block.language for block in ALL if block.page == ROOT / "README.md"} == {"bash", "text"}
