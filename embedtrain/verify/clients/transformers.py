"""Vectors of transformers: AutoModel, then the pooling and the normalisation that the directory names."""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoTokenizer

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
directory = Path(given["model"])
tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
model = AutoModel.from_pretrained(directory, local_files_only=True, torch_dtype=torch.float32).eval()
pooling = json.loads((directory / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
rows = []
with torch.no_grad():
    for text in given["texts"]:
        batch = tokenizer(text, truncation=True, return_tensors="pt")
        hidden = model(**batch).last_hidden_state[0]
        mean = pooling["pooling_mode_mean_tokens"]
        vector = hidden.mean(dim=0) if mean else hidden[0 if pooling["pooling_mode_cls_token"] else -1]
        if any(module["type"].endswith("Normalize") for module in modules):
            vector = torch.nn.functional.normalize(vector, dim=0)
        rows.append(vector.tolist())
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": transformers.__version__, "vectors": {"text": rows}}, result)
