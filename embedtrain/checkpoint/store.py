"""The checkpoints of a run: save, resume from the newest intact one, keep the newest few and the best."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from embedtrain import __version__
from embedtrain.checkpoint.folder import (
    FORMAT,
    OtherFormatError,
    StepFolder,
    describe_files,
    finish,
    list_steps,
    list_unfinished,
    prune,
    read_manifest,
    step_path,
    unfinished_path,
    verify,
)
from embedtrain.checkpoint.tensors import cause_of, read_tensors, write_tensors
from embedtrain.config.schema import CheckpointConfig, Contents
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError

# Ends the name of an option that is a digest of rows: nobody can set it back.
ROWS = ".rows"


class Checkpoints:
    """The folder `checkpoints/` of a run. Every method but the constructor is called on every rank.

    Args:
        root: the folder; made when first needed.
        config: how many are kept, in which layout, with what contents.
        world: the ranks.
        identity: the options that a resumed run must share (option -> value), see `resume`.
        say: takes a line for the user.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        world: World,
        *,
        identity: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.root, self.config, self.world, self.identity, self.say = root, config, world, identity, say

    def save(self, trained: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `state["step"]`, then delete what `checkpoint.keep` no longer covers.

        Args:
            trained: encoder and loss, between two steps (no gradient held).
            optimizer: their optimiser.
            state: the run's TrainState as a dictionary.

        Raises:
            CheckpointError: on every rank alike, naming the rank that could not write and why.
        """
        step = int(state["step"])
        phase = f"saving the checkpoint of step {step}"
        unfinished, final = unfinished_path(self.root, step), step_path(self.root, step)
        with self.world.together(phase), _named(phase):
            if self.world.is_main:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
        kept = optimizer if self.config.contents is Contents.all else None
        with _named(phase):
            plain = write_tensors(unfinished, trained, kept, self.config.layout, self.world)
        self.world.barrier()
        files: dict[str, Any] = {}
        with self.world.together(phase), _named(phase):
            mine = describe_files(unfinished, self.world.rank, self.world.size)
        for part in self.world.gather(mine):
            files |= part
        with self.world.together(phase), _named(phase):
            if self.world.is_main:
                manifest = {
                    "format": FORMAT,
                    "step": step,
                    "state": state,
                    "contents": self.config.contents.value,
                    "layout": self.config.layout.value,
                    "world_size": self.world.size,
                    "identity": self.identity,
                    "optimizer": plain,
                    "versions": {"embedtrain": __version__, "torch": torch.__version__},
                    "files": files,
                }
                finish(unfinished, final, manifest)
                prune(self.root, step, self.config.keep, protected={int(state.get("best_step") or -1)})
        return final

    def newest(self) -> StepFolder | None:
        """The newest intact checkpoint; what is half-written or damaged is named and passed over.

        Raises:
            CheckpointError: on every rank alike, a checkpoint of another version's format.
        """
        report: list[str] = []
        chosen: StepFolder | None = None
        with self.world.together("looking for checkpoints"):
            listed = list_steps(self.root)
            report += [f"{path} was not written to its end: passed over" for path in list_unfinished(self.root)]
        for _, path in self.world.broadcast(listed):
            problem = None
            try:
                chosen = read_manifest(path)
                verify(chosen, self.world.rank, self.world.size)
            except OtherFormatError as error:
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
        return chosen

    def require_same_course(self, folder: StepFolder) -> None:
        """Refuse a checkpoint of a run that learns something else than this one.

        Raises:
            CheckpointError: names the first option that differs, with both values and what to do.
        """
        before = folder.manifest.get("identity", {})
        for option, value in self.identity.items():
            if option in before and before[option] != value:
                name, was, now = _first_difference(option, before[option], value)
                anew = "or choose another output_dir to start anew"
                if name.endswith(ROWS):
                    raise CheckpointError(
                        f"{folder.path} was written of other rows than {name.removesuffix(ROWS)} holds now: bring its "
                        f"old files back, {anew}"
                    )
                raise CheckpointError(
                    f"{folder.path} was written with {name}={was}, this run has {name}={now}: set it back, {anew}"
                )

    def resume(self, folder: StepFolder, trained: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Read a checkpoint; the TrainState it holds, or None where it holds weights alone.

        Raises:
            CheckpointError: the tensors do not fit the model.
        """
        complete = folder.manifest["contents"] == Contents.all.value
        with _named(f"reading {folder.path}"):
            read_tensors(folder.path, trained, optimizer if complete else None)
        return dict(folder.manifest["state"]) if complete else None


def _first_difference(option: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """The innermost option that differs, and its values: of a long mapping nobody wants to read two copies."""
    if isinstance(before, dict) and isinstance(now, dict):
        if before.keys() != now.keys():
            return option, ", ".join(map(str, before)), ", ".join(map(str, now))
        for key, value in now.items():
            if before[key] != value:
                return _first_difference(f"{option}.{key}", before[key], value)
    return option, before, now


@contextlib.contextmanager
def _named(phase: str) -> Iterator[None]:
    """Turn what the file system or DCP raises into one sentence that names the phase."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{phase} failed: {error.strerror or error} ({error.filename})") from error
    except CheckpointException as error:  # a BaseException, so nobody else catches it
        raise CheckpointError(f"{phase} failed: {cause_of(error)}") from None
