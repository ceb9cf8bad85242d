"""Prints which upper bounds of pyproject.toml are behind the package index of pip: `python docs/hooks/bounds.py`.

A comment beside a requirement says why its bound stays. Status 1 if one without a comment is behind, so that a weekly
job fails until the bound is lifted, or explained.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_UPPER = ("<", "<=", "==", "~=")


class Bound(NamedTuple):
    """A requirement with an upper bound, its newest release, and the comment beside it."""

    requirement: Requirement
    newest: str
    reason: str

    @property
    def is_behind(self) -> bool:
        """Whether the newest release is not allowed."""
        return not self.requirement.specifier.contains(self.newest, prereleases=True)


def newest_release(name: str) -> str:
    """The newest release that pip would install here; a CalledProcessError if the index cannot be reached."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", name]
    output = subprocess.run(command, check=True, text=True, capture_output=True).stdout  # noqa: S603 - no input
    return max(re.findall(r"[^\s,]+", output.partition("versions:")[2].partition("\n")[0]), key=Version)


def bounds(project: str, newest: Callable[[str], str] = newest_release) -> Iterator[Bound]:
    """The upper bounds in the text of a pyproject.toml, each once, by name."""
    parsed = tomllib.loads(project)
    listed = [parsed["project"]["dependencies"], *parsed["project"]["optional-dependencies"].values()]
    # By text: the same requirement is part of several extras, and of `dev`.
    lines = sorted({line for part in listed for line in part}, key=str.lower)
    reasons = dict(re.findall(r'^\s*"(.+?)",?\s*# *(.+)$', project, re.MULTILINE))
    for line in lines:
        requirement = Requirement(line)
        if any(part.operator in _UPPER for part in requirement.specifier):
            yield Bound(requirement, newest(requirement.name), reasons.get(line, ""))


def main() -> int:
    """Print one line for each upper bound."""
    unexplained = 0
    for bound in bounds(PROJECT.read_text(encoding="utf-8")):
        verdict = ("behind: " + (bound.reason or "lift it, or say why not")) if bound.is_behind else "current"
        print(f"{bound.requirement!s:<36} newest {bound.newest:<10} {verdict}")
        unexplained += bound.is_behind and not bound.reason
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
