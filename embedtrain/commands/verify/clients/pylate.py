"""Vectors of tokens of PyLate, which inserts prefixes itself, and prepends the other prompts if it is asked to."""

import json
import sys

import pylate
import torch
from pylate import models

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
model = models.ColBERT(given["model"], device="cpu", model_kwargs={"torch_dtype": torch.float32})
texts, vectors = given["texts"], {}
for role in ("query", "document"):
    rows = model.encode(texts, prompt_name=role, is_query=role == "query", show_progress_bar=False, batch_size=4)
    vectors[role] = [row.tolist() for row in rows]
prompts = {role: model.prompts[role] for role in vectors}
output = {
    "version": pylate.__version__,
    "token_vectors": vectors,
    "changes": "strips white space from the ends of texts",
    "changed": {
        role: [row for row, text in enumerate(texts) if (prompt + text).strip() != prompt + text]
        for role, prompt in prompts.items()
    },
}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(output, result)
