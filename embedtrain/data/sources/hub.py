"""Data sets of the Hugging Face Hub, or folders with the layout of a repository, opened by `datasets`."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from embedtrain.data.sources.parts import Part, PartKind, is_saved_dataset
from embedtrain.data.sources.values import describe_error
from embedtrain.errors import DataError, HubUnavailable
from embedtrain.utils.hub import hub_is_reachable

T = TypeVar("T")

_UNKNOWN_SPLIT = re.compile(r"Unknown split .*? Should be one of \[(.*)\]")  # of datasets


def open_dataset(part: Part, subset: str | None, split: str) -> Any:
    """One split of a data set of the Hub or of a folder; the part's own subset and split take precedence."""
    import datasets  # takes a second, and most sources are plain files

    name, subset, split = part.name, part.subset or subset, part.split or split
    try:
        if not Path(name).exists():
            hub_is_reachable()
        if is_saved_dataset(Path(name)):
            data = datasets.load_from_disk(name)
            if not isinstance(data, datasets.DatasetDict):
                return data
            if split not in data:
                raise DataError(_no_split(name, split, list(data)))
            return data[split]
        return datasets.load_dataset(name, subset, split=split, revision=part.revision)
    except DataError:
        raise
    except Exception as error:  # anything: network, name, split, the data set's own files
        reason = " ".join(str(error).split())
        if match := _UNKNOWN_SPLIT.match(reason):
            raise DataError(_no_split(name, split, re.findall(r"\w[\w.-]*", match[1]))) from None
        revision = "" if part.revision is None else f", revision {part.revision}"
        raise _kind_of_error(name, error)(
            f"{name}: neither a local file nor a data set that can be opened "
            f"(subset {subset}, split {split}{revision}): {type(error).__name__}: {reason}"
        ) from error


def _no_split(name: str, split: str, splits: list[str]) -> str:
    return f"{name}: has no split {split}, but {', '.join(splits)}; write {{path: {name}, split: {splits[0]}}}"


def _kind_of_error(path: str, error: Exception) -> type[DataError]:
    if Path(path).exists():
        return DataError
    unreachable = isinstance(error, ConnectionError | TimeoutError) or not hub_is_reachable()
    return HubUnavailable if unreachable else DataError


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without the progress bars of `datasets`, which every rank would print; the caller's setting is restored."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


class HubRepository:
    """The configurations and splits of a data set repository: a Hub id, or a folder with the layout of one."""

    def __init__(self, path: str, revision: str | None = None) -> None:
        import datasets

        self.path, self.revision = path, revision
        names, splits = datasets.get_dataset_config_names, datasets.get_dataset_split_names
        self.configs: list[str] = _query_hub(path, lambda: names(path, revision=revision))
        self.splits_of = cache(lambda config: _query_hub(path, lambda: list(splits(path, config, revision=revision))))

    @property
    def default_config(self) -> str | None:
        """The configuration used where none is named."""
        return "default" if "default" in self.configs else self.configs[0] if len(self.configs) == 1 else None

    def part(self, config: str, split: str) -> Part:
        """One split of a configuration."""
        return Part(self.path, PartKind.hub, subset=config, split=split, revision=self.revision)

    def table(self, config: str, name: str, split: str) -> Part:
        """A table of a retrieval set: the split of its name, else `split`, else the only one."""
        splits = self.splits_of(config)
        chosen = name if name in splits else split if split in splits else splits[0] if len(splits) == 1 else None
        if chosen is None:
            raise DataError(
                f"{self.path} ({config}) holds the splits {', '.join(splits)}, and neither {name} nor {split}"
            )
        return self.part(config, chosen)


def _query_hub(path: str, query: Callable[[], T]) -> T:
    try:
        if not Path(path).exists():
            hub_is_reachable()
        with no_progress_bars():
            return query()
    # The library raises dozens of types, of its own, of fsspec, of requests and of pyarrow.
    except Exception as error:
        raise _kind_of_error(path, error)(
            f"{path}: neither a local file nor a data set that can be opened ({describe_error(error)})"
        ) from error
