"""Vectors of LlamaIndex's HuggingFaceEmbedding."""

import json
import sys
from importlib.metadata import version
from typing import Any

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
output: dict[str, Any] = {"version": version("llama-index-core")}
try:
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding
except ImportError:
    output["unsupported"] = "llama-index-embeddings-huggingface is not installed"
else:
    model = HuggingFaceEmbedding(
        model_name=given["model"],
        device="cpu",
        # They replace the prompts of the directory, which is why they have to be repeated.
        query_instruction=given["prompts"]["query"],
        text_instruction=given["prompts"]["document"],
        normalize=False,  # the modules of the directory do, before they keep the first dimensions
        model_kwargs={"dtype": "float32"},
    )
    output["vectors"] = {
        "query": [model.get_query_embedding(text) for text in given["texts"]],
        "document": model.get_text_embedding_batch(given["texts"]),
    }
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(output, result)
