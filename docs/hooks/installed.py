"""Status 0 if this environment has this checkout and the packages of its `dev` extra: `installed.py [CONSTRAINTS]`.

pip takes 20 seconds of CPU time to find that nothing is missing, so `make .venv` asks it only if something is.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def requirements(project: dict[str, dict[str, list[str]]], extra: str) -> Iterator[Requirement]:
    """What an extra asks for; one that asks for others of the same project has theirs."""
    for line in project["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            yield requirement
        for inner in requirement.extras if requirement.name == project["name"] else ():
            yield from requirements(project, inner)


def missing(project: dict[str, dict[str, list[str]]], constraints: str = "") -> Iterator[str]:
    """What `pip install -e '.[dev]' -c CONSTRAINTS` would change here, except dependencies of dependencies."""
    lines = [line.partition("#")[0].strip() for line in constraints.splitlines()]
    limits = {limit.name: limit.specifier for limit in map(Requirement, filter(None, lines))}
    for requirement in [*map(Requirement, project["dependencies"]), *requirements(project, "dev")]:
        specifier = requirement.specifier & limits.get(requirement.name, requirement.specifier)
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = None
        if found is None or not specifier.contains(found, prereleases=True):
            yield f"{requirement.name}{specifier}"
    scripts = {script.name: script.value for script in entry_points(group="console_scripts")}
    if not project["scripts"].items() <= scripts.items():
        yield "scripts"
    spec = find_spec(str(project["name"]))
    if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT):
        yield str(project["name"])


if __name__ == "__main__":
    text = "".join(Path(path).read_text(encoding="utf-8") for path in sys.argv[1:])
    sys.exit(any(missing(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"], text)))
