"""Step directories below `checkpoints/`: which are complete, atomic commit, retention, disk space.

A step is written as `step-00000100.tmp`. When every rank has written its shard, a manifest with the checksums of all
tensors is added and the directory is renamed, so that partial or damaged checkpoints are detected, reported and
skipped. Tensors are safetensors and the manifest is JSON: reading a checkpoint executes no code, whoever wrote it.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from embedtrain.checkpoint.snapshot import AVERAGE, OPTIMIZER, WEIGHTS, checkpointed_weights
from embedtrain.checkpoint.tensor_files import TensorReader
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import CheckpointConfig, CheckpointContents, CheckpointLayout, WeightsOf
from embedtrain.config.saved_recipe import current_identity, current_recipe
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.utils.files import directory_size, flush_to_disk, reading, remove_tree
from embedtrain.utils.records import read_record

MANIFEST = "checkpoint.json"
# Of a step directory; raised whenever older versions can no longer read it. Earlier formats are not read, because they
# had a pickled index, which an attacker could have written.
FORMAT = 4
_STEP = re.compile(r"step-([0-9]{8,})")
_UNFINISHED = ".tmp"
_REPLACED = ".replaced.tmp"
_MAX_SHOWN = 12  # steps in a message
GB = 10**9


class UnsupportedFormatError(CheckpointError):
    """An intact checkpoint in another version's format: skipping it would train from scratch and then delete it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What `checkpoint.json` says of a checkpoint; its format and checksum are verified before."""

    step: int
    layout: CheckpointLayout
    shards: int
    tensors: dict[str, dict[str, Any]]  # kind -> name -> type, shape and checksums
    state: dict[str, Any] = field(default_factory=dict)  # progress of the run
    contents: CheckpointContents = CheckpointContents.all
    world_size: int = 1
    identity: dict[str, Any] = field(default_factory=dict)  # options that a resumed run must share
    recipe: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for no shards, and for tensors of an unknown kind: both name files."""
        if self.shards < 1:
            raise ValueError(f"shards={self.shards}")
        if not {WEIGHTS} <= self.tensors.keys() <= {WEIGHTS, OPTIMIZER, AVERAGE}:
            raise ValueError(f"its tensors are {', '.join(map(repr, self.tensors))}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The number of steps that were done."""
        return self.manifest.step

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of tensors it holds: `weights`, `optimizer` unless it was saved without, `ema` if the run has one."""
        return tuple(self.manifest.tensors)

    def weights_kind(self, weights_of: WeightsOf | None) -> str:
        """The kind of its weights; None: the moving average if it has one. CheckpointError if it has none."""
        if weights_of is None:
            return AVERAGE if AVERAGE in self.kinds else WEIGHTS
        if weights_of is WeightsOf.ema and AVERAGE not in self.kinds:
            raise CheckpointError(f"weights_of=ema: {self.path} has no moving average of the weights (optim.ema)")
        return AVERAGE if weights_of is WeightsOf.ema else WEIGHTS

    def tensors(self, kind: str) -> TensorReader:
        """Its tensors of one kind; KeyError, TypeError or ValueError if the manifest does not describe them."""
        manifest = self.manifest
        return TensorReader(self.path, kind, manifest.layout, manifest.shards, manifest.tensors[kind])


def step_path(root: Path, step: int) -> Path:
    """Directory of the complete checkpoint of `step`."""
    return root / f"step-{step:08d}"


def unfinished_path(root: Path, step: int) -> Path:
    """Directory in which the checkpoint of `step` is written."""
    return root / f"step-{step:08d}{_UNFINISHED}"


def _has_mode(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether there is a file or directory of a kind; unlike `Path.is_dir` of Python 3.14, raises other errors."""
    try:
        return is_kind(path.stat().st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """Committed step directories, newest first. They are not verified. UnreadableError if they cannot be listed."""
    with reading(root):
        if not _has_mode(root, stat.S_ISDIR):
            return []
    with reading(root):
        matches = [(_STEP.fullmatch(path.name), path) for path in root.iterdir()]
        steps = [(int(match[1]), path) for match, path in matches if match and _has_mode(path, stat.S_ISDIR)]
    return sorted(((step, path) for step, path in steps if path == step_path(root, step)), reverse=True)


def list_unfinished(root: Path) -> list[Path]:
    """Directories left behind by interrupted saves."""
    return sorted(root.glob(f"step-*{_UNFINISHED}")) if root.is_dir() else []


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of a step directory and compare the sizes of its files.

    Raises:
        CheckpointError: the manifest or a file is missing or damaged.
        UnsupportedFormatError: another version wrote it.
        UnreadableError: the disk fails to read it.
    """
    with _reading(path):
        return _open_checkpoint(path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        with reading(path):
            yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{error.filename or path} is missing") from None


def _open_checkpoint(path: Path) -> Checkpoint:
    file = path / MANIFEST
    if not _has_mode(file, stat.S_ISREG):
        raise CheckpointError(f"{path} has no {MANIFEST}: the save was interrupted")
    try:
        with reading(file):
            manifest = json.loads(file.read_text(encoding="utf-8"))
        version = int(manifest["format"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(file, error) from None
    if version != FORMAT:
        age = "a newer" if version > FORMAT else "an older"
        raise UnsupportedFormatError(
            f"{path} was written by {age} embedtrain (format {version}; this version reads {FORMAT})"
        )
    try:
        if manifest.pop("crc32") != _checksum(manifest):
            raise ValueError("its checksum does not match")
        saved = read_record(Manifest, manifest)
        recipe, identity = current_recipe(saved.recipe), current_identity(saved.identity)
        checkpoint = Checkpoint(path, replace(saved, recipe=recipe, identity=identity))
        layout, shards = checkpoint.manifest.layout, checkpoint.manifest.shards
        if layout is CheckpointLayout.sharded and shards > len(os.listdir(path)):  # a list of the names might not end
            raise ValueError(f"shards={shards} is more than the files of the directory")
        readers = [checkpoint.tensors(kind) for kind in checkpoint.kinds]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(file, error) from None
    for reader in readers:
        reader.require_sizes()
    return checkpoint


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}")


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def find_checkpoint(root: Path, name: str) -> Checkpoint:
    """The verified checkpoint that `latest`, `best` or a step number refers to.

    Raises CheckpointError if there is none, or it is damaged.
    """
    steps = dict(list_steps(root))
    if not steps:
        raise CheckpointError(f"{root} holds no checkpoint")
    if name == "latest":
        problems = []
        for path in steps.values():
            try:
                return _open_verified(path)
            except CheckpointError as error:
                problems.append(str(error))
        raise CheckpointError(f"{root} holds no intact checkpoint: {problems[0]}")
    numbers = [str(step) for step in sorted(steps)]
    shown = numbers if len(numbers) <= _MAX_SHOWN else [*numbers[:2], "...", *numbers[2 - _MAX_SHOWN :]]
    available = ", ".join(shown)
    if name == "best":
        best = _open_verified(steps[max(steps)]).manifest.state.get("best_step")
        if best is None:
            raise CheckpointError(
                "step=best: this run did not track its best step (checkpoint.best_metric); "
                f"available are latest and {available}"
            )
        name = str(best)
    requested = {str(step): path for step, path in steps.items()}.get(name.lstrip("0"))
    if requested is None:
        raise CheckpointError(f"step={name}: not in {root}; available are latest and {available}")
    return _open_verified(requested)


def _open_verified(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    verify_checksums(checkpoint, 0, 1)
    return checkpoint


def verify_checksums(checkpoint: Checkpoint, rank: int, world_size: int) -> None:
    """Verify the part of the checksums that falls to a rank; raises as `open_checkpoint` if a file has changed."""
    with _reading(checkpoint.path):
        for kind in checkpoint.kinds:
            checkpoint.tensors(kind).verify_checksums(rank, world_size)


def commit_checkpoint(unfinished: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest and rename the directory; on one rank, after all ranks have written."""
    file = unfinished / MANIFEST
    plain = json.loads(json.dumps(manifest))  # as it will be read: keys are strings, tuples are lists
    with file.open("w", encoding="utf-8") as out:
        json.dump(plain | {"crc32": _checksum(plain)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    flush_to_disk(unfinished)
    replaced = final.with_name(final.name + _REPLACED)
    if os.path.lexists(final):  # the same step, saved again after its evaluation, or skipped as damaged
        final.rename(replaced)
    unfinished.rename(final)
    flush_to_disk(final.parent)
    remove_tree(replaced)


def recover_replaced(root: Path) -> None:
    """Restore a step whose second save was interrupted between the two renames; on one rank."""
    for path in list_unfinished(root):
        final = path.with_name(path.name.removesuffix(_REPLACED))
        if path.name.endswith(_REPLACED) and not os.path.lexists(final):
            path.rename(final)


def delete_checkpoint(path: Path) -> None:
    """Delete a step, or the link to one; renames it first: an interrupted deletion must not look like a checkpoint."""
    renamed = path.with_name(f"{path.name}.old{_UNFINISHED}")
    remove_tree(renamed)
    path.rename(renamed)
    remove_tree(renamed)


def prunable(root: Path, newest: int, keep: int, *, every: int, protected: set[int]) -> list[Path]:
    """Steps to delete, newest first.

    Kept are the `keep` newest steps up to step `newest`, the multiples of `every`, and `protected`.
    Steps above `newest`, the one just saved, are leftovers of an abandoned run: damaged, or without optimizer state.
    If they stayed, every restart would try them first.
    """
    steps = list_steps(root)
    retained = {step for step, _ in [item for item in steps if item[0] <= newest][:keep]} | protected
    if every > 0:
        retained |= {step for step, _ in steps if step <= newest and step % every == 0}
    return [path for step, path in steps if step not in retained]


def checkpoint_bytes(trained: nn.Module, contents: CheckpointContents, optim: OptimConfig) -> int:
    """Bytes of the tensors of a checkpoint with this optimizer, at most.

    Headers and manifest are negligible.
    """
    total: int = sum(_num_bytes(tensor) for tensor in checkpointed_weights(trained).values())
    if contents is CheckpointContents.all:
        state = (p.numel() * optim.state_bytes(p.shape) for p in trained.parameters() if p.requires_grad)
        total += math.ceil(sum(state))
    return total


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of the unsharded tensor if it is a DTensor


def require_disk_limit(config: CheckpointConfig, size: int, total_steps: int) -> None:
    """Raise ConfigError if checkpoints of `size` bytes would exceed `checkpoint.max_disk_gb` during the run."""
    if config.max_disk_gb is None:
        return
    count = max_checkpoints_on_disk(config, total_steps)
    if count * size > config.max_disk_gb * GB:
        raise ConfigError(
            f"checkpoint.max_disk_gb={config.max_disk_gb:g}: there are up to {count} checkpoints of {size / GB:.3g} GB "
            f"on disk at a time (keep={config.keep}, keep_every={config.keep_every}, "
            f"best_metric={config.best_metric or 'null'}; the previous one stays until the new one is complete): allow "
            f"{count * size / GB:.3g} or more, or keep fewer"
        )


def max_checkpoints_on_disk(config: CheckpointConfig, total_steps: int) -> int:
    """Number of checkpoints on disk while the last one is written, itself included, at most."""
    # By time, or after a better evaluation, it may be any step.
    every = config.every or int(config.minutes > 0 or config.best_metric is not None)
    saved = list(range(every, total_steps, every)) if every else []
    retained = set(saved[-max(1, config.keep - 1) :])
    if config.every and config.keep_every:
        retained |= {step for step in saved if step % config.keep_every == 0}
    # A run that was stopped and resumes has a previous checkpoint even if it only saves at its end.
    return max(2, len(retained) + 1 + (config.best_metric is not None))


def free_disk_space(root: Path, needed: int, limit_gb: float | None, deletable: Sequence[Path]) -> None:
    """Ensure that a checkpoint of `needed` bytes fits below the limit and on the disk; on one rank.

    Deletes the remains of interrupted saves, and steps from the end of `deletable` as long as space is missing. Raises
    CheckpointError if that does not suffice; nothing was written, and the newest checkpoint is untouched.
    """
    for path in list_unfinished(root):
        remove_tree(path)
    limit = math.inf if limit_gb is None else limit_gb * GB
    used, candidates = directory_size(root), list(deletable)
    while candidates and (used + needed > limit or needed > shutil.disk_usage(root).free):
        used -= directory_size(candidates[-1])
        delete_checkpoint(candidates.pop())
    if used + needed > limit:
        raise CheckpointError(
            f"no space for a checkpoint of {needed / GB:.3g} GB: {root} already holds {used / GB:.3g} GB, and "
            f"checkpoint.max_disk_gb={limit / GB:g}; raise it, or keep fewer"
        )
    free = shutil.disk_usage(root).free
    if needed > free:
        raise CheckpointError(
            f"no space for a checkpoint of {needed / GB:.3g} GB: the disk of {root} has {free / GB:.3g} GB left"
        )
