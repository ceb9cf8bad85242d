"""The bounds of pyproject.toml: the oldest versions are tested, and `docs/hooks/bounds.py` finds newer releases."""

import importlib.metadata
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


def test_make_installs_what_is_missing():
    """`make .venv` asks pip only if a package is missing, too old, or limited by constraints.txt to another version."""
    hook = load_hook("installed")
    version = importlib.metadata.version("packaging")
    project = {
        "name": "embedtrain",
        "dependencies": ["packaging>=20", "numpy<1"],
        "optional-dependencies": {"dev": ["embedtrain[web]", "pytest>=1"], "web": ["no-such-package-here>=1"]},
        "scripts": {"embedtrain": "embedtrain.cli.console:main"},
    }
    assert sorted(hook.missing(project)) == ["no-such-package-here>=1", "numpy<1"]
    del project["optional-dependencies"]["web"][0], project["dependencies"][1]
    assert list(hook.missing(project, f"# tested\npackaging=={version}  # why\npytest>=1\n")) == []
    assert list(hook.missing(project, "packaging==20.0")) == ["packaging==20.0,>=20"]
    project["scripts"]["embedtrain-other"] = "embedtrain:other"
    assert list(hook.missing(project)) == ["scripts"]
