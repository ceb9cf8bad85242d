"""No line of the package unpickles, evaluates, or trusts foreign code unasked: read off the source of every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
# Functions that execute their arguments, or unpickle them.
NEVER = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all", "pandas.read_pickle", "torch.hub.load",
    "importlib.import_module", "runpy.run_path", "runpy.run_module", "torch.package.PackageImporter", "torch.jit.load",
    "torch.distributed.checkpoint.load",
}  # fmt: skip
NEVER_METHODS = {"instantiate", "get_class", "get_method", "get_object", "import_from_string"}
# Collectives that unpickle what other ranks send.
NEVER_METHODS |= {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
TRUSTS = ("trust_remote_code", "allow_all_kernels")
# What whoever starts a run names (see tests/losses/test_custom.py for who may not), and commands from a fixed table.
ALLOWED = {
    "config/code.py": ["importlib.import_module(module)"],
    "config/kinds.py": ["importlib.import_module(module)"],
    "config/commands.py": ["importlib.import_module(module)"],
}


def files() -> list[Path]:
    return sorted((ROOT / "embedtrain").rglob("*.py"))


def names_of(tree: ast.AST) -> dict[str, str]:
    """What a file calls things, and what they are: `np` is numpy, `load` may be torch.load."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


SAFE_LOADERS = (
    "yaml.BaseLoader",  # makes text of everything
    "limited_loader(base or omegaconf._utils.get_yaml_loader())",  # a subclass of yaml.SafeLoader, or the caller's
)


def unsafe(source: str) -> Iterator[str]:
    """Every expression of a source that breaks the rule, as it is written."""
    tree = ast.parse(source)
    names = names_of(tree)
    for name in names.values():
        if name.split(".")[0] in PICKLES:
            yield f"import {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            called = f"{names.get(first, first)}{dot}{rest}"
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called == "yaml.load" and keywords.get("Loader") in SAFE_LOADERS:
                continue
            if called in NEVER or called.rpartition(".")[2] in NEVER_METHODS:
                yield ast.unparse(node)
            if called in ("torch.load", "torch.serialization.load") and keywords.get("weights_only") != "True":
                yield ast.unparse(node)
            if keywords.get("weights_only", "True") != "True" or keywords.get("allow_pickle", "False") != "False":
                yield ast.unparse(node)
            if called.startswith("numpy.load") and keywords.get("allow_pickle") != "False":
                yield ast.unparse(node)
            if keywords.get("shell", "False") != "False":
                yield ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg in TRUSTS and ast.unparse(node.value) == "True":
            yield f"{node.arg}=True"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT / "embedtrain")))
def test_no_line_executes_code_from_files(path):
    allowed = ALLOWED.get(str(path.relative_to(ROOT / "embedtrain")), [])
    assert list(unsafe(path.read_text(encoding="utf-8"))) == allowed


@pytest.mark.parametrize(
    "line",
    [
        "import torch; torch.load(path)", "import torch as t; t.load(path, weights_only=False)",
        "from torch import load; load(path)", "import pickle", "from cloudpickle import loads", "import joblib",
        "import numpy as np; np.load(path)", "import numpy as np; np.load(path, allow_pickle=True)",
        "from numpy import load as read; read(path)", "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "from yaml import unsafe_load; unsafe_load(text)", "import hydra; hydra.utils.instantiate(config)",
        "from hydra.utils import instantiate; instantiate(config)", "eval(text)", "exec(text)",
        "import os; os.system(text)", "import subprocess; subprocess.run(text, shell=True)",
        "from transformers import AutoModel; AutoModel.from_pretrained(path, trust_remote_code=True)",
        "model.from_pretrained(path, weights_only=False)", "import importlib; importlib.import_module(name)",
        "from importlib import import_module; import_module(name)",
        "import torch.distributed as dist; dist.all_gather_object(values, value)",
    ],
)  # fmt: skip
def test_the_rule_detects_violations(line):
    assert list(unsafe(line))


def test_configurations_name_no_code():
    """No recipe and no configuration says `_target_` or has a tag; Hydra's own are guarded when they are composed."""
    for path in [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")]:
        text = path.read_text(encoding="utf-8")
        assert "_target_" not in text, path
        assert "!!" not in text, path
