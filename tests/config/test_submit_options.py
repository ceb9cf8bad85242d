"""The command line of submit: its own options, the recipe's, and what cannot work; all before anything is submitted."""

import pytest

from embedtrain.config.slurm import SlurmConfig
from embedtrain.config.submit_options import compose_submit
from embedtrain.errors import ConfigError

RECIPE = ["name=t", "model.path=model", "data.train=[train.jsonl]", "train.steps=3"]


def slurm(*arguments: str) -> SlurmConfig:
    return compose_submit([*RECIPE, *arguments]).slurm


def test_options_of_the_job_and_of_the_training_are_told_apart():
    submission = compose_submit(["slurm.nodes=4", *RECIPE, "optim.lr=1e-3", "slurm.time=24:00:00"])
    assert submission.arguments == [*RECIPE, "optim.lr=1e-3"]
    assert submission.recipe.optim.lr == 1e-3
    assert submission.slurm == SlurmConfig(nodes=4, time="24:00:00")
    assert submission.output_dirs == ["runs/t"]


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("slurm.constraint=a100&nvlink", "constraint", "a100&nvlink"),
        ("slurm.time=1-12", "time", "1-12"),
        ("slurm.time=90", "time", "90"),
        ("slurm.account='quoted'", "account", "quoted"),
        ("slurm.account=null", "account", None),
        ("slurm.container_command=apptainer exec --bind a:b,c:d x.sif", "container_command",
         "apptainer exec --bind a:b,c:d x.sif"),
        ("slurm.setup=export X=${HOME}/a, b", "setup", ["export X=${HOME}/a, b"]),
        ("slurm.setup=[module load cuda, source env]", "setup", ["module load cuda", "source env"]),
        ("slurm.extra=--exclude=n1,n2", "extra", ["--exclude=n1,n2"]),
        (r"slurm.job_name=a\ ", "job_name", "a\\ "),
        ("slurm.job_name=a\\", "job_name", "a\\"),
    ],
)  # fmt: skip
def test_values_are_written_as_on_a_line_of_their_own(argument, name, value):
    assert getattr(slurm(argument), name) == value


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["slurm.nodse=2"], "unknown option slurm.nodse, did you mean nodes?"),
        (["optim.rl=1"], "unknown option optim.rl"),
        (["slurm.nodes=0"], "slurm.nodes=0: at least 1"),
        (["slurm.nodes=two"], "slurm.nodes=two"),
        (["slurm.gpus_per_node=-1"], "slurm.gpus_per_node=-1: a number of GPUs"),
        (["slurm.gpus_per_node=0", "slurm.gres=gpu:8"], "slurm.gpus_per_node=0 with slurm.gres=gpu:8"),
        (["slurm.gpu_type=a100", "slurm.gres=gpu:8"], "both name GPUs: keep one"),
        (["slurm.time=tomorrow"], "slurm.time=tomorrow: written as minutes"),
        (["slurm.time=5"], "slurm.time=5 with slurm.signal_seconds=300: the job would be asked to stop as soon"),
        (["slurm.signal_seconds=0"], "slurm.signal_seconds=0: seconds before the time limit"),
        (["slurm.launcher=mpirun"], "slurm.launcher=mpirun"),
        (["slurm.launcher=srun", "slurm.max_restarts=1"], "slurm.max_restarts=1 is torchrun's"),
        (["slurm.launcher=srun", "slurm.cpus_per_node=12"], "write a multiple of 8"),
        (["slurm.max_requeues=-1"], "must not be negative"),
        (["slurm.seeds=[1,1]"], "one stands twice"),
        (["slurm.seeds=[1]", "seed=3"], "seed=3 and slurm.seeds=[1] both choose seeds"),
        (["slurm.seeds=[-1]"], "seed=-1: a number from 0"),
        (["slurm.seeds_at_once=2"], "is for an array"),
        (["slurm.container_image=a", "slurm.container_command=b"], "are both set"),
        (["slurm.container_mounts=a:b"], "slurm.container_mounts is for slurm.container_image"),
        (["slurm.container_command=a 'b"], "a quote is not closed"),
        (["slurm.mail_type=END"], "slurm.mail_type=END: to whom?"),
        (["slurm.extra=exclude"], "slurm.extra: 'exclude' is no option"),
        (["slurm.extra=--nodes=3"], "--nodes=3 is set by the script; write slurm.nodes= instead"),
        (["slurm.extra=-p high"], "-p high is set by the script; write slurm.partition= instead"),
        (["slurm.account=a\nb"], "slurm.account='a\\nb': one line each"),
        (["slurm.setup=a\nrm -r b"], "one line each"),
        (["name=a\nb"], "a line end cannot stand in a job's script"),
        (["output_dir=\"a'b\""], "without line ends, backslashes and quotes"),
        (["slurm.log=a\\b-%j"], "a backslash switches SLURM's patterns off"),
        (["-m", "optim.lr=1,2"], "multirun (-m) is for training"),
        (["train.chunk_tokens=0"], "train.chunk_tokens=0: must be above 0"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as error:
        compose_submit([*RECIPE, *arguments])
    assert sentence in str(error.value)


def test_a_file_holds_what_one_cluster_wants(tmp_path):
    """Its values as they are written, 24:00:00 no number; the command line wins."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "partition: gpu\ntime: 24:00:00\nexclusive: true\nmem: 0\nsetup:\n  - module load cuda\n  - export X=\"a, b\"\n"
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
