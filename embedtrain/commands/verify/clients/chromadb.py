"""The output of Chroma: vectors of documents as a collection stores them, and of queries that it finds them with."""

import json
import sys
from typing import Any

import chromadb
import numpy as np
from chromadb.config import Settings
from chromadb.utils.embedding_functions import HuggingFaceSparseEmbeddingFunction, SentenceTransformerEmbeddingFunction

OPTIONS: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": "float32"}}


def encode() -> dict[str, Any]:
    """Vectors of the documents of a collection, and of queries, whose results are compared with exact ones."""
    texts = given["texts"]
    function = SentenceTransformerEmbeddingFunction(given["model"], default_prompt_name="document", **OPTIONS)
    client = chromadb.EphemeralClient(Settings(anonymized_telemetry=False))
    collection = client.create_collection(
        "texts", embedding_function=function, configuration={"hnsw": {"space": "cosine"}}
    )
    names = [str(index) for index in range(len(texts))]
    collection.add(ids=names, documents=texts)
    documents = np.array(collection.get(ids=names, include=["embeddings"])["embeddings"])
    # Functions of the same model share one that is loaded with the prompt of the first, and a collection has one.
    SentenceTransformerEmbeddingFunction.models.clear()
    queries = np.array(
        SentenceTransformerEmbeddingFunction(given["model"], default_prompt_name="query", **OPTIONS)(texts)
    )
    found = collection.query(query_embeddings=queries, n_results=len(texts), include=["distances"])
    exact = 1 - unit(queries) @ unit(documents).T
    for row, ids, distances in zip(exact, found["ids"], found["distances"], strict=True):
        if abs(row[[int(name) for name in ids]] - distances).max() > 1e-4:
            raise SystemExit("query() returns distances that are not those of the vectors")
    return {"query": queries.tolist(), "document": documents.tolist()}


def unit(vectors: Any) -> Any:
    """The vectors with the length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
if given["kind"] == "sparse":
    model = HuggingFaceSparseEmbeddingFunction(given["model"], query_config={"task": "query"}, **OPTIONS)
    rows = {"query": model.embed_query(given["texts"]), "document": model(given["texts"])}
    output = {
        "word_weights": {
            role: [{"indices": list(row.indices), "values": list(map(float, row.values))} for row in rows[role]]
            for role in rows
        }
    }
else:
    output = {"vectors": encode()}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": chromadb.__version__} | output, result)
