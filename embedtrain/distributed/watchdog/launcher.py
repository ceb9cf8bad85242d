"""The launcher of this host, where it cannot notice that its ranks have ended: torchrun asks its store all the time.

When the host of that store is out of reach, torchrun waits in the kernel until TCP gives up, after a quarter of an
hour, and no signal but SIGKILL reaches it (torch 2.13). A rank that leaves then has a small process of its own stay
behind, which ends a launcher that has nothing left to do:

    python -m embedtrain.distributed.launcher PID CREATED
"""

import os
import subprocess
import sys
import time

import psutil

_ALONE = 15.0  # seconds that a launcher without ranks has to end by itself
_ON_SIGNAL = 5.0
_AT_MOST = 180.0
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def start_launcher_reaper() -> None:
    """Have this process's launcher ended if it hangs once its ranks are gone.

    One that may start them again is left alone: it goes on when the other host is back.
    """
    restarts = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if not all(number.isdecimal() for number in restarts) or int(restarts[0]) < int(restarts[1]):
        return
    launcher = _launcher()
    if launcher is not None:
        command = [sys.executable, "-m", __name__, str(launcher.pid), repr(launcher.create_time())]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603


def _launcher() -> psutil.Process | None:
    for parent in psutil.Process().parents()[:3]:  # a shell may stand between
        try:
            words = parent.cmdline()[:4]
        except psutil.Error:
            return None
        if any(word.endswith(name) for word in words for name in _TORCHRUN):
            return parent
    return None


def _end(pid: int, created: float) -> None:
    """Wait for the launcher to have no rank left, and then for it to go; end it if it does not."""
    try:
        launcher = psutil.Process(pid)
        until, alone = time.monotonic() + _AT_MOST, None
        while launcher.is_running() and launcher.create_time() == created and launcher.status() != psutil.STATUS_ZOMBIE:
            now = time.monotonic()
            ranks = [child for child in launcher.children() if child.status() != psutil.STATUS_ZOMBIE]
            alone = None if ranks else alone or now
            if now > until or (alone is not None and now - alone > _ALONE):
                told = f"torchrun (process {pid}) still waits for a host that is out of reach, with all its ranks gone"
                print(f"{told}: it is ended", file=sys.stderr, flush=True)
                launcher.terminate()
                time.sleep(_ON_SIGNAL)
                launcher.kill()
                return
            time.sleep(0.5)
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    _end(int(sys.argv[1]), float(sys.argv[2]))
