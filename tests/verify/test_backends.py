"""The graphs of every kind of model with `backend="onnx"` and `backend="openvino"` of sentence-transformers."""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.verify.test_kinds import exported

CLASSES = {
    "dense": "SentenceTransformer",
    "cross_encoder": "CrossEncoder",
    "late_interaction": "MultiVectorEncoder",
    "sparse": "SparseEncoder",
    "m3": "SentenceTransformer",
}


@pytest.mark.engines
@pytest.mark.parametrize("kind", CLASSES)
def test_backends_of_sentence_transformers(tmp_path, kind):
    python = ROOT / ".venv-backends" / "bin" / "python"
    if not os.access(python, os.X_OK):
        pytest.skip(f"{python} does not exist: make test-engines installs it")
    formats = ["onnx", *(["openvino"] if find_spec("openvino") is not None else [])]
    model = exported(kind, tmp_path, *formats)
    program = Path(__file__).with_name("backends.py")
    done = subprocess.run(
        [python, "-I", program, model, CLASSES[kind]],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    differences = json.loads(done.stdout.strip().splitlines()[-1])
    assert differences.keys() == set(formats)
    assert max(differences.values()) < 1e-5
