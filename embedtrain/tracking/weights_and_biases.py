"""Weights & Biases, when the recipe asks for it: one run for all ranks, continued when training is."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embedtrain.config.compose import to_plain
from embedtrain.config.schema import Recipe

INIT_TIMEOUT = 30.0  # seconds; the other ranks wait in their first collective meanwhile
FINISH_TIMEOUT = 300.0  # seconds that the end of a run may wait for figures to be sent
KEY_TIMEOUT = 60.0  # seconds that a person at a terminal has to type the key in


class WandbRun:
    """One wandb run. Whatever goes wrong with it is said once and then left alone: training goes on.

    Steps are logged as `train/loss`, evaluations as `SET/METRIC`, both over the column `step`. wandb's own step
    counter is not used: it only goes up, so a run continued from an earlier checkpoint would lose its rows
    (https://github.com/wandb/wandb/issues/9871, 5979).
    """

    def __init__(self, recipe: Recipe, world_size: int, run_dir: Path, id: str | None, warn: Callable[[str], None]):
        """Start the run, or continue the one called `id`. To be called on rank 0, after the process group is joined.

        Args:
            recipe: the resolved recipe; it becomes the run's config.
            world_size: number of ranks, noted in the config.
            run_dir: wandb writes into the folder `wandb` there, or into WANDB_DIR if that is set.
            id: the id of the run to continue, as `id` gave it; None: a new run.
            warn: says a sentence to the user.
        """
        self._id = id
        self._warn = warn
        self._run: Any = None
        self._attempt("could not be started", lambda: self._start(recipe, world_size, run_dir))

    @property
    def id(self) -> str | None:
        """What continues this run: to be stored in checkpoints. None if no run could ever be started."""
        return self._id

    def step(self, row: Mapping[str, Any]) -> None:
        """Log a training step's figures."""
        self._log(row["step"], {f"train/{key}": value for key, value in row.items() if key != "step"})

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Log what was measured after `step`."""
        rows = {f"{name}/{metric}": value for name, figures in results.items() for metric, value in figures.items()}
        self._log(step, rows)

    def close(self, failed: bool = False) -> None:
        """Send what is not sent yet and mark the run as finished, or as failed."""
        run, self._run = self._run, None
        if run is not None:
            self._attempt("could not be finished", lambda: run.finish(exit_code=1 if failed else 0))

    def _start(self, recipe: Recipe, world_size: int, run_dir: Path) -> None:
        import wandb  # takes a second, and most runs do without

        settings: dict[str, Any] = {
            "quiet": True,
            "console": "off",  # it would record every frame of the live display
            "login_timeout": KEY_TIMEOUT,
        }
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = INIT_TIMEOUT
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = FINISH_TIMEOUT
        run = wandb.init(
            project=recipe.tracking.wandb_project,
            entity=recipe.tracking.wandb_entity,
            group=recipe.tracking.wandb_group,
            name=recipe.name or None,
            config={**to_plain(recipe), "world_size": world_size},
            dir=os.environ.get("WANDB_DIR") or str(run_dir),
            id=self._id,
            resume="allow",
            allow_val_change=True,  # a continued run may have other ranks, or more steps
            settings=wandb.Settings(**settings),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        self._run, self._id = run, str(run.id)

    def _log(self, step: float, row: dict[str, Any]) -> None:
        if self._run is not None:
            self._attempt("failed", lambda: self._run.log({"step": step, **row}))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # wandb has ended processes in the past
            self._run = None
            reason = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"wandb {what}, training goes on without it (metrics.jsonl has everything): {reason}")
