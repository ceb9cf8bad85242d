"""The outputs of libraries whose program is short: a function for each, of the name that the request has.

An import within a function is that of the library; the others are not installed there.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

Given = dict[str, Any]
Output = dict[str, Any]
FLOAT32 = {"dtype": "float32"}


def fastembed(given: Given) -> Output:
    """The graph's `sentence_embedding`, or the scores of a cross-encoder."""
    from fastembed import TextEmbedding, __version__
    from fastembed.common.model_description import ModelSource, PoolingType
    from fastembed.rerank.cross_encoder import TextCrossEncoder

    source = ModelSource(hf="local/model")
    if given["kind"] == "cross_encoder":
        TextCrossEncoder.add_custom_model(model="local/model", sources=source, model_file="onnx/model.onnx")
        model = TextCrossEncoder("local/model", specific_model_path=given["model"], cuda=False)
        scores = model.rerank_pairs([tuple(pair) for pair in given["formatted_pairs"]], batch_size=4)
        return {"version": __version__, "scores": {"logits": [float(score) for score in scores]}}
    TextEmbedding.add_custom_model(
        model="local/model",
        pooling=PoolingType.DISABLED,
        normalization=False,
        sources=source,
        dim=given["dimension"],
        output_name="sentence_embedding",
    )
    model = TextEmbedding("local/model", specific_model_path=given["model"], cuda=False)
    rows = [vector.tolist() for vector in model.embed(given["texts"], batch_size=4)]
    return {"version": __version__, "vectors": {"text": rows}}


def langchain_huggingface(given: Given) -> Output:
    """Vectors of HuggingFaceEmbeddings, with the prompts that the directory stores."""
    from langchain_huggingface import HuggingFaceEmbeddings

    texts = given["texts"]
    embeddings = HuggingFaceEmbeddings(
        model_name=given["model"],
        model_kwargs={"device": "cpu", "model_kwargs": FLOAT32},
        encode_kwargs={"prompt_name": "document"},
        query_encode_kwargs={"prompt_name": "query"},
    )
    return {
        "version": version("langchain-huggingface"),
        "vectors": {
            "query": [embeddings.embed_query(text) for text in texts],
            "document": embeddings.embed_documents(texts),
        },
        "changes": "replaces line breaks with spaces",
        "changed": {role: [row for row, text in enumerate(texts) if "\n" in text] for role in ("query", "document")},
    }


def llama_index(given: Given) -> Output:
    """Vectors of HuggingFaceEmbedding."""
    output: Output = {"version": version("llama-index-core")}
    try:
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding
    except ImportError:
        return output | {"unsupported": "llama-index-embeddings-huggingface is not installed"}
    model = HuggingFaceEmbedding(
        model_name=given["model"],
        device="cpu",
        # They replace the prompts of the directory, which is why they have to be repeated.
        query_instruction=given["prompts"]["query"],
        text_instruction=given["prompts"]["document"],
        normalize=False,  # the modules of the directory do, before they keep the first dimensions
        model_kwargs=FLOAT32,
    )
    queries = [model.get_query_embedding(text) for text in given["texts"]]
    return output | {"vectors": {"query": queries, "document": model.get_text_embedding_batch(given["texts"])}}


def haystack(given: Given) -> Output:
    """The output of the components for sentence-transformers, with the prompts that the directory stores."""
    import haystack
    from haystack import Document
    from haystack.utils import ComponentDevice

    output: Output = {"version": haystack.__version__}
    try:
        from haystack_integrations.components.embedders import sentence_transformers as embedders
        from haystack_integrations.components.rankers import sentence_transformers as rankers
    except ImportError:
        return output | {"unsupported": "sentence-transformers-haystack is not installed"}
    output["version"] += f" (sentence-transformers-haystack {version('sentence-transformers-haystack')})"
    options = {"model": given["model"], "device": ComponentDevice.from_str("cpu"), "model_kwargs": FLOAT32}

    def score(*, scale: bool) -> list[float]:
        """Scores of pairs, as logits or with the sigmoid function."""
        ranker = rankers.SentenceTransformersSimilarityRanker(scale_score=scale, **options)
        return [
            ranker.run(query=query, documents=[Document(content=document)])["documents"][0].score
            for query, document in given["formatted_pairs"]
        ]

    if given["kind"] == "cross_encoder":
        return output | {"scores": {"logits": score(scale=False), "activated": score(scale=True)}}
    texts = given["texts"]
    if given["kind"] == "sparse":
        weights = {}
        for way, prompt in ({"text": ""} | given["prompts"]).items():
            embedder = embedders.SentenceTransformersSparseTextEmbedder(prefix=prompt, **options)
            rows = [embedder.run(text)["sparse_embedding"] for text in texts]
            weights[way] = [{"indices": row.indices, "values": row.values} for row in rows]
        return output | {"word_weights": weights}
    options["progress_bar"] = False
    queries = embedders.SentenceTransformersTextEmbedder(encode_kwargs={"prompt_name": "query"}, **options)
    documents = embedders.SentenceTransformersDocumentEmbedder(encode_kwargs={"prompt_name": "document"}, **options)
    rows = documents.run([Document(content=text) for text in texts])["documents"]
    vectors = {"query": [queries.run(text)["embedding"] for text in texts], "document": [row.embedding for row in rows]}
    return output | {"vectors": vectors}


def chromadb(given: Given) -> Output:
    """Vectors of documents as a collection stores them, and of queries that it finds them with."""
    import chromadb
    import numpy as np
    from chromadb.config import Settings
    from chromadb.utils import embedding_functions as functions

    output: Output = {"version": chromadb.__version__}
    options: dict[str, Any] = {"device": "cpu", "model_kwargs": FLOAT32}
    texts = given["texts"]
    if given["kind"] == "sparse":
        model = functions.HuggingFaceSparseEmbeddingFunction(given["model"], query_config={"task": "query"}, **options)
        weights = {"query": model.embed_query(texts), "document": model(texts)}
        return output | {
            "word_weights": {
                role: [{"indices": list(row.indices), "values": list(map(float, row.values))} for row in rows]
                for role, rows in weights.items()
            }
        }

    def embedding(role: str) -> Any:
        function = functions.SentenceTransformerEmbeddingFunction
        # Functions of the same model share one that is loaded with the prompt of the first, and a collection has one.
        function.models.clear()
        return function(given["model"], default_prompt_name=role, **options)

    def unit(vectors: Any) -> Any:
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    client = chromadb.EphemeralClient(Settings(anonymized_telemetry=False))
    space = {"hnsw": {"space": "cosine"}}
    collection = client.create_collection("texts", embedding_function=embedding("document"), configuration=space)
    names = [str(index) for index in range(len(texts))]
    collection.add(ids=names, documents=texts)
    documents = np.array(collection.get(ids=names, include=["embeddings"])["embeddings"])
    queries = np.array(embedding("query")(texts))
    found = collection.query(query_embeddings=queries, n_results=len(texts), include=["distances"])
    exact = 1 - unit(queries) @ unit(documents).T
    for row, ids, distances in zip(exact, found["ids"], found["distances"], strict=True):
        if abs(row[[int(name) for name in ids]] - distances).max() > 1e-4:
            raise SystemExit("query() returns distances that are not those of the vectors")
    return output | {"vectors": {"query": queries.tolist(), "document": documents.tolist()}}


def txtai(given: Given) -> Output:
    """Vectors with pooling and prompts of the directory, or of sentence-transformers."""
    from txtai import Embeddings

    directory = Path(given["model"])
    modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
    pooling = json.loads((directory / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    # By default it leaves out dense heads, and pools the tokens of prompts.
    options: dict[str, Any] = {"vectors": FLOAT32}
    if any(module["type"].endswith("Dense") for module in modules) or not pooling["include_prompt"]:
        options = {"method": "sentence-transformers", "vectors": {"model_kwargs": FLOAT32}}
    embeddings = Embeddings(path=given["model"], gpu=False, **options)
    roles = {"query": "query", "document": "data"}
    vectors = {role: embeddings.batchtransform(given["texts"], category).tolist() for role, category in roles.items()}
    return {"version": version("txtai"), "vectors": vectors}


def pylate(given: Given) -> Output:
    """Vectors of tokens of PyLate, which inserts prefixes itself, and prepends the other prompts if it is asked to."""
    import pylate
    import torch
    from pylate import models

    model = models.ColBERT(given["model"], device="cpu", model_kwargs={"torch_dtype": torch.float32})
    texts, vectors = given["texts"], {}
    for role in ("query", "document"):
        rows = model.encode(texts, prompt_name=role, is_query=role == "query", show_progress_bar=False, batch_size=4)
        vectors[role] = [row.tolist() for row in rows]
    prompts = {role: model.prompts[role] for role in vectors}
    return {
        "version": pylate.__version__,
        "token_vectors": vectors,
        "changes": "strips white space from the ends of texts",
        "changed": {
            role: [row for row, text in enumerate(texts) if (prompt + text).strip() != prompt + text]
            for role, prompt in prompts.items()
        },
    }


def vllm(given: Given) -> Output:
    """The output of vLLM in this process, in float32."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

    import vllm

    if given["kind"] in ("sparse", "late_interaction"):
        # It serves some of them with --hf-overrides.
        unsupported = "verify runs it for vectors of texts and scores only"
        return {"version": vllm.__version__, "unsupported": unsupported}
    # At the model's maximum length; without it, a longer text is an error.
    options = {"tokenization_kwargs": {"truncate_prompt_tokens": -1}, "use_tqdm": False}
    engine = vllm.LLM(model=given["model"], runner="pooling", dtype="float32", enforce_eager=True, max_num_seqs=4)
    if given["kind"] != "cross_encoder":
        answers = engine.embed(given["texts"], **options)
        rows = [list(answer.outputs.embedding) for answer in answers]
        return {"version": vllm.__version__, "vectors": {"text": rows}}
    scores: dict[str, list[float]] = {}
    for way, is_activated in (("logits", False), ("activated", True)):
        params = vllm.PoolingParams(use_activation=is_activated)
        answers = [
            engine.score(query, document, pooling_params=params, **options)[0]
            for query, document in given["formatted_pairs"]
        ]
        scores[way] = [answer.outputs.score for answer in answers]
    return {"version": vllm.__version__, "scores": scores}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    functions = (fastembed, langchain_huggingface, llama_index, haystack, chromadb, txtai, pylate, vllm)
    answer = {function.__name__: function for function in functions}[request["engine"]](request)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)
