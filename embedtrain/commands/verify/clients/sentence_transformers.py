"""The output of sentence-transformers, which applies prompts itself."""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import sentence_transformers
import torch
import transformers

CLASSES = {"cross_encoder": "CrossEncoder", "late_interaction": "MultiVectorEncoder", "sparse": "SparseEncoder"}


def encoded(model: Any, texts: list[str], *, sparse: bool = False) -> Iterator[tuple[str, Any]]:
    """Vectors of texts by way of encoding."""
    options = {"show_progress_bar": False} | ({"convert_to_sparse_tensor": False} if sparse else {})
    yield "text", model.encode(texts, prompt="", **options)
    for role in ("query", "document"):
        if hasattr(model, f"encode_{role}"):
            yield role, getattr(model, f"encode_{role}")(texts, **options)
        elif role in model.prompts:  # before version 5
            yield role, model.encode(texts, prompt_name=role, **options)


def words(row: torch.Tensor) -> dict[str, Any]:
    """The weights of words that are not 0."""
    (indices,) = row.nonzero(as_tuple=True)
    return {"indices": indices.tolist(), "values": row[indices].tolist()}


with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
kind, version = given["kind"], f"{sentence_transformers.__version__} (transformers {transformers.__version__})"
name = CLASSES.get(kind, "SentenceTransformer")
output: dict[str, Any] = {"version": version}
if not hasattr(sentence_transformers, name):
    output["unsupported"] = f"this version has no {name}"
else:
    model = getattr(sentence_transformers, name)(
        given["model"], device="cpu", local_files_only=True, model_kwargs={"torch_dtype": "float32"}
    )
    if kind == "cross_encoder":
        # A chat template has the prompts as well.
        pairs = given["pairs" if "message" in getattr(model, "modalities", ()) else "formatted_pairs"]
        # In this order: before version 6, the function of a call stays that of later ones.
        functions = {"activated": None, "logits": torch.nn.Identity()}
        output["scores"] = {
            way: model.predict(pairs, activation_fn=function, show_progress_bar=False).tolist()
            for way, function in functions.items()
        }
    elif kind == "late_interaction":
        output["token_vectors"] = {
            role: [rows.tolist() for rows in getattr(model, f"encode_{role}")(given["texts"], show_progress_bar=False)]
            for role in ("query", "document")
        }
    elif kind == "sparse":
        texts = encoded(model, given["texts"], sparse=True)
        output["word_weights"] = {way: [words(row) for row in rows] for way, rows in texts}
    else:
        output["vectors"] = {way: rows.tolist() for way, rows in encoded(model, given["texts"])}
        if hasattr(model, "similarity_fn_name"):  # from version 3 on
            output["similarity"] = str(model.similarity_fn_name)
    if find_spec("sentence_transformers.base") is None and kind != "cross_encoder":  # before version 5.4
        output["changes"] = "strips white space from the ends of texts"
        output["changed"] = {
            way: [row for row, text in enumerate(given["texts"]) if (prompt + text).strip() != prompt + text]
            for way, prompt in ({"text": ""} | given["prompts"]).items()
        }
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(output, result)
