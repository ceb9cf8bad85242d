"""Options of `python -m embedtrain.submit`, under `slurm.`: what is asked of the cluster, and how the job behaves."""

from dataclasses import dataclass, field
from enum import Enum


class Launcher(str, Enum):
    """What starts the ranks of a node.

    `torchrun`: srun starts one task a node, torchrun the ranks in it. `srun`: one task a rank, no torchrun.
    """

    torchrun = "torchrun"
    srun = "srun"


@dataclass(kw_only=True)
class SlurmConfig:
    """One job, or one array of jobs for several seeds."""

    dry_run: bool = False  # show the script, write and submit nothing
    cluster: str | None = None  # a YAML file with options of this list, for your cluster; the command line wins
    # What is asked for.
    nodes: int = 1  # machines
    gpus_per_node: int = 8  # 0: none, training on the CPU
    gpu_type: str | None = None  # asks for --gpus-per-node=TYPE:N
    gres: str | None = None  # asked for instead of --gpus-per-node, such as gpu:a100:8
    ranks_per_node: int | None = None  # default: one a GPU; 1 where there is none
    cpus_per_node: int | None = None  # default: what the cluster gives, often a single one
    mem: str | None = None  # of a node, such as 500G; 0: all of it
    exclusive: bool = False  # whole nodes, alone on them
    time: str | None = None  # limit, in SLURM's forms: minutes, H:MM:SS, D-HH, D-HH:MM:SS; default: the partition's
    partition: str | None = None  # default: the cluster's
    account: str | None = None  # that is charged
    qos: str | None = None  # quality of service, with its limits and priority
    constraint: str | None = None  # features of the nodes, such as a100&nvlink
    reservation: str | None = None  # whose nodes are taken
    mail_user: str | None = None  # who is written to
    mail_type: str | None = None  # about what, such as END,FAIL,REQUEUE; default with mail_user: END,FAIL
    job_name: str | None = None  # default: the recipe's name
    log: str | None = None  # with SLURM's patterns; default: slurm-%j.log in the run directory (%A_%a of an array)
    extra: list[str] = field(default_factory=list)  # further options of sbatch, such as --exclude=n13
    srun_extra: list[str] = field(default_factory=list)  # further options of srun, such as --mpi=none
    seeds: list[int] = field(default_factory=list)  # a job of an array for each, in OUTPUT_DIR/seed-S
    seeds_at_once: int | None = None  # so many of them run at a time; default: all
    # What runs in it.
    launcher: Launcher = Launcher.torchrun  # of the ranks
    python: str | None = None  # default: the one that submits; in a container `python`
    setup: list[str] = field(default_factory=list)  # lines of shell before it: module load, source, export
    container_image: str | None = None  # of srun --container-image (the pyxis plugin)
    container_mounts: list[str] = field(default_factory=list)  # FROM:TO; default: the working directory
    container_command: str | None = None  # or words before python, such as apptainer exec --nv image.sif
    # How it ends and goes on.
    signal_seconds: int = 300  # before the time limit ranks are asked for a checkpoint
    requeue: bool = True  # go on in the queue after a time limit, a preemption or the loss of a node
    max_requeues: int = 100  # starts after the first, whatever made them necessary
    max_restarts: int = 0  # times torchrun starts all ranks again within the job when one has failed


@dataclass(kw_only=True)
class SubmitOptions:
    """Options of `python -m embedtrain.submit`; all others on its command line are the recipe's."""

    slurm: SlurmConfig = field(default_factory=SlurmConfig)  # the job
