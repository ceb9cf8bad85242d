"""What a run directory holds, and writing the recipe into it."""

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
        """Configuration, tokenizer and pooling: with any checkpoint, all an export needs."""
        return self.path / "architecture"

    @property
    def adapter(self) -> Path:
        """What adapters are trained, as PEFT writes it, where the recipe asked for some."""
        return self.path / "adapter"

    @property
    def tokenizer(self) -> Path:
        """A vocabulary trained on the data, where the recipe asked for one."""
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
        """Prepared data, where the home directory cannot take it."""
        return self.path / "cache"

    @property
    def sample(self) -> Path:
        """A few texts and their vectors before and after training, for the report."""
        return self.path / "sample"

    @property
    def sessions(self) -> Path:
        """When the run was under way, on how many ranks, and how each time ended."""
        return self.path / SESSIONS_FILE

    @property
    def lock(self) -> Path:
        """Held by the run that is under way; says which that is."""
        return self.path / "run.lock"

    @property
    def stopped(self) -> Path:
        """There after a signal has stopped the run, until it goes on."""
        return self.path / "stopped.json"

    def require_exists(self) -> None:
        """Refuse to write into a directory that was moved or deleted while the run was under way.

        Raises:
            TrainingError: what is there now is not what the run began in.
        """
        if not self.lock.is_file():
            raise TrainingError(
                f"output_dir={self.path} has vanished while the run was under way: bring it back, and the same "
                f"command goes on from its newest checkpoint"
            )

    def resume_hint(self) -> str:
        """From where the same command goes on, for the end of a message."""
        steps = list_steps(self.checkpoints)
        if not steps:
            return "there is no checkpoint yet: the same command begins again"
        return f"the newest complete checkpoint is {steps[0][1]}: the same command goes on from there"

    def write_stopped(self, step: int, signal: str, rank: int) -> None:
        """Write `stopped.json`, for who looks whether to start the run again; on one rank."""
        content = {"step": step, "signal": signal, "rank": rank, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self.stopped.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def write_recipe(self, recipe: Recipe, world_size: int, model_commit: str | None = None) -> None:
        """Write `recipe.yaml`; on one rank.

        Args:
            recipe: resolved.
            world_size: number of ranks.
            model_commit: of the Hub repository that the model came from.
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


# Seconds: a run that was killed may take a moment to end, and a shared file system to show what was written.
_PATIENCE = 10.0


@contextlib.contextmanager
def output_dir_lock(path: Path, world: World, timeout: float) -> Iterator[None]:
    """Hold the lock of an output directory while the block runs. A collective.

    It is the operating system's: a run that is killed holds it no longer.

    Args:
        path: the lock's file, in the output directory; it says who holds it.
        world: the ranks; the first one holds it.
        timeout: seconds that a rank waits for the others.

    Raises:
        ConfigError: on every rank alike, another run holds it, or a rank does not see the directory.
    """
    patience = min(_PATIENCE, timeout / 2)
    lock = FileLock(path)
    held = ""
    with contextlib.ExitStack() as leaving:
        with world.fail_together("taking the output directory"):
            if world.is_main:
                try:
                    leaving.enter_context(lock.acquire(timeout=patience))
                except Timeout:
                    raise ConfigError(
                        f"output_dir={path.parent} is in use by {_holder(path)}: wait for it, stop it, or choose "
                        f"another output_dir"
                    ) from None
                held = _this_run(world)
                path.write_text(held, encoding="utf-8")
        held = world.broadcast(held)
        with world.fail_together("looking at the output directory"):
            _require_seen(path, held, patience)
        yield


def _require_seen(path: Path, held: str, patience: float) -> None:
    until = time.monotonic() + patience
    while not (path.is_file() and path.read_text(encoding="utf-8") == held):
        if time.monotonic() > until:
            raise ConfigError(
                f"output_dir={path.parent}: {socket.gethostname()} does not see what {json.loads(held)['host']} has "
                f"written there: it has to lie on a file system that all hosts share"
            )
        time.sleep(0.1)


def _this_run(world: World) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started, "ranks": world.size})


def _holder(path: Path) -> str:
    """Who holds the lock, in words."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        ranks = f"{held['ranks']} rank{'s' * (held['ranks'] != 1)}"
        return f"another run (process {held['pid']} on {held['host']}, {ranks}, since {held['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
