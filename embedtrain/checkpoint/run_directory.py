"""The directory of a run: its files, recipe.yaml, and the lock that keeps other runs out."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from embedtrain import __version__
from embedtrain.checkpoint.step_directory import list_steps
from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import Recipe
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, TrainingError
from embedtrain.files import atomic_write
from embedtrain.formatting import format_count
from embedtrain.tracking.sessions import SESSIONS_FILE

_VERSIONS_OF = ("torch", "transformers", "sentence-transformers", "datasets")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files and folders of a run, by name."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, versions and world size: enough to run it again."""
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def architecture(self) -> Path:
        """Configuration, tokenizer and pooling: with any checkpoint, all that an export needs."""
        return self.path / "architecture"

    @property
    def adapter(self) -> Path:
        """The PEFT configuration of trained adapters, if the recipe has any."""
        return self.path / "adapter"

    @property
    def tokenizer(self) -> Path:
        """A vocabulary trained on the data, if the recipe requests one."""
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        """The final export."""
        return self.path / "model"

    @property
    def profile(self) -> Path:
        """Traces of the steps that `tracking.profile` names."""
        return self.path / "profile"

    @property
    def cache(self) -> Path:
        """Prepared data, if the home directory cannot be written."""
        return self.path / "cache"

    @property
    def sample(self) -> Path:
        """A few texts and their embeddings before and after training, for the report."""
        return self.path / "sample"

    @property
    def sessions(self) -> Path:
        """Start, end and number of ranks of each session of the run."""
        return self.path / SESSIONS_FILE

    @property
    def lock(self) -> Path:
        """Lock of the active run; its content describes the run."""
        return self.path / "run.lock"

    @property
    def stopped(self) -> Path:
        """Exists after a signal has stopped the run, until it resumes."""
        return self.path / "stopped.json"

    def require_exists(self) -> None:
        """Check that the directory was not moved or deleted during the run.

        Raises:
            TrainingError: it was.
        """
        if not self.lock.is_file():
            raise TrainingError(
                f"output_dir={self.path} has disappeared during the run: restore it, and run the same command to "
                "resume from its newest checkpoint"
            )

    def resume_hint(self) -> str:
        """Where the same command resumes, for the end of a message."""
        steps = list_steps(self.checkpoints)
        if not steps:
            return "no checkpoint yet (run the same command to start again)"
        return f"newest complete checkpoint: {steps[0][1]} (run the same command to resume)"

    def write_stopped(self, step: int, signal: str, rank: int) -> None:
        """Write `stopped.json`, which tells schedulers to start the run again; on one rank."""
        content = {"step": step, "signal": signal, "rank": rank, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self.stopped.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def write_recipe(self, recipe: Recipe, world_size: int, model_commit: str | None = None) -> None:
        """Write `recipe.yaml`; on one rank.

        Args:
            recipe: composed recipe.
            world_size: number of ranks.
            model_commit: commit of the model's Hub repository.
        """
        versions: dict[str, object] = {"embedtrain": __version__, "python": sys.version.split()[0]}
        for name in _VERSIONS_OF:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        if model_commit is not None:
            versions["model_commit"] = model_commit
        content = to_plain(recipe) | {"versions": versions | {"world_size": world_size}}
        with atomic_write(self.recipe) as file:
            file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


# Seconds: a killed run may take a moment to end, and a shared file system to show new files.
_LOCK_TIMEOUT = 10.0


@contextlib.contextmanager
def output_dir_lock(path: Path, world: World, timeout: float) -> Iterator[None]:
    """Hold the lock of an output directory during the block. A collective.

    The operating system releases the lock of a killed run.

    Args:
        path: lock file in the output directory; its content describes the run that holds it.
        world: all ranks; rank 0 holds the lock.
        timeout: seconds that ranks wait for each other.

    Raises:
        ConfigError: on every rank, another run holds the lock, or a rank does not see the directory.
    """
    wait = min(_LOCK_TIMEOUT, timeout / 2)
    lock = FileLock(path)
    description = ""
    with contextlib.ExitStack() as stack:
        with world.fail_together("locking the output directory"):
            if world.is_main:
                try:
                    stack.enter_context(lock.acquire(timeout=wait))
                except Timeout:
                    raise ConfigError(
                        f"output_dir={path.parent} is in use by {_describe_holder(path)}: wait for it, stop it, or "
                        f"choose another output_dir"
                    ) from None
                description = _describe_run(world)
                path.write_text(description, encoding="utf-8")
        description = world.broadcast(description)
        with world.fail_together("looking for the output directory"):
            _require_visible(path, description, wait)
        yield


def _require_visible(path: Path, content: str, wait: float) -> None:
    deadline = time.monotonic() + wait
    while not (path.is_file() and path.read_text(encoding="utf-8") == content):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"output_dir={path.parent}: {socket.gethostname()} does not see what {json.loads(content)['host']} has "
                f"written: it must be on a file system that all hosts share"
            )
        time.sleep(0.1)


def _describe_run(world: World) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started, "ranks": world.size})


def _describe_holder(path: Path) -> str:
    """The run that holds the lock, for a message."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        ranks = format_count(run["ranks"], "rank")
        return f"another run (process {run['pid']} on {run['host']}, {ranks}, since {run['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
