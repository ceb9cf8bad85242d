"""Refuses paths that do not exist before torch and the libraries of data are imported, which takes seconds."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from embedtrain.config.columns import DataPath
from embedtrain.config.evaluation import EvaluationSet
from embedtrain.config.recipe import Recipe, TrainSource
from embedtrain.config.validation import is_expected
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.utils.files import expand_user

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w./-]+)?")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow|feather)(\.gz|\.zst)?", re.IGNORECASE)


def is_missing(path: str) -> bool:
    """Whether there is nothing at a path that can be no URL, pattern or id on the Hub."""
    if "://" in path or glob.has_magic(path) or is_expected(path):
        return False
    if _HUB_ID.fullmatch(path) and not _DATA_FILE.search(path):
        return False
    try:
        os.lstat(os.path.expanduser(path))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # reported where the path is read
        return False
    return False


def require_models(**paths: str | None) -> None:
    """Raise a ModelError for a directory that does not exist, or that is a run's and not its model's.

    The names of options are those of the arguments.
    """
    for option, path in paths.items():
        if path is None:
            continue
        if is_missing(path):
            raise ModelError(f"{option}={path}: there is no such directory")
        directory = expand_user(path)
        if (directory / "recipe.yaml").is_file() and not (directory / "config.json").exists():
            exported = directory / "model"
            advice = (
                f"write {option}={exported}" if exported.is_dir() else f"export its model: embedtrain export run={path}"
            )
            raise ModelError(f"{option}={path}: is the directory of a run, not of a model; {advice}")


def require_sources(sources: Sequence[TrainSource], corpus: Sequence[DataPath] = ()) -> None:
    """Raise a DataError for training rows or documents that do not exist."""
    for source in (*sources, *corpus):
        if is_missing(source.path):
            raise DataError(f"{source.path}: no such file or folder")


def require_output_outside(output_dir: str, sources: Sequence[TrainSource | DataPath], read_as: str = "rows") -> None:
    """Raise a ConfigError for an output directory inside a folder that is read whole: what is written would be read."""
    written = expand_user(output_dir).resolve()
    for source in sources:
        folder = expand_user(source.path)
        if folder.is_dir() and written.is_relative_to(folder.resolve()):
            raise ConfigError(
                f"output_dir={output_dir} is in {source.path}, whose files are all read as {read_as}: write a "
                "directory outside"
            )


def require_sets(sets: Sequence[EvaluationSet]) -> None:
    """Raise a DataError for an evaluation set that does not exist."""
    for evaluation_set in sets:
        if is_missing(evaluation_set.path):
            raise DataError(f"{evaluation_set.path} does not exist")


def require_run(run: str) -> None:
    """Raise a ConfigError for a directory that no run has written."""
    path = Path(run) / "recipe.yaml"
    if not os.path.lexists(path) and not is_expected(run):
        raise ConfigError(f"{path} is missing: is this the output_dir of a run?")


def require_recipe_paths(recipe: Recipe) -> None:
    """Raise an error for a model, training rows or evaluation sets that do not exist."""
    require_models(**{"model.path": recipe.model.path, "model.lora.path": recipe.model.lora.path})
    if recipe.train.init_from is not None and is_missing(recipe.train.init_from):
        raise ConfigError(f"train.init_from={recipe.train.init_from}: there is no such run or checkpoint")
    require_sources(recipe.data.train)
    require_sets(recipe.evaluation.sets)
