"""The checkpoint folder on disk: which steps are complete, written whole or not at all, how many are kept.

A step is first written as `step-00000100.tmp`; when every rank has written its part a manifest with the
size and checksum of each file is added, and the folder is renamed. What is half-written or damaged is
therefore told by looking, named, and passed over.
"""

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = 3  # of what a step folder holds; raised when older versions could no longer read it
# That this version reads. Format 1 had the encoder's weights alone, under other names; 2 was written when rows came in
# another order, so what remains of such a run is not known.
OLDEST_FORMAT = 3
_STEP = re.compile(r"step-(\d{8})")
_UNFINISHED = ".tmp"


class OtherFormatError(CheckpointError):
    """An intact checkpoint of another version's format: passing it over would train anew and then delete it."""


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A complete checkpoint: its folder, its step, and what its manifest says."""

    path: Path
    step: int
    manifest: dict[str, Any]


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies once complete."""
    return root / f"step-{step:08d}"


def unfinished_path(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return root / f"step-{step:08d}{_UNFINISHED}"


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """Renamed step folders, the newest first; whether they are intact is another question."""
    if not root.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


def list_unfinished(root: Path) -> list[Path]:
    """Folders that a save left behind when it was cut off."""
    return sorted(root.glob(f"step-*{_UNFINISHED}")) if root.is_dir() else []


def read_manifest(path: Path) -> StepFolder:
    """What the manifest of a step folder says; sizes of its files are compared.

    Raises:
        CheckpointError: no manifest, one that cannot be read, a missing file, or one of another size.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} has no {MANIFEST}: it was not written to its end")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        files = {str(name): (int(facts["bytes"]), int(facts["crc32"])) for name, facts in manifest["files"].items()}
        step, written_as = int(manifest["step"]), int(manifest["format"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    if written_as > FORMAT:
        raise OtherFormatError(
            f"{path} was written by a newer embedtrain (format {written_as}; this one reads {FORMAT})"
        )
    if written_as < OLDEST_FORMAT:
        raise OtherFormatError(
            f"{path} was written by an earlier embedtrain (format {written_as}; this one reads {OLDEST_FORMAT} and on)"
        )
    for name, (size, _) in files.items():
        part = path / name
        if not part.is_file():
            raise CheckpointError(f"{part} is missing")
        if part.stat().st_size != size:
            raise CheckpointError(f"{part} is damaged: {part.stat().st_size} bytes instead of {size}")
    return StepFolder(path, step, manifest)


def choose_step(root: Path, asked: str) -> StepFolder:
    """The checkpoint that `latest`, `best` or a step's number names.

    Raises:
        CheckpointError: there is none, or the one asked for is not intact.
    """
    steps = dict(list_steps(root))
    if not steps:
        raise CheckpointError(f"{root} holds no checkpoint")
    if asked == "latest":
        damage = []
        for path in steps.values():
            try:
                return _intact(path)
            except CheckpointError as error:
                damage.append(str(error))
        raise CheckpointError(f"{root} holds no intact checkpoint: {damage[0]}")
    there = ", ".join(str(step) for step in sorted(steps))
    if asked == "best":
        best = _intact(steps[max(steps)]).manifest["state"].get("best_step")
        if best is None:
            raise CheckpointError(
                f"step=best: this run was not asked to keep its best step (checkpoint.best); there are {there}"
            )
        asked = str(best)
    if not asked.isdigit() or int(asked) not in steps:
        raise CheckpointError(f"step={asked}: {root} has latest and {there}")
    return _intact(steps[int(asked)])


def _intact(path: Path) -> StepFolder:
    folder = read_manifest(path)
    verify(folder, 0, 1)
    return folder


def verify(folder: StepFolder, part: int, parts: int) -> None:
    """Compare checksums of every `parts`-th file, so that ranks share the reading.

    Raises:
        CheckpointError: a file's content is not what was written.
    """
    for name in sorted(folder.manifest["files"])[part::parts]:
        if checksum(folder.path / name) != folder.manifest["files"][name]["crc32"]:
            raise CheckpointError(f"{folder.path / name} is damaged: its checksum is not the one that was written")


def checksum(path: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def describe_files(path: Path, part: int, parts: int) -> dict[str, dict[str, int]]:
    """Size and checksum of every `parts`-th file in a folder."""
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name != MANIFEST)
    return {file.name: {"bytes": file.stat().st_size, "crc32": checksum(file)} for file in files[part::parts]}


def finish(unfinished: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest and give the folder its name; on one rank, when all have written their part."""
    file = unfinished / MANIFEST
    with file.open("w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    if final.exists():  # the same step, saved before the run was taken back to an earlier one
        shutil.rmtree(final)
    unfinished.rename(final)


def prune(root: Path, newest: int, keep: int, protected: set[int]) -> None:
    """Delete all but the `keep` newest steps up to `newest` and the `protected` ones; on one rank.

    Steps above the one just saved were left by a course that was abandoned, because they are damaged or hold
    weights alone; they would be looked at first at every restart.
    """
    steps = list_steps(root)
    kept = {step for step, _ in [item for item in steps if item[0] <= newest][:keep]} | protected
    for step, path in steps:
        if step not in kept:
            # Renamed first: a deletion cut off in the middle must not leave what looks like a checkpoint.
            doomed = path.with_name(path.name + _UNFINISHED)
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
