"""Blocks of YAML, JSON and Python in the pages are valid, and recipes among them can work."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import Recipe
from embedtrain.pipeline.compose import compose_pipeline
from tests.conftest import ROOT
from tests.docs.commands import Command, check
from tests.docs.pages import Block, blocks, pages
from tests.docs.stand_ins import ABSOLUTE

# Of a block that names no model.
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MODEL_OF_KIND = {
    "late_interaction": "answerdotai/ModernBERT-base",
    "sparse": "google-bert/bert-base-uncased",
}
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


def composed(block: Block, folder: Path) -> tuple[Command, list[Recipe]] | None:
    """The training of a recipe, or of a part of one with a model and data; None for other files."""
    if block.excused:
        pytest.skip("shown only")
    keys = yaml.safe_load(block.text)
    if block.title is not None and "@package _global_" not in block.text:
        assert isinstance(keys, dict), "a file that a command of the page takes: test_commands.py tries it"
        return None
    (folder / "recipe").mkdir()
    text = block.text
    for absolute, below in ABSOLUTE.items():
        text = text.replace(absolute, below)
    (folder / "recipe" / "block.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
    arguments = ["--config-dir", str(folder), "recipe=block"]
    if keys.get("kind") == "pipeline":
        pipeline = compose_pipeline(arguments, check_paths=False)
        assert {stage.name.partition("-")[0] for stage in pipeline.stages} >= keys["stages"].keys()
        return None
    assert keys.keys() <= {*vars(Recipe()), "defaults"}, "a recipe or a part of one"
    has_model = keys.get("model", {}).keys() & {"path", "config", "query", "text"}
    model = MODEL_OF_KIND.get(keys.get("model", {}).get("kind", "dense"), MODEL)
    added = {"name=block": "name", f"model.path={model}": "model", "data.train=[my.jsonl]": "data"}
    missing = [text for text, key in added.items() if key not in keys or (key == "model" and not has_model)]
    recipes = compose_recipes([*arguments, *missing])
    assert [recipe.name for recipe in recipes] == [keys.get("name", "block")]
    return Command("train", tuple(missing)), recipes


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_composed_as_its_command_does(block, page_folder):
    """What it combines must be possible."""
    composed(block, page_folder)


@pytest.mark.slow
@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_checked_as_its_command_does(block, page_folder, stand_ins):
    """The same up to where `train` would load the model, with models and rows of the names in the block."""
    training = composed(block, page_folder)
    if training is not None:
        stand_ins.put(f"{block.text} {training}", block.page.name, page_folder)
        check(*training)


def test_the_pages_have_blocks():
    assert sum(block.language == "yaml" for block in ALL) >= 4
    assert {block.language for block in ALL if block.page == ROOT / "README.md"} == {"bash", "python"}
