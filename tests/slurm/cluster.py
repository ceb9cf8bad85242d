"""A real SLURM on this machine: munged, slurmctld and two slurmd as virtual nodes, without systemd and cgroups.

Everything lies in a folder of its own, on ports of its own, and is stopped by the pids it wrote there.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = ("n1", "n2")

# `high` preempts `low`: jobs of `low` get a signal and are requeued after the grace time.
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{parameters}
SlurmdTimeout={node_timeout}
SlurmctldTimeout=15
InactiveLimit=0
KillWait=10
KillOnBadExit=0
MinJobAge=600
FirstJobId={first_job}
ReturnToService=2
MessageTimeout=10
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state/ctld
SlurmdSpoolDir={folder}/state/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[1-2] MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why no cluster can be started here, or None; installs missing packages if possible."""
    if getpass.getuser() != "root":
        return "starting a SLURM cluster needs root"
    if all(map(shutil.which, PROGRAMS)):
        return None
    if shutil.which("apt-get") is None:
        return "SLURM is not installed, and apt-get is not there to install it"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"SLURM cannot be installed: {done.stderr.strip().splitlines()[-1:]}"
    return None if all(map(shutil.which, PROGRAMS)) else "SLURM is installed and incomplete"


class Cluster:
    """Two nodes that are up.

    Args:
        proctrack: how SLURM finds a step's processes: `linuxproc` signals all of them, `pgid` the tasks alone.
        sends_user_signal: whether a job that is preempted gets its own signal, or SIGTERM.
        node_timeout: seconds until a node that is silent counts as lost.
    """

    def __init__(self, *, proctrack: str, sends_user_signal: bool, node_timeout: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        for each in ("state/ctld", *(f"state/{node}" for node in NODES)):
            (self.folder / each).mkdir(parents=True)
        parameters = "SlurmctldParameters=preempt_send_user_signal" if sends_user_signal else ""
        conf = _CONF.format(
            folder=self.folder, host=socket.gethostname().split(".")[0], ports=_free_ports(3), proctrack=proctrack,
            parameters=parameters, node_timeout=node_timeout,
            first_job=1000 + secrets.randbelow(15000),  # it determines the ports, and another cluster may run here
        )  # fmt: skip
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(conf)
        devices = []
        for number in range(2):  # SLURM only looks whether they are there
            device = self.folder / f"gpu{number}"
            os.mknod(device, 0o20666, os.makedev(1, 3))
            devices.append(str(device))
        lines = [f"NodeName={node} Name=gpu File={device}" for node in NODES for device in devices]
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self._daemon(
            "munged", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munge.seed", "--num-threads=2",
        )  # fmt: skip
        self._daemon("slurmctld", "-f", str(self.conf))
        for node in NODES:
            self.power_on(node)
        self.until(lambda: self._up() == len(NODES), 60, "both nodes are up")

    def power_on(self, node: str) -> None:
        self._daemon("slurmd", "-N", node, "-f", str(self.conf))

    def power_off(self, node: str) -> None:
        """Kill everything on a node, as if it lost power: its daemon, the daemons of its jobs, and their processes."""
        gone = {self._pid(f"slurmd-{node}")}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get("SLURMD_NODENAME") == node and environment.get("SLURM_CONF") == str(self.conf):
                    gone |= {process.pid, *(parent.pid for parent in process.parents() if _is_step(parent))}
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them shall see another go
            for pid in gone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        (self.folder / f"slurmd-{node}.pid").unlink(missing_ok=True)

    def call(self, *words: str, code: int | None = 0) -> str:
        """The output of a SLURM command."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, timeout=120)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`; empty if SLURM has forgotten the job."""
        output = self.call("scontrol", "--oneliner", "show", "job", number, code=None)
        return dict(each.split("=", 1) for each in output.split() if "=" in each)

    def wait(self, number: str, seconds: float = 300) -> dict[str, str]:
        """Wait until a job has ended and will not restart."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.until(lambda: self.job(number).get("JobState") in over, seconds, f"job {number} ends")
        return self.job(number)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                queue = self.call("squeue", code=None) + self.call("sinfo", "-N", "-l", code=None)
                log = (self.folder / "slurmctld.log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"{what}: not within {seconds} s\n{queue}\n{log}")
            time.sleep(0.3)

    def calm(self) -> None:
        """Wait until no job is left and all nodes are up, for the next test."""
        self.call("scancel", f"--user={getpass.getuser()}", code=None)
        for node in NODES:
            if not self._alive(f"slurmd-{node}"):
                self.power_on(node)
        self.until(lambda: not self.call("squeue", "--noheader", code=None).strip(), 90, "the queue is empty")
        self.until(lambda: self._up() == len(NODES), 90, "both nodes are up")

    def stop(self) -> None:
        with contextlib.suppress(AssertionError):
            self.calm()
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
            if self._alive(name):
                pid = self._pid(name)
                os.kill(pid, signal.SIGTERM)
                with contextlib.suppress(psutil.Error):
                    psutil.Process(pid).wait(10)
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
        for process in psutil.process_iter():  # what a node that was powered off and on again has lost sight of
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.conf):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _up(self) -> int:
        states = self.call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T", code=None).split()
        return sum(state in ("idle", "mixed", "allocated") for state in states)

    def _daemon(self, *words: str) -> None:
        program = shutil.which(words[0])
        assert program is not None
        done = subprocess.run([program, *words[1:]], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def _pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def _alive(self, name: str) -> bool:
        try:
            return psutil.pid_exists(self._pid(name))
        except (OSError, ValueError):
            return False


@contextlib.contextmanager
def running(**options: object) -> Iterator[Cluster]:
    cluster = Cluster(**options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _is_step(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("slurmstepd")
    return False


def _free_ports(number: int) -> list[int]:
    held = [socket.socket() for _ in range(number)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
