"""A process whose launcher is killed, also while suspended, gets SIGTERM; without a launcher it outlives its parent."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from embedtrain.distributed.watchdog.launcher import Launcher

# A rank that waits, and the agent that starts it: in a session of its own, as torchrun does, or below a shell.
RANK = """
import time
from embedtrain.distributed.watchdog.launcher import stop_after_launcher
stop_after_launcher()
print("ready", flush=True)
time.sleep(60)
"""
AGENT = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], start_new_session=True)
time.sleep(60)
"""


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"]])
@pytest.mark.parametrize("is_launched", [True, False])
def test_a_rank_ends_after_its_launcher(is_launched, wrapper):
    environment = {**os.environ} | ({"TORCHELASTIC_RUN_ID": "1"} if is_launched else {})
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *wrapper, sys.executable, "-c", RANK],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert agent.stdout.readline() == "ready\n"
    started = psutil.Process(agent.pid).children(recursive=True)
    try:
        launcher = Launcher(agent.pid, started[0])
        assert not launcher.has_ended
        assert not launcher.is_suspended
        agent.send_signal(signal.SIGSTOP)
        while not launcher.is_suspended:
            time.sleep(0.01)
        assert not launcher.has_ended
        assert all(process.is_running() for process in started)
        agent.kill()
        _, alive = psutil.wait_procs(started, timeout=30 if is_launched else 2)
        assert bool(alive) == (not is_launched)
    finally:
        for process in started:
            if process.is_running():
                process.kill()
    assert agent.communicate()[1].count(f"the launcher (process {agent.pid} on ") == is_launched
