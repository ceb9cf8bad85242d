"""Whole runs in a broken environment: they continue with a warning, or end with an error that says what to set."""

import fcntl
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from embedtrain.tracking.metrics import read_metrics
from tests.small import save_small, small_model, write_beir, write_rows

pytestmark = pytest.mark.slow

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
KEY = "0123456789abcdef" * 2 + "01234567"
NO_WAIT = {"WANDB_INIT_TIMEOUT": "5", "WANDB_FINISH_TIMEOUT": "5"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    write_rows(folder / "train.jsonl", 36)
    write_beir(folder / "dev", 20)
    save_small(small_model("xlm-roberta"), folder / "model")
    return folder


@pytest.fixture(params=["full", "read-only"])
def broken_disk(tmp_path, request):
    """A folder on its own disk: full, or read-only (for root as well)."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount(folder, "64k")
    try:
        if request.param == "full":
            fill(folder)
        else:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def mount(folder, size):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("no right to mount a disk")


def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 1024):
                pass
        except OSError:
            return


def command(workshop, out, *more):
    return [
        sys.executable, "-m", "embedtrain", "name=t", f"model.path={workshop / 'model'}", "model.pooling=mean",
        f"data.train=[{workshop / 'train.jsonl'}]", "train.global_batch_size=10", "train.log_every=1", "train.steps=3",
        "parallel.precision=fp32", "export.check=false", f"output_dir={out}", *more,
    ]  # fmt: skip


def environment(home, **more):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**clean, "HOME": str(home), "OMP_NUM_THREADS": "1", **more}


def trained(workshop, out, *more, home, **variables):
    """Standard output of a run through a pipe, without standard input."""
    done = subprocess.run(
        command(workshop, out, *more), env=environment(home, **variables), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert (out / "model" / "model.safetensors").is_file()
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row] == [1, 2, 3]
    return done.stdout


def warnings(output, logger="wandb"):
    return [line for line in output.splitlines() if line.startswith(f"warning: {logger} ")]


FAKE = """
import time
class Settings:
    def __init__(self, **options): pass
class _Run:
    id, summary = "fake", {{}}
    def define_metric(self, *args, **options): pass
    def log(self, row):
        {log}
    def finish(self, exit_code):
        {finish}
def init(**options):
    {init}
    return _Run()
"""


@pytest.mark.parametrize(
    "broken",
    [
        {"top": "raise ImportError('a wrong protobuf')"},
        {"init": "raise SystemExit(3)"},
        {"log": "raise OSError('gone')"},
    ],
)
def test_wandb_that_raises(workshop, tmp_path, broken):
    calls = {name: broken.get(name, "pass") for name in ("init", "log", "finish")}
    (tmp_path / "wandb.py").write_text(broken.get("top", "") + FAKE.format(**calls))
    output = trained(
        workshop, tmp_path / "run", "tracking.wandb=true", home=tmp_path,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )  # fmt: skip
    (warning,) = warnings(output)
    assert "training continues without it" in warning


def test_wandb_without_a_key_and_without_a_terminal(workshop, tmp_path):
    (warning,) = warnings(trained(workshop, tmp_path / "run", "tracking.wandb=true", home=tmp_path))
    assert "API key" in warning


def test_wandb_whose_server_cannot_be_reached(workshop, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    began = time.monotonic()
    output = trained(
        workshop, tmp_path / "run", "tracking.wandb=true", home=tmp_path, WANDB_BASE_URL=address, WANDB_API_KEY=KEY,
        **NO_WAIT,
    )  # fmt: skip
    assert len(warnings(output)) == 1
    assert time.monotonic() - began < 300


def test_wandb_whose_server_never_answers(workshop, tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        output = trained(
            workshop, tmp_path / "run", "tracking.wandb=true", home=tmp_path, WANDB_BASE_URL=address,
            WANDB_API_KEY=KEY, **NO_WAIT,
        )  # fmt: skip
    assert len(warnings(output)) == 1


def test_a_broken_home_directory(workshop, tmp_path, broken_disk):
    """Files go where the recipe says; the cache moves from the home directory to the run directory."""
    output = trained(
        workshop, tmp_path / "run", "tracking.wandb=true", "tracking.wandb_init={mode: offline}",
        "tracking.tensorboard=true",
        home=broken_disk, EMBEDTRAIN_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    assert len(warnings(output)) <= 1
    assert not warnings(output, "TensorBoard")
    output = trained(workshop, tmp_path / "other", home=broken_disk, EMBEDTRAIN_CACHE="")
    (warning,) = [line for line in output.splitlines() if "cannot be written" in line]
    assert warning.startswith(f"{broken_disk}/.cache/embedtrain cannot be written (")
    assert str(tmp_path / "other" / "cache") in warning
    assert "data.cache_dir" in warning


def test_a_cache_directory_set_explicitly_is_not_replaced(workshop, tmp_path, broken_disk):
    done = subprocess.run(
        command(workshop, tmp_path / "run", f"data.cache_dir={broken_disk}"), env=environment(tmp_path),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip().startswith(f"error: {broken_disk}")
    assert "data.cache_dir or $EMBEDTRAIN_CACHE" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


DISK = """
import sys, torch
from pathlib import Path
from embedtrain.config.recipe import Recipe
from embedtrain.config.recipe import TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.tracking.tracker import Tracker
from tests.tracking.test_failures import fill
run_dir = Path(sys.argv[1])
tracking = TrackingConfig(wandb=True, wandb_init={"mode": "offline"}, tensorboard=True)
with Tracker.open(Recipe(name="t", tracking=tracking), World(0, 1, 0, 1, torch.device("cpu")), run_dir) as tracker:
    tracker.step({"step": 1, "loss": 1.0})
    fill(run_dir)
    for step in range(2, 3000):
        tracker.step({"step": step, "loss": 1.0})
print("continued")
"""


def test_a_disk_that_fills_up(tmp_path):
    """metrics.jsonl, TensorBoard and wandb, all on one small disk: each is reported once."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount(folder, "2m")
    try:
        done = subprocess.run(
            [sys.executable, "-c", DISK, folder], env=environment(tmp_path, WANDB_FINISH_TIMEOUT="20"),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.rstrip().endswith("continued")
    assert done.stdout.count("metrics.jsonl cannot be written") == 1
    assert len(warnings(done.stdout, "TensorBoard")) == 1
    assert len(warnings(done.stdout)) <= 1


HANGS = """
import psutil, sys, torch
from pathlib import Path
from embedtrain.config.recipe import Recipe
from embedtrain.config.recipe import TrackingConfig
from embedtrain.distributed.world import World
from embedtrain.cli.entry import run_command
from embedtrain.tracking import clients
from embedtrain.tracking.tracker import Tracker

def main(_):
    clients.WANDB_MARGIN = 3.0
    tracking = TrackingConfig(wandb=True, wandb_init={"mode": "offline"})
    world = World(0, 1, 0, 1, torch.device("cpu"))
    with Tracker.open(Recipe(name="t", tracking=tracking), world, Path(sys.argv[1])) as tracker:
        tracker.step({"step": 1, "loss": 1.0})
        helpers = psutil.Process().children(recursive=True)
        for helper in helpers:
            helper.suspend()
        for step in range(2, 100):
            tracker.step({"step": step, "loss": 1.0})
    psutil.wait_procs(helpers, timeout=10)
    print("left", sum(helper.is_running() and helper.status() != "zombie" for helper in helpers), "of", len(helpers))

run_command(lambda arguments: None, main)
"""


def test_real_wandb_that_hangs(tmp_path):
    """Its processes are suspended, as on a node without memory: they are killed, and the run ends."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path / "run"], env=environment(tmp_path, WANDB_FINISH_TIMEOUT="3"),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (warning,) = warnings(done.stdout)
    assert "did not finish within 6 s" in warning
    assert re.search("left 0 of [1-9]", done.stdout)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 99


def on_a_terminal(workshop, out, tmp_path, term, columns=60):
    """What a run prints on a terminal of `columns` columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    arguments = command(workshop, out, f"evaluation.sets=[{workshop / 'dev'}]", "evaluation.every=2")
    process = subprocess.Popen(
        arguments, env={**environment(tmp_path), "TERM": term, "COLUMNS": str(columns)}, stdin=theirs, stdout=theirs,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, process.stderr.read()
    return shown.decode()


def test_a_terminal_of_60_columns(workshop, tmp_path):
    shown = on_a_terminal(workshop, tmp_path / "run", tmp_path, "xterm-256color")
    lines = [line for part in ESCAPES.sub("", shown).split("\n") for line in part.split("\r")]
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3"]
    for line in steps:
        assert len(line) < 60
        metrics = re.split(r" {2,}", line.rstrip())
        assert len(metrics) >= 4
        assert all(re.fullmatch(r"[a-z_/ ]+ [\d.,/e:%-]+( GiB)?", metric) for metric in metrics)
    assert any("ndcg@10" in line for line in lines)
    assert all(len(line) <= 60 for line in lines if "0." in line and "ndcg" not in line)


def test_a_dumb_terminal_gets_plain_lines(workshop, tmp_path):
    shown = on_a_terminal(workshop, tmp_path / "run", tmp_path, "dumb")
    assert "\x1b" not in shown
    assert sum(line.startswith("step ") for line in shown.splitlines()) == 3


def test_a_closed_pipe_does_not_stop_training(workshop, tmp_path):
    quoted = " ".join(f"'{part}'" for part in command(workshop, tmp_path / "run"))
    shell = f"set -o pipefail; {quoted} | head -1"
    done = subprocess.run(
        ["bash", "-c", shell], env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert Path(tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_user_without_a_home_directory(workshop, tmp_path):
    """The user ids of containers and of batch systems have no entry in passwd, and HOME may be unset."""
    (tmp_path / "empty").touch()
    script = 'for file in passwd nsswitch.conf; do mount --bind empty /etc/$file || exit; done; exec "$@"'
    hide = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*hide, "true"], cwd=tmp_path, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a file")
    kept = {name: os.environ[name] for name in ("PATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [*hide, *command(workshop, tmp_path / "run")], env={**kept, "TMPDIR": str(tmp_path)}, cwd=tmp_path,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no home directory" in done.stderr
    assert (tmp_path / "run" / "model" / "README.md").is_file()
    assert not (tmp_path / "~").exists()
