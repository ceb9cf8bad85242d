"""Retrieval sets of the Hub, MTEB's layout: configurations `corpus`, `queries`, and `qrels` or `default`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from embedtrain.data.sources.kinds import Part, PartKind
from embedtrain.data.sources.problems import describe_error
from embedtrain.errors import DataError

T = TypeVar("T")


def judged_part(name: str, split: str, revision: str | None = None) -> Part:
    """The judgements of a split, with the queries and the corpus.

    Args:
        name: Hub id, or a folder laid out like a repository.
        split: of the judgements.
        revision: commit, tag or branch of the repository.

    Raises:
        DataError: it cannot be opened, or is laid out in another way.
    """
    import datasets  # takes a second, and most sources are plain files

    configs = _ask(name, lambda: datasets.get_dataset_config_names(name, revision=revision))
    of_judgements = next((config for config in ("qrels", "default") if config in configs), None)
    if of_judgements is None or not {"corpus", "queries"} <= set(configs):
        raise DataError(
            f"{name}: format=beir asks for the configurations corpus, queries, and qrels or default, "
            f"and there are: {', '.join(configs)}"
        )

    def splits_of(config: str) -> list[str]:
        return _ask(name, lambda: datasets.get_dataset_split_names(name, config, revision=revision))

    there = splits_of(of_judgements)
    if split not in there:
        raise DataError(f"{name}: {of_judgements} holds no judgements of split={split}, only of {', '.join(there)}")

    def table(config: str, split: str) -> Part:
        return Part(name, PartKind.hub, subset=config, split=split, revision=revision)

    texts = [table(config, _only_split(name, config, splits_of(config))) for config in ("queries", "corpus")]
    return Part(name, PartKind.beir, tables=(table(of_judgements, split), *texts))


def _only_split(name: str, config: str, splits: Sequence[str]) -> str:
    """The split that holds a table: the one called like it, or the only one."""
    if config in splits:
        return config
    if len(splits) == 1:
        return splits[0]
    raise DataError(f"{name}: {config} has the splits {', '.join(splits)}, and one that is called {config} is expected")


def _ask(name: str, question: Callable[[], Sequence[T]]) -> list[T]:
    try:
        return list(question())
    except Exception as error:  # the library raises dozens of types
        raise DataError(
            f"{name}: neither a file here nor a data set that can be opened ({describe_error(error)})"
        ) from error
