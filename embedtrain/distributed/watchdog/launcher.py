"""Termination of a torchrun agent that hangs after all its ranks have ended.

The agent polls its store. If the host of the store is unreachable, the agent waits in the kernel until TCP gives up
after a quarter of an hour, and ignores every signal except SIGKILL (torch 2.13). A rank that ends in this situation
starts a small process that outlives it and terminates an agent that has no ranks left:

    python -m embedtrain.distributed.watchdog.launcher PID CREATED
"""

import os
import subprocess
import sys
import time

import psutil

_GRACE = 15.0  # seconds that an agent without ranks has to end by itself
_TERMINATE_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_MAX_WAIT = 180.0
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def start_launcher_reaper() -> None:
    """Have this process's agent terminated if it hangs after its ranks have ended.

    An agent that may still restart its ranks is left alone: it continues when the other host is back.
    """
    restarts = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if not all(number.isdecimal() for number in restarts) or int(restarts[0]) < int(restarts[1]):
        return
    launcher = _find_launcher()
    if launcher is not None:
        command = [sys.executable, "-m", __name__, str(launcher.pid), repr(launcher.create_time())]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603


def _find_launcher() -> psutil.Process | None:
    for parent in psutil.Process().parents()[:3]:  # there may be a shell in between
        try:
            words = parent.cmdline()[:4]
        except psutil.Error:
            return None
        if any(word.endswith(name) for word in words for name in _TORCHRUN):
            return parent
    return None


def _reap(pid: int, created: float) -> None:
    """Wait until the agent has no ranks left and ends; terminate it if it does not end."""
    try:
        launcher = psutil.Process(pid)
        deadline, alone_since = time.monotonic() + _MAX_WAIT, None
        while launcher.is_running() and launcher.create_time() == created and launcher.status() != psutil.STATUS_ZOMBIE:
            now = time.monotonic()
            ranks = [child for child in launcher.children() if child.status() != psutil.STATUS_ZOMBIE]
            alone_since = None if ranks else alone_since or now
            if now > deadline or (alone_since is not None and now - alone_since > _GRACE):
                message = (
                    f"torchrun (process {pid}) still waits for an unreachable host although all its ranks have ended: "
                    "terminating it"
                )
                print(message, file=sys.stderr, flush=True)
                launcher.terminate()
                time.sleep(_TERMINATE_GRACE)
                launcher.kill()
                return
            time.sleep(0.5)
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    _reap(int(sys.argv[1]), float(sys.argv[2]))
