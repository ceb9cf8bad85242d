"""What the results of a stage depend on, and stage.json, which records it and what the stage has produced.

OUTPUT_DIR/stages/NAME/             what the command of the stage writes
OUTPUT_DIR/stages/NAME/stage.json   written when the stage begins, and again when it has ended
OUTPUT_DIR/stages/NAME.old-1/       an earlier result, set aside by from=
"""

import glob
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from embedtrain.config.compose import to_plain
from embedtrain.config.options import is_in_result, is_input
from embedtrain.config.saved_recipe import current_recipe, current_static
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.export_record import DESCRIPTIONS
from embedtrain.pipeline.types import Pipeline, Stage, is_training, leaves
from embedtrain.utils.files import Checksums, atomic_write, checksum_of, file_checksum
from embedtrain.utils.records import read_record

STAGE_FILE = "stage.json"
_KEY = re.compile(r"[^.\[]+|\[\d+\]")  # of dotted names: data.train[0].path


def options_of(stage: Stage) -> dict[str, Any]:
    """The options that the results depend on, by dotted name, with plain values; paths of inputs are among them."""
    return {
        name: value.value if isinstance(value, Enum) else value
        for name, value in leaves(stage.options, "")
        if name != stage.command.output and is_in_result(name, stage.options)
    }


def input_paths(stage: Stage) -> dict[str, str]:
    """The options, by dotted name, that count and name local files or directories, and their values."""
    paths = {}
    for name, value in options_of(stage).items():
        if not isinstance(value, str) or not value or not is_input(name, stage.options):
            continue
        path = os.path.expanduser(value)
        if _is_below(path, stage.directory.parent) or glob.has_magic(path) or os.path.lexists(path):
            paths[name] = value
    return paths


def _is_below(path: str, directory: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))


def digest_of(options: dict[str, Any], inputs: dict[str, str | None]) -> str:
    """The digest of a stage. The content of an input counts and not its path."""
    return checksum_of([{name: value for name, value in options.items() if name not in inputs}, inputs])


def output_checksums(directory: Path, below: str) -> Checksums:
    """Checksums of the files of a result: those of a directory or of a pattern, by path below that of the stage."""
    pattern = directory / below
    files: dict[str, tuple[int, list[str]]] = {}
    for path in sorted(glob.glob(str(pattern))) if glob.has_magic(str(pattern)) else [str(pattern)]:
        files |= Checksums.of(Path(path)).below(os.path.relpath(path, directory))
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


@dataclass(frozen=True)
class StageRecord:
    """The content of stage.json."""

    do: str
    digest: str
    options: dict[str, Any]
    inputs: dict[str, str | None]  # by option: digest of the content
    began: float  # seconds since the epoch
    ranks: int
    versions: dict[str, str] = field(default_factory=dict)
    ended: float | None = None  # None: it has begun
    figures: dict[str, Any] = field(default_factory=dict)  # what the command has measured
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # by pattern: digest, and checksums of files


class PipelineState:
    """The records of all stages of a pipeline; on one rank."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._contents = ContentDigests(pipeline.output_dir / "state.json")
        self._verified: set[str] = set()

    def require_own(self, stage: Stage) -> None:
        """Raise ConfigError if the directory of a stage is a link, or has files although no stage has begun there."""
        if stage.directory.is_symlink():
            raise ConfigError(f"{stage.directory} is a link, through which nothing is written: delete it")
        if stage.directory.exists() and not stage.directory.is_dir():
            raise ConfigError(f"{stage.directory} is a file: move it away, or rename the stage {stage.name}")
        if stage.directory.is_dir() and not os.path.lexists(stage.directory / STAGE_FILE):
            foreign = next(iter(sorted(os.listdir(stage.directory))), None)
            if foreign is not None:
                raise ConfigError(
                    f"{stage.directory} contains {foreign}, which no stage has written: move it away, or rename the "
                    f"stage {stage.name}"
                )

    def read(self, stage: Stage) -> StageRecord | None:
        """The record of a stage; None if it has not begun. Raises CheckpointError if the file is damaged."""
        path = stage.directory / STAGE_FILE
        try:
            return read_record(StageRecord, json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): write from={stage.name} to repeat the stage, or restore the file"
            ) from None

    def current(self, stage: Stage, *, ranks: int, versions: Mapping[str, str]) -> StageRecord:
        """The record with which the stage would begin now; its inputs are all present."""
        options = options_of(stage)
        inputs = {name: self._digest(path) for name, path in input_paths(stage).items()}
        self._contents.save()
        return StageRecord(
            do=stage.command.name,
            digest=digest_of(options, inputs),
            options=to_plain({name: value for name, value in options.items() if name not in inputs}),
            inputs=inputs,
            began=time.time(),
            ranks=ranks,
            versions=dict(versions),
        )

    def _digest(self, path: str) -> str | None:
        for stage in self.pipeline.stages:
            if path == stage.output("dir") or path in map(stage.output, stage.command.outputs):
                record = self.read(stage)
                if record is None or record.ended is None:
                    raise ConfigError(f"the stage {stage.name} has not ended, and its results are needed: run it first")
                below = os.path.relpath(path, stage.directory)
                return record.outputs[below]["digest"] if below in record.outputs else record.digest
        return self._contents.of(path)

    def write(self, stage: Stage, record: StageRecord) -> None:
        """Write stage.json."""
        with atomic_write(stage.directory / STAGE_FILE) as temporary:
            temporary.write_text(json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def finish(self, stage: Stage, figures: Mapping[str, Any], describe: Callable[[StageRecord], None]) -> StageRecord:
        """Record the end of a stage and the checksums of its results, after `describe` has added files to them."""
        record = self.read(stage)
        assert record is not None
        record = replace(record, ended=time.time(), figures=dict(figures))
        describe(record)
        outputs = {}
        for below in filter(None, stage.command.outputs.values()):
            checksums = output_checksums(stage.directory, below)
            outputs[below] = {"digest": content_digest(checksums), "files": checksums.files}
        record = replace(record, outputs=outputs)
        self.write(stage, record)
        self._verified.add(stage.name)
        return record

    def verify_inputs(self, stage: Stage) -> None:
        """Raise CheckpointError if a result of an earlier stage that this one uses is damaged; each is read once."""
        for name in stage.depends:
            if name in self._verified:
                continue
            earlier = self.pipeline.stage(name)
            record = self.read(earlier)
            for output in () if record is None else record.outputs.values():
                files = {file: (int(size), list(blocks)) for file, (size, blocks) in output["files"].items()}
                damaged = Checksums(files).damaged(earlier.directory)
                if damaged:
                    raise CheckpointError(
                        f"{earlier.directory / damaged[0]} is missing or differs from what the stage {name} wrote: "
                        f"restore it, or write from={name} to repeat the stage"
                    )
            self._verified.add(name)

    def require_same(self, stage: Stage, before: StageRecord, now: StageRecord) -> None:
        """Raise ConfigError if a stage that has ended was run with other options or inputs.

        One that has only begun is resumed by the rules of its command; its inputs must be the same.
        """
        for name, old, new in _differences(stage, before, now):
            behind = [stage.name, *(other.name for other in self.pipeline.dependents(stage.name))]
            raise ConfigError(
                f"stages.{stage.name}: {name} was {_shown(old)} when the stage ran and is now {_shown(new)}: set it "
                f"back, or write from={stage.name} to repeat {', '.join(behind)}; earlier results are kept as "
                f"{stage.name}.old-1"
            )

    def set_aside(self, stage: Stage) -> Path | None:
        """Rename the directory of a stage; its new path, or None if there is none."""
        if not os.path.lexists(stage.directory):
            return None
        number = 1
        while os.path.lexists(path := stage.directory.with_name(f"{stage.directory.name}.old-{number}")):
            number += 1
        stage.directory.rename(path)
        self._verified.discard(stage.name)
        return path


def _differences(stage: Stage, before: StageRecord, now: StageRecord) -> Iterator[tuple[str, Any, Any]]:
    if before.do != now.do:
        yield "do", before.do, now.do
    if before.ended is not None:
        saved, current = (_current_options(stage, record.options) for record in (before, now))
        defaults = _defaults(stage)
        for name in dict.fromkeys([*current, *saved]):
            if name in before.inputs and name in now.inputs:
                continue
            if name not in current and not (_exists(stage.options, name) and is_in_result(name, stage.options)):
                continue  # an earlier version had the option, or its result depended on it
            # A version that did not have the option counts as its default.
            old, new = (options.get(name, defaults.get(name)) for options in (saved, current))
            if old != new and name not in now.inputs and name not in before.inputs:
                yield name, old, new
    for name in dict.fromkeys([*now.inputs, *before.inputs]):
        old, new = before.inputs.get(name), now.inputs.get(name)
        if old != new and (old is not None or new is not None):
            yield f"the content of {name}", old, new


def _current_options(stage: Stage, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a record that an earlier version may have written, with the names of this version."""
    if stage.command.name == "static":
        return current_static(saved)
    if not is_training(stage.command):
        return dict(saved)
    recipe: dict[str, Any] = {}
    for name, value in saved.items():
        *path, last = _KEY.findall(name)
        node = recipe
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return dict(leaves(current_recipe(_with_lists(recipe)), ""))


def _with_lists(node: Any) -> Any:
    """A tree in which a mapping from `[0]`, `[1]`, ... is a list, with None for elements that are inputs."""
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(item) for key, item in node.items()}
    if not items or not all(key.startswith("[") for key in items):
        return items
    elements = {int(key[1:-1]): item for key, item in items.items()}
    return [elements.get(position) for position in range(max(elements) + 1)]


def _exists(options: Any, name: str) -> bool:
    """Whether the options have one of this dotted name, also as an element that a list or mapping had before."""
    for part in name.split("."):
        if not is_dataclass(options):
            return True
        option = part.partition("[")[0]
        if not hasattr(options, option):
            return False
        options = getattr(options, option)
    return True


def _defaults(stage: Stage) -> dict[str, Any]:
    default = replace(stage, options=stage.command.option_class())
    return dict(to_plain(options_of(default)))


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
