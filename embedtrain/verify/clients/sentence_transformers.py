"""Vectors of sentence-transformers, which applies prompts itself."""

import json
import sys

import sentence_transformers
import transformers
from sentence_transformers import SentenceTransformer

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
model = SentenceTransformer(
    given["model"], device="cpu", local_files_only=True, model_kwargs={"torch_dtype": "float32"}
)
texts = given["texts"]
vectors = {"text": model.encode(texts, prompt="", show_progress_bar=False)}
# Before version 5 a prompt is chosen by its name.
for role in ("query", "document"):
    if role in model.prompts:
        vectors[role] = model.encode(texts, prompt_name=role, show_progress_bar=False)
version = f"{sentence_transformers.__version__} (transformers {transformers.__version__})"
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": version, "vectors": {role: rows.tolist() for role, rows in vectors.items()}}, result)
