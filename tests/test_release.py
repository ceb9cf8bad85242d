"""A release: its version and changelog, and packages that install and train in a fresh environment."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from embedtrain import __version__
from tests.conftest import ROOT

REPOSITORY, SITE = "https://git.example/team/embedtrain", "https://docs.example/embedtrain"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def do(*command: object, cwd: Path, **variables: str) -> str:
    """The output of a program that succeeds; without the paths of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("packages")
    options = ("--no-isolation", "--outdir", folder, ROOT)
    do(sys.executable, "-m", "build", *options, cwd=folder, DOCS_REPO_URL=REPOSITORY, DOCS_SITE_URL=f"{SITE}/")
    return folder


@pytest.fixture(scope="module")
def wheel(packages):
    (path,) = packages.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def source(packages):
    """The folder that a source distribution unpacks to."""
    (path,) = packages.glob("*.tar.gz")
    with tarfile.open(path) as file:
        file.extractall(packages, filter="data")
    return packages / path.name.removesuffix(".tar.gz")


def name(requirement: str) -> str:
    """`PyYAML>=6` as `pyyaml`."""
    return canonicalize_name(Requirement(requirement).name)


def files_of(folder: Path) -> set[str]:
    """The files below a folder of the checkout that are no output of Python, relative to the checkout."""
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def test_the_changelog_describes_the_version():
    """The newest release is the version of the package; a section has what fits on a few screens."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    releases = [title.split()[0] for title in titles if title != "Unreleased"]
    assert releases[0] == __version__
    assert releases == sorted(releases, key=Version, reverse=True)
    assert "Unreleased" not in titles[1:], "it is above all releases"
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        assert title == "Unreleased" or section.count("\n") <= 150, title


def test_packages_are_valid(packages):
    """As `make dist` checks them, with the extra `release`."""
    pytest.importorskip("twine")
    pytest.importorskip("check_wheel_contents")
    do(sys.executable, "-m", "twine", "check", "--strict", *packages.glob("embedtrain-*.*"), cwd=packages)
    do(sys.executable, "-m", "check_wheel_contents", *packages.glob("*.whl"), cwd=ROOT)


def test_the_wheel_has_all_files_of_the_package(wheel):
    """Templates, prompts, tables, recipes, their data and configs as well."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = files_of(ROOT / "embedtrain")
    expected |= {f"embedtrain/{path}" for top in ("recipes", "configs") for path in files_of(ROOT / top)}
    assert names == expected


def test_the_metadata(wheel):
    """One version, one license, known addresses, and a README whose links lead to the tag of the version."""
    with zipfile.ZipFile(wheel) as file:
        (path,) = (path for path in file.namelist() if path.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(path))
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    addresses = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
    assert addresses == {
        "Documentation": SITE,
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/v{__version__}/CHANGELOG.md",
    }
    readme = metadata.get_payload(decode=True).decode()
    targets = re.findall(r"\]\(([^)]+)\)", readme) + re.findall(r'src(?:set)?="([^"]+)"', readme)
    assert len(targets) > 50
    assert all(target.startswith("https://") for target in targets), targets
    for target in targets:
        if target.startswith(REPOSITORY):
            path = re.sub(rf"^{re.escape(REPOSITORY)}/(?:blob|raw)/v[^/]+/", "", target).partition("#")[0]
            assert (ROOT / path).exists(), target
    assert "HOST/OWNER" not in readme


def test_a_readme_without_an_address_has_no_dead_links(packages, tmp_path):
    variables = {"DOCS_REPO_URL": "", "DOCS_SITE_URL": ""}
    do(sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", tmp_path, ROOT, cwd=tmp_path, **variables)
    with zipfile.ZipFile(*tmp_path.glob("*.whl")) as file:
        (path,) = (path for path in file.namelist() if path.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(path))
    assert "Project-URL" not in metadata
    assert not re.search(r"\]\((?!https://)|<picture>", metadata.get_payload(decode=True).decode())


def test_the_source_has_what_its_tests_and_pages_need(source):
    """Everything that is in the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a repository")
    tracked = set(do("git", "ls-files", cwd=ROOT).splitlines())
    packed = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {path for path in tracked - packed if (ROOT / path).exists()} == set()


# Of `uv`, where pip finds packages here.
UV = ["uv", "--no-config", "--quiet"]


def uv(*arguments: object, cwd: Path) -> str:
    """Run uv of the extra `release` with the indexes of pip; without a package index, the test is skipped."""
    pytest.importorskip("uv")
    where = [
        *(f"--find-links={place}" for place in os.environ.get("PIP_FIND_LINKS", "").split()),
        *(f"--extra-index-url={place}" for place in os.environ.get("PIP_EXTRA_INDEX_URL", "").split()),
        "--index-strategy=unsafe-best-match",
    ]
    try:
        return do(Path(sys.executable).parent / UV[0], *UV[1:], *arguments, *where, cwd=cwd)
    except AssertionError as error:
        if re.search(r"[Ff]ailed to fetch|dns error|Could not connect|error sending request", str(error)):
            pytest.skip("needs a package index")
        raise


@pytest.mark.slow
def test_every_extra_installs_with_the_tested_versions(tmp_path):
    """pip would search for hours where an extra asks for another version than constraints.txt."""
    compiled = uv(
        "pip", "compile", "--all-extras", "--python", sys.executable, "-c", ROOT / "constraints.txt",
        ROOT / "pyproject.toml", cwd=tmp_path,
    )  # fmt: skip
    found = {name(line) for line in compiled.splitlines() if line and not line.lstrip().startswith("#")}
    assert {name(line) for extra in PROJECT["optional-dependencies"].values() for line in extra} <= {
        *found,
        "embedtrain",
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_a_fresh_environment_trains(kind, packages, tmp_path):
    """With the dependencies of the package alone, outside of the checkout: train, evaluate, search."""
    (package,) = packages.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    uv("venv", "--python", sys.executable, tmp_path / "env", cwd=tmp_path)
    environment = tmp_path / "env" / "bin"
    uv("pip", "install", "--python", environment / "python", "-c", ROOT / "constraints.txt", package, cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    where = do(environment / "python", "-c", "import embedtrain; print(embedtrain.__file__)", cwd=work)
    assert where.startswith(str(tmp_path / "env"))
    assert f"embedtrain {__version__}" in do(environment / "embedtrain", "--version", cwd=work)
    do(
        environment / "embedtrain", "train", "--nproc-per-node", "2", "recipe=quickstart", "train.steps=2",
        "evaluation.sets=[]", cwd=work, OMP_NUM_THREADS="1",
    )  # fmt: skip
    code = "import sentence_transformers as s; print(s.SentenceTransformer('runs/quickstart/model').encode('a').shape)"
    assert "(192,)" in do(environment / "python", "-c", code, cwd=work)
    corpus = next((tmp_path / "env").glob("lib/*/site-packages/embedtrain/recipes/quickstart/dev-en"))
    options = ("model=runs/quickstart/model", f"corpus={corpus}", "query=edit photos", "top_k=2")
    assert do(environment / "embedtrain", "search", *options, cwd=work).count("\n") >= 2
    shutil.rmtree(tmp_path / "env")


@pytest.mark.slow
def test_tests_of_the_source_pass(source):
    """Tests that read pages, recipes and configuration find them in a source distribution."""
    paths = ["tests/docs/test_links.py", "tests/docs/test_workflow.py", "tests/test_versions.py", "tests/docker"]
    variables = {"PYTHONPATH": str(source)}
    do(sys.executable, "-m", "pytest", "-m", "not image", *paths, cwd=source, **variables)
