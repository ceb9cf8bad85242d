"""The notebook of the documentation: its cells run in order in one process."""

import ast
import json

import pytest
import torch.distributed as dist

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def cells() -> list[str]:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


def test_cells_compile_and_import_what_exists():
    for source in cells():
        ast.parse(source)
    exec(compile(cells()[0], str(NOTEBOOK), "exec"), {})


@pytest.mark.slow
def test_cells_run_in_order(monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict[str, object] = {}
    for source in cells():
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert 0 < names["metrics"]["dev-en"]["ndcg@10"] <= 1
    assert not dist.is_initialized()
