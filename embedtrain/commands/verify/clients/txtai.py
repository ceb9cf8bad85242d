"""Vectors of txtai, which reads pooling and prompts of the directory, or opens it with sentence-transformers."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from txtai import Embeddings

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
modules = json.loads((Path(given["model"]) / "modules.json").read_text(encoding="utf-8"))
pooling = json.loads((Path(given["model"]) / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
# By default it leaves out dense heads, and pools the tokens of prompts.
options: dict[str, Any] = {"vectors": {"dtype": "float32"}}
if any(module["type"].endswith("Dense") for module in modules) or not pooling["include_prompt"]:
    options = {"method": "sentence-transformers", "vectors": {"model_kwargs": {"dtype": "float32"}}}
embeddings = Embeddings(path=given["model"], gpu=False, **options)
roles = {"query": "query", "document": "data"}
vectors = {role: embeddings.batchtransform(given["texts"], category).tolist() for role, category in roles.items()}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": version("txtai"), "vectors": vectors}, result)
