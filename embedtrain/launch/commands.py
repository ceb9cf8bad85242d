"""Calling SLURM's own commands."""

import os
import shutil
import subprocess
from collections.abc import Mapping

# The controller of a busy cluster may be slow to answer.
_PATIENCE = 120.0


def call(*words: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str] | None:
    """Exit code, standard output and standard error of a command; None: it is not there, or did not answer."""
    program = shutil.which(words[0])
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603  (no shell: words stay words)
            [program, *words[1:]],
            env=dict(os.environ if environment is None else environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout, done.stderr
