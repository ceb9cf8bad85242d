"""Where the rows of a training source lie: a path in the recipe -> files here or under a URL, or a Hub data set."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from embedtrain.config.recipe import DataFormat, TrainSource
from embedtrain.data.sources import corpora
from embedtrain.data.sources.folders import files_in, files_matching, is_folder, is_pattern, require_target
from embedtrain.data.sources.hub_sets import judged_part
from embedtrain.data.sources.json_lists import is_json_list
from embedtrain.data.sources.kinds import (
    KIND_OF_SUFFIX,
    SUFFIXES_IN_FOLDERS,
    SUFFIXES_TOLD,
    Part,
    PartKind,
    may_be_hub_id,
    path_of,
    saved_to_disk,
    stem_of,
    suffix_of,
)
from embedtrain.data.sources.remote import is_url, local_path
from embedtrain.errors import ConfigError, DataError

__all__ = [
    "KIND_OF_SUFFIX",
    "SUFFIXES_IN_FOLDERS",
    "SUFFIXES_TOLD",
    "Part",
    "PartKind",
    "SourceParts",
    "expand_sources",
    "find_parts",
    "may_be_hub_id",
    "no_in_batch_negatives",
    "resolve_parts",
    "source_names",
    "stem_of",
    "suffix_of",
]

# How FlagEmbedding's users mark files whose rows may not serve as each other's negatives.
NO_IN_BATCH_NEGATIVES = "no_in_batch_neg"


@dataclass(frozen=True, slots=True)
class SourceParts:
    """What a source's path means: the parts that hold its rows, and those of the corpus that rows name documents of."""

    parts: list[Part]
    document_parts: list[Part]


def expand_sources(sources: Sequence[TrainSource]) -> list[TrainSource]:
    """The sources, those of `each_file` as one of each of their files, named after it, the other options as they are.

    Raises:
        DataError: nothing matches a path; or some files of a source say no_in_batch_neg and others do not.
        ConfigError: `each_file` of what has no files.
    """
    expanded: list[TrainSource] = []
    for source in sources:
        if not source.each_file:
            if source.in_batch_negatives is None:
                no_in_batch_negatives(source)
            expanded.append(source)
            continue
        parts = resolve_parts(source)
        if parts[0].kind in (PartKind.hub, PartKind.beir):
            raise ConfigError(
                f"{source.path}: each_file=true asks for a source of each file, and this is one "
                f"{parts[0].kind.value}: leave it out"
            )
        found = find_parts(source, parts)
        for part in found.parts:
            name = stem_of(path_of(part.name))
            name = name if source.name is None else f"{source.name}-{name}"
            documents = source.documents or _corpus_path(found.document_parts)
            expanded.append(replace(source, path=part.name, name=name, each_file=False, documents=documents))
    return expanded


def no_in_batch_negatives(source: TrainSource) -> bool:
    """Whether a source's files, or the folders they lie in, are named ...no_in_batch_neg, FlagEmbedding's convention.

    Raises:
        DataError: some are and others are not; or nothing matches the path.
    """
    if NO_IN_BATCH_NEGATIVES not in source.path and not (is_pattern(source.path) or _may_hold_files(source.path)):
        return False
    marked: list[str] = []
    plain: list[str] = []
    for part in resolve_parts(source):
        path = path_of(part.name)
        names = [stem_of(path), *(parent.name for parent in path.parents)]
        (marked if any(name.endswith(NO_IN_BATCH_NEGATIVES) for name in names) else plain).append(part.name)
    if marked and plain:
        raise DataError(
            f"{source.path}: {marked[0]} is named {NO_IN_BATCH_NEGATIVES} and {plain[0]} is not: write "
            "each_file: true, so that each file is a source, or in_batch_negatives: true or false for all of them"
        )
    return bool(marked)


def _may_hold_files(path: str) -> bool:
    local = local_path(path)
    return is_folder(local) if is_url(local) else Path(local).is_dir()


def source_names(sources: Sequence[TrainSource]) -> list[str]:
    """A distinct label for each source: its name, else the end of its path; `-2`, `-3`, ... where two are alike.

    Names that are given come first, so that none of them is changed for the end of another's path.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # so that ten thousand sources of one name are no ten thousand searches each
    for place in sorted(range(len(sources)), key=lambda place: not sources[place].name):
        wanted = sources[place].name or _end_of(sources[place].path)
        name = wanted
        while name in taken:
            numbers[wanted] = numbers.get(wanted, 1) + 1
            name = f"{wanted}-{numbers[wanted]}"
        taken.add(name)
        names[place] = name
    return [names[place] for place in range(len(sources))]


def find_parts(source: TrainSource, parts: list[Part] | None = None) -> SourceParts:
    """The parts that hold a source's rows, and its corpus, if its rows name documents by id.

    The corpus is `documents`, else what is called corpus... beside the rows.

    Args:
        source: an element of `data.train`.
        parts: what `resolve_parts` says of it, if that is known.

    Raises:
        DataError: as `resolve_parts`; or rows name documents and there is no corpus.
        ConfigError: as `resolve_parts`; or `documents` of rows that hold their texts.
    """
    parts = parts or resolve_parts(source)
    if parts[0].kind is PartKind.beir:
        if source.documents is not None:
            raise ConfigError(f"{source.path}: documents={source.documents} has no use with a BEIR folder's own corpus")
        return SourceParts(parts, [parts[0].tables[2]])
    if source.documents is None and source.format not in (DataFormat.auto, DataFormat.tevatron):
        return SourceParts(parts, [])
    if source.columns is not None and source.documents is None:
        return SourceParts(parts, [])
    own_corpus = set(corpora.beside(parts, "corpus", [part.name for part in parts]))
    rows = [part for part in parts if part.name not in own_corpus]
    if not corpora.any_names_documents(rows, subset=source.subset, split=source.split):
        if source.documents is not None:
            raise ConfigError(
                f"{source.path}: documents={source.documents} has no use: rows hold their documents' texts themselves"
            )
        return SourceParts(parts, [])
    if source.documents is None:
        corpus = _corpus_beside(rows[0])
    else:
        corpus = resolve_parts(TrainSource(path=source.documents, revision=source.documents_revision))
    if not corpus:
        raise DataError(
            f"{source.path}: rows name documents by id, and there is no corpus beside them: "
            f"write data.train=[{{path: {source.path}, documents: FILE}}], "
            "where FILE is the file, folder or Hub data set that holds their texts"
        )
    return SourceParts(rows, corpus)


def _corpus_beside(part: Part) -> list[Part]:
    """The files called corpus... in a part's folder, or else those of a folder called so."""
    if part.kind is PartKind.hub:
        return []
    folder = part.name[: part.name.rindex("/") + 1] if "/" in part.name else ""
    pattern = f"{folder if is_url(folder) else glob.escape(folder)}corpus*"
    for one in (pattern, f"{pattern}/**"):
        try:
            names = [name for name in files_matching(one) if suffix_of(path_of(name)) is not None]
        except DataError:  # nothing is called so
            continue
        if names:
            return [_part_of_file(name) for name in names]
    return []


def _corpus_path(parts: list[Part]) -> str | None:
    """What to write for a corpus found beside a source's files, so that each of them finds it."""
    folders = {part.name.rpartition("/")[0] for part in parts}
    if len(parts) == 1:
        return parts[0].name
    folder = folders.pop() if len(folders) == 1 else ""
    return folder if path_of(folder).name.startswith("corpus") else None


def resolve_parts(source: TrainSource) -> list[Part]:
    """The files, in sorted order, or the Hub data set that a source's path means.

    A file is taken as its name's ending says. A folder means all data files below it, whatever their
    names, unless it is laid out as BEIR's or for `datasets` (a README.md that names configurations, or made by
    `save_to_disk`), or a subset or a split other than `train` is asked for. What is no path here is a Hub id.

    Raises:
        DataError: nothing matches, a file of an unknown kind, or a folder with files of several kinds.
        ConfigError: a subset or a split of a file, or a revision of what is not on the Hub.
    """
    path = local_path(source.path)
    is_file = Path(path).is_file() and not is_url(path)
    if source.revision is not None and (is_url(path) or is_pattern(path) or Path(path).exists()):
        raise ConfigError(
            f"{source.path}: revision={source.revision} chooses a version of a Hub data set, and this is none: leave "
            "it out (in a URL it stands behind the id, hf://datasets/OWNER/NAME@REVISION/...)"
        )
    if not is_file and not is_pattern(path) and (is_url(path) or Path(path).is_dir()) and is_folder(path):
        return _parts_of_folder(path, source)
    if not is_url(path):
        require_target(Path(path))
    if is_file or is_url(path) or is_pattern(path):
        if _asks_for_part(source):
            raise ConfigError(
                f"{source.path}: subset={source.subset}, split={source.split} choose a part of a Hub data set or "
                "folder, and these are files: leave them out, and write the path of the file that is meant"
            )
        if source.format == DataFormat.beir:
            raise ConfigError(
                f"{source.path}: format=beir is a folder's, with corpus, queries and qrels: write its path"
            )
        names = files_matching(path) if is_pattern(path) and not is_file else [path]
        return [_part_of_file(name) for name in names]
    if not may_be_hub_id(source.path):
        raise DataError(f"{source.path}: no such file or folder")
    if source.format == DataFormat.beir:
        return [judged_part(path, source.split, source.revision)]
    return [Part(source.path, PartKind.hub, revision=source.revision)]


def _part_of_file(name: str) -> Part:
    suffix = suffix_of(path_of(name))
    if suffix is None:
        raise DataError(f"{name}: this kind of file is not read as training rows; what is read: {SUFFIXES_TOLD}")
    if suffix == ".json" and is_json_list(name):
        return Part(name, PartKind.json)
    return Part(name, KIND_OF_SUFFIX[suffix])


def _parts_of_folder(folder: str, source: TrainSource) -> list[Part]:
    found = [name for name in files_in(folder) if suffix_of(path_of(name)) in SUFFIXES_IN_FOLDERS]
    beir = _beir_part(folder, found, source)
    if beir is not None:
        return [beir]
    if source.format == DataFormat.beir:
        return [judged_part(folder, source.split)]
    if not is_url(folder) and (_asks_for_part(source) or _is_hub_folder(Path(folder))):
        return [Part(folder, PartKind.hub)]
    parts = [_part_of_file(name) for name in found]
    if not parts:
        raise DataError(f"{source.path}: this folder holds no training files; what is read: {SUFFIXES_TOLD}")
    kinds = sorted({part.kind.value for part in parts})
    if len(kinds) > 1:
        raise DataError(
            f"{source.path}: this folder holds {' and '.join(kinds)} files: "
            f"write which ones to train on, such as path={source.path.rstrip('/')}/*{suffix_of(path_of(found[0]))}*"
        )
    return parts


def _beir_part(folder: str, files: Sequence[str], source: TrainSource) -> Part | None:
    """A BEIR folder's judgements, queries and corpus; None where the folder is none, or is to be read as another."""
    if source.format not in (DataFormat.auto, DataFormat.beir):
        return None
    root = path_of(folder)
    own = _by_stem(files, root)
    judged = _by_stem(files, root / "qrels")
    there = {"corpus.jsonl": "corpus" in own, "queries.jsonl": "queries" in own, "qrels/": judged}
    missing = [what for what, is_there in there.items() if not is_there]
    if missing:
        is_repository = not is_url(folder) and (Path(folder) / "README.md").is_file()
        if source.format == DataFormat.beir and not is_repository:
            raise DataError(f"{source.path}: format=beir, and this folder holds no {' and no '.join(missing)}")
        return None
    if source.split not in judged:
        raise DataError(
            f"{source.path}: qrels/ holds no judgements of split={source.split}, only of {', '.join(sorted(judged))}"
        )
    chosen = (judged[source.split], own["queries"], own["corpus"])
    for names in chosen:
        if len(names) > 1:
            raise DataError(f"{source.path}: {names[0]} and {names[1]} are both called {stem_of(path_of(names[0]))}")
    tables = [_part_of_file(name) for (name,) in chosen]
    return Part(tables[0].name, PartKind.beir, tables=tuple(tables))


def _by_stem(files: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """The files of a folder by their names without endings."""
    found: dict[str, list[str]] = {}
    for name in files:
        if path_of(name).parent == folder:
            found.setdefault(stem_of(path_of(name)), []).append(name)
    return found


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


def _end_of(path: str) -> str:
    inside = path_of(path)
    stem = stem_of(inside)
    if glob.has_magic(stem) or not stem:
        stem = next((part for part in reversed(inside.parts[:-1]) if not glob.has_magic(part)), stem)
    return stem
