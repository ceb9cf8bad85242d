"""Vectors of onnxruntime: the graph's output `sentence_embedding`, and tokenizers for the tokens."""

import json
import sys
from pathlib import Path

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
session = onnxruntime.InferenceSession(str(directory / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
tokens = tokenizer.encode_batch(given["texts"])
columns = {
    "input_ids": [each.ids for each in tokens],
    "attention_mask": [each.attention_mask for each in tokens],
    "token_type_ids": [each.type_ids for each in tokens],
}
feed = {each.name: np.array(columns[each.name], dtype=np.int64) for each in session.get_inputs()}
(vectors,) = session.run(["sentence_embedding"], feed)
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": onnxruntime.__version__, "vectors": {"text": vectors.tolist()}}, result)
