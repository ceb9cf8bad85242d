"""What an entry of a visit is: a check or a measurement, with the folder and the models that it shares with others."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.models import Sized, saved
from embedtrain.distributed.world import World

# The batches of `benchmarks.gpu.models` fit on a GPU of so many bytes; smaller GPUs get fewer pairs.
FULL_BATCH_BYTES = 141e9


class Skipped(Exception):
    """The entry does not apply here: an option that this version does not have, or a program that is not installed."""


@dataclass(kw_only=True)
class Visit:
    """What the entries of a part share.

    Attributes:
        small: tiny models, on any device.
        folder: for files; it is deleted after the part.
        deadline: of the part, in the seconds of `time.monotonic`.
        models: directories of random models that earlier entries have written, by name.
        kept: closed after the part.
    """

    small: bool
    folder: Path
    deadline: float
    models: dict[str, Path] = field(default_factory=dict)
    kept: ExitStack = field(default_factory=ExitStack)

    @property
    def seconds_left(self) -> float:
        """Seconds until the part ends."""
        return self.deadline - time.monotonic()

    def model(self, sized: Sized, device: torch.device) -> Path:
        """The directory of the model with random weights, for this entry and later ones."""
        if sized.name not in self.models:
            self.models[sized.name] = self.kept.enter_context(saved(sized, device))
        return self.models[sized.name]

    def subfolder(self, name: str) -> Path:
        """A new or existing folder."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path


Values = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A check or a measurement.

    Attributes:
        name: unique in its part.
        measure: returns what the report shows; raises what is wrong, or Skipped.
        limit: seconds after which it is ended.
        varied: repeats another entry with other values, and is left out with --small.
        unpretended: compiles, or computes with models of sentence-transformers, which the pretended device of the tests
            cannot.
    """

    name: str
    measure: Callable[[World, Visit], Values]
    limit: float = 60.0
    varied: bool = False
    unpretended: bool = False


def batch_share(device: torch.device) -> float:
    """The part of the pairs of `benchmarks.gpu.models` that fits on this device."""
    if device.type != "cuda":
        return 1.0
    return min(1.0, torch.cuda.get_device_properties(device).total_memory / FULL_BATCH_BYTES)


@contextmanager
def recorded_waits(device: torch.device) -> Iterator[list[str]]:
    """Where the host waits for a CUDA device during the block, as far as torch warns of it: "file:line", repeated.

    Waiting for an event is no such wait; a step of training waits for one, when all of it is queued.
    """
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
