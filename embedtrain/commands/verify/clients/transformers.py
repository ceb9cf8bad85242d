"""The output of transformers: the class of the kind, then what the directory says of pooling and normalisation."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)


def read(name: str) -> Any:
    """The content of a JSON file of the directory."""
    return json.loads((directory / name).read_text(encoding="utf-8"))


def vector(hidden: torch.Tensor) -> list[float]:
    """The vector of a text, from those of its tokens [L, H]."""
    pooling = read("1_Pooling/config.json")
    (mode,) = (name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True)
    weights = torch.arange(1, len(hidden) + 1)[:, None]
    pooled = {
        "cls_token": lambda: hidden[0],
        "mean_tokens": lambda: hidden.mean(dim=0),
        "lasttoken": lambda: hidden[-1],
        "max_tokens": lambda: hidden.amax(dim=0),
        "weightedmean_tokens": lambda: (weights * hidden).sum(dim=0) / weights.sum(),
    }[mode.removeprefix("pooling_mode_")]()
    is_normalized = any(module["type"].endswith("Normalize") for module in read("modules.json"))
    vector: list[float] = (torch.nn.functional.normalize(pooled, dim=0) if is_normalized else pooled).tolist()
    return vector


def words(logits: torch.Tensor) -> dict[str, list[Any]]:
    """The weights of words of a text, from the logits of its tokens [L, V]."""
    (path,) = directory.glob("*SpladePooling/config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    weights = logits.relu().log1p()
    weights = weights.log1p() if settings["activation_function"] == "log1p_relu" else weights
    row = weights.amax(dim=0) if settings["pooling_strategy"] == "max" else weights.sum(dim=0)
    (indices,) = row.nonzero(as_tuple=True)
    return {"indices": indices.tolist(), "values": row[indices].tolist()}


with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
kind, directory = given["kind"], Path(given["model"])
architectures = read("config.json").get("architectures") or [""]
is_causal = architectures[0].endswith("ForCausalLM")
language_model = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
name = {"cross_encoder": AutoModelForSequenceClassification, "sparse": language_model}.get(kind, AutoModel)
tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
model = name.from_pretrained(directory, local_files_only=True, torch_dtype=torch.float32).eval()
rows: list[Any] = []
with torch.no_grad():
    for texts in given["formatted_pairs"] if kind == "cross_encoder" else [[text] for text in given["texts"]]:
        output = model(**tokenizer(*texts, truncation=True, return_tensors="pt"))
        if kind == "cross_encoder":
            rows.append(output.logits.item())
        else:
            rows.append(words(output.logits[0]) if kind == "sparse" else vector(output.last_hidden_state[0]))
part, way = {"cross_encoder": ("scores", "logits"), "sparse": ("word_weights", "text")}.get(kind, ("vectors", "text"))
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": transformers.__version__, part: {way: rows}}, result)
