"""The run directory: its files and folders, recipe.yaml, and the lock that only one run holds."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from embedtrain import __version__
from embedtrain.checkpoint.step_directory import list_steps
from embedtrain.config.compose import YAML_ERRORS
from embedtrain.config.hydra_files import load_yaml
from embedtrain.config.recipe import Resume
from embedtrain.config.saved_recipe import current_recipe
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, ConfigError, TrainingError
from embedtrain.tracking.clients import TENSORBOARD_FOLDER
from embedtrain.tracking.metrics import DIRECTORY as QUERY_METRICS
from embedtrain.tracking.metrics import METRICS_FILE
from embedtrain.tracking.sessions import SESSIONS_FILE
from embedtrain.utils.files import CHECKSUMS, atomic_write, damaged_files, require_own_file
from embedtrain.utils.formatting import format_count

_VERSIONS_OF = ("torch", "transformers", "sentence-transformers", "datasets")


class RunDirectory:
    """Files and folders of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"  # the resolved recipe, versions and world size: enough to repeat the run
        self.checkpoints = path / "checkpoints"  # one directory per saved step
        self.architecture = path / "architecture"  # with a checkpoint, all that an export needs
        self.adapter = path / "adapter"  # PEFT configuration, if the recipe trains adapters
        self.tokenizer = path / "tokenizer"  # trained on the data, if the recipe requests one
        self.model = path / "model"  # the final export
        self.profile = path / "profile"  # traces of the steps in `tracking.profile`
        self.cache = path / "cache"  # of data, if the home directory cannot be written
        self.teacher_vectors = path / "teacher-vectors"  # of texts that directories of the losses' teachers lack
        self.query_metrics = path / QUERY_METRICS  # of each evaluation, for the report
        self.sample = path / "sample"  # texts and their embeddings before and after training, for the report
        self.sessions = path / SESSIONS_FILE  # start, number of ranks and outcome of each session
        self.lock = path / "run.lock"  # contains a description of the running process
        self.stopped = path / "stopped.json"  # exists from when a signal stops the run until it resumes

    def require_own(self) -> None:
        """Raise ConfigError if a run would write through a link, or replace files that no run has written; on one rank.

        Files that are replaced as a whole may be links: these are replaced. `checkpoints` and `cache` may be links to
        folders on another disk.
        """
        for file in (self.lock, self.sessions, self.path / METRICS_FILE):
            require_own_file(file)
        for folder in (
            self.sample,
            self.query_metrics,
            self.teacher_vectors,
            self.profile,
            self.path / TENSORBOARD_FOLDER,
            self.path / "wandb",
        ):
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link, through which nothing is written: delete it")
        if self.checkpoints.is_symlink() and (self.checkpoints.resolve().parent / self.lock.name).exists():
            raise ConfigError(
                f"{self.checkpoints} is a link to the checkpoints of another run, and this run would delete them: "
                "copy those that you need"
            )
        if self.lock.exists():
            return
        # An empty folder of checkpoints may be a link to another disk.
        steps = sorted(self.checkpoints.glob("step-*"))
        for path in (self.recipe, self.architecture, self.adapter, self.tokenizer, self.sample, *steps[:1]):
            if os.path.lexists(path):
                raise ConfigError(
                    f"output_dir={self.path} contains {path.relative_to(self.path)}, which no run has written, and "
                    f"which would be replaced: name another output_dir (in a copy of a run, create an empty run.lock)"
                )

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun in the directory."""
        return self.recipe.exists() or bool(list_steps(self.checkpoints))

    def require_new(self, resume: Resume) -> None:
        """Raise ConfigError if the directory holds a run that must not be continued."""
        if resume is Resume.never and self.holds_run:
            raise ConfigError(
                f"resume=never: output_dir={self.path} holds a run: choose another output_dir, or write resume=auto to "
                "continue it"
            )

    def require_exists(self) -> None:
        """Raise TrainingError if the directory was moved or deleted during the run."""
        if not self.lock.is_file():
            raise TrainingError(
                f"output_dir={self.path} has disappeared during the run: restore it, and the same command resumes from "
                "its newest checkpoint"
            )

    def require_intact(self) -> None:
        """Raise CheckpointError if a file of `architecture/` or `adapter/` is damaged."""
        for folder in (self.architecture, self.adapter):
            if (folder / CHECKSUMS).exists() and (damaged := damaged_files(folder)):
                raise CheckpointError(
                    f"{folder / damaged[0]} is damaged: start the training command again, which writes it again"
                )

    def saved_precision(self) -> str | None:
        """`parallel.precision` of a run with checkpoints; None if there are none, or recipe.yaml does not say it."""
        if not list_steps(self.checkpoints):
            return None
        parallel = self.saved_recipe().get("parallel")
        precision = parallel.get("precision") if isinstance(parallel, dict) else None
        return precision if precision in ("bf16", "fp32") else None

    def resume_hint(self) -> str:
        """From where the same command resumes, for the end of a message."""
        steps = list_steps(self.checkpoints)
        if not steps:
            return "there is no checkpoint yet: the same command starts from scratch"
        return f"the newest complete checkpoint is {steps[0][1]}: the same command resumes from it"

    def write_stopped(self, step: int, signal: str, rank: int) -> None:
        """Write `stopped.json`, by which job scripts decide whether to restart the run; on one rank."""
        content = {"step": step, "signal": signal, "rank": rank, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        with atomic_write(self.stopped) as file:
            file.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def write_recipe(
        self,
        recipe: Mapping[str, Any],
        world_size: int,
        model_commit: str | None = None,
        query_writers: Mapping[str, int] | None = None,
    ) -> None:
        """Write `recipe.yaml`, with the commit of the model's Hub repository; on one rank.

        `query_writers` are the language models that wrote queries, with the number of rows of each.
        """
        versions: dict[str, object] = {"embedtrain": __version__, "python": sys.version.split()[0]}
        for name in _VERSIONS_OF:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        if model_commit is not None:
            versions["model_commit"] = model_commit
        if query_writers:
            versions["query_writers"] = dict(query_writers)
        self._write_yaml({**recipe, "versions": versions | {"world_size": world_size}})

    def query_writers(self) -> dict[str, int]:
        """The language models that wrote queries of the training data, with the number of rows of each."""
        versions = self.saved_recipe().get("versions")
        writers = versions.get("query_writers") if isinstance(versions, dict) else None
        if not isinstance(writers, dict):
            return {}
        return {str(name): count for name, count in writers.items() if isinstance(count, int)}

    def update_recipe(self, changed: Mapping[str, Any]) -> None:
        """Write `recipe.yaml` with other values of some groups, and the versions of the training; on one rank."""
        if (content := self.saved_recipe()) and any(content.get(group) != changed[group] for group in changed):
            self._write_yaml({**content, **changed})

    def saved_recipe(self) -> dict[str, Any]:
        """`recipe.yaml` with the options of this version; empty if it is missing or damaged: checkpoints have it."""
        try:
            content = load_yaml(self.recipe, yaml.SafeLoader)
        except YAML_ERRORS:
            return {}
        return current_recipe(content) if isinstance(content, dict) else {}

    def _write_yaml(self, content: Mapping[str, Any]) -> None:
        with atomic_write(self.recipe) as file:
            file.write_text(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True), encoding="utf-8")


# Seconds: a killed run may take a moment to end, and a shared file system to show what another host wrote.
_LOCK_TIMEOUT = 10.0


@contextlib.contextmanager
def output_dir_lock(path: Path, world: World, timeout: float, output_dir: Path | None = None) -> Iterator[None]:
    """Hold the lock of an output directory, by default the one that `path` is in, while the block runs. A collective.

    The operating system releases the lock if the run is killed. Raises ConfigError on every rank if another run
    holds the lock, or if a rank cannot see the directory within `timeout` seconds.
    """
    lock_timeout = min(_LOCK_TIMEOUT, timeout / 2)
    output_dir = output_dir or path.parent
    lock = FileLock(path)
    owner = ""
    with contextlib.ExitStack() as stack:
        with world.fail_together("taking the output directory"):
            if world.is_main:
                require_own_file(path)
                try:
                    stack.enter_context(lock.acquire(timeout=lock_timeout))
                except Timeout:
                    raise ConfigError(
                        f"output_dir={output_dir} is in use by {_holder(path)}: wait for it, stop it, or choose "
                        f"another output_dir"
                    ) from None
                owner = _describe_run(world)
                path.write_text(owner, encoding="utf-8")
        owner = world.broadcast(owner)
        with world.fail_together("looking at the output directory"):
            _require_visible(path, output_dir, owner, lock_timeout)
        yield


def _require_visible(path: Path, output_dir: Path, owner: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not (path.is_file() and path.read_text(encoding="utf-8") == owner):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"output_dir={output_dir}: {socket.gethostname()} does not see what {json.loads(owner)['host']} "
                f"wrote there: it must be on a file system that all hosts share"
            )
        time.sleep(0.1)


def _describe_run(world: World) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started, "ranks": world.size})


def _holder(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        ranks = format_count(owner["ranks"], "rank")
        return f"another run (process {owner['pid']} on {owner['host']}, {ranks}, since {owner['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
