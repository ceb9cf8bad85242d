"""constraints-oldest.txt, with which `make test-oldest` runs, has the lower bound of every dependency."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def test_the_oldest_versions_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], *optional["onnx"], *optional["mteb"], *optional["tensorboard"]]
    bounds = {}
    for requirement in map(Requirement, requirements):
        (bounds[requirement.name],) = (Version(part.version) for part in requirement.specifier if part.operator == ">=")
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {name: Version(version) for name, version in (line.split("==") for line in lines)}
    assert pinned == bounds
