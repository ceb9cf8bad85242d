"""The launcher of this process's rank: ranks end after it was killed, and an agent that hangs is terminated.

A launcher that is killed cannot end its ranks, and they would train until they need its store: their GPUs and the
output directory stay occupied, and nobody sees their output.

The agent polls its store. If the host of the store is unreachable, the agent waits in the kernel until TCP gives up
after a quarter of an hour, and ignores every signal except SIGKILL (torch 2.13). A rank that ends in this situation
starts a small process that outlives it and terminates an agent that has no ranks left:

    python -m embedtrain.distributed.watchdog.launcher PID CREATED
"""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil

from embedtrain.distributed.signals import start_monitor

_GRACE = 15.0  # seconds that an agent without ranks has to end by itself
_TERMINATE_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_MAX_WAIT = 180.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Launcher:
    """The agent of torchrun or `accelerate launch` that started this process."""

    pid: int
    child: psutil.Process  # of the agent: this process, or a shell or numactl that started it

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended without its child: it was killed."""
        if self.child.pid == os.getpid():
            return os.getppid() != self.pid
        try:
            return bool(self.child.ppid() != self.pid)
        except psutil.NoSuchProcess:
            return True
        except OSError:  # this process has reached its limit of open files
            return False

    @property
    def is_suspended(self) -> bool:
        """Whether the agent was stopped by SIGSTOP or Ctrl-Z."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except (psutil.Error, OSError):
            return False

    def __str__(self) -> str:
        return f"the launcher (process {self.pid} on {socket.gethostname()})"


def find_launcher() -> Launcher | None:
    """The agent that started this process; None if a user or srun did."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        child = psutil.Process(os.getsid(0))  # the agent starts a session for each rank
        pid = child.ppid()
    except (psutil.Error, OSError):  # in another pid namespace, or no file can be opened
        return None
    return Launcher(pid, child) if pid else None


def stop_after_launcher() -> None:
    """Send this process SIGTERM when the agent that started it has ended.

    Without effect on processes that a user or srun started: their parent may end before them, as with `nohup`. Linux
    could send the signal by itself (PR_SET_PDEATHSIG), but only when the parent ends, which may be a shell.
    """
    launcher = find_launcher()
    if launcher is not None:
        start_monitor("launcher", lambda: _stop_after(launcher))


def _stop_after(launcher: Launcher) -> None:
    while not launcher.has_ended:
        time.sleep(_POLL_SECONDS)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{launcher} has ended: stopping as after SIGTERM", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def start_launcher_reaper() -> None:
    """Have this process's agent terminated if it hangs after its ranks have ended.

    An agent that may still restart its ranks is left alone: it continues when the other host is back.
    """
    restarts = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if not all(number.isdecimal() for number in restarts) or int(restarts[0]) < int(restarts[1]):
        return
    launcher = find_launcher()
    if launcher is not None and not launcher.has_ended:
        created = psutil.Process(launcher.pid).create_time()
        command = [sys.executable, "-P", "-m", __name__, str(launcher.pid), repr(created)]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603


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
                suspended = launcher.status() == psutil.STATUS_STOPPED
                state = "is suspended" if suspended else "still waits for an unreachable host"
                message = f"the launcher (process {pid}) {state} although all its ranks have ended: terminating it"
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
