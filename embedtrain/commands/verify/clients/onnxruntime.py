"""The outputs of the graph in onnxruntime, and tokenizers for the tokens."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
kind, directory = given["kind"], Path(given["model"])
settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
tokenizer.no_padding()
pad = settings["pad_token"]
pad = tokenizer.token_to_id(pad if isinstance(pad, str) else pad["content"])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
session = onnxruntime.InferenceSession(
    str(directory / "onnx" / "model.onnx"), options, providers=["CPUExecutionProvider"]
)


def run(names: list[str], columns: list[Any]) -> list[Any]:
    """Outputs of the graph for the columns of each text: ids, attention mask, and token types if there are any."""
    width = max(len(text[0]) for text in columns)
    is_left = settings.get("padding_side") == "left"
    feed = {}
    for name, fill, values in zip(
        ("input_ids", "attention_mask", "token_type_ids"), (pad, 0, 0), zip(*columns, strict=True), strict=True
    ):
        padded = [[fill] * (width - len(row)) + row if is_left else row + [fill] * (width - len(row)) for row in values]
        feed[name] = np.array(padded, dtype=np.int64)
    outputs = session.run(names, {node.name: feed[node.name] for node in session.get_inputs()})
    return [*outputs, feed["input_ids"], feed["attention_mask"] > 0]


def tokens(texts: list[Any]) -> list[Any]:
    """The columns of texts, or of pairs."""
    return [(text.ids, text.attention_mask, text.type_ids) for text in tokenizer.encode_batch(texts)]


def expanded(role: str) -> tuple[list[Any], list[list[bool]]]:
    """The columns of texts with prompt and expansion tokens, and which of their tokens have a vector."""
    vectors = given["token_vectors"]
    options, expansion = vectors["roles"][role], vectors["expansion_id"]
    tokenizer.enable_truncation(options["max_length"])
    rows: list[Any] = []
    kept = []
    for ids, _, types in tokens([given["prompts"][role] + text for text in given["texts"]]):
        more = max(0, options["expanded_length"] - len(ids))
        rows.append((ids + [expansion] * more, [1] * len(ids) + [int(vectors["attend"])] * more, types + [0] * more))
        kept.append([index == 0 or token not in options["skipped"] for index, token in enumerate(rows[-1][0])])
    return rows, kept


def words(row: Any) -> dict[str, Any]:
    """The weights of words that are not 0."""
    return {"indices": np.flatnonzero(row).tolist(), "values": row[np.flatnonzero(row)].tolist()}


def lexical(ids: Any, weights: Any) -> dict[str, Any]:
    """The largest weight of each token of a text; special tokens have none."""
    names = ("cls_token", "bos_token", "eos_token", "sep_token", "pad_token", "unk_token")
    entries = [settings[name] for name in names if settings.get(name)]
    special = {tokenizer.token_to_id(entry["content"] if isinstance(entry, dict) else entry) for entry in entries}
    largest: dict[int, float] = {}
    for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if token not in special:
            largest[token] = max(weight, largest.get(token, 0.0))
    return {"indices": list(largest), "values": list(largest.values())}


output: dict[str, Any]
if kind == "cross_encoder":
    logits, *_ = run(["logits"], tokens([tuple(pair) for pair in given["formatted_pairs"]]))
    output = {"scores": {"logits": logits[:, 0].tolist()}}
elif kind == "late_interaction":
    output = {"token_vectors": {}}
    for role in ("query", "document"):
        rows, kept = expanded(role)
        vectors, *_ = run(["token_embeddings"], rows)
        is_left = settings.get("padding_side") == "left"
        texts = [row[-len(k) :] if is_left else row[: len(k)] for row, k in zip(vectors, kept, strict=True)]
        output["token_vectors"][role] = [row[k].tolist() for row, k in zip(texts, kept, strict=True)]
elif kind == "sparse":
    weights, *_ = run(["sentence_embedding"], tokens(given["texts"]))
    output = {"word_weights": {"text": [words(row) for row in weights]}}
elif kind == "m3":
    dense, weights, vectors, ids, real = run(["dense_vecs", "sparse_vecs", "colbert_vecs"], tokens(given["texts"]))
    output = {
        "vectors": {"text": dense.tolist()},
        "word_weights": {"text": [lexical(i[r], w[r, 0]) for i, w, r in zip(ids, weights, real, strict=True)]},
        "token_vectors": {"text": [v[r[1:]].tolist() for v, r in zip(vectors, real, strict=True)]},
    }
else:
    vectors, *_ = run(["sentence_embedding"], tokens(given["texts"]))
    output = {"vectors": {"text": vectors.tolist()}}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": onnxruntime.__version__} | output, result)
