"""The command line of submit: its own options, options of the recipe, and options that are rejected."""

import pytest

from embedtrain.commands.submit import compose, require_paths
from embedtrain.commands.submit.options import Launcher, SlurmConfig, Submission, check_slurm, compose_submit
from embedtrain.commands.submit.sbatch import render_script
from embedtrain.config.options import check_values
from embedtrain.errors import ConfigError, EmbedtrainError

RECIPE = ["name=t", "model.path=model", "data.train=[train.jsonl]", "train.steps=3"]


def slurm(*arguments: str) -> SlurmConfig:
    return compose_submit([*RECIPE, *arguments]).job.slurm


def test_options_of_the_job_and_of_the_training_are_separated():
    submission = compose_submit(["slurm.nodes=4", *RECIPE, "optim.lr=1e-3", "slurm.time=24:00:00"])
    assert submission.arguments == [*RECIPE, "optim.lr=1e-3"]
    assert submission.recipe.optim.lr == 1e-3
    assert submission.job.slurm == SlurmConfig(nodes=4, time="24:00:00")
    assert submission.output_dirs == ["runs/t"]


@pytest.mark.slow
def test_a_pipeline_is_a_job():
    """Whose stages resume in its directory: `stopped.json` is there."""
    submission = compose_submit(["recipe=pipelines/quickstart", "slurm.nodes=2", "only=clean", "output_dir=runs/p"])
    assert submission.arguments == ["recipe=pipelines/quickstart", "only=clean", "output_dir=runs/p"]
    assert (submission.command.name, submission.name) == ("train", "quickstart_pipeline")
    assert str(submission.directory) == "runs/p"
    text = render_script(submission, command_line=["submit"], workdir="/w", log="log", python="python")
    assert "\nrun_dir=runs/p\n" in text
    assert '"${ranks_of[@]}" -m embedtrain train "${arguments[@]}" &' in text
    with pytest.raises(ConfigError, match=r"slurm\.seeds=\[1,2\] is for .*repeat"):
        compose_submit(["recipe=pipelines/quickstart", "slurm.seeds=[1,2]"])


def test_values_need_no_quotes():
    """Hydra interprets nothing in a text, and a list of one line needs no brackets."""
    config = slurm(
        "slurm.constraint=a100&nvlink", "slurm.time=1-12", "slurm.account='quoted'", "slurm.qos=null",
        "slurm.container_command=apptainer exec --bind a:b,c:d x.sif", "slurm.setup=export X=${HOME}/a, b",
        "slurm.extra=--exclude=n1,n2", "slurm.job_name=a\\", "slurm.mail_user=me@example.org", "slurm.mem=0",
        "slurm.srun_extra=[--mpi=none, --unbuffered]",
    )  # fmt: skip
    assert config == SlurmConfig(
        constraint="a100&nvlink", time="1-12", account="quoted", qos=None, job_name="a\\", mail_user="me@example.org",
        container_command="apptainer exec --bind a:b,c:d x.sif", setup=["export X=${HOME}/a, b"],
        extra=["--exclude=n1,n2"], mem="0", srun_extra=["--mpi=none", "--unbuffered"],
    )  # fmt: skip


_SRUN = Launcher.srun


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, r"slurm\.nodes=0"),
        ({"gpus_per_node": -1}, r"slurm\.gpus_per_node=-1"),
        ({"gpus_per_node": 0, "gres": "gpu:8"}, r"slurm\.gpus_per_node=0: gres"),
        ({"gpu_type": "a100", "gres": "gpu:8"}, r"slurm\.gres=gpu:8: gpu_type=a100"),
        ({"time": "tomorrow"}, r"slurm\.time=tomorrow"),
        ({"time": "5"}, r"slurm\.time=5: .*signal_seconds=300"),
        ({"signal_seconds": 0}, r"slurm\.signal_seconds=0"),
        ({"launcher": _SRUN, "max_restarts": 1}, r"slurm\.max_restarts=1: .*launcher=torchrun"),
        ({"launcher": _SRUN, "cpus_per_node": 12}, r"slurm\.cpus_per_node=12: .*multiple of the 8"),
        ({"max_requeues": -1}, r"slurm\.max_requeues=-1"),
        ({"seeds": [1, 1]}, r"slurm\.seeds=\[1,1\]"),
        ({"seeds_at_once": 2}, r"slurm\.seeds_at_once=2: .*slurm\.seeds"),
        ({"container_image": "a", "container_command": "b"}, r"slurm\.container_image=a: container_command"),
        ({"container_mounts": ["a:b"]}, r"slurm\.container_mounts=\[a:b\]: .*container_image"),
        ({"container_command": "a 'b"}, r"slurm\.container_command=a 'b"),
        ({"mail_type": "END"}, r"slurm\.mail_type=END: .*slurm\.mail_user"),
        ({"extra": ["exclude"]}, r"slurm\.extra=\[exclude\]"),
        ({"extra": ["--nodes=3"]}, r"slurm\.extra=.*slurm\.nodes="),
        ({"extra": ["-p high"]}, r"slurm\.extra=.*slurm\.partition="),
        ({"account": "a\nb"}, r"slurm\.account='a\\nb'"),
        ({"setup": ["a\nrm -r b"]}, r"slurm\.setup="),
        ({"log": "a\\b-%j"}, r"slurm\.log=a\\b-%j"),
    ],
)
def test_invalid_options_of_the_job(options, message):
    def checked(config: SlurmConfig) -> None:
        check_values(config, "slurm.")
        check_slurm(config)

    with pytest.raises(ConfigError, match=message):
        checked(SlurmConfig(**options))


@pytest.mark.parametrize("time", ["90", "10:00", "24:00:00", "2-00", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_all_time_formats_of_slurm(time):
    assert check_slurm(SlurmConfig(time=time)).time == time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm.nodse=2"], r"slurm\.nodse, did you mean nodes"),
        (["slurm.launcher=mpirun"], r"slurm\.launcher=mpirun"),
        (["optim.rl=1"], r"optim\.rl"),
        (["train.chunk_tokens=0"], r"train\.chunk_tokens=0"),
        (["slurm.seeds=[1]", "seed=3"], r"seed=3 and slurm\.seeds=\[1\]"),
        (["name=a\nb"], r"name=a\\nb"),
        (['output_dir="a\'b"'], r"output_dir=a'b"),
        (["-m", "optim.lr=1,2"], r"multirun \(-m\)"),
    ],
)
def test_invalid_command_lines(arguments, message):
    with pytest.raises(ConfigError, match=message):
        compose_submit([*RECIPE, *arguments])


def test_a_file_holds_the_options_of_a_cluster(tmp_path):
    """Its values are read as text (24:00:00 is not a number), and the command line overrides them."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        'partition: gpu\ntime: 24:00:00\nexclusive: true\nmem: 0\nsetup:\n  - module load cuda\n  - export X="a, b"\n'
        "gres:\n"
    )
    config = slurm(f"slurm.cluster={path}", "slurm.partition=low")
    assert config == SlurmConfig(
        cluster=str(path), partition="low", time="24:00:00", exclusive=True, mem="0",
        setup=["module load cuda", 'export X="a, b"'],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read"),
        ("a: [", r"cannot be read"),
        ("- a", r"partition: gpu"),
        ("partion: gpu", r"partion, did you mean partition"),
        ("setup: {a: b}", r"setup must be a single value"),
        ("nodes: x", r"slurm\.nodes=x"),
    ],
)
def test_an_invalid_file_of_a_cluster(tmp_path, content, message):
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        slurm(f"slurm.cluster={path}")


def composed(arguments: list[str]) -> Submission:
    options = compose(arguments)
    require_paths(options)
    return options[0]


def test_other_commands_are_checked_as_they_check_themselves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"query": "a", "pos": ["b"]}\n')
    submission = composed(["mine", "model=model", "data=[rows.jsonl]", "output_dir=mined", "slurm.nodes=2"])
    assert (submission.command.name, submission.name) == ("mine", "mine-mined")
    assert submission.arguments == ["model=model", "data=[rows.jsonl]", "output_dir=mined"]
    assert str(submission.directory) == "mined.job", "the script is not among the results"
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "recipe.yaml").write_text("name: x\n")
    submission = composed(["export", "run=runs/x"])
    assert (submission.output_dirs, submission.job.slurm.gpus_per_node) == (["runs/x/model"], 0)
    for arguments, message in [
        (["mine", "model=model", "data=[absent.jsonl]", "output_dir=mined"], r"absent\.jsonl"),
        (["evaluate", "model=model", "sest=[dev]"], "sest"),
        (["evaluate", "model=model", "slurm.seeds=[1]"], r"slurm\.seeds=\[1\]"),
        (["evalute", "model=model"], "evalute.*evaluate"),
    ]:
        with pytest.raises(EmbedtrainError, match=message):
            composed(arguments)
    rank_batch = ["mine", "model=/in/image", "data=[/in/x.jsonl]", "output_dir=m"]
    for option in ("slurm.container_image=x.sqsh", "slurm.extra=--dependency=afterok:12"):
        assert composed([*rank_batch, option]).command.name == "mine", "paths that do not exist here, or not yet"
