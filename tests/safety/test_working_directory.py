"""The working directory may hold data of others: no command imports a module from it that no option names."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embedtrain.config.commands import COMMANDS
from tests.commands import ENVIRONMENT, TORCHRUN
from tests.conftest import ROOT
from tests.small import write_rows

SCRIPT = Path(sys.executable).with_name("embedtrain")
PYTHON = [sys.executable, "-m"]
LIBRARIES = (
    "accelerate", "antlr4", "bm25s", "datasets", "dill", "filelock", "fsspec", "huggingface_hub", "hydra",
    "hydra_plugins", "mteb", "multiprocess", "numpy", "omegaconf", "onnxruntime", "packaging", "pandas", "peft",
    "psutil", "pyarrow", "regex", "rich", "safetensors", "scipy", "sentence_transformers", "sklearn", "tensorboard",
    "tokenizers", "torch", "tqdm", "transformers", "wandb", "yaml",
)  # fmt: skip
# What Python itself imports before it runs the code of a package by `python -m` (3.11 to 3.14).
OF_PYTHON = {
    "collections", "contextlib", "functools", "importlib", "keyword", "operator", "reprlib", "types", "warnings",
    "threading", "enum", "re", "copyreg",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory with a module for every library and every module of Python, which all leave a mark."""
    folder = tmp_path_factory.mktemp("data-of-others")
    code = "import posix\nposix.close(posix.open(MARK, posix.O_CREAT | posix.O_WRONLY))\n"
    for name in (*LIBRARIES, *sys.stdlib_module_names):
        (folder / f"{name}.py").write_text(code.replace("MARK", repr(str(folder / f"{name}.mark"))))
    write_rows(folder / "rows.jsonl", 8)
    return folder


def imported(folder: Path, *command: object) -> set[str]:
    """The modules of the folder that a command has imported."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    names = {path.stem for path in folder.glob("*.mark")}
    for name in names:
        (folder / f"{name}.mark").unlink()
    assert done.returncode == 0 or names, done.stdout + done.stderr
    return names


@pytest.mark.skipif(not SCRIPT.is_file(), reason="the console script is not installed")
@pytest.mark.parametrize("commands", [["train"], pytest.param(list(COMMANDS), marks=pytest.mark.slow)])
def test_no_command_imports_from_the_working_directory(folder, commands):
    """All commands at once: whichever of them imports one leaves its mark."""
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda command: imported(folder, SCRIPT, command, "--help"), commands))
    assert results == [set()] * len(commands)
    works = [["inspect", "data=rows.jsonl", "cache_dir=cache"]]
    if len(commands) > 1:  # ranks, which import torch; in the quick case those of `python -m` below
        works.append(["doctor", "--nproc-per-node=2", "quick=true", "hub=false"])
    for work in works:
        assert imported(folder, SCRIPT, *work) == set()


def test_python_m_imports_no_library_from_the_working_directory(folder):
    """Python looks there until the package's first line has run, so a few of its own modules are not protected."""
    for name in OF_PYTHON:
        (folder / f"{name}.py").rename(folder / f"{name}.away")
    try:
        assert imported(folder, *PYTHON, "embedtrain", "inspect", "data=rows.jsonl", "cache_dir=cache") == set()
        assert imported(folder, *TORCHRUN, "2", "-m", "embedtrain", "doctor", "quick=true", "hub=false") == set()
    finally:
        for name in OF_PYTHON:
            (folder / f"{name}.away").rename(folder / f"{name}.py")
    assert imported(folder, sys.executable, "-P", "-m", "embedtrain", "--help") == set()


def test_a_program_that_imports_the_package_keeps_its_path(tmp_path):
    """`python -m project` of a user finds its own modules, also if its name or an argument is like ours."""
    for name in ("project", "embedtrain_project"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import embedtrain\n")
        (tmp_path / name / "__main__.py").write_text("import sibling\n")
    (tmp_path / "sibling.py").write_text(f"open({str(tmp_path / 'found.mark')!r}, 'w')\n")
    for name in ("project", "embedtrain_project"):
        assert imported(tmp_path, *PYTHON, name, "embedtrain") == {"found"}


def test_an_option_names_a_module_of_the_working_directory(tmp_path):
    """It is found last, so that it hides nothing, and so are the modules that it imports."""
    write_rows(tmp_path / "rows.jsonl", 8)
    (tmp_path / "mine.py").write_text(f"import helper\nopen({str(tmp_path / 'mine.mark')!r}, 'w')\n")
    (tmp_path / "helper.py").write_text(f"open({str(tmp_path / 'helper.mark')!r}, 'w')\n")
    (tmp_path / "numpy.py").write_text(f"open({str(tmp_path / 'numpy.mark')!r}, 'w')\n")
    code = "from embedtrain.config.code import load_code; load_code('mine:helper', 'loss.path')"
    assert imported(tmp_path, sys.executable, "-P", "-c", code) == {"mine", "helper"}


def test_processes_of_libraries_do_not_look_there_either(tmp_path):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import planted'], check=False)"
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'planted.mark')!r}, 'w')\n")
    (tmp_path / "inside.py").write_text(
        "from embedtrain.cli.entry import run_command\n"
        "def main(_):\n    import os\n    assert os.environ['PYTHONSAFEPATH'] == '1'\n"
        f"    {code}\n"
        "run_command(lambda arguments: arguments, main)\n"
    )
    assert os.environ.get("PYTHONSAFEPATH") is None
    assert imported(tmp_path, sys.executable, "-P", "inside.py") == set()
