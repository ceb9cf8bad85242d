"""The command line of submit: its own options, the recipe's, and what cannot work; all before anything is submitted."""

import pytest

from embedtrain.errors import ConfigError
from embedtrain.submit.options import Launcher, SlurmConfig, check_slurm, compose_submit

RECIPE = ["name=t", "model.path=model", "data.train=[train.jsonl]", "train.steps=3"]


def slurm(*arguments: str) -> SlurmConfig:
    return compose_submit([*RECIPE, *arguments]).slurm


def test_options_of_the_job_and_of_the_recipe_are_separated():
    submission = compose_submit(["slurm.nodes=4", *RECIPE, "optim.lr=1e-3", "slurm.time=24:00:00"])
    assert submission.arguments == [*RECIPE, "optim.lr=1e-3"]
    assert submission.recipe.optim.lr == 1e-3
    assert submission.slurm == SlurmConfig(nodes=4, time="24:00:00")
    assert submission.output_dirs == ["runs/t"]


def test_values_need_no_quotes():
    """Nothing in a text means anything to Hydra, and a list of one line needs no brackets."""
    options = slurm(
        "slurm.constraint=a100&nvlink", "slurm.time=1-12", "slurm.account='quoted'", "slurm.qos=null",
        "slurm.container_command=apptainer exec --bind a:b,c:d x.sif", "slurm.setup=export X=${HOME}/a, b",
        "slurm.extra=--exclude=n1,n2", "slurm.job_name=a\\", "slurm.mail_user=me@example.org", "slurm.mem=0",
        "slurm.srun_extra=[--mpi=none, --unbuffered]",
    )  # fmt: skip
    assert options == SlurmConfig(
        constraint="a100&nvlink", time="1-12", account="quoted", qos=None, job_name="a\\", mail_user="me@example.org",
        container_command="apptainer exec --bind a:b,c:d x.sif", setup=["export X=${HOME}/a, b"],
        extra=["--exclude=n1,n2"], mem="0", srun_extra=["--mpi=none", "--unbuffered"],
    )  # fmt: skip


_SRUN = Launcher.srun


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "slurm.nodes=0: "),
        ({"gpus_per_node": -1}, "slurm.gpus_per_node=-1: "),
        ({"gpus_per_node": 0, "gres": "gpu:8"}, "slurm.gpus_per_node=0: gres"),
        ({"gpu_type": "a100", "gres": "gpu:8"}, "slurm.gres=gpu:8: gpu_type=a100"),
        ({"time": "tomorrow"}, "slurm.time=tomorrow: "),
        ({"time": "5"}, "slurm.time=5: must be longer than signal_seconds=300"),
        ({"signal_seconds": 0}, "slurm.signal_seconds=0: "),
        ({"launcher": _SRUN, "max_restarts": 1}, "slurm.max_restarts=1: "),
        ({"launcher": _SRUN, "cpus_per_node": 12}, "slurm.cpus_per_node=12: must be a multiple of the 8"),
        ({"max_requeues": -1}, "slurm.max_requeues=-1: "),
        ({"seeds": [1, 1]}, "slurm.seeds=[1,1]: "),
        ({"seeds_at_once": 2}, "slurm.seeds_at_once=2: "),
        ({"container_image": "a", "container_command": "b"}, "slurm.container_image=a: container_command"),
        ({"container_mounts": ["a:b"]}, "slurm.container_mounts=[a:b]: "),
        ({"container_command": "a 'b"}, "slurm.container_command=a 'b: "),
        ({"mail_type": "END"}, "slurm.mail_type=END: "),
        ({"extra": ["exclude"]}, "slurm.extra=[exclude]: "),
        ({"extra": ["--nodes=3"]}, "slurm.extra=[--nodes=3]: --nodes=3 is set by the script; write slurm.nodes="),
        ({"extra": ["-p high"]}, "slurm.extra=[-p high]: -p high is set by the script; write slurm.partition="),
        ({"account": "a\nb"}, "slurm.account='a\\nb': "),
        ({"setup": ["a\nrm -r b"]}, "slurm.setup="),
        ({"log": "a\\b-%j"}, "slurm.log=a\\b-%j: "),
    ],
)
def test_a_rejected_option_is_named_with_its_value(options, message):
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        check_slurm(SlurmConfig(**options))
    assert message in str(error.value)


@pytest.mark.parametrize("time", ["90", "10:00", "24:00:00", "2-00", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_times_in_all_forms_of_slurm(time):
    assert check_slurm(SlurmConfig(time=time)).time == time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm.nodse=2"], "unknown option slurm.nodse, did you mean nodes?"),
        (["slurm.launcher=mpirun"], "slurm.launcher=mpirun"),
        (["optim.rl=1"], "unknown option optim.rl"),
        (["train.chunk_tokens=0"], "train.chunk_tokens=0: "),
        (["slurm.seeds=[1]", "seed=3"], "seed=3 and slurm.seeds=[1] "),
        (["name=a\nb"], "'name=a\\nb': "),
        (['output_dir="a\'b"'], "output_dir=a'b: "),
        (["-m", "optim.lr=1,2"], "multirun (-m) is for training"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(arguments, message):
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        compose_submit([*RECIPE, *arguments])
    assert message in str(error.value)


def test_options_of_a_cluster_come_from_a_file(tmp_path):
    """Its values as they are written, 24:00:00 no number; the command line wins."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        'partition: gpu\ntime: 24:00:00\nexclusive: true\nmem: 0\nsetup:\n  - module load cuda\n  - export X="a, b"\n'
        "gres:\n"
    )
    options = slurm(f"slurm.cluster={path}", "slurm.partition=low")
    assert options == SlurmConfig(
        cluster=str(path), partition="low", time="24:00:00", exclusive=True, mem="0",
        setup=["module load cuda", 'export X="a, b"'],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("- a", "partition: gpu"),
        ("partion: gpu", "unknown option partion, did you mean partition?"),
        ("setup: {a: b}", "setup "),
        ("nodes: x", "slurm.nodes=x"),
    ],
)
def test_an_invalid_cluster_file_is_named(tmp_path, content, message):
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        slurm(f"slurm.cluster={path}")
    assert message in str(error.value)
