"""What a recipe names and is not here: found before the job waits for hours in a queue."""

import re
from pathlib import Path

from embedtrain.config.schema import Recipe
from embedtrain.errors import ConfigError

_ON_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_IS_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_NOT_LOCAL = re.compile(r"://|[*?\[]")  # URLs; patterns, which may match later


def require_present(recipe: Recipe) -> None:
    """Refuse paths of the recipe that are neither here nor may be names on the Hub.

    Raises:
        ConfigError: names the option and its value.
    """
    named = [("model.path", recipe.model.path), ("model.tokenizer", recipe.model.tokenizer)]
    named += [("data.train", source.path) for source in recipe.data.train]
    named += [("evaluation.sets", each.path) for each in recipe.evaluation.sets]
    for option, path in named:
        if path is not None and not _NOT_LOCAL.search(path) and _must_be_here(path):
            raise ConfigError(f"{option}: {path} is not here ({Path.cwd()}): the job would end as soon as it begins")


def _must_be_here(path: str) -> bool:
    is_name = _ON_THE_HUB.fullmatch(path) and not _IS_FILE.search(path) and not path.startswith(".")
    return not is_name and not Path(path).expanduser().exists()
