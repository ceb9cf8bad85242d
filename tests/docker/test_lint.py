"""What can be said of the images without building them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

FILES = ["docker/Dockerfile", "docker/Dockerfile.cpu"]


@pytest.mark.parametrize("file", FILES)
def test_hadolint(file):
    hadolint = Path(sys.executable).with_name("hadolint")
    assert hadolint.exists(), "pip install -e '.[dev]' brings it"
    done = subprocess.run([hadolint, ROOT / file], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_stages(file):
    """A pinned base, dependencies before the code, no root, and an environment that is checked."""
    text = (ROOT / file).read_text()
    assert re.search(r"^ARG BASE=\S+:\S*\d+\.\d+\S*$", text, re.MULTILINE), "a base without its version moves"
    assert text.index("pip install -c constraints.txt -r requirements.txt") < text.index("COPY . .")
    assert text.index("USER 1000:1000") < text.index("RUN python -m embedtrain doctor")


def test_they_differ_in_base_and_packages_alone():
    cuda, cpu = ((ROOT / file).read_text() for file in FILES)
    between = "# The dependencies, in a layer", "FROM base AS final"
    of_cuda = cuda[cuda.index(between[0]) : cuda.index(between[1])]
    same = of_cuda.replace("FROM base", "FROM ${BASE}").replace("whl/cu130", "whl/cpu")
    assert same in cpu


def test_the_wheel_is_made_of_what_the_context_has():
    """The wheel cannot have what .dockerignore leaves out: folders that pyproject.toml names, README, licence, hook."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "README.md", "pyproject.toml", "hatch_build.py"}
    assert needed <= kept
    assert set(project["project"]["license-files"]) <= kept


def test_compose():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    for service in services.values():
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
