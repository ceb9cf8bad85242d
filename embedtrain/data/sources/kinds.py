"""How the parts of a source are stored, told by the ends of their names."""

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit


class PartKind(Enum):
    """How a part of a source is stored."""

    jsonl = "JSONL"
    json = "JSON"  # one value a file: a list of rows
    csv = "CSV"
    tsv = "TSV"
    parquet = "Parquet"
    arrow = "Arrow"
    hub = "Hub data set"
    beir = "BEIR folder"


KIND_OF_SUFFIX = {
    ".jsonl": PartKind.jsonl,
    ".json": PartKind.jsonl,
    ".csv": PartKind.csv,
    ".tsv": PartKind.tsv,
    ".parquet": PartKind.parquet,
    ".arrow": PartKind.arrow,
    ".feather": PartKind.arrow,
}
PACKED_SUFFIXES = (".gz", ".zst")
_PACKED_KINDS = (PartKind.jsonl, PartKind.csv, PartKind.tsv)  # that are read packed as well
# A folder may also hold configuration in .json files, so there only .jsonl counts.
SUFFIXES_IN_FOLDERS = [suffix for suffix in KIND_OF_SUFFIX if suffix != ".json"]
SUFFIXES_TOLD = ".jsonl, .json, .csv and .tsv (each also with .gz or .zst), .parquet, .arrow and .feather"
_WITHOUT_LINES = (PartKind.parquet, PartKind.arrow, PartKind.hub)


@dataclass(frozen=True, slots=True)
class Part:
    """One file, one data set that the `datasets` library opens, or the files that make rows together.

    Attributes:
        name: the file's path or URL, or the Hub id, as messages show it; of a BEIR folder its judgements'.
        kind: how it is stored.
        subset: configuration of a Hub data set, other than the source's.
        split: likewise.
        revision: commit, tag or branch of a Hub data set.
        tables: of a BEIR folder: its judgements, queries and corpus.
    """

    name: str
    kind: PartKind
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    tables: tuple["Part", ...] = ()

    def location(self, line: int) -> str:
        """Where a row is, for messages: `path:line`, or `path: row N` where a file has no lines.

        Of a list in a file of one JSON value it is `path: element N`.
        """
        if self.tables:
            return self.tables[0].location(line)
        if self.kind is PartKind.json:
            return f"{self.name}: element {line}"
        return f"{self.name}: row {line}" if self.kind in _WITHOUT_LINES else f"{self.name}:{line}"


def path_of(name: str) -> Path:
    """The path in a name: of an https:// URL without what follows `?` or `#`."""
    return Path(urlsplit(name).path if re.match(r"https?://", name, re.IGNORECASE) else name)


def suffix_of(path: Path) -> str | None:
    """The ending that tells a file's kind, `.gz` and `.zst` put aside; None where it tells none."""
    name = path.name.lower()
    packed = next((suffix for suffix in PACKED_SUFFIXES if name.endswith(suffix)), "")
    plain = Path(name.removesuffix(packed)).suffix
    if plain not in KIND_OF_SUFFIX or (packed and KIND_OF_SUFFIX[plain] not in _PACKED_KINDS):
        return None
    return plain


def stem_of(path: Path) -> str:
    """A data file's name without its ending, `.gz` and `.zst` included; any other name whole."""
    suffix = suffix_of(path)
    return path.name if suffix is None else path.name[: path.name.lower().rindex(suffix)]


def saved_to_disk(folder: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def may_be_hub_id(path: str) -> bool:
    """Whether what is no path here can be a data set of the Hub: `name` or `owner/name`, and no data file's ending."""
    return suffix_of(Path(path)) is None and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None
