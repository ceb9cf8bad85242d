"""The checkpoints of a run: save, resume from the newest intact one, keep the newest few and the best."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from embedtrain import __version__
from embedtrain.checkpoint.snapshot import (
    OPTIMIZER,
    WEIGHTS,
    Snapshot,
    Staging,
    checkpointed_weights,
    init_optimizer_state,
    take_snapshot,
)
from embedtrain.checkpoint.step_directory import (
    FORMAT,
    Checkpoint,
    UnsupportedFormatError,
    checkpoint_bytes,
    commit_checkpoint,
    free_disk_space,
    list_steps,
    list_unfinished,
    open_checkpoint,
    prunable,
    prune,
    recover_replaced,
    require_disk_limit,
    step_path,
    unfinished_path,
    verify_checksums,
)
from embedtrain.checkpoint.tensor_files import TensorReader, describe_tensors, tensor_files, write_local_shards
from embedtrain.config.recipe import CheckpointConfig, CheckpointContents
from embedtrain.distributed.weights import row_range
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, EmbedtrainError, LostContact


class Checkpointer:
    """The folder `checkpoints/` of a run. Every method is called on every rank.

    As a context manager it waits at the end for a save that is under way.

    Args:
        root: the folder; made when first needed.
        config: how many are kept, in which layout, with what contents, and whether training goes on meanwhile.
        world: the ranks.
        metadata: what every manifest says besides: the options that a resumed run must share, and the recipe.
        say: takes a line for the user.
        timeout: seconds that ranks wait for each other while they save beside training.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        world: World,
        *,
        metadata: Mapping[str, Any],
        say: Callable[[str], None],
        timeout: float = 1800.0,
    ) -> None:
        self.root, self.config, self.world, self.say = root, config, world, say
        self._about, self._timeout = dict(metadata), timeout
        self._staging = Staging()
        self._cpu_world: World | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._newest: int | None = None  # the step of the newest intact one

    def save(self, trained: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `state["step"]`, then delete what no longer has to be kept.

        With `checkpoint.asynchronous` it returns when the tensors are copied and a thread is writing them; the save
        before has ended by then.

        Args:
            trained: encoder and loss, between two steps (no gradient held).
            optimizer: their optimiser.
            state: the run's TrainState as a dictionary.

        Raises:
            CheckpointError: on every rank alike, naming the rank that could not write and why; of this save, or
                of the one before.
        """
        self.wait()
        snapshot = take_snapshot(trained, optimizer if self.config.contents is CheckpointContents.all else None)
        state = dict(state)
        with self.world.fail_together(_phase(state)), _named(_phase(state), self.root):
            if self.world.is_main:
                self.root.mkdir(parents=True, exist_ok=True)
                free_disk_space(self.root, snapshot.num_bytes, self.config.max_disk_gb, self._prunable(state))
        if not self.config.asynchronous:
            self._write(snapshot, state, self.world)
            return
        if self._cpu_world is None:
            self._cpu_world = self.world.new_cpu_group(self._timeout)
        staged = self._staging.copy(snapshot) if snapshot.share.writes else snapshot
        self._pending = self._thread.submit(self._write, staged, state, self._cpu_world)

    @property
    def failed(self) -> bool:
        """Whether a save beside training has failed on this rank; `wait` says why. Not a collective."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait_for_staging(self) -> None:
        """Have this thread's next work on the GPU wait until a save has copied the weights: before they change."""
        self._staging.wait_for_staging()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: on every rank alike, it failed.
        """
        under_way, self._pending = self._pending, None
        if under_way is not None:
            under_way.result()

    def _write(self, snapshot: Snapshot, state: Mapping[str, Any], world: World) -> None:
        """Write one checkpoint whole, or leave nothing of it; in the thread where training goes on meanwhile."""
        step, phase = int(state["step"]), _phase(state)
        unfinished = unfinished_path(self.root, step)
        try:
            with world.fail_together(phase), _named(phase, self.root):
                self._staging.wait()
                if world.is_main:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    unfinished.mkdir(parents=True)
            files = {
                kind: tensor_files(kind, parts, self.config.layout, snapshot.share.shards)
                for kind, parts in snapshot.tensors.items()
            }
            checksums: dict[str, dict[str, int]] = {}
            with world.fail_together(phase), _named(phase, unfinished):
                for kind, parts in snapshot.tensors.items():
                    checksums[kind] = write_local_shards(unfinished, files[kind], snapshot.share, parts)
            written = world.gather((snapshot.share, checksums))
            with world.fail_together(phase), _named(phase, unfinished):
                if world.is_main:
                    of_shards = dict(sorted((share.shard, sums) for share, sums in written if share.writes))
                    tensors = {
                        kind: describe_tensors(one, [sums[kind] for sums in of_shards.values()])
                        for kind, one in files.items()
                    }
                    commit_checkpoint(
                        unfinished, step_path(self.root, step), self._manifest(snapshot, state, tensors, world)
                    )
                    self._newest = step
                    self._prune(state)
        except Exception:
            if world.is_main:  # half a checkpoint is of no use, and may be what fills the disk
                shutil.rmtree(unfinished, ignore_errors=True)
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
            "shards": snapshot.share.shards,
            **self._about,
            "versions": {"embedtrain": __version__, "torch": torch.__version__},
            "tensors": tensors,
        }

    def _prune(self, state: Mapping[str, Any]) -> None:
        keep, every = self.config.keep, self.config.keep_every
        prune(self.root, int(state["step"]), keep, every=every, protected=_protected(state))

    def _prunable(self, state: Mapping[str, Any]) -> list[Path]:
        """What goes once the new step is there, but for the newest of now, which is needed until then."""
        if self._newest is None:
            return []
        keep, every = max(1, self.config.keep - 1), self.config.keep_every
        return prunable(self.root, self._newest, keep, every=every, protected=_protected(state))

    def require_disk_space(self, trained: nn.Module, total_steps: int) -> None:
        """Refuse a limit on disk use that the run is sure to meet, before training.

        Raises:
            ConfigError: on every rank alike.
        """
        require_disk_limit(self.config, checkpoint_bytes(trained, self.config.contents), total_steps)

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint; what is half-written or damaged is named and passed over.

        Raises:
            CheckpointError: on every rank alike, a checkpoint of another version's format.
        """
        report: list[str] = []
        chosen: Checkpoint | None = None
        listed: list[tuple[int, Path]] = []
        with self.world.fail_together("looking for checkpoints"):
            if self.world.is_main:
                recover_replaced(self.root)
            listed = list_steps(self.root)
            report += [f"{path} was not written to its end: passed over" for path in list_unfinished(self.root)]
        for _, path in self.world.broadcast(listed):
            problem = None
            try:
                chosen = open_checkpoint(path)
                verify_checksums(chosen, self.world.rank, self.world.size)
            except UnsupportedFormatError as error:
                raise CheckpointError(f"{error}: go on with that version, or choose another output_dir") from None
            except (CheckpointError, OSError) as error:
                problem = str(error)
            problems = [text for text in self.world.gather(problem) if text]
            if not problems:
                break
            chosen = None
            report.append(f"{problems[0]}: passed over")
        for line in report:
            self.say(line)
        self._newest = None if chosen is None else chosen.step
        return chosen

    def resume(self, folder: Checkpoint, trained: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Read a checkpoint; the TrainState it holds, or None where it holds weights alone.

        Raises:
            CheckpointError: the tensors do not fit the model.
        """
        complete = folder.manifest["contents"] == CheckpointContents.all.value
        with self.world.fail_together(f"reading {folder.path}"), _named(f"reading {folder.path}", folder.path):
            read_tensors(folder, trained, optimizer if complete else None)
        return dict(folder.manifest["state"]) if complete else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let a save under way end; where the run fails for another reason, that reason stays the one that is told."""
        try:
            if kind is None:
                self.wait()
            # Where a rank is lost the save waits for it too, and longer: it is left as it is, unfinished.
            elif self._pending is not None and issubclass(kind, EmbedtrainError) and not issubclass(kind, LostContact):
                with contextlib.suppress(EmbedtrainError):
                    self.wait()
        finally:
            self._thread.shutdown(wait=False)
        if kind is None and self._cpu_world is not None:
            dist.destroy_process_group(self._cpu_world.group)
            self._cpu_world = None


def _phase(state: Mapping[str, Any]) -> str:
    return f"saving the checkpoint of step {state['step']}"


def _protected(state: Mapping[str, Any]) -> set[int]:
    """The best step."""
    return {int(state.get("best_step") or -1)}


@contextlib.contextmanager
def _named(phase: str, where: Path) -> Iterator[None]:
    """Turn what the file system raises into one sentence that names the phase and the place."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{phase} failed: {error.strerror or error}: {error.filename or where}") from error


def read_tensors(folder: Checkpoint, trained: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Fill the sharded encoder and its loss, and the optimiser unless it is None.

    Each rank reads its own rows, whatever number of ranks wrote the folder; no collective.

    Raises:
        CheckpointError: a tensor is missing, left over, or has another shape than the model's.
    """
    # These are the parameters' own memory, so what is read is in place at once.
    _fill(checkpointed_weights(trained), folder, WEIGHTS)
    if optimizer is None:
        return
    init_optimizer_state(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(trained, optimizer, options=options)
    _fill({name: value for name, value in state.items() if isinstance(value, Tensor)}, folder, OPTIMIZER)
    set_optimizer_state_dict(trained, optimizer, state, options=options)


def _fill(tensors: Mapping[str, Tensor], folder: Checkpoint, kind: str) -> None:
    with folder.tensors(kind) as stored, torch.no_grad():
        for name in sorted(tensors.keys() ^ stored.specs.keys()):
            place = "the checkpoint lacks it" if name in tensors else "the model lacks it"
            raise CheckpointError(f"{folder.path} does not fit this model: {name}: {place}")
        for name, tensor in tensors.items():
            spec = stored.specs[name]
            if tuple(tensor.shape) != spec.shape:
                raise CheckpointError(
                    f"{folder.path} does not fit this model: {name} has the shape {list(spec.shape)}, the model's "
                    f"{list(tensor.shape)}"
                )
            start, end = row_range(tensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            _fill_rows(local, start, stored, name, start, end)


def _fill_rows(target: Tensor, first: int, stored: TensorReader, name: str, start: int, end: int) -> None:
    """Copy rows [start, end) into a tensor whose first row is the whole's row `first`."""
    for row, values in stored.rows(name, start, end):
        if target.dim() == 0:
            target.copy_(values)
        else:
            target[row - first : row - first + len(values)].copy_(values)
