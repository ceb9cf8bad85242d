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
    """The output of `python -m embedtrain COMMAND ...`, of as many ranks as under torchrun if `ranks` is given.

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
    exit_code, output, errors = run_module(arguments, ENVIRONMENT, cwd or Path.cwd(), stdin, ranks)
    assert exit_code == code, output + errors
    return output, errors
