"""The kinds of stages: `do` in a recipe names one. A further command becomes a stage by one entry here."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.code import UserOptions, composing_stage
from embedtrain.config.compose import compose_recipes
from embedtrain.config.overrides import flatten, to_overrides
from embedtrain.config.paths import require_recipe_paths
from embedtrain.config.recipe import Recipe

# What stages produce, by the name that follows the dot in ${out:NAME.model}.
MODEL, DATA, VECTORS, RUN, DIR = "model", "data", "vectors", "run", "dir"


@dataclass(frozen=True, slots=True)
class StageKind:
    """One kind of stage.

    Attributes:
        name: value of `do`.
        module: its `__main__` has `compose(arguments)` and `main(options)`.
        options: dataclass of its options, in `module.options`.
        output: the option that names where it writes.
        folder: what that is, below the directory of the stage; empty for the directory itself.
        outputs: what later stages can refer to, as paths or patterns below the directory of the stage.
        has_ranks: whether all ranks run it together; otherwise rank 0 runs it while the others wait.
        resumes: whether the command resumes what it has begun; otherwise the stage starts again in an empty directory.
        ignored: options without influence on what it writes, besides those of every kind.
    """

    name: str
    module: str
    options: str
    output: str = "output_dir"
    folder: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)
    has_ranks: bool = True
    resumes: bool = True
    ignored: tuple[str, ...] = ()

    @property
    def main_output(self) -> str | None:
        """What `${out:NAME.each}` lists of every member; None if nothing can be referred to."""
        return next(iter(self.outputs), None)

    def option_class(self) -> type[Any]:
        """The dataclass of the options."""
        if self.name == TRAIN:
            return Recipe
        kind: type[Any] = getattr(importlib.import_module(f"{self.module}.options"), self.options)
        return kind

    def arguments(self, values: Mapping[str, Any]) -> list[str]:
        """The command line that sets these options."""
        flat = flatten(self.option_class(), values)
        if self.name != TRAIN:
            return to_overrides(flat)
        recipe = flat.pop("recipe", None)
        return [*(to_overrides({"recipe": recipe}) if recipe is not None else []), *to_overrides(flat)]

    def compose(self, arguments: list[str], user: UserOptions) -> Any:
        """The options of the command, checked, with paths that exist or that earlier stages will write.

        `user` has what the user wrote of them; the file of the pipeline wrote the others, and cannot name code.
        """
        with composing_stage(user):
            if self.name != TRAIN:
                return importlib.import_module(f"{self.module}.__main__").compose(arguments)
            (recipe,) = compose_recipes(arguments)
        require_recipe_paths(recipe)
        return recipe

    def main(self, options: Any) -> Any:
        """Run the command, except for training, which `run.py` starts with the signals of the pipeline."""
        return importlib.import_module(f"{self.module}.__main__").main(options)


TRAIN, PRUNE, TRIM, STATIC = "train", "prune", "trim", "static"
KINDS = {
    kind.name: kind
    for kind in (
        StageKind(TRAIN, "embedtrain", "Recipe", outputs={MODEL: "model", RUN: ""}),
        StageKind("mine", "embedtrain.commands.mine", "MineOptions", outputs={DATA: "*.jsonl"}),
        StageKind(
            "split",
            "embedtrain.commands.split",
            "SplitOptions",
            outputs={DATA: "*.jsonl", "dev": "dev"},
            has_ranks=False,
            resumes=False,
        ),
        StageKind("filter", "embedtrain.commands.filter", "FilterOptions", outputs={DATA: "*.jsonl"}),
        StageKind(
            "merge",
            "embedtrain.commands.merge",
            "MergeOptions",
            folder="model",
            outputs={MODEL: "model"},
            resumes=False,
            ignored=("check", "push_to_hub", "private", "find.chunk_tokens"),
        ),
        StageKind(
            "vectors", "embedtrain.commands.vectors", "VectorsOptions", folder="vectors", outputs={VECTORS: "vectors"}
        ),
        StageKind(
            "calibrate", "embedtrain.commands.calibrate", "CalibrateOptions", folder="model", outputs={MODEL: "model"}
        ),
        StageKind(
            PRUNE,
            "embedtrain.commands.prune",
            "PruneOptions",
            folder="model",
            outputs={MODEL: "model"},
            has_ranks=False,
            resumes=False,
            ignored=("check",),
        ),
        StageKind(
            TRIM,
            "embedtrain.commands.trim",
            "TrimOptions",
            folder="model",
            outputs={MODEL: "model"},
            has_ranks=False,
            resumes=False,
            ignored=("check",),
        ),
        StageKind(
            STATIC,
            "embedtrain.commands.static",
            "StaticOptions",
            folder="model",
            outputs={MODEL: "model"},
            resumes=False,
            ignored=("check",),
        ),
        StageKind("evaluate", "embedtrain.commands.evaluate", "EvaluateOptions", ignored=("run_depth",)),
        StageKind(
            "export",
            "embedtrain.commands.export",
            "ExportOptions",
            folder="model",
            outputs={MODEL: "model"},
            has_ranks=False,
            ignored=("check", "push_to_hub", "private"),
        ),
    )
}
