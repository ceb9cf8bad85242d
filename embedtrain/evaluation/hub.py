"""Evaluation sets as they lie on the Hugging Face Hub, or in a local copy of such a repository.

Three layouts: MTEB's retrieval sets (configurations `corpus`, `queries`, and `default` or `qrels`), those of
C-MTEB and BEIR (`corpus` and `queries` as splits or configurations, judgements in a second repository called
`<path>-qrels`), and tables of scored sentence pairs.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import datasets

from embedtrain.config.evaluation import SetKind
from embedtrain.errors import DataError
from embedtrain.evaluation.pairs import read_pairs
from embedtrain.evaluation.retrieval import assemble, choose_split
from embedtrain.evaluation.rows import Row
from embedtrain.evaluation.types import RetrievalSet, ScoredPairs

T = TypeVar("T")


def read_hub_set(
    path: str, kind: SetKind, name: str, split: str | None
) -> tuple[RetrievalSet | ScoredPairs, list[str]]:
    """Read a set through `datasets`.

    Args:
        path: Hub id, or a directory laid out like a repository.
        kind: what it is; auto looks for a corpus.
        name: the set's name.
        split: of the judgements or of the pairs; default: test, else dev or validation, else the only one.

    Returns:
        The set, and notes on what is odd about it.

    Raises:
        DataError: it cannot be loaded, or is laid out in another way.
    """
    repository = _Repository(path)
    is_retrieval = repository.has("corpus") and repository.has("queries")
    if kind is SetKind.retrieval and not is_retrieval:
        raise DataError(f"{path} holds no corpus and queries, only {repository.contents()}")
    if is_retrieval and kind is not SetKind.sts:
        corpus, queries = repository.table("corpus"), repository.table("queries")
        qrels = _judgements(repository)
        places = (f"{path}, corpus", f"{path}, queries", f"{qrels.path}, judgements")
        return assemble(name, corpus, queries, qrels.rows(qrels.config, split), places)
    return read_pairs(name, repository.rows(repository.config, split), path), []


class _Repository:
    """A data set repository: its configurations, and the splits of the one that holds a set's main table."""

    def __init__(self, path: str, config: str | None = None) -> None:
        self.path = path
        self.configs: list[str] = _ask(path, lambda: datasets.get_dataset_config_names(path))
        plain = "default" if "default" in self.configs else self.configs[0]
        self.config = plain if config is None else config
        self.splits: list[str] = _ask(path, lambda: datasets.get_dataset_split_names(path, self.config))

    def contents(self) -> str:
        return f"the configurations {', '.join(self.configs)} ({self.config}: {', '.join(self.splits)})"

    def has(self, name: str) -> bool:
        return name in self.configs or name in self.splits

    def table(self, name: str) -> Iterator[Row]:
        """The rows of a table that is a configuration of its own, or else a split."""
        if name not in self.configs:
            return self.rows(self.config, name)
        splits = _ask(self.path, lambda: datasets.get_dataset_split_names(self.path, name))
        return self.rows(name, name if name in splits else None)

    def rows(self, config: str, split: str | None) -> Iterator[Row]:
        splits = _ask(self.path, lambda: datasets.get_dataset_split_names(self.path, config))
        chosen = choose_split(splits, split, f"{self.path} ({config})")
        table = _ask(self.path, lambda: datasets.load_dataset(self.path, config, split=chosen))
        for number, fields in enumerate(table, start=1):
            yield f"{self.path} ({config}, {chosen}):{number}", fields


def _judgements(repository: _Repository) -> _Repository:
    """Where the judgements are: a configuration beside corpus and queries, else a repository of their own."""
    for config in ("qrels", "default"):
        if config in repository.configs and not (config == repository.config and "corpus" in repository.splits):
            return _Repository(repository.path, config)
    second = f"{repository.path.rstrip('/')}-qrels"
    try:
        return _Repository(second)
    except DataError as error:
        raise DataError(
            f"{repository.path} holds no judgements (a configuration called default or qrels), "
            f"and there is no {second} either: {error}"
        ) from None


def _ask(path: str, question: Callable[[], T]) -> T:
    """Put a question to `datasets`, quietly; whatever it raises becomes one sentence."""
    # Restored below: whether bars are shown is the caller's to say.
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return question()
    # The library raises dozens of types, of its own, of fsspec, of requests and of pyarrow.
    except Exception as error:
        raise DataError(f"{path} cannot be loaded as a data set: {_first_line(error)}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def _first_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
