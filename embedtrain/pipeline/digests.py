"""What the results of a stage depend on: its options without those that only steer, and its inputs by content."""

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from embedtrain.config.options import is_in_result
from embedtrain.models.export_record import DESCRIPTIONS
from embedtrain.pipeline.types import Stage
from embedtrain.utils.checksums import Checksums, checksum_of, file_checksum
from embedtrain.utils.files import atomic_write

# Of every kind of stage: where files are, speed, memory, and permissions.
_IGNORED = (
    *("output_dir", "cache_dir", "vectors_dir", "timeout", "unshard", "chunk_tokens", "query_batch_size"),
    *("trust_remote_code", "index.place", "index.scan_dtype", "max_file_size"),
)
_INDEX = re.compile(r"\[\d+\]")
SET_OPTIONS = ("sets", "find.sets", "find.held_out", "evaluation.sets")
LOSS_OPTIONS = ("loss", "loss.losses", "data.train.loss", "data.train.loss.losses")
# Options of all kinds of stages that name files, directories or ids of the Hub, without the numbers of elements. Others
# are texts, whatever they look like.
INPUT_OPTIONS = frozenset(
    (
        *("model", "models", "adapter", "base", "teacher", "run", "corpus", "reranker", "reranker.path"),
        *("reranker.adapter", "model.path", "model.config", "model.tokenizer", "model.lora.path"),
        *("model.query_weights", "parallel.accelerate_config", "train.init_from"),
        *(f"{rows}{option}" for rows in ("data", "data.train") for option in ("", ".path", ".documents")),
        *(f"{sets}{option}" for sets in SET_OPTIONS for option in ("", ".path", ".candidates", ".train")),
        *(f"{loss}.{option}" for loss in LOSS_OPTIONS for option in ("guide", "teacher", "teachers")),
    )
)

ADAPTER_OPTIONS = "adapters."  # a mapping from the user's names of tasks to runs


def options_of(stage: Stage) -> dict[str, Any]:
    """The options that count, by dotted name, with plain values; paths of inputs are among them."""
    ignored = (*_IGNORED, *stage.command.ignored, stage.command.output)
    values: dict[str, Any] = {}
    for name, value in leaves(stage.options, ""):
        if stage.is_training:
            counts = is_in_result(name, stage.options)
        else:
            counts = not any(name == option or name.startswith((f"{option}.", f"{option}[")) for option in ignored)
        if counts:
            values[name] = value.value if isinstance(value, Enum) else value
    return values


def input_paths(stage: Stage) -> dict[str, str]:
    """The options, by dotted name, that count and name local files or directories, and their values."""
    paths = {}
    for name, value in options_of(stage).items():
        is_input = _INDEX.sub("", name) in INPUT_OPTIONS or name.startswith(ADAPTER_OPTIONS)
        if not isinstance(value, str) or not value or not is_input:
            continue
        path = os.path.expanduser(value)
        if _is_below(path, stage.directory.parent) or glob.has_magic(path) or os.path.lexists(path):
            paths[name] = value
    return paths


def _is_below(path: str, directory: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All values in options, by dotted name below `name`."""
    prefix = f"{name}." if name else ""
    if is_dataclass(value) and not isinstance(value, type):
        for option in fields(value):
            yield from leaves(getattr(value, option.name), f"{prefix}{option.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{prefix}{key}")
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
    else:
        yield name, value


def digest_of(options: dict[str, Any], inputs: dict[str, str | None]) -> str:
    """The digest of a stage. The content of an input counts and not its path."""
    return checksum_of([{name: value for name, value in options.items() if name not in inputs}, inputs])


def output_checksums(pattern: Path) -> Checksums:
    """Checksums of the files of a result: those of a directory or of a pattern, by path below its folder."""
    files: dict[str, tuple[int, list[str]]] = {}
    for path in sorted(glob.glob(str(pattern))) if glob.has_magic(str(pattern)) else [str(pattern)]:
        files |= Checksums.of(Path(path)).below(Path(path).name)
    return Checksums(files)


def content_digest(checksums: Checksums) -> str:
    """The digest of a result, without the files that describe how it was made."""
    return checksum_of({name: entry for name, entry in checksums.files.items() if not _is_description(name)})


def _is_description(name: str) -> bool:
    return name.rpartition("/")[2] in DESCRIPTIONS or name.endswith(".md")


class ContentDigests:
    """Digests of files and directories outside of the pipeline; unchanged files (size and time) are read once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, path: str) -> str | None:
        """The digest of what a path or pattern names; None if nothing is there, as for ids of the Hub."""
        path = os.path.expanduser(path)
        paths = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
        entries = []
        for named in map(Path, paths):
            files = [named] if named.is_file() else sorted(file for file in named.rglob("*") if file.is_file())
            for file in files:
                name = file.name if file == named else file.relative_to(named).as_posix()
                # A file that is named itself counts whatever its name is.
                if file == named or not (_is_description(name) or name.startswith(".cache/")):
                    entries.append([name, self._file(file)])
        return checksum_of(entries) if entries else None

    def _file(self, file: Path) -> str:
        status, key = file.stat(), os.path.abspath(file)
        version = [status.st_size, status.st_mtime_ns]
        before = self._known.get(key)
        if isinstance(before, list) and before[:2] == version and len(before) == 3:
            return str(before[2])
        self._known[key] = [*version, file_checksum(file)]
        return str(self._known[key][2])

    def save(self) -> None:
        """Keep what was computed for the next command."""
        with atomic_write(self._path) as temporary:
            temporary.write_text(json.dumps(self._known), encoding="utf-8")

    @cached_property
    def _known(self) -> dict[str, list[Any]]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}
