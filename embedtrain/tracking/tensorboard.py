"""TensorBoard, when the recipe asks for it: event files in the run directory, one history over restarts."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import Recipe

START, FINISH = 60.0, 30.0  # seconds
FOLDER = "tensorboard"
_FLUSH = 30  # seconds from a figure to the file


class TensorBoardLogger:
    """Writes `train/loss` and the like for steps, `SET/METRIC` for evaluations. See Recorder.

    A run that goes on writes a file of its own, which tells TensorBoard to drop what the files before it hold of later
    steps (its `purge_step`); one that starts anew makes it drop all of it.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, resumed_step: int | None) -> None:
        """Open a file.

        Args:
            recipe: shown under the tab "text".
            run_dir: holds the folder `tensorboard`.
            resumed_step: the step training goes on from; None: it starts anew.

        Raises:
            RuntimeError: TensorBoard is not installed.
            OSError: the file cannot be written.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # takes a second, and most runs do without
        except ImportError as error:
            raise RuntimeError(
                f"the package tensorboard cannot be imported ({error}): pip install 'embedtrain[tensorboard]'"
            ) from None
        self._hook = threading.excepthook
        threading.excepthook = self._heard
        anew = resumed_step is None
        purge_step = 0 if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(str(run_dir / FOLDER), purge_step=purge_step, flush_secs=_FLUSH)
        if anew:
            told = yaml.safe_dump(to_plain(recipe), sort_keys=False, allow_unicode=True)
            text = "\n".join(f"    {line}" for line in told.splitlines())  # verbatim in Markdown
            self._writer.add_text("recipe", text, 0)
        self._writer.flush()

    def step(self, row: Mapping[str, Any]) -> None:
        """See Recorder."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(f"train/{name}", value, row["step"])

    def evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """See Recorder."""
        for name, figures in results.items():
            for metric, value in figures.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"{name}/{metric}", value, step)
        self._writer.flush()

    def exported(self, directory: Path) -> None:
        """Event files have no place for models."""

    def close(self, failed: bool) -> None:
        """See Recorder."""
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _heard(self, told: threading.ExceptHookArgs) -> None:
        # Its own thread fails with the disk, and the next call here says so: nobody wants the traceback besides.
        if not type(told.thread).__module__.startswith("tensorboard."):
            self._hook(told)
