"""Vectors of LangChain's HuggingFaceEmbeddings, with the prompts that the directory stores."""

import json
import sys
from importlib.metadata import version

from langchain_huggingface import HuggingFaceEmbeddings

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
texts = given["texts"]
embeddings = HuggingFaceEmbeddings(
    model_name=given["model"],
    model_kwargs={"device": "cpu", "model_kwargs": {"dtype": "float32"}},
    encode_kwargs={"prompt_name": "document"},
    query_encode_kwargs={"prompt_name": "query"},
)
output = {
    "version": version("langchain-huggingface"),
    "vectors": {
        "query": [embeddings.embed_query(text) for text in texts],
        "document": embeddings.embed_documents(texts),
    },
    "changes": "replaces line breaks with spaces",
    "changed": {role: [row for row, text in enumerate(texts) if "\n" in text] for role in ("query", "document")},
}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(output, result)
