"""Weights & Biases, when the recipe asks for it: one run for all ranks, continued when training is."""

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import Recipe

INIT_TIMEOUT = 30.0  # seconds; the other ranks wait in their first collective meanwhile
KEY_TIMEOUT = 60.0  # seconds that a person at a terminal has to type the key in
FINISH_TIMEOUT = 60.0  # seconds that the end of a run may wait for figures to be sent
UPLOAD_TIMEOUT = 3600.0  # and for a model
_PARTING = 5.0  # seconds to let go of a wandb that hangs
_MORE = 15.0  # seconds beyond wandb's own limits before it counts as hanging


def finish_seconds(recipe: Recipe) -> float:
    """How long the end of a run may take."""
    return _limit("WANDB_FINISH_TIMEOUT", UPLOAD_TIMEOUT if recipe.tracking.wandb_artifacts else FINISH_TIMEOUT) + _MORE


def start_seconds() -> float:
    """How long its start may take."""
    return _limit("WANDB_INIT_TIMEOUT", INIT_TIMEOUT) + KEY_TIMEOUT + _MORE


def _limit(variable: str, seconds: float) -> float:
    try:
        return float(os.environ[variable])
    except (KeyError, ValueError):
        return seconds


def abandon() -> None:
    """End the processes that send figures: this one would wait for them at its own end, for ever if they hang."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "wandb-" in child.name():  # wandb-core, and its wandb-symon
                child.kill()
    # What wandb wants to do at this process's end is done now, where nobody sees that there is no one to talk to.
    parting = threading.Thread(target=_tear_down, daemon=True)
    parting.start()
    parting.join(_PARTING)


def _tear_down() -> None:
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


class WandbLogger:
    """One wandb run. See Recorder.

    Steps are logged as `train/loss`, evaluations as `SET/METRIC`, both over the column `step`. wandb's own step
    counter is not used: it only goes up, so a run continued from an earlier checkpoint would lose its rows
    (https://github.com/wandb/wandb/issues/9871, 5979). Its summary has the last figures of all, and of each set's main
    metric the best, as `best/SET/METRIC` and `best/SET/step`.
    """

    def __init__(
        self,
        recipe: Recipe,
        world_size: int,
        run_dir: Path,
        id: str | None,
        measured: Mapping[int, Mapping[str, Mapping[str, float]]],
    ) -> None:
        """Start the run, or continue the one called `id`. To be called on rank 0, after the process group is joined.

        Args:
            recipe: the resolved recipe; it becomes the run's config.
            world_size: number of ranks, noted in the config.
            run_dir: wandb writes into the folder `wandb` there, or into WANDB_DIR if that is set.
            id: the id of the run to continue, as `id` gave it; None: a new run.
            measured: evaluations before this start, as step -> set -> metric -> value.
        """
        import wandb  # takes a second, and most runs do without

        asked = recipe.tracking
        limit = UPLOAD_TIMEOUT if asked.wandb_artifacts else FINISH_TIMEOUT
        settings: dict[str, Any] = {
            "quiet": True,
            "console": "off",  # it would record every frame of the live display
            "login_timeout": KEY_TIMEOUT,
            "finish_timeout_raises": True,
        }
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = INIT_TIMEOUT
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = limit
        self._run = wandb.init(
            project=asked.wandb_project,
            entity=asked.wandb_entity,
            group=asked.wandb_group,
            name=asked.wandb_name or recipe.name or None,
            tags=asked.wandb_tags or None,
            notes=asked.wandb_notes,
            mode=None if asked.wandb_mode is None else asked.wandb_mode.value,
            config={**to_plain(recipe), "world_size": world_size},
            dir=os.environ.get("WANDB_DIR") or str(run_dir),
            id=id,
            resume="allow",
            allow_val_change=True,  # a continued run may have other ranks, or more steps
            settings=wandb.Settings(**settings),
        )
        self.id = str(self._run.id)
        self._artifact = wandb.Artifact if asked.wandb_artifacts else None
        self._name = recipe.name or "model"
        self._best: dict[str, float] = {}
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        for step, results in measured.items():
            self._remember(step, results)

    def step(self, row: Mapping[str, Any]) -> None:
        """See Recorder."""
        figures = {f"train/{key}": value for key, value in row.items() if key != "step"}
        self._run.log({"step": row["step"], **figures})

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """See Recorder."""
        rows = {f"{name}/{metric}": value for name, figures in results.items() for metric, value in figures.items()}
        self._run.log({"step": step, **rows})
        self._remember(step, results)

    def exported(self, directory: Path) -> None:
        """Upload the model, where that is asked for."""
        if self._artifact is not None:
            artifact = self._artifact(f"{self._name}-{self.id}", type="model")
            artifact.add_dir(str(directory))
            self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Send what is not sent yet and mark the run as finished, or as failed."""
        self._run.finish(exit_code=1 if failed else 0)

    def _remember(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for name, figures in results.items():
            metric, value = next(iter(figures.items()), ("", None))  # the main one comes first
            if isinstance(value, int | float) and value > self._best.get(name, float("-inf")):
                self._best[name] = value
                self._run.summary.update({f"best/{name}/{metric}": value, f"best/{name}/step": step})
