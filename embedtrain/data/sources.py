"""Where the rows of a training source lie: a path in the recipe -> files here, or a data set of the Hub."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from embedtrain.config.schema import TrainSource
from embedtrain.errors import ConfigError, DataError


class Kind(Enum):
    """How a part of a source is stored."""

    jsonl = "JSONL"
    csv = "CSV"
    tsv = "TSV"
    parquet = "Parquet"
    hub = "Hub data set"


KIND_OF_SUFFIX = {
    ".jsonl": Kind.jsonl,
    ".json": Kind.jsonl,
    ".csv": Kind.csv,
    ".tsv": Kind.tsv,
    ".parquet": Kind.parquet,
}
# A folder may also hold configuration in .json files, so there only .jsonl counts.
SUFFIXES_IN_FOLDERS = [suffix for suffix in KIND_OF_SUFFIX if suffix != ".json"]
SUFFIXES_TOLD = ".jsonl, .json, .csv and .tsv (each also with .gz) and .parquet"


@dataclass(frozen=True, slots=True)
class Part:
    """One file, or one data set that the `datasets` library opens."""

    name: str  # the file's path or the Hub id, as messages show it
    kind: Kind

    def place(self, line: int) -> str:
        """Where a row is, for messages: `path:line`, or `path: row N` where a file has no lines."""
        return f"{self.name}: row {line}" if self.kind in (Kind.parquet, Kind.hub) else f"{self.name}:{line}"


def parts_of(source: TrainSource) -> list[Part]:
    """The files, in sorted order, or the Hub data set that a source's path means.

    A file is taken as its name's ending says. A folder means all data files below it, whatever their
    names, unless it is laid out for `datasets` (a README.md that names configurations, or made by
    `save_to_disk`), or a subset or a split other than `train` is asked for. What is no path here is a Hub id.

    Raises:
        DataError: nothing matches, a file of an unknown kind, or a folder with files of several kinds.
        ConfigError: a subset or a split of a file.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        return _parts_of_folder(path, source)
    if (path.is_file() or glob.has_magic(source.path)) and _asks_for_part(source):
        raise ConfigError(
            f"{source.path}: subset={source.subset}, split={source.split} choose a part of a Hub data set or "
            "folder, and these are files: leave them out, and write the path of the file that is meant"
        )
    if path.is_file():
        return [_part_of_file(path)]
    if glob.has_magic(source.path):
        found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not found:
            raise DataError(f"{source.path}: no file matches this pattern")
        return [_part_of_file(p) for p in found]
    if not may_be_hub_id(source.path):
        raise DataError(f"{source.path}: no such file or folder")
    return [Part(source.path, Kind.hub)]


def source_names(sources: Sequence[TrainSource]) -> list[str]:
    """A distinct label for each source: its name, else the end of its path; `-2`, `-3`, ... where two are alike."""
    names: list[str] = []
    for source in sources:
        wanted = source.name or _end_of(source.path)
        name, number = wanted, 1
        while name in names:
            number += 1
            name = f"{wanted}-{number}"
        names.append(name)
    return names


def _part_of_file(path: Path) -> Part:
    suffix = suffix_of(path)
    if suffix is None:
        raise DataError(f"{path}: this kind of file is not read as training rows; what is read: {SUFFIXES_TOLD}")
    return Part(str(path), KIND_OF_SUFFIX[suffix])


def _parts_of_folder(folder: Path, source: TrainSource) -> list[Part]:
    if _asks_for_part(source) or _is_hub_folder(folder):
        return [Part(source.path, Kind.hub)]
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and suffix_of(path) in SUFFIXES_IN_FOLDERS
        and not any(name.startswith(".") for name in path.relative_to(folder).parts)  # caches of tools and notebooks
    )
    parts = [_part_of_file(path) for path in found]
    if not parts:
        raise DataError(f"{source.path}: this folder holds no training files; what is read: {SUFFIXES_TOLD}")
    kinds = sorted({part.kind.value for part in parts})
    if len(kinds) > 1:
        raise DataError(
            f"{source.path}: this folder holds {' and '.join(kinds)} files: "
            f"write which ones to train on, such as path={source.path.rstrip('/')}/*{suffix_of(found[0])}*"
        )
    return parts


def _asks_for_part(source: TrainSource) -> bool:
    return source.subset is not None or source.split != "train"


def _is_hub_folder(folder: Path) -> bool:
    if saved_to_disk(folder):
        return True
    card = folder / "README.md"
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"\ufeff?---\s*\n(.*?)\n---", text, flags=re.DOTALL)
    return front is not None and re.search(r"^(configs|dataset_info):", front[1], flags=re.MULTILINE) is not None


def saved_to_disk(folder: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def may_be_hub_id(path: str) -> bool:
    """Whether what is no path here can be a data set of the Hub: `name` or `owner/name`, and no data file's ending."""
    return suffix_of(Path(path)) is None and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


def suffix_of(path: Path) -> str | None:
    """The ending that tells a file's kind, `.gz` put aside; None where it tells none."""
    name = path.name.lower()
    plain = Path(name.removesuffix(".gz")).suffix
    if plain not in KIND_OF_SUFFIX or (plain == ".parquet" and name.endswith(".gz")):
        return None
    return plain


def stem_of(path: Path) -> str:
    """A data file's name without its ending, `.gz` included; any other name whole."""
    suffix = suffix_of(path)
    return path.name if suffix is None else path.name[: path.name.lower().rindex(suffix)]


def _end_of(path: str) -> str:
    stem = stem_of(Path(path))
    if glob.has_magic(stem) or not stem:
        stem = next((part for part in reversed(Path(path).parts[:-1]) if not glob.has_magic(part)), stem)
    return stem
