"""Parts of a source (files and data sets), their kinds by file name, and the files of a folder or pattern."""

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from embedtrain.config.columns import DEFAULT_MAX_PIXELS, DataPath
from embedtrain.data.sources.files import file_system, is_url, open_binary, unreachable_error
from embedtrain.data.sources.text_rows import is_json_list
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.hub import is_local_path


class PartKind(Enum):
    """How a part of a source is stored."""

    jsonl = "JSONL"
    json = "JSON"  # one value per file: a list of rows
    csv = "CSV"
    tsv = "TSV"
    parquet = "Parquet"
    arrow = "Arrow"
    tar = "tar"  # of webdataset
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
    ".tar": PartKind.tar,
}
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_COMPRESSED_TAR = re.compile(r"\.(tar\.(gz|zst|bz2|xz)|tgz)$", re.IGNORECASE)
_COMPRESSIBLE_KINDS = (PartKind.jsonl, PartKind.csv, PartKind.tsv)
# A folder may also hold configuration in .json files, so only .jsonl counts there.
FOLDER_SUFFIXES = [suffix for suffix in KIND_OF_SUFFIX if suffix != ".json"]
SUPPORTED_FILES = ".jsonl, .json, .csv and .tsv (each also with .gz or .zst), .parquet, .arrow, .feather and .tar"
_KIND_OF_MAGIC = {b"PAR1": PartKind.parquet, b"ARROW1": PartKind.arrow}
_KINDS_WITHOUT_LINES = (PartKind.parquet, PartKind.arrow, PartKind.tar, PartKind.hub)


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One file, one data set that `datasets` opens, or the three tables of a BEIR folder."""

    name: str  # path, URL or Hub id, for messages; that of the judgements for a BEIR folder
    kind: PartKind
    subset: str | None = None  # of a Hub data set, where it is not the source's
    split: str | None = None  # of a Hub data set, where it is not the source's
    revision: str | None = None  # commit, tag or branch of a Hub data set
    backslash_escapes: bool = False  # of CSV and TSV
    image_dir: str | None = None  # the folder of pictures that rows name, if it is not the file's
    image_columns: tuple[str, ...] = ()  # of pictures, besides those that are by their names
    max_image_pixels: int = DEFAULT_MAX_PIXELS
    # Judgements, queries and corpus of a BEIR folder.
    tables: tuple["SourcePart", ...] = ()

    def with_pictures(self, options: DataPath | None) -> "SourcePart":
        """The same part, whose pictures are where the options say."""
        if options is None:
            return self
        return replace(
            self,
            image_dir=options.image_dir,
            image_columns=tuple(options.image_columns or ()),
            max_image_pixels=options.max_image_pixels,
            tables=tuple(table.with_pictures(options) for table in self.tables),
        )

    def location(self, line: int) -> str:
        """A row's location for messages: `path:line`; `path: row N` or `path: element N` in files without lines."""
        if self.tables:
            return self.tables[0].location(line)
        if self.kind is PartKind.json:
            return f"{self.name}: element {line}"
        return f"{self.name}: row {line}" if self.kind in _KINDS_WITHOUT_LINES else f"{self.name}:{line}"


def part_of_file(name: str, *, backslash_escapes: bool = False) -> SourcePart:
    """The part of a file: its name and, for JSON, its beginning give the kind. Raises DataError for other kinds.

    `backslash_escapes` is the option of its source or set, and of CSV and TSV alone.
    """
    suffix = suffix_of(path_of(name))
    if suffix is None:
        reject_compressed_tars([name])
        raise DataError(f"{name}: this kind of file is not supported; supported are {SUPPORTED_FILES}")
    kind = _kind_of_content(name) if KIND_OF_SUFFIX[suffix] in _COMPRESSIBLE_KINDS else None
    if kind is None and suffix == ".json" and is_json_list(name):
        kind = PartKind.json
    kind = kind or KIND_OF_SUFFIX[suffix]
    if backslash_escapes and kind not in (PartKind.csv, PartKind.tsv):
        raise ConfigError(f"{name}: backslash_escapes is an option of CSV and TSV files, and this is {kind.value}")
    return SourcePart(name, kind, backslash_escapes=backslash_escapes)


def reject_compressed_tars(names: Iterable[str]) -> None:
    """Raise a DataError for the first compressed tar file."""
    for name in names:
        if _COMPRESSED_TAR.search(name):
            raise DataError(
                f"{name}: pictures in a compressed tar file cannot be read one by one: decompress it to a .tar file"
            )


def _kind_of_content(name: str) -> PartKind | None:
    """Parquet or Arrow where a local file named as text holds it; None for text, and for a file that cannot be read."""
    if is_url(name) or not Path(name).is_file():
        return None
    try:
        with open_binary(name) as file:
            start = file.read(8)
    except (DataError, OSError):  # reported where the rows are read
        return None
    return next((kind for magic, kind in _KIND_OF_MAGIC.items() if start.startswith(magic)), None)


# Names.


def path_of(name: str) -> Path:
    """The path in a name; the query and fragment of an https:// URL are left out."""
    return Path(urlsplit(name).path if re.match(r"https?://", name, re.IGNORECASE) else name)


def suffix_of(path: Path) -> str | None:
    """The suffix that gives a file's kind, without `.gz` or `.zst`; None for other files."""
    name = path.name.lower()
    compressed = next((suffix for suffix in _COMPRESSED_SUFFIXES if name.endswith(suffix)), "")
    suffix = Path(name.removesuffix(compressed)).suffix
    if suffix not in KIND_OF_SUFFIX or (compressed and KIND_OF_SUFFIX[suffix] not in _COMPRESSIBLE_KINDS):
        return None
    return suffix


def stem_of(path: Path) -> str:
    """A data file's name without its suffixes; any other name unchanged."""
    suffix = suffix_of(path)
    return path.name if suffix is None else path.name[: path.name.lower().rindex(suffix)]


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def may_be_hub_id(path: str, revision: str | None = None) -> bool:
    """Whether a path that does not exist may be a Hub id: `name` or `owner/name`, without a data file's suffix."""
    if is_local_path(path) and revision is None:
        return False
    return suffix_of(Path(path)) is None and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is not None


# Files.


def is_pattern(path: str) -> bool:
    """Whether a path is a glob pattern. In https:// URLs `?` begins a query."""
    return glob.has_magic(path.replace("?", "") if path.lower().startswith("http") and is_url(path) else path)


def is_folder(path: str) -> bool:
    """Whether a path or URL is a folder. Raises DataError if a URL cannot be reached."""
    if not is_url(path):
        return Path(path).is_dir()
    system, inside = file_system(path)
    if path.lower().startswith("http"):  # HTTP has pages, not folders
        return path.endswith("/") or suffix_of(Path(inside)) is None
    try:
        return bool(system.info(inside)["type"] == "directory")
    except Exception as error:  # each file system raises its own types
        raise unreachable_error(path, error) from error


def files_in(folder: str) -> list[str]:
    """All files below a folder, sorted, without hidden files and folders. Links are followed, broken ones rejected."""
    if is_url(folder):
        system, inside = file_system(folder)
        try:
            paths = system.find(inside)
        except Exception as error:
            raise unreachable_error(folder, error) from error
        root = inside.rstrip("/")
        names = [name for name in paths if not _is_hidden(name.removeprefix(root))]
        return sorted(str(system.unstrip_protocol(name)) for name in names)
    return sorted(_walk(Path(folder)))


def files_matching(pattern: str) -> list[str]:
    """All files that match a glob pattern, sorted; `**` matches any depth. Raises DataError if there is none."""
    if is_url(pattern):
        system, inside = file_system(pattern)
        try:
            paths = [name for name, info in system.glob(inside, detail=True).items() if info["type"] != "directory"]
        except Exception as error:
            raise unreachable_error(pattern, error) from error
        names = [str(system.unstrip_protocol(name)) for name in paths]
    else:
        names = [name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name)]
        for name in names:
            reject_broken_link(Path(name))
        names = list(dict.fromkeys(str(Path(name)) for name in names))
    if not names:
        raise DataError(f"{pattern}: no file matches this pattern")
    return sorted(names)


def reject_broken_link(path: Path) -> None:
    """Reject a link to a file that does not exist."""
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path}: is a link to {os.readlink(path)}, which does not exist")


def _walk(root: Path) -> list[str]:
    names: list[str] = []
    visited: set[str] = set()  # links may form a cycle

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: this folder cannot be read: {error.strerror}") from error

    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        for name in files:
            path = Path(folder) / name
            if name.startswith("."):
                continue
            if suffix_of(path) is not None:
                reject_broken_link(path)
            if path.is_file():
                names.append(str(path))
    return names


def _is_hidden(relative: str) -> bool:
    return any(name.startswith(".") for name in relative.split("/"))
