# ruff: noqa: N999 - the name of the package
"""The output of FlagEmbedding, with the pooling, the normalisation and the lengths that the directory names."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from FlagEmbedding import BGEM3FlagModel, FlagAutoModel, FlagAutoReranker


def read(name: str) -> Any:
    """The content of a JSON file of the directory."""
    return json.loads((directory / name).read_text(encoding="utf-8"))


def pooling() -> tuple[str, str]:
    """FlagEmbedding's class and name of the pooling."""
    settings = read("1_Pooling/config.json")
    if settings["pooling_mode_lasttoken"]:
        return "decoder-only-base", "last_token"
    return "encoder-only-base", "cls" if settings["pooling_mode_cls_token"] else "mean"


def is_cut(query: str, document: str) -> bool:
    """Whether a text of a pair is cut."""
    query_length = len(model.tokenizer(query, add_special_tokens=False)["input_ids"])
    return bool(query_length > length * 3 // 4 or len(model.tokenizer(query, document)["input_ids"]) > length)


with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
directory, texts = Path(given["model"]), given.get("texts", [])
length = read("tokenizer_config.json")["model_max_length"]
options: dict[str, Any] = {"use_fp16": False, "devices": "cpu"}
output: dict[str, Any] = {"version": version("FlagEmbedding")}
if given["kind"] == "cross_encoder":
    model = FlagAutoReranker.from_finetuned(
        given["model"], model_class="encoder-only-base", max_length=length, **options
    )
    ways = {"logits": False, "activated": True}
    pairs = given["formatted_pairs"]
    output["scores"] = {way: model.compute_score(pairs, normalize=normalize) for way, normalize in ways.items()}
    changed = [row for row, pair in enumerate(pairs) if is_cut(*pair)]
    output["changes"] = "cuts queries at three quarters of the maximum length, and else documents only"
    output["changed"] = {"logits": changed, "activated": changed}
else:
    options |= {"query_max_length": length, "passage_max_length": length}
    prompts = given["prompts"]
    if prompts["query"]:
        options |= {"query_instruction_for_retrieval": prompts["query"], "query_instruction_format": "{}{}"}
    if prompts["document"]:
        options |= {"passage_instruction_for_retrieval": prompts["document"], "passage_instruction_format": "{}{}"}
    options["normalize_embeddings"] = any(module["type"].endswith("Normalize") for module in read("modules.json"))
if given["kind"] == "m3":
    model = BGEM3FlagModel(given["model"], colbert_dim=read("m3.json")["dim"], **options)
    parts = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}
    rows = {
        "text": model.encode(texts, max_length=length, **parts),
        "query": model.encode_queries(texts, **parts),
        "document": model.encode_corpus(texts, **parts),
    }
    output |= {
        "vectors": {way: each["dense_vecs"].tolist() for way, each in rows.items()},
        "word_weights": {
            way: [
                {"indices": [int(word) for word in row], "values": [float(weight) for weight in row.values()]}
                for row in each["lexical_weights"]
            ]
            for way, each in rows.items()
        },
        "token_vectors": {way: [row.tolist() for row in each["colbert_vecs"]] for way, each in rows.items()},
    }
elif given["kind"] == "dense":
    kind, name = pooling()
    model = FlagAutoModel.from_finetuned(given["model"], model_class=kind, pooling_method=name, **options)
    rows = {
        "text": model.encode(texts, max_length=length),
        "query": model.encode_queries(texts),
        "document": model.encode_corpus(texts),
    }
    output["vectors"] = {way: each.tolist() for way, each in rows.items()}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(output, result)
