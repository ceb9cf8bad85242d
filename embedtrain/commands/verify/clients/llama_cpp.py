"""The output of llama.cpp's server, of a GGUF file in float32 that its converter writes.

The converter is convert_hf_to_gguf.py in the folder llama.cpp of this environment. It recognises a byte-level tokenizer
by a checksum of its tokens; for a vocabulary of one's own LLAMA_CPP_PRE_TOKENIZER names the pre-tokenizer, which tests
with small vocabularies do.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import xllamacpp
from tokenizers import Tokenizer

POOLINGS = {"pooling_mode_cls_token": "CLS", "pooling_mode_mean_tokens": "MEAN", "pooling_mode_lasttoken": "LAST"}
CONVERTER = Path(sys.prefix) / "llama.cpp"


def convert(directory: Path, file: Path) -> str:
    """Write the GGUF file; returns why not."""
    sys.path[:0] = [str(CONVERTER), str(CONVERTER / "gguf-py")]
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


def server(file: Path, max_length: int) -> Any:
    """The server without HTTP, with a cache of keys and values in float32 instead of float16."""
    params = xllamacpp.CommonParams()
    params.model.path, params.embedding, params.warmup, params.n_parallel = str(file), True, False, 1
    params.n_ctx = params.n_batch = params.n_ubatch = max_length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling()}")
    if read("config.json").get("is_causal") is False:
        params.attention_type = xllamacpp.llama_attention_type.LLAMA_ATTENTION_TYPE_NON_CAUSAL
    if is_pair or any(module["type"].endswith("Normalize") for module in read("modules.json")):
        return xllamacpp.Server(params)
    params.embd_normalize = -1
    return xllamacpp.Server(params)


def read(name: str) -> Any:
    """A JSON file of the model."""
    return json.loads((directory / name).read_text(encoding="utf-8"))


def pooling() -> str:
    """The name of llama.cpp; the converter writes the pooling of encoders, Qwen3 and Gemma 3 only."""
    if is_pair:
        return "RANK"
    flags = read("1_Pooling/config.json")
    return next(name for flag, name in POOLINGS.items() if flags[flag])


def vector(text: str) -> list[float]:
    """The vector of a text, which is cut here: the server rejects one beyond the maximum length."""
    tokens = tokenizer.encode(text)
    answer = engine.handle_embeddings({"input": tokens.ids if tokens.overflowing else text})
    if "data" not in answer:
        raise ValueError(answer)
    return list(answer["data"][0]["embedding"])


def score(query: str, document: str) -> float:
    """The logit of a pair; NaN for one beyond the maximum length, which the server rejects."""
    answer = engine.handle_rerank({"query": query, "documents": [document]})
    return float(answer["results"][0]["relevance_score"]) if "results" in answer else float("nan")


with open(sys.argv[1], encoding="utf-8") as request:
    given, result = json.load(request), sys.argv[2]
directory, is_pair, output = Path(given["model"]), given["kind"] == "cross_encoder", {"version": xllamacpp.__version__}
tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
with tempfile.TemporaryDirectory() as folder:
    if reason := convert(directory, Path(folder) / "model.gguf"):
        output["unsupported"] = reason
    else:
        engine = server(Path(folder) / "model.gguf", read("tokenizer_config.json")["model_max_length"])
        if is_pair:
            output["scores"] = {"logits": [score(*pair) for pair in given["formatted_pairs"]]}
        else:
            output["vectors"] = {"text": [vector(text) for text in given["texts"]]}
with open(result, "w", encoding="utf-8") as file:
    json.dump(output, file)
