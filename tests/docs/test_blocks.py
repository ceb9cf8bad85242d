"""Blocks of YAML, JSON and Python in the pages are valid, and recipes among them can work."""

import json
from typing import Any

import pytest
import yaml

from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import Recipe
from embedtrain.pipeline.compose import compose_pipeline
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
def test_yaml_is_checked_as_its_command_does(block, tmp_path, monkeypatch):
    """A recipe, or a part of one with a model and data: what it combines must be possible."""
    if block.excused:
        pytest.skip("shown only")
    keys = yaml.safe_load(block.text)
    if block.title is not None and "@package _global_" not in block.text:
        assert isinstance(keys, dict), "a file that a command of the page takes: test_commands.py tries it"
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "block.yaml").write_text(f"# @package _global_\n{block.text}", encoding="utf-8")
    arguments = ["--config-dir", str(tmp_path), "recipe=block"]
    if keys.get("kind") == "pipeline":
        pipeline = compose_pipeline(arguments, check_paths=False)
        assert {stage.name.partition("-")[0] for stage in pipeline.stages} >= keys["stages"].keys()
        return
    assert keys.keys() <= {*vars(Recipe()), "defaults"}, "a recipe or a part of one"
    added = {"name=block": "name", "model.path=my-model": "model", "data.train=[my.jsonl]": "data"}
    has_model = keys.get("model", {}).keys() & {"path", "config", "query", "text"}
    missing = [text for text, key in added.items() if key not in keys or (key == "model" and not has_model)]
    (recipe,) = compose_recipes([*arguments, *missing])
    assert recipe.name == keys.get("name", "block")


def test_the_pages_have_blocks():
    assert sum(block.language == "yaml" for block in ALL) >= 4
    assert {block.language for block in ALL if block.page == ROOT / "README.md"} == {"bash", "python"}
