"""The output of Haystack's components for sentence-transformers, with the prompts that the directory stores."""

import json
import sys
from importlib.metadata import version
from typing import Any

import haystack
from haystack import Document
from haystack.utils import ComponentDevice


def encode() -> dict[str, Any]:
    """Vectors of queries and of documents."""
    options = {"model": given["model"], "device": device, "progress_bar": False, "model_kwargs": {"dtype": "float32"}}
    queries = embedders.SentenceTransformersTextEmbedder(encode_kwargs={"prompt_name": "query"}, **options)
    documents = embedders.SentenceTransformersDocumentEmbedder(encode_kwargs={"prompt_name": "document"}, **options)
    rows = documents.run([Document(content=text) for text in given["texts"]])["documents"]
    return {
        "query": [queries.run(text)["embedding"] for text in given["texts"]],
        "document": [row.embedding for row in rows],
    }


def weigh() -> dict[str, Any]:
    """Weights of the words of texts."""
    prompts = {"text": ""} | given["prompts"]
    weights = {}
    for way, prompt in prompts.items():
        options = {"model": given["model"], "device": device, "prefix": prompt}
        embedder = embedders.SentenceTransformersSparseTextEmbedder(model_kwargs={"dtype": "float32"}, **options)
        rows = [embedder.run(text)["sparse_embedding"] for text in given["texts"]]
        weights[way] = [{"indices": row.indices, "values": row.values} for row in rows]
    return weights


def score(scale: bool) -> list[float]:
    """Scores of pairs, as logits or with the sigmoid function."""
    ranker = rankers.SentenceTransformersSimilarityRanker(
        model=given["model"], device=device, scale_score=scale, model_kwargs={"dtype": "float32"}
    )
    return [
        ranker.run(query=query, documents=[Document(content=document)])["documents"][0].score
        for query, document in given["formatted_pairs"]
    ]


with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
output, device = {"version": haystack.__version__}, ComponentDevice.from_str("cpu")
try:
    from haystack_integrations.components.embedders import sentence_transformers as embedders
    from haystack_integrations.components.rankers import sentence_transformers as rankers
except ImportError:
    output["unsupported"] = "sentence-transformers-haystack is not installed"
else:
    output["version"] += f" (sentence-transformers-haystack {version('sentence-transformers-haystack')})"
    if given["kind"] == "cross_encoder":
        output["scores"] = {"logits": score(False), "activated": score(True)}
    elif given["kind"] == "sparse":
        output["word_weights"] = weigh()
    else:
        output["vectors"] = encode()
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(output, result)
