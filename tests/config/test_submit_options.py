"""The command line of submit: its own options, the recipe's, and what cannot work; all before anything is submitted."""

import pytest

from embedtrain.errors import ConfigError
from embedtrain.submit.options import Launcher, SlurmConfig, check_slurm, compose_submit

RECIPE = ["name=t", "model.path=model", "data.train=[train.jsonl]", "train.steps=3"]


def slurm(*arguments: str) -> SlurmConfig:
    return compose_submit([*RECIPE, *arguments]).slurm


def test_options_of_the_job_and_of_the_training_are_told_apart():
    submission = compose_submit(["slurm.nodes=4", *RECIPE, "optim.lr=1e-3", "slurm.time=24:00:00"])
    assert submission.arguments == [*RECIPE, "optim.lr=1e-3"]
    assert submission.recipe.optim.lr == 1e-3
    assert submission.slurm == SlurmConfig(nodes=4, time="24:00:00")
    assert submission.output_dirs == ["runs/t"]


def test_values_are_written_as_on_a_line_of_their_own():
    """Nothing in a text means anything to Hydra, and a list of one line needs no brackets."""
    found = slurm(
        "slurm.constraint=a100&nvlink", "slurm.time=1-12", "slurm.account='quoted'", "slurm.qos=null",
        "slurm.container_command=apptainer exec --bind a:b,c:d x.sif", "slurm.setup=export X=${HOME}/a, b",
        "slurm.extra=--exclude=n1,n2", "slurm.job_name=a\\", "slurm.mail_user=me@example.org", "slurm.mem=0",
        "slurm.srun_extra=[--mpi=none, --unbuffered]",
    )  # fmt: skip
    assert found == SlurmConfig(
        constraint="a100&nvlink", time="1-12", account="quoted", qos=None, job_name="a\\", mail_user="me@example.org",
        container_command="apptainer exec --bind a:b,c:d x.sif", setup=["export X=${HOME}/a, b"],
        extra=["--exclude=n1,n2"], mem="0", srun_extra=["--mpi=none", "--unbuffered"],
    )  # fmt: skip


_SRUN = Launcher.srun


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nodes": 0}, "slurm.nodes=0: at least 1"),
        ({"gpus_per_node": -1}, "slurm.gpus_per_node=-1: a number of GPUs"),
        ({"gpus_per_node": 0, "gres": "gpu:8"}, "slurm.gpus_per_node=0 with slurm.gres=gpu:8"),
        ({"gpu_type": "a100", "gres": "gpu:8"}, "both name GPUs: keep one"),
        ({"time": "tomorrow"}, "slurm.time=tomorrow: written as minutes"),
        ({"time": "5"}, "slurm.time=5 with slurm.signal_seconds=300: the job would be asked to stop as soon"),
        ({"signal_seconds": 0}, "slurm.signal_seconds=0: seconds before the time limit"),
        ({"launcher": _SRUN, "max_restarts": 1}, "slurm.max_restarts=1 is torchrun's"),
        ({"launcher": _SRUN, "cpus_per_node": 12}, "write a multiple of 8"),
        ({"max_requeues": -1}, "must not be negative"),
        ({"seeds": [1, 1]}, "one stands twice"),
        ({"seeds_at_once": 2}, "is for an array"),
        ({"container_image": "a", "container_command": "b"}, "are both set"),
        ({"container_mounts": ["a:b"]}, "slurm.container_mounts is for slurm.container_image"),
        ({"container_command": "a 'b"}, "a quote is not closed"),
        ({"mail_type": "END"}, "slurm.mail_type=END: to whom?"),
        ({"extra": ["exclude"]}, "slurm.extra: 'exclude' is no option"),
        ({"extra": ["--nodes=3"]}, "--nodes=3 is set by the script; write slurm.nodes= instead"),
        ({"extra": ["-p high"]}, "-p high is set by the script; write slurm.partition= instead"),
        ({"account": "a\nb"}, "slurm.account='a\\nb': one line each"),
        ({"setup": ["a\nrm -r b"]}, "one line each"),
        ({"log": "a\\b-%j"}, "a backslash switches SLURM's patterns off"),
    ],
)
def test_what_cannot_work_is_one_sentence(options, sentence):
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        check_slurm(SlurmConfig(**options))
    assert sentence in str(error.value)


@pytest.mark.parametrize("time", ["90", "10:00", "24:00:00", "2-00", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_times_in_all_forms_of_slurm(time):
    assert check_slurm(SlurmConfig(time=time)).time == time


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["slurm.nodse=2"], "unknown option slurm.nodse, did you mean nodes?"),
        (["slurm.launcher=mpirun"], "slurm.launcher=mpirun"),
        (["optim.rl=1"], "unknown option optim.rl"),
        (["train.chunk_tokens=0"], "train.chunk_tokens=0: must be above 0"),
        (["slurm.seeds=[1]", "seed=3"], "seed=3 and slurm.seeds=[1] both choose seeds"),
        (["name=a\nb"], "a line end cannot stand in a job's script"),
        (['output_dir="a\'b"'], "without line ends, backslashes and quotes"),
        (["-m", "optim.lr=1,2"], "multirun (-m) is for training"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        compose_submit([*RECIPE, *arguments])
    assert sentence in str(error.value)


def test_a_file_holds_what_one_cluster_wants(tmp_path):
    """Its values as they are written, 24:00:00 no number; the command line wins."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        'partition: gpu\ntime: 24:00:00\nexclusive: true\nmem: 0\nsetup:\n  - module load cuda\n  - export X="a, b"\n'
        "gres:\n"
    )
    found = slurm(f"slurm.cluster={path}", "slurm.partition=low")
    assert found == SlurmConfig(
        cluster=str(path), partition="low", time="24:00:00", exclusive=True, mem="0",
        setup=["module load cuda", 'export X="a, b"'],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("- a", "lines such as `partition: gpu` are expected"),
        ("partion: gpu", "unknown option partion, did you mean partition?"),
        ("setup: {a: b}", "setup is a single value, or a list of them"),
        ("nodes: x", "slurm.nodes=x"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        slurm(f"slurm.cluster={path}")
    assert sentence in str(error.value)
