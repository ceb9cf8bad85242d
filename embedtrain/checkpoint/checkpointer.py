"""The checkpoints of a run: save, find the newest intact one, load it, delete those that are not kept."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain import __version__
from embedtrain.checkpoint.snapshot import (
    AVERAGE,
    OPTIMIZER,
    SCALES,
    WEIGHTS,
    Snapshot,
    Staging,
    checkpointed_weights,
    decode_moment,
    encode_moment,
    live_snapshot,
    optimizer_tensors,
)
from embedtrain.checkpoint.step_directory import (
    FORMAT,
    Checkpoint,
    UnsupportedFormatError,
    checkpoint_bytes,
    commit_checkpoint,
    delete_checkpoint,
    free_disk_space,
    list_steps,
    list_unfinished,
    max_checkpoints_on_disk,
    open_checkpoint,
    prunable,
    recover_replaced,
    require_disk_limit,
    step_path,
    unfinished_path,
    verify_checksums,
)
from embedtrain.checkpoint.tensor_files import (
    ShardPosition,
    describe_tensors,
    require_fit,
    tensor_files,
    write_local_shards,
)
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import CheckpointConfig, CheckpointContents
from embedtrain.distributed.device import thread_initializer
from embedtrain.distributed.sharding import row_range
from embedtrain.distributed.signals import Notice
from embedtrain.distributed.watchdog.watchdog import MAX_FINISHING, UnfinishedWork
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, EmbedtrainError, LostContact, UnreadableError
from embedtrain.utils.files import directory_size, remove_tree
from embedtrain.utils.formatting import format_bytes

_T = TypeVar("_T")
_MAX_MESSAGES = 10  # about directories that are skipped


class Checkpointer:
    """Saves and loads the checkpoints below `root`. Every method is called on every rank.

    As a context manager it waits at the end for a pending save, also if the run has failed. Every manifest gets the
    entries of `metadata`: the options that a resumed run must share, and the recipe. In an asynchronous save ranks wait
    `timeout` seconds for each other.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        world: World,
        *,
        metadata: Mapping[str, Any],
        log: Callable[[str], None],
        timeout: float = 1800.0,
    ) -> None:
        self.root, self.config, self.world, self.log = root, config, world, log
        self._metadata, self._timeout = dict(metadata), timeout
        self._staging = Staging()
        self._cpu_world: World | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=thread_initializer())
        self._pending: Future[None] | None = None
        self._pending_phase = ""
        self.average: Mapping[str, Tensor] | None = None  # of the weights, by their names; saved and loaded with them
        self._newest: int | None = None  # step of the newest intact checkpoint
        self._saved_at = math.inf  # when the last save began, or training

    def save(self, trained: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `state["step"]`, then delete those that need not be kept.

        Called between two steps, when no gradients are held. With `checkpoint.asynchronous` it returns as soon as the
        tensors are copied; a thread writes them. It first waits for the previous save. A run that only saves at its end
        (`CheckpointConfig.stages`) has nothing to delay, and writes without a copy.

        Raises CheckpointError on every rank, naming the rank that could not write this or the previous save, and
        why.
        """
        self.wait()
        self._saved_at = time.monotonic()
        snapshot = self._live_snapshot(trained, optimizer)
        state = dict(state)
        with self.world.fail_together(_phase(state)), _os_errors(_phase(state), self.root):
            if self.world.is_main:
                self.root.mkdir(parents=True, exist_ok=True)
                free_disk_space(self.root, snapshot.num_bytes, self.config.max_disk_gb, self._deletable(state))
        if not self.config.stages:
            self._write(snapshot, state, self.world)
            return
        staged = self._staging.copy(snapshot) if snapshot.position.is_writer else snapshot
        self._pending_phase = _phase(state)
        self._pending = self._thread.submit(self._write, staged, state, self._background_world())

    def prepare_asynchronous(self, trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Create the process group of asynchronous saves, and allocate their pinned memory on a GPU.

        The first save would otherwise delay the steps after it, and fail if the store has ended with the launcher.
        """
        if not self.config.stages:
            return
        self._background_world()
        if self.world.device.type != "cuda":
            return
        snapshot = self._live_snapshot(trained, optimizer)
        with self.world.fail_together("allocating host memory for checkpoints"):
            if snapshot.position.is_writer:
                self._staging.reserve(snapshot)

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a run that resumes from these checkpoints must share."""
        identity: Mapping[str, Any] = self._metadata["identity"]
        return identity

    @property
    def failed(self) -> bool:
        """Whether an asynchronous save has failed on this rank; `wait` raises the reason. Not a collective."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    @property
    def notice(self) -> Notice:
        """What this rank announces to the others at the end of a step. Not a collective.

        Clocks differ, so that of rank 0 decides for all ranks when a save is due by time.
        """
        if self.failed:
            return Notice.save_failed
        is_pending = self._pending is not None and not self._pending.done()
        minutes = (time.monotonic() - self._saved_at) / 60
        is_due = self.world.is_main and not is_pending and minutes >= (self.config.minutes or math.inf)
        return Notice.save_due if is_due else Notice(0)

    def wait_for_staging(self) -> None:
        """Make this thread's next work on the GPU wait for the copies of a save; call it before weights change."""
        self._staging.wait_for_staging()

    def wait(self) -> None:
        """Wait for the pending save; raises CheckpointError on every rank if it failed."""
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                self._pending = None

    def _background_world(self) -> World:
        if self._cpu_world is None:
            self._cpu_world = self.world.new_cpu_group(self._timeout)
        return self._cpu_world

    def _live_snapshot(self, trained: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
        complete = self.config.contents is CheckpointContents.all
        return live_snapshot(trained, optimizer if complete else None, self.average)

    def _write(self, snapshot: Snapshot, state: Mapping[str, Any], world: World) -> None:
        """Write one complete checkpoint, or leave nothing of it; runs in the thread if saves are asynchronous."""
        step, phase = int(state["step"]), _phase(state)
        unfinished = unfinished_path(self.root, step)
        try:
            with world.fail_together(phase), _os_errors(phase, self.root):
                self._staging.wait()
                if world.is_main:
                    remove_tree(unfinished)
                    unfinished.mkdir(parents=True)
            files = {
                kind: tensor_files(kind, shards, self.config.layout, snapshot.position.num_shards)
                for kind, shards in snapshot.tensors.items()
            }
            checksums: dict[str, NDArray[np.int64]] = {}
            with world.fail_together(phase), _os_errors(phase, unfinished):
                for kind, shards in snapshot.tensors.items():
                    checksums[kind] = write_local_shards(unfinished, files[kind], snapshot.position, shards)
            gathered = world.gather((snapshot.position, checksums), ShardPosition)
            with world.fail_together(phase), _os_errors(phase, unfinished):
                if world.is_main:
                    by_shard = dict(sorted((position.shard, sums) for position, sums in gathered if position.is_writer))
                    tensors = {
                        kind: describe_tensors(layout, [sums[kind] for sums in by_shard.values()])
                        for kind, layout in files.items()
                    }
                    manifest = self._manifest(snapshot, state, tensors, world)
                    commit_checkpoint(unfinished, step_path(self.root, step), manifest)
                    self._newest = step
                    self._prune(state)
        except Exception:
            if world.is_main:  # a partial checkpoint is useless, and may be what fills the disk
                remove_tree(unfinished)
            raise

    def _manifest(
        self, snapshot: Snapshot, state: Mapping[str, Any], tensors: Mapping[str, Any], world: World
    ) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": state["step"],
            "state": state,
            "contents": self.config.contents.value,
            "layout": self.config.layout.value,
            "world_size": world.size,
            "shards": snapshot.position.num_shards,
            **self._metadata,
            "versions": {"embedtrain": __version__, "torch": torch.__version__},
            "tensors": tensors,
        }

    def _prune(self, state: Mapping[str, Any]) -> None:
        keep, every = self.config.keep, self.config.keep_every
        for path in prunable(self.root, int(state["step"]), keep, every=every, protected=_protected(state)):
            delete_checkpoint(path)

    def _deletable(self, state: Mapping[str, Any]) -> list[Path]:
        """Steps that the next save will prune, except for the newest, which is needed until then."""
        if self._newest is None:
            return []
        keep, every = max(1, self.config.keep - 1), self.config.keep_every
        return prunable(self.root, self._newest, keep, every=every, protected=_protected(state))

    def require_disk_space(self, trained: nn.Module, total_steps: int, optim: OptimConfig) -> str:
        """When checkpoints are saved, and the disk space that they need, for the user; a warning if it is not free.

        Raises ConfigError on every rank if the run would exceed `checkpoint.max_disk_gb`.
        """
        size = checkpoint_bytes(trained, self.config.contents, optim)
        require_disk_limit(self.config, size, total_steps)
        count = max_checkpoints_on_disk(self.config, total_steps)
        with self.world.fail_together("looking for disk space"):
            folder = next(path for path in (self.root, *self.root.parents) if path.is_dir())
            free, used = shutil.disk_usage(folder).free, directory_size(self.root) if self.world.is_main else 0
        needed = f"up to {count} of {format_bytes(size)} at a time"
        if self.world.is_main and count * size > free + used:
            self.log(
                f"the disk of {self.root} has {format_bytes(free)} left, too few for checkpoints ({needed}): a save "
                "that fails ends the run; free space, or choose another output_dir"
            )
        return f"checkpoints: {self.config.moments}, {needed}; the disk has {format_bytes(free)} left"

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint; partial and damaged ones are reported and skipped.

        Raises CheckpointError on every rank if a checkpoint has another version's format, and UnreadableError if a rank
        cannot read one: an older one would be resumed from, and the newer ones deleted.
        """
        messages: list[str] = []
        newest: Checkpoint | None = None
        steps: list[tuple[int, Path]] = []
        with self.world.fail_together("looking for checkpoints"):
            if self.world.is_main:
                recover_replaced(self.root)
            steps = list_steps(self.root)
            messages += [f"{path} is an interrupted save: skipped" for path in list_unfinished(self.root)]
        for path in map(Path, self.world.broadcast([str(path) for _, path in steps])):
            problem = None
            try:
                newest = open_checkpoint(path)
                verify_checksums(newest, self.world.rank, self.world.size)
            except EmbedtrainError as error:
                problem = type(error).__name__, str(error)
            problems = {rank: found for rank, found in enumerate(self.world.gather(problem)) if found}
            if not problems:
                break
            newest = None
            for rank, (name, text) in problems.items():
                if name == UnreadableError.__name__:
                    raise UnreadableError(f"{text} (rank {rank})")
                if name == UnsupportedFormatError.__name__:
                    raise CheckpointError(f"{text}: resume with that version, or choose another output_dir")
            messages.append(f"{next(iter(problems.values()))[1]}: skipped")
        for message in messages[:_MAX_MESSAGES]:
            self.log(message)
        if len(messages) > _MAX_MESSAGES:
            self.log(f"{len(messages) - _MAX_MESSAGES} more directories in {self.root} are skipped")
        self._newest = None if newest is None else newest.step
        return newest

    def resume(
        self, checkpoint: Checkpoint, trained: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any] | None:
        """Load a checkpoint; its TrainState as a dictionary, or None if it holds weights only.

        Raises CheckpointError if the tensors do not fit the model.
        """
        complete = checkpoint.manifest.contents is CheckpointContents.all
        phase = f"reading {checkpoint.path}"
        with self.world.fail_together(phase), _os_errors(phase, checkpoint.path):
            read_tensors(checkpoint, trained, optimizer if complete else None)
            if self.average is not None:
                # That of a run which had none so far begins with the weights.
                _read_into(self.average, checkpoint, AVERAGE if complete and AVERAGE in checkpoint.kinds else WEIGHTS)
        return dict(checkpoint.manifest.state) if complete else None

    def _unfinished(self) -> UnfinishedWork | None:
        pending = self._pending
        return None if pending is None else (self._pending_phase, pending)

    def __enter__(self) -> Self:
        """Begin to train: the clock starts, and the watchdog finishes a pending save if the run fails."""
        if self.world.watchdog is not None:
            self.world.watchdog.unfinished = self._unfinished
        self._saved_at = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let a pending save end; if the run fails for another reason, that reason is the one raised."""
        try:
            if kind is None:
                self.wait()
            # The watchdog has waited, if there is one. Without it, only a lost rank is known to be missing in the save.
            elif (
                self._pending is not None
                and self.world.watchdog is None
                and issubclass(kind, Exception)
                and not issubclass(kind, LostContact)
            ):
                wait_for([self._pending], timeout=MAX_FINISHING)
        finally:
            if self.world.watchdog is not None:
                self.world.watchdog.unfinished = lambda: None
            self._thread.shutdown(wait=False)
        if kind is None and self._cpu_world is not None:
            dist.destroy_process_group(self._cpu_world.group)
            self._cpu_world = None


def read_tensors(
    checkpoint: Checkpoint, trained: nn.Module, optimizer: torch.optim.Optimizer | None, kind: str = WEIGHTS
) -> None:
    """Load the weights of the sharded encoder and its loss, and the optimizer state unless it is None.

    `kind` is WEIGHTS, or AVERAGE for their moving average.

    Each rank reads its own rows, whatever number of ranks wrote them; no collective. Raises CheckpointError if a tensor
    is missing, unexpected, or of another shape than the model's.
    """
    # The state dict refers to the parameters' own memory, so reading into it is enough.
    _read_into(checkpointed_weights(trained), checkpoint, kind)
    if optimizer is None:
        return
    _read_into(optimizer_tensors(trained, optimizer), checkpoint, OPTIMIZER)


# Elements of a moment that are encoded at a time.
_ENCODED = 1 << 22


def _read_into(tensors: Mapping[str, Tensor], checkpoint: Checkpoint, kind: str) -> None:
    """Read this rank's rows. Moments that only one of both has in 8 bits are encoded or decoded."""
    with checkpoint.tensors(kind) as reader, torch.no_grad():
        both = tensors.keys() & reader.specs.keys()
        recoded = {name for name in tensors.keys() ^ reader.specs.keys() if name.removesuffix(SCALES) in both}
        require_fit(checkpoint.path, _without(tensors, recoded), _without(reader.specs, recoded))
        for name in both:
            scales, (start, end) = name + SCALES, row_range(tensors[name])
            count = max(1, _ENCODED // tensors[name].shape[1] if scales in recoded else end - start)
            for low in range(start, end, count):
                for first, rows in reader.rows(name, low, min(low + count, end)):
                    read = {name: rows}
                    if scales in recoded & tensors.keys():
                        block = rows.shape[1] // tensors[scales].shape[1]
                        read[name], read[scales] = encode_moment(rows.float(), block, tensors[name].dtype)
                    elif scales in recoded:
                        ((_, of_rows),) = reader.rows(scales, first, first + len(rows))
                        read[name] = decode_moment(rows, of_rows)
                    for key, part in read.items():
                        tensor = tensors[key]
                        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                        (local[first - start : first - start + len(part)] if local.dim() else local).copy_(part)


def _without(mapping: Mapping[str, _T], names: Set[str]) -> dict[str, _T]:
    return {name: value for name, value in mapping.items() if name not in names}


def _phase(state: Mapping[str, Any]) -> str:
    return f"saving the checkpoint of step {state['step']}"


def _protected(state: Mapping[str, Any]) -> set[int]:
    """The best step."""
    return {int(state.get("best_step") or -1)}


@contextlib.contextmanager
def _os_errors(phase: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the phase and the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{phase} failed: {error.strerror or error}: {error.filename or path}") from error
