"""Commands in processes of their own, with what they print."""

import os
import subprocess
import sys
from pathlib import Path

from tests.forked import run_module

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(arguments: list[str], **more: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, **more
    )


def call(*arguments: str, ranks: int = 0, cwd: Path | None = None, code: int = 0, stdin: str = "") -> str:
    """The output of `python -m embedtrain COMMAND ...`, under torchrun if `ranks` is given.

    The first argument is the command, or a module of the package instead of `embedtrain COMMAND`.
    """
    output, errors = call_separately(*arguments, ranks=ranks, cwd=cwd, code=code, stdin=stdin)
    return output + errors


def call_separately(
    *arguments: str, ranks: int = 0, cwd: Path | None = None, code: int = 0, stdin: str = ""
) -> tuple[str, str]:
    """Its standard output and standard error."""
    if not arguments[0].startswith("embedtrain"):
        arguments = ("embedtrain", *arguments)
    if not ranks:
        exit_code, output, errors = run_module(arguments, ENVIRONMENT, cwd or Path.cwd(), stdin)
    else:
        done = subprocess.run(
            [*TORCHRUN, str(ranks), "-m", *arguments],
            cwd=cwd, env=ENVIRONMENT, text=True, input=stdin, capture_output=True, timeout=240, check=False,
        )  # fmt: skip
        exit_code, output, errors = done.returncode, done.stdout, done.stderr
    assert exit_code == code, output + errors
    return output, errors
