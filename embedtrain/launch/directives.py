"""The #SBATCH lines of a job: what is asked of the cluster."""

import re

from embedtrain.config.schema import Recipe
from embedtrain.config.slurm import Launcher, SlurmConfig
from embedtrain.config.slurm_checks import ranks_per_node

_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
# Of these the variables that sbatch reads are named otherwise than SBATCH_OPTION.
_VARIABLES = {"time": "SBATCH_TIMELIMIT", "array": "SBATCH_ARRAY_INX", "mem": "SBATCH_MEM_PER_NODE"}


def directives(recipe: Recipe, options: SlurmConfig, workdir: str, log: str) -> list[tuple[str, str | None]]:
    """Options of sbatch and their values, in the order of the script; None: one without a value.

    Args:
        recipe: what is trained.
        options: checked.
        workdir: the folder that the job starts in, absolute.
        log: the file that it writes, with SLURM's patterns.
    """
    per_task = None
    tasks = ranks_per_node(options) if options.launcher is Launcher.srun else 1
    if options.cpus_per_node is not None:
        per_task = options.cpus_per_node // tasks
    gpus = None
    if options.gpus_per_node and options.gres is None:
        gpus = f"{options.gpu_type}:{options.gpus_per_node}" if options.gpu_type else str(options.gpus_per_node)
    at_once = f"%{options.seeds_at_once}" if options.seeds_at_once is not None else ""
    last = len(options.seeds) - 1
    asked: list[tuple[str, str | int | bool | None]] = [
        ("job-name", options.job_name or recipe.name),
        ("chdir", workdir),
        ("output", log),
        ("open-mode", "append"),
        ("export", "ALL"),
        ("nodes", options.nodes),
        ("ntasks-per-node", tasks),
        ("cpus-per-task", per_task),
        ("gpus-per-node", gpus),
        ("gres", options.gres),
        ("mem", options.mem),
        ("exclusive", options.exclusive),
        ("time", options.time),
        ("partition", options.partition),
        ("account", options.account),
        ("qos", options.qos),
        ("constraint", options.constraint),
        ("reservation", options.reservation),
        ("mail-user", options.mail_user),
        ("mail-type", options.mail_type or ("END,FAIL" if options.mail_user else None)),
        ("array", f"0-{last}{at_once}" if options.seeds else None),
        ("signal", f"B:USR1@{options.signal_seconds}"),
        ("requeue" if options.requeue else "no-requeue", True),
    ]
    given = [(name, value) for name, value in asked if value is not None and value is not False]
    return [(name, None if value is True else str(value)) for name, value in given]


def written(name: str, value: str | None) -> str:
    """One option as a line that sbatch reads, which has quotes of its own and expands nothing."""
    if value is None:
        return f"#SBATCH --{name}"
    if _PLAIN.fullmatch(value):
        return f"#SBATCH --{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{escaped}"'


def variable_of(name: str) -> str:
    """The variable of the environment that sbatch would obey rather than the script's option of that name."""
    return _VARIABLES.get(name, f"SBATCH_{name.upper().replace('-', '_')}")
