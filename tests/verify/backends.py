"""`python -I backends.py DIRECTORY CLASS`: compares the backends of sentence-transformers; prints JSON.

It runs in an environment of its own, without this package.
"""

import json
import sys
from pathlib import Path

import numpy as np
import sentence_transformers
import torch

FILES = {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}
TEXTS = ["alpha beta", "gamma delta epsilon zeta eta", "mu"]
directory, name = Path(sys.argv[1]), sys.argv[2]


def outputs(backend):
    """What a backend computes of texts, or of pairs of them, as one array."""
    options = {}
    if backend == "onnx":
        options = {"file_name": FILES[backend], "provider": "CPUExecutionProvider"}
    elif backend == "openvino":
        options = {"file_name": FILES[backend], "ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
    model = getattr(sentence_transformers, name)(
        str(directory), device="cpu", backend=backend, local_files_only=True, model_kwargs=options
    )
    if name == "CrossEncoder":
        return model.predict([(text, TEXTS[0]) for text in TEXTS], activation_fn=torch.nn.Identity())
    if name == "MultiVectorEncoder":
        return np.concatenate([torch.as_tensor(rows).numpy() for rows in model.encode_query(TEXTS)])
    return model.encode(TEXTS, **({"convert_to_sparse_tensor": False} if name == "SparseEncoder" else {}))


expected = np.asarray(outputs("torch"))
backends = [backend for backend, file in FILES.items() if (directory / file).is_file()]
print(json.dumps({backend: float(np.abs(np.asarray(outputs(backend)) - expected).max()) for backend in backends}))
