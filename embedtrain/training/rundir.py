"""What a run directory holds, and writing the recipe into it."""

import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from embedtrain import __version__
from embedtrain.config.compose import to_plain
from embedtrain.config.schema import Recipe

_VERSIONS_OF = ("torch", "transformers", "sentence-transformers", "datasets")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files and folders of a run, by name."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, versions and world size: enough to run it again."""
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def architecture(self) -> Path:
        """Configuration, tokenizer and pooling: with any checkpoint, all an export needs."""
        return self.path / "architecture"

    @property
    def tokenizer(self) -> Path:
        """A vocabulary trained on the data, where the recipe asked for one."""
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        """The final export."""
        return self.path / "model"

    def write_recipe(self, recipe: Recipe, world_size: int) -> None:
        """Write `recipe.yaml`; on one rank."""
        versions: dict[str, object] = {"embedtrain": __version__, "python": sys.version.split()[0]}
        for name in _VERSIONS_OF:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        content = to_plain(recipe) | {"versions": versions | {"world_size": world_size}}
        unfinished = self.recipe.with_suffix(".tmp")
        unfinished.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        os.replace(unfinished, self.recipe)
