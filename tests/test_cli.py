"""The entry of commands: threads per rank, in real processes in which OpenMP reads its environment; late imports."""

import json
import os
import signal
import subprocess
import sys

import pytest

from embedtrain.cli.entry import set_allocator, set_kernel_cache, set_threads
from embedtrain.utils.limits import num_usable_cores
from tests.conftest import ROOT

SCRIPT = """
from embedtrain.cli.entry import run_command

def main(options):
    import torch
    print("threads", torch.get_num_threads())

run_command(lambda arguments: None, main)
"""


NO_SPINNING = 0


def threads_of_command(**environment: str) -> tuple[int, int]:
    """The number of torch's threads in the process of a command, and the spin count that OpenMP reports."""
    replaced = ("OMP_", "LOCAL_WORLD_SIZE", "GOMP_", "MKL_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(replaced)}
    variables |= {"OMP_DISPLAY_ENV": "VERBOSE", **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True)
    spin_count = next(line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line)
    return int(done.stdout.split()[1]), int(spin_count.split("'")[1])


def test_ranks_share_the_cores_and_do_not_spin():
    assert threads_of_command(LOCAL_WORLD_SIZE=str(max(2, num_usable_cores()))) == (1, NO_SPINNING)


def test_settings_of_the_user_stay():
    threads = min(2, num_usable_cores())
    given = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "ACTIVE"}
    num_threads, spin_count = threads_of_command(LOCAL_WORLD_SIZE=str(max(2, num_usable_cores())), **given)
    assert num_threads == threads
    assert spin_count > 1e6


@pytest.mark.skipif(num_usable_cores() < 2, reason="one core has one thread")
def test_a_single_process_uses_all_cores():
    threads, spin_count = threads_of_command(LOCAL_WORLD_SIZE="1")
    assert threads > 1
    assert spin_count > NO_SPINNING
    assert threads_of_command() == (threads, spin_count)


@pytest.mark.parametrize(
    ("given", "threads", "policy"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, str(max(1, num_usable_cores() // 2)), "PASSIVE"),
        ({"LOCAL_WORLD_SIZE": "4096"}, "1", "PASSIVE"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "7"}, "7", "PASSIVE"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_WAIT_POLICY": "active"}, str(max(1, num_usable_cores() // 2)), "active"),
        ({"LOCAL_WORLD_SIZE": "1"}, None, None),
        ({"LOCAL_WORLD_SIZE": "two"}, None, None),
        ({}, None, None),
    ],
)
def test_only_unset_variables_are_set(given, threads, policy):
    environment = dict(given)
    set_threads(environment)
    assert (environment.get("OMP_NUM_THREADS"), environment.get("OMP_WAIT_POLICY")) == (threads, policy)
    assert {name: environment[name] for name in given} == given


@pytest.mark.parametrize(
    ("set_default", "given", "added"),
    [
        (set_allocator, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (set_allocator, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        (set_allocator, {"PYTORCH_CUDA_ALLOC_CONF": ""}, {}),
        (set_kernel_cache, {}, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}),
        (set_kernel_cache, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"}, {}),
        (set_kernel_cache, {"DNNL_PRIMITIVE_CACHE_CAPACITY": "0"}, {}),
    ],
)
def test_memory_of_chunks_of_many_sizes_is_limited_unless_the_user_has_configured_it(set_default, given, added):
    environment = dict(given)
    set_default(environment)
    assert environment == given | added


@pytest.mark.parametrize("command", ["train", "evaluate", "mine", "export", "search", "plan", "inspect"])
def test_a_command_imports_torch_only_after_setting_threads(command):
    script = f"import sys, embedtrain.__main__, embedtrain.commands.{command}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def run_main(body: str, *, shell: str = "", stdout: int | None = subprocess.PIPE, **environment: str):
    """A command whose `main` has this body, with redirections of a shell; it writes the file `done` at its end."""
    script = (
        "import os, sys, warnings; from embedtrain.errors import DataError\n"
        "from embedtrain.cli.entry import run_command\n"
        f"def main(options):\n    {body}\n    open('done', 'w').close()\n"
        "run_command(lambda arguments: None, main, has_ranks=False)"
    )
    variables = {**os.environ, **environment}
    return subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {shell}', sys.executable, script],
        env=variables, stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&- <&-", "| head -n 1; exit ${PIPESTATUS[0]}"])
def test_a_command_continues_without_its_terminal(tmp_path, monkeypatch, shell):
    monkeypatch.chdir(tmp_path)
    body = "assert open('x', 'w').fileno() > 2; [print('line', i, flush=True) for i in range(500)]; sys.stdin.read()"
    done = run_main(body, shell=shell)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "done").is_file()
    assert (tmp_path / "x").stat().st_size == 0, "output went into a file of the command"


def test_lost_output_is_an_error_of_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_main("print('result')", shell="> /dev/full")
    assert done.returncode == 1
    assert done.stderr == b"error: standard output cannot be written: No space left on device\n"
    assert run_main("print('result')", shell="> /dev/full 2>&1").returncode == 1


def test_text_cannot_control_the_terminal_and_has_any_encoding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = "t = '\\x1b[2J\\x9b\\u202e\\udcff\\xe9\\u4e2d'; print('\\x1b[31m' + t); warnings.warn(t)"
    body += "; raise DataError(t + '\\nline')"
    utf8 = run_main(body, PYTHONUTF8="1")
    assert utf8.returncode == 1
    assert utf8.stdout.decode() == "\\x1b[2J\\x9b\\u202e\\udcffé中\n"
    assert utf8.stderr.decode().count("\\x1b[2J\\x9b\\u202e\\udcffé中") == 2
    assert utf8.stderr.decode().endswith("error: \\x1b[2J\\x9b\\u202e\\udcffé中\\nline\n")
    ascii_only = run_main(body, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert ascii_only.stdout == b"\\x1b[2J\\x9b\\u202e\\udcff\\xe9\\u4e2d\n"
    assert ascii_only.stderr.count(b"\\xe9\\u4e2d") == 2


MISSING_PATHS = [
    ("train", ["name=x", "train.epochs=1", "model.path=./gone", "data.train=[rows.jsonl]"], "model.path=./gone"),
    ("train", ["name=x", "train.epochs=1", "model.path=here", "data.train=[a/b/rows.jsonl]"], "a/b/rows.jsonl"),
    (
        "train",
        ["name=x", "train.epochs=1", "model.path=here", "data.train=[here]", "evaluation.sets=[/gone/beir]"],
        "/gone/beir",
    ),
    ("evaluate", ["model=here", "sets=[here,{path: ~/gone/dev}]"], "~/gone/dev"),
    ("mine", ["model=here", "data=[here]", "corpus=[gone.jsonl]", "output_dir=o"], "gone.jsonl"),
    ("mine", ["model=here", "data=[here]", "teacher=/gone", "output_dir=o"], "teacher=/gone"),
    ("search", ["model=here", "corpus=beir"], "beir"),
    ("export", ["run=runs/gone"], "runs/gone/recipe.yaml"),
]


def test_missing_paths_are_rejected_before_torch_is_imported(tmp_path):
    """In one process without torch; importing it takes longer than everything that these commands do."""
    script = """
import json, os, sys
from embedtrain.config.commands import COMMANDS
os.mkdir("here")
for command, arguments, path in json.loads(sys.argv[1]):
    try:
        COMMANDS[command].require_paths(COMMANDS[command].compose(arguments))
        raise AssertionError(f"{path} was accepted")
    except Exception as error:
        assert path in str(error) and type(error).__module__ == "embedtrain.errors", repr(error)
assert not {"torch", "datasets", "transformers"} & sys.modules.keys()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, json.dumps(MISSING_PATHS)], cwd=tmp_path, env=environment, check=True)


def test_a_crash_in_native_code_says_where():
    script = (
        "import faulthandler\nfrom embedtrain.cli.entry import run_command\n"
        "def main(options):\n    faulthandler._sigsegv()\n"
        "run_command(lambda arguments: None, main, has_ranks=False)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr
    assert "line 4 in main" in ended.stderr


def test_warnings_of_the_hub_are_printed_once_for_all_ranks():
    """Ranks compose their options in processes of their own, before libraries are quiet, and each asks the Hub."""
    script = """
from embedtrain.cli.entry import run_command

def compose(arguments):
    from huggingface_hub.utils import logging
    logging.get_logger("huggingface_hub.utils._http").warning("requests without a token")

run_command(compose, lambda options: None, has_ranks=False)
"""
    printed = []
    for rank in ("0", "1", "2"):
        environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank}
        environment.pop("HF_HUB_VERBOSITY", None)
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        printed += [line for line in done.stderr.splitlines() if "without a token" in line]
    assert len(printed) == 1
