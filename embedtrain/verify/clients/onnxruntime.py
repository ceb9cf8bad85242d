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
directory = Path(given["model"])
settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
pad = settings["pad_token"]
pad = pad if isinstance(pad, str) else pad["content"]
tokenizer.enable_padding(
    pad_token=pad, pad_id=tokenizer.token_to_id(pad), direction=settings.get("padding_side", "right")
)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
session = onnxruntime.InferenceSession(
    str(directory / "onnx" / "model.onnx"), options, providers=["CPUExecutionProvider"]
)


def run(name: str, texts: list[Any]) -> Any:
    """An output of the graph for texts, or for pairs of them, as one padded batch."""
    tokens = tokenizer.encode_batch(texts)
    columns = {
        "input_ids": [each.ids for each in tokens],
        "attention_mask": [each.attention_mask for each in tokens],
        "token_type_ids": [each.type_ids for each in tokens],
    }
    feed = {each.name: np.array(columns[each.name], dtype=np.int64) for each in session.get_inputs()}
    return session.run([name], feed)[0]


if given["kind"] == "cross_encoder":
    logits = run("logits", [tuple(pair) for pair in given["formatted_pairs"]])
    output = {"scores": {"logits": logits[:, 0].tolist()}}
else:
    output = {"vectors": {"text": run("sentence_embedding", given["texts"]).tolist()}}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": onnxruntime.__version__} | output, result)
