"""One run per output directory, which all of its ranks see."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError

# Seconds: a run that was killed may take a moment to end, and a shared file system to show what was written.
_PATIENCE = 10.0


@contextlib.contextmanager
def only_run(path: Path, world: World, timeout: float) -> Iterator[None]:
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
        with world.together("taking the output directory"):
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
        with world.together("looking at the output directory"):
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
