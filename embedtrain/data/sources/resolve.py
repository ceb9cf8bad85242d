"""Resolves the path of a training source to its parts: local files, files under a URL, or a Hub data set."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from embedtrain.config.recipe import DataFormat, TrainSource
from embedtrain.data.sources.files import is_url, local_path
from embedtrain.data.sources.part_reader import raw_rows
from embedtrain.data.sources.parts import (
    FOLDER_SUFFIXES,
    SUPPORTED_FILES,
    PartKind,
    SourcePart,
    files_in,
    files_matching,
    is_folder,
    is_pattern,
    is_saved_dataset,
    may_be_hub_id,
    part_of_file,
    path_of,
    reject_broken_link,
    reject_compressed_tars,
    stem_of,
    suffix_of,
)
from embedtrain.data.sources.retrieval import find_hub_tables, find_retrieval_files, judgements_part
from embedtrain.data.sources.table_rows import HubRepository
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import ConfigError, DataError

# Words of names of files and folders that say which split a file is of, those of the library datasets.
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# The suffix of names by which FlagEmbedding marks files whose rows are not each other's negatives.
NO_IN_BATCH_NEGATIVES = "no_in_batch_neg"
_NUM_INSPECTED_ROWS = 16


@dataclass(frozen=True, slots=True)
class SourceParts:
    """The parts that hold a source's rows, and those of the corpus whose documents the rows refer to by id."""

    parts: list[SourcePart]
    document_parts: list[SourcePart]
    left_out: Sequence[str] = ()  # files of the folder that are of another split by their names


def expand_sources(sources: Sequence[TrainSource]) -> list[TrainSource]:
    """The sources, with each one that has `each_file` replaced by one source per file.

    Raises DataError if nothing matches a path or only some files of a source are named no_in_batch_neg, and ConfigError
    for `each_file` where there are no files.
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
        source_parts = find_parts(source, parts)
        ends = _distinct_ends([part.name for part in source_parts.parts])
        for part, end in zip(source_parts.parts, ends, strict=True):
            name = None if source.name is None else f"{source.name}-{end}"
            documents = source.documents or _corpus_path(source_parts.document_parts)
            # The split has chosen the files.
            file = replace(source, path=part.name, name=name, each_file=False, documents=documents, split="train")
            expanded.append(file)
    return expanded


def no_in_batch_negatives(source: TrainSource) -> bool:
    """Whether a source's files or their folders are named ...no_in_batch_neg, which is FlagEmbedding's convention.

    Raises DataError if only some are, or if nothing matches the path.
    """
    path = local_path(source.path)
    may_hold_files = is_pattern(source.path) or is_folder(path)
    if NO_IN_BATCH_NEGATIVES not in source.path and not may_hold_files:
        return False
    marked: list[str] = []
    unmarked: list[str] = []
    for part in resolve_parts(source):
        file = path_of(part.name)
        names = [stem_of(file), *(parent.name for parent in file.parents)]
        (marked if any(name.endswith(NO_IN_BATCH_NEGATIVES) for name in names) else unmarked).append(part.name)
    if marked and unmarked:
        raise DataError(
            f"{source.path}: {marked[0]} is named {NO_IN_BATCH_NEGATIVES} and {unmarked[0]} is not: write "
            "each_file: true, so that each file is a source, or in_batch_negatives: true or false for all of them"
        )
    return bool(marked)


def source_names(sources: Sequence[TrainSource]) -> list[str]:
    """A distinct label for each source: its name, else the end of its path that no other path has.

    `web/train.jsonl` and `news/train.jsonl` are `web/train` and `news/train`. Sources that are still equal (several of
    one file, or of one name) are numbered: `-2`, `-3`, ... Names that the user gives take precedence.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # so that ten thousand sources with one name need no quadratic search
    ends = iter(_distinct_ends([source.path for source in sources if not source.name]))
    bases = [source.name or next(ends) for source in sources]
    for index in sorted(range(len(sources)), key=lambda index: not sources[index].name):
        base = bases[index]
        name = base
        while name in taken:
            numbers[base] = numbers.get(base, 1) + 1
            name = f"{base}-{numbers[base]}"
        taken.add(name)
        names[index] = name
    return [names[index] for index in range(len(sources))]


def _distinct_ends(paths: Sequence[str]) -> list[str]:
    """The last name of each path, with as many folders before it as distinguish it from the others."""
    parts = [_name_parts(path) for path in paths]
    lengths = [1] * len(paths)
    while True:
        ends = ["/".join(names[-length:]) for names, length in zip(parts, lengths, strict=True)]
        different: dict[str, set[tuple[str, ...]]] = {}
        for end, names in zip(ends, parts, strict=True):
            different.setdefault(end, set()).add(names)
        # Equal paths cannot be distinguished.
        longer = [
            min(len(names), length + (len(different[end]) > 1))
            for end, names, length in zip(ends, parts, lengths, strict=True)
        ]
        if longer == lengths:
            return ends
        lengths = longer


def _name_parts(path: str) -> tuple[str, ...]:
    """The folders of a path that say something, and its last name without the suffix of a data file."""
    folders = [part for part in path_of(path).parent.parts if part.strip("/.") and not glob.has_magic(part)]
    name = _last_name(path)
    return (*(folders[:-1] if folders and folders[-1] == name else folders), name)


def _last_name(path: str) -> str:
    inside = path_of(path)
    stem = stem_of(inside)
    if glob.has_magic(stem) or not stem:
        stem = next((part for part in reversed(inside.parts[:-1]) if not glob.has_magic(part)), stem)
    return stem


def find_parts(source: TrainSource, parts: list[SourcePart] | None = None, *, every_split: bool = False) -> SourceParts:
    """The parts that hold a source's rows, and its corpus, if its rows refer to documents by id.

    `every_split`: see `resolve_parts`.

    The corpus is `documents`, else the files or the folder next to the rows whose names begin with `corpus`. Raises
    DataError if rows need a corpus and there is none, and ConfigError for `documents` that have no use.
    """
    left_out: Sequence[str] = ()
    if parts is None:
        parts, left_out = _resolve(source, every_split=every_split)
    if parts[0].kind is PartKind.beir:
        if source.documents is not None:
            raise ConfigError(f"{source.path}: documents={source.documents} has no use with a BEIR folder's own corpus")
        return SourceParts(parts, [parts[0].tables[2]])
    if source.documents is None and source.format not in (DataFormat.auto, DataFormat.tevatron):
        return SourceParts(parts, [], left_out)
    if source.columns is not None and source.documents is None:
        return SourceParts(parts, [], left_out)
    folders = {str(path_of(part.name).parent) for part in parts}
    rows = [part for part in parts if not _is_corpus_in(path_of(part.name), folders)]
    if not _refer_to_documents(rows, source):
        if source.documents is not None:
            raise ConfigError(
                f"{source.path}: documents={source.documents} has no use: rows hold their documents' texts themselves"
            )
        return SourceParts(parts, [], left_out)
    if source.documents is None:
        corpus = _adjacent_corpus(rows[0])
    else:
        corpus = resolve_parts(TrainSource(path=source.documents, revision=source.documents_revision), every_split=True)
    corpus = [part.with_pictures(source) for part in corpus]
    if not corpus:
        raise DataError(
            f"{source.path}: rows name documents by id, and there is no corpus beside them: "
            f"write data.train=[{{path: {source.path}, documents: FILE}}], "
            "where FILE is the file, folder or Hub data set that holds their texts"
        )
    return SourceParts(rows, corpus, left_out)


def _is_corpus_in(path: Path, folders: set[str]) -> bool:
    """Whether a file, or a folder that holds it, is in one of these folders and its name begins with `corpus`."""
    return any(entry.name.startswith("corpus") and str(entry.parent) in folders for entry in (path, *path.parents))


def _refer_to_documents(parts: Sequence[SourcePart], source: TrainSource) -> bool:
    """Whether one of the first rows refers to documents by id: the very first may be a bad one."""
    rows = (row for part in parts for _, row in raw_rows(part, subset=source.subset, split=source.split))
    inspected = islice(rows, _NUM_INSPECTED_ROWS)
    return any(not isinstance(row, BadRow) and _refers_to_documents(row) for row in inspected)


def _refers_to_documents(row: dict[str, Any]) -> bool:
    if "positive_document_ids" in row or "negative_document_ids" in row:
        return True
    documents = row.get("pos_doc")
    first = documents[0] if isinstance(documents, list) and documents else documents
    return isinstance(first, dict) and "id" in first and "text" not in first


def _adjacent_corpus(part: SourcePart) -> list[SourcePart]:
    """The files called corpus... in a part's folder, or else those of a folder called so."""
    if part.kind is PartKind.hub:
        return []
    folder = part.name[: part.name.rindex("/") + 1] if "/" in part.name else ""
    pattern = f"{folder if is_url(folder) else glob.escape(folder)}corpus*"
    for files_pattern in (pattern, f"{pattern}/**"):
        try:
            names = [name for name in files_matching(files_pattern) if suffix_of(path_of(name)) is not None]
        except DataError:  # there is none
            continue
        if names:
            return [part_of_file(name) for name in names]
    return []


def _corpus_path(parts: list[SourcePart]) -> str | None:
    """The value of `documents` for a corpus found next to a source's files."""
    folders = {part.name.rpartition("/")[0] for part in parts}
    if len(parts) == 1:
        return parts[0].name
    folder = folders.pop() if len(folders) == 1 else ""
    return folder if path_of(folder).name.startswith("corpus") else None


def resolve_parts(source: TrainSource, *, every_split: bool = False) -> list[SourcePart]:
    """The files, in sorted order, or the Hub data set of a source's path.

    The suffix of a file gives its kind. A folder stands for all data files below it but those that are of another split
    by their names, unless it has the layout of BEIR or of `datasets` (a README.md that names configurations, or
    `save_to_disk`). With `every_split`, which corpora are read with, a folder stands for the files of all splits. A
    path that does not exist is a Hub id.

    Raises:
        DataError: nothing matches, a file of an unknown kind, or a folder with files of several kinds.
        ConfigError: a subset or split of a file, or a revision of what is not on the Hub.
    """
    return _resolve(source, every_split=every_split)[0]


def _resolve(source: TrainSource, *, every_split: bool) -> tuple[list[SourcePart], Sequence[str]]:
    """The parts, and the files of the folder that are of another split by their names."""
    parts, left_out = _locate(source, every_split=every_split)
    return [part.with_pictures(source) for part in parts], left_out


def _locate(source: TrainSource, *, every_split: bool) -> tuple[list[SourcePart], Sequence[str]]:
    path = local_path(source.path)
    is_file = Path(path).is_file() and not is_url(path)
    if source.revision is not None and (is_url(path) or is_pattern(path) or Path(path).exists()):
        raise ConfigError(
            f"{source.path}: revision={source.revision} chooses a version of a Hub data set, and this is not one: "
            "leave it out (a URL has it after the id, hf://datasets/OWNER/NAME@REVISION/...)"
        )
    if not is_file and not is_pattern(path) and is_folder(path):
        return _parts_of_folder(path, source, every_split=every_split)
    if not is_url(path):
        reject_broken_link(Path(path))
    if is_file or is_url(path) or is_pattern(path):
        if _has_subset_or_split(source):
            raise ConfigError(
                f"{source.path}: subset={source.subset}, split={source.split} choose a part of a Hub data set or "
                "folder, and these are files: leave them out, and write the path of the file"
            )
        _reject_beir(source)
        names = files_matching(path) if is_pattern(path) and not is_file else [path]
        return [part_of_file(name, backslash_escapes=source.backslash_escapes) for name in names], ()
    if not may_be_hub_id(source.path, source.revision):
        raise DataError(f"{source.path}: no such file or folder")
    if source.format == DataFormat.beir:
        return [_hub_beir_part(path, source)], ()
    return [SourcePart(source.path, PartKind.hub, revision=source.revision)], ()


def _parts_of_folder(folder: str, source: TrainSource, *, every_split: bool) -> tuple[list[SourcePart], Sequence[str]]:
    files = files_in(folder)
    beir = _beir_part(folder, files, source)
    if beir is not None:
        return [beir], ()
    if source.format == DataFormat.beir:
        return [_hub_beir_part(folder, source)], ()
    if not is_url(folder) and (source.subset is not None or _is_hub_folder(Path(folder))):
        return [SourcePart(folder, PartKind.hub)], ()
    names = [name for name in files if suffix_of(path_of(name)) in FOLDER_SUFFIXES]
    if not names:
        reject_compressed_tars(files)
        raise DataError(f"{source.path}: this folder holds no training files; supported are {SUPPORTED_FILES}")
    chosen = names if every_split else _files_of_split(names, path_of(folder), source)
    parts = [part_of_file(name, backslash_escapes=source.backslash_escapes) for name in chosen]
    kinds = sorted({part.kind.value for part in parts})
    if len(kinds) > 1:
        raise DataError(
            f"{source.path}: this folder holds {' and '.join(kinds)} files: "
            f"choose the ones to train on, such as path={source.path.rstrip('/')}/*{suffix_of(path_of(chosen[0]))}*"
        )
    taken = set(chosen)
    return parts, [name for name in names if name not in taken]


def _files_of_split(names: Sequence[str], folder: Path, source: TrainSource) -> list[str]:
    """The files of the split that is asked for. A file whose name says nothing is of the split train."""
    split = _SPLIT_WORDS.get(source.split, source.split)
    splits = {name: _split_of(path_of(name), folder, source.split) for name in names}
    chosen = [name for name, of_name in splits.items() if split == (of_name or "train")]
    if not chosen:
        found = ", ".join(sorted({of_name or "train" for of_name in splits.values()}))
        raise DataError(
            f"{source.path}: by the names of its files, such as {names[0]}, this folder holds no split {source.split}, "
            f"only {found}: write split: with one of them, or the path of the files, such as "
            f"{source.path.rstrip('/')}/*{suffix_of(path_of(names[0]))}"
        )
    return chosen


def _split_of(path: Path, folder: Path, asked: str) -> str | None:
    """The split that the name of a file in a folder says, or that of the folder next to it; None where none does."""
    inside = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
    for name in (stem_of(inside), *(parent.name for parent in inside.parents)):
        words = re.split(r"[-._ 0-9]+", name.lower())
        if asked in (name, *words):  # any name may be a split
            return _SPLIT_WORDS.get(asked, asked)
        splits = {_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS}
        if splits:
            return "train" if "train" in splits else min(splits)
    return None


def _beir_part(folder: str, names: Sequence[str], source: TrainSource) -> SourcePart | None:
    """A BEIR folder's judgements, queries and corpus; None where it has another layout or format."""
    if source.format not in (DataFormat.auto, DataFormat.beir):
        return None
    files = find_retrieval_files(names, path_of(folder))
    roles = {"corpus.jsonl": files.corpus, "queries.jsonl": files.queries, "qrels/": files.judgements}
    missing = [role for role, names in roles.items() if not names]
    if missing:
        is_repository = not is_url(folder) and (Path(folder) / "README.md").is_file()
        if source.format == DataFormat.beir and not is_repository:
            raise DataError(f"{source.path}: format=beir, and this folder holds no {' and no '.join(missing)}")
        return None
    if source.split not in files.judgements:
        raise DataError(
            f"{source.path}: qrels/ holds no judgements of split={source.split}, only of "
            f"{', '.join(sorted(files.judgements))}"
        )
    judgements = files.judgements[source.split]
    for candidates in (judgements, files.queries, files.corpus):
        if len(candidates) > 1:
            stem = stem_of(path_of(candidates[0]))
            raise DataError(f"{source.path}: {candidates[0]} and {candidates[1]} are both called {stem}")
    tables = (judgements_part(judgements[0]), part_of_file(files.queries[0]), part_of_file(files.corpus[0]))
    return SourcePart(tables[0].name, PartKind.beir, tables=tables)


def _hub_beir_part(path: str, source: TrainSource) -> SourcePart:
    tables = find_hub_tables(HubRepository(path, source.revision), split=source.split)
    if tables is None:
        raise DataError(f"{path}: format=beir needs corpus, queries and judgements, and this data set lacks them")
    return SourcePart(path, PartKind.beir, tables=(tables.judgements, tables.queries, tables.corpus))


def _reject_beir(source: TrainSource) -> None:
    if source.format == DataFormat.beir:
        raise ConfigError(f"{source.path}: format=beir is a folder's, with corpus, queries and qrels: write its path")


def _has_subset_or_split(source: TrainSource) -> bool:
    return source.subset is not None or source.split != "train"


def _is_hub_folder(folder: Path) -> bool:
    if is_saved_dataset(folder):
        return True
    card = folder / "README.md"
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8", errors="replace")
    header = re.match(r"\ufeff?---\s*\n(.*?)\n---", text, flags=re.DOTALL)
    return header is not None and re.search(r"^(configs|dataset_info):", header[1], flags=re.MULTILINE) is not None
