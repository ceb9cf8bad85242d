"""The process that measures one part: it imports everything, waits until it may begin, and records each entry."""

import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.visit.record import DONE, DUE, FAILED, SKIPPED, STARTED, Record

if TYPE_CHECKING:  # which import torch, unlike the process that starts the others
    from benchmarks.gpu.visit.entries import Entry, Visit
    from embedtrain.distributed.world import World

# After these errors a process can no longer use its GPU.
BROKEN_DEVICE = 75
MESSAGE_LENGTH = 2000
SMALL_FACTOR = 4.0  # tiny models run on machines with few cores


def work(part: str, path: Path, *, small: bool) -> int:
    """Measure the entries of a part that are not recorded yet, when a line with the seconds comes on standard input."""
    from benchmarks.gpu.visit.entries import Visit
    from embedtrain.distributed.world import joined_world

    entries = import_module(f"benchmarks.gpu.visit.{part}").ENTRIES
    line = sys.stdin.readline()
    if not line.strip():
        return 0  # the visit has ended
    deadline = time.monotonic() + float(line)
    with tempfile.TemporaryDirectory(prefix="embedtrain-visit-") as folder, joined_world() as world:
        visit = Visit(small=small, folder=Path(folder), deadline=deadline)
        with visit.kept:
            return measure(entries, part, Record(path), world, visit)


def measure(entries: Sequence["Entry"], part: str, record: Record, world: "World", visit: "Visit") -> int:
    """Measure entries until the deadline, or until one has broken the device; the exit code."""
    import torch

    from benchmarks.gpu.visit.entries import Skipped

    left = due(entries, part, record, small=visit.small)
    record.announce(part, [entry.name for entry in left])
    for entry in left:
        started = time.monotonic()
        if started > visit.deadline:  # the process that ends this one in time has been killed
            break
        limit = entry.limit * (SMALL_FACTOR if visit.small else 1.0)
        record.add(part, entry.name, STARTED, limit=limit)
        try:
            values = entry.measure(world, visit)
        except Skipped as reason:
            record.add(part, entry.name, SKIPPED, message=str(reason), seconds=time.monotonic() - started)
        except Exception as error:
            traceback.print_exc()
            record.add(part, entry.name, FAILED, message=describe(error), seconds=time.monotonic() - started)
            if isinstance(error, torch.AcceleratorError):
                return BROKEN_DEVICE
        else:
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            record.add(part, entry.name, DONE, values=dict(values), seconds=time.monotonic() - started)
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def due(entries: Sequence["Entry"], part: str, record: Record, *, small: bool) -> list["Entry"]:
    """Entries that are not recorded yet, in their order; after them those that have failed or did not end."""
    last = record.last(part)
    left = [entry for entry in entries if not (small and entry.varied)]
    states = {entry.name: last[part, entry.name]["state"] for entry in left if (part, entry.name) in last}
    new = [entry for entry in left if states.get(entry.name, DUE) == DUE]
    return new + [entry for entry in left if states.get(entry.name, DUE) not in (DUE, DONE)]


def describe(error: BaseException) -> str:
    """The error, and for an assertion without a message its line."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and frames:
        text = f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})"
    return text[:MESSAGE_LENGTH]
