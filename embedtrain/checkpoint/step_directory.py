"""The checkpoint folder on disk: which steps are complete, written whole or not at all, how many are kept.

A step is first written as `step-00000100.tmp`; when every rank has written its part a manifest with the checksums of
every tensor is added, and the folder is renamed. What is half-written or damaged is therefore told by looking, named,
and passed over. Tensors are safetensors and the manifest is JSON: reading a folder runs no code, whoever wrote it.
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedtrain.checkpoint.index import TensorReader
from embedtrain.config.recipe import CheckpointLayout
from embedtrain.errors import CheckpointError
from embedtrain.files import flush_to_disk

MANIFEST = "checkpoint.json"
FORMAT = 4  # of what a step folder holds; raised when older versions could no longer read it
# That this version reads. Those before had a pickled index, which an attacker may have written.
OLDEST_FORMAT = 4
_STEP = re.compile(r"step-(\d{8})")
_UNFINISHED = ".tmp"
_REPLACED = ".replaced.tmp"


class UnsupportedFormatError(CheckpointError):
    """An intact checkpoint of another version's format: passing it over would train anew and then delete it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its folder, its step, and what its manifest says."""

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which tensors it has: `weights`, and `optimizer` where it holds all."""
        return tuple(self.manifest["tensors"])

    def tensors(self, kind: str) -> TensorReader:
        """Its tensors of one kind.

        Raises:
            KeyError, TypeError, ValueError: the manifest describes none.
        """
        manifest = self.manifest
        return TensorReader(
            self.path, kind, CheckpointLayout(manifest["layout"]), int(manifest["shards"]), manifest["tensors"][kind]
        )


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


def open_checkpoint(path: Path) -> Checkpoint:
    """What the manifest of a step folder says; sizes of its files are compared.

    Raises:
        CheckpointError: no manifest, one that cannot be read, a missing file, or one of another size.
        UnsupportedFormatError: another version wrote it.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} has no {MANIFEST}: it was not written to its end")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        written_as = int(manifest["format"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise _damaged(file, error) from None
    if written_as > FORMAT:
        raise UnsupportedFormatError(
            f"{path} was written by a newer embedtrain (format {written_as}; this one reads {FORMAT})"
        )
    if written_as < OLDEST_FORMAT:
        raise UnsupportedFormatError(
            f"{path} was written by an earlier embedtrain (format {written_as}; this one reads {OLDEST_FORMAT} and on)"
        )
    try:
        if manifest.pop("crc32") != _checksum(manifest):
            raise ValueError("its checksum is not the one that was written")
        folder = Checkpoint(path, int(manifest["step"]), manifest)
        stored = [folder.tensors(kind) for kind in folder.kinds]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(file, error) from None
    for tensors in stored:
        tensors.require_sizes()
    return folder


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}")


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def find_checkpoint(root: Path, asked: str) -> Checkpoint:
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
                f"step=best: this run was not asked to keep its best step (checkpoint.best_metric); there are {there}"
            )
        asked = str(best)
    if not asked.isdigit() or int(asked) not in steps:
        raise CheckpointError(f"step={asked}: {root} has latest and {there}")
    return _intact(steps[int(asked)])


def _intact(path: Path) -> Checkpoint:
    folder = open_checkpoint(path)
    verify_checksums(folder, 0, 1)
    return folder


def verify_checksums(folder: Checkpoint, part: int, parts: int) -> None:
    """Compare checksums of every `parts`-th piece, so that ranks share the reading.

    Raises:
        CheckpointError: a file's content is not what was written.
    """
    for kind in folder.kinds:
        folder.tensors(kind).verify_checksums(part, parts)


def commit_checkpoint(unfinished: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest and give the folder its name; on one rank, when all have written their part."""
    file = unfinished / MANIFEST
    plain = json.loads(json.dumps(manifest))  # as it will be read: keys are texts, tuples lists
    with file.open("w", encoding="utf-8") as out:
        json.dump(plain | {"crc32": _checksum(plain)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    flush_to_disk(unfinished)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():  # the same step: saved again after its evaluation, or passed over before
        final.rename(replaced)
    unfinished.rename(final)
    flush_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover_replaced(root: Path) -> None:
    """Give a step its name back whose saving again was cut off just before the new one had it; on one rank."""
    for path in list_unfinished(root):
        final = path.with_name(path.name.removesuffix(_REPLACED))
        if path.name.endswith(_REPLACED) and not final.exists():
            path.rename(final)


def delete_checkpoint(path: Path) -> None:
    """Delete a step; renamed first, for a deletion cut off midway must not leave what looks like a checkpoint."""
    doomed = path.with_name(f"{path.name}.old{_UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_unfinished(root: Path) -> None:
    """Delete what saves and deletions that were cut off left behind; on one rank, while none is under way."""
    for path in list_unfinished(root):
        shutil.rmtree(path, ignore_errors=True)


def directory_size(path: Path) -> int:
    """Bytes of all files below a folder; what disappears meanwhile does not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def prune(root: Path, newest: int, keep: int, *, every: int, protected: set[int]) -> None:
    """Delete all but the `keep` newest steps up to `newest`, every `every`-th and the `protected` ones; on one rank.

    Steps above the one just saved were left by a course that was abandoned, because they are damaged or hold
    weights alone; they would be looked at first at every restart.
    """
    for path in prunable(root, newest, keep, every=every, protected=protected):
        delete_checkpoint(path)


def prunable(root: Path, newest: int, keep: int, *, every: int, protected: set[int]) -> list[Path]:
    """The steps that need not be kept, the oldest last."""
    steps = list_steps(root)
    kept = {step for step, _ in [item for item in steps if item[0] <= newest][:keep]} | protected
    if every > 0:
        kept |= {step for step, _ in steps if step <= newest and step % every == 0}
    return [path for step, path in steps if step not in kept]
