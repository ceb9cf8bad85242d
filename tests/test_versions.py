"""The bounds of pyproject.toml: the oldest versions are tested, and `docs/hooks/bounds.py` finds newer releases."""

import itertools
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import ROOT
from tests.docs.pages import load_hook


def test_the_oldest_versions_are_the_lower_bounds():
    """`make test-oldest` runs with constraints-oldest.txt, so it has the lower bound of every dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    extras = (optional[name] for name in ("onnx", "mteb", "tensorboard", "images", "pages", "synthesize"))
    requirements = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    bounds = {}
    for requirement in map(Requirement, requirements):
        (bounds[requirement.name],) = (Version(part.version) for part in requirement.specifier if part.operator == ">=")
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {name: Version(version) for name, version in (line.split("==") for line in lines)}
    assert pinned == bounds


def test_releases_above_upper_bounds():
    """A comment beside the requirement is the reason why its bound stays; what has no upper bound is never behind."""
    project = """
[project]
dependencies = [
    "numpy>=2",
    "torch>=2.11,<2.16",
    "peft>=0.21,<0.22",
    "transformers>=5.17,<5.24",  # PEFT does not allow it
]
[project.optional-dependencies]
dev = ["ruff>=0.17,<0.18", "build==1.2"]
docs = ["ruff>=0.17,<0.18"]
"""
    asked = {"torch": "2.15.3", "peft": "0.22.0", "transformers": "5.24.0", "ruff": "0.17.9", "build": "1.3"}
    found = {bound.requirement.name: bound for bound in load_hook("bounds").bounds(project, asked.pop)}
    assert not asked, "each is asked for once"
    assert [name for name, bound in found.items() if bound.is_behind] == ["build", "peft", "transformers"]
    assert {name: bound.reason for name, bound in found.items() if bound.reason} == {
        "transformers": "PEFT does not allow it"
    }
