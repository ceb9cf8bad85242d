"""The facts about serving engines, one entry each, from the source code of the version that it names."""

from collections.abc import Iterator, Mapping

from embedtrain.config.recipe import Pooling
from embedtrain.config.sparse import SparseActivation, SparsePooling
from embedtrain.formats.onnx import GRAPH
from embedtrain.formats.serving import Effect, Engine, Loss, ServedModel, Trait

_DENSE, _PAIRS, _TOKENS = "dense", "cross_encoder", "late_interaction"
_SPARSE, _M3 = "sparse", "m3"
_VECTOR_OF_M3 = "it computes the vector of a text, not the weights and vectors of its tokens"
_GRAPH_FILES = (GRAPH, "tokenizer.json")
_GRAPH = frozenset({Trait.no_graph, Trait.no_vectors_in_graph, Trait.static, Trait.logit_scores})
_PLAIN = frozenset({Trait.dense, Trait.include_prompt, Trait.truncation, Trait.static, Trait.logit_scores})
_BY_CLIENT = "the client prepends them"

# text-embeddings-inference: model types whose encoder has no pooling of the last token, and those of its heads.
_ENCODERS = frozenset(
    {"bert", "camembert", "deberta-v2", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta"}
)
_DECODERS = frozenset({"gemma3_text", "llama", "mistral", "qwen2", "qwen3"})
_TEI_RERANKERS = _ENCODERS - {"mpnet"}
_TEI_SPARSE = frozenset({"bert", "camembert", "distilbert", "roberta", "xlm-roberta"})
_TEI_ACTIVATIONS = ("torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity")
# Of vLLM; `*Model` of a decoder is opened as its `*ForCausalLM`.
_VLLM_TYPES = frozenset(
    {"bert", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "modernbert", "phi3", "qwen2", "qwen3", "roberta"}
) | {"xlm-roberta"}  # fmt: skip
_VLLM_BIDIRECTIONAL = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def _check_candle(model: ServedModel) -> Iterator[Loss]:
    """Conditions of the implementations in backends/candle of text-embeddings-inference."""
    source, config, kind = model.source, model.config, model.model_type
    if source.kind.name == _PAIRS and kind not in _TEI_RERANKERS:
        yield Loss(Effect.refused, f"it has no reranker of {kind}")
    if source.kind.name == _SPARSE:
        yield from _check_splade(model, _TEI_SPARSE)
    if source.kind.name == _DENSE and kind in _ENCODERS and source.pooling is Pooling.last:
        yield Loss(Effect.refused, f"it does not pool the last token of {kind}")
    if kind == "gemma3_text" and source.pooling is Pooling.cls:
        yield Loss(Effect.refused, "it does not pool the first token of gemma3_text")
    activations = [dense.activation for dense in source.dense if dense.activation not in _TEI_ACTIVATIONS]
    if activations:
        yield Loss(Effect.refused, f"it knows no dense head with {activations[0].rpartition('.')[2]}, only Tanh")
    if kind in ("llama", "mistral", "qwen2"):
        yield Loss(Effect.rounded, f"it computes {kind} in float16 only, and only on GPUs")
    yield from _check_attention_of_candle(model)
    if config.get("hidden_act", config.get("hidden_activation", config.get("activation"))) == "gelu":
        yield Loss(Effect.rounded, "it computes GELU by its tanh approximation")


def _check_attention_of_candle(model: ServedModel) -> Iterator[Loss]:
    config, kind = model.config, model.model_type
    head_dim = config.get("head_dim") or 0
    if kind in ("llama", "mistral"):
        if head_dim and head_dim * config["num_attention_heads"] != config["hidden_size"]:
            yield Loss(Effect.refused, f"it requires the head_dim of {kind} to be hidden_size / num_attention_heads")
        if config.get("attention_bias"):
            yield Loss(Effect.changed, "it ignores the biases of attention (attention_bias)")
    if kind == "llama" and config.get("rope_scaling"):
        yield Loss(Effect.refused, "it does not scale the rotary positions of llama")
    if kind == "qwen3" and config.get("use_sliding_window"):
        yield Loss(Effect.refused, "it has no sliding window for qwen3")
    if kind == "modernbert" and "global_attn_every_n_layers" not in config:
        yield Loss(Effect.refused, "it requires layers with full attention at a regular distance")
    if kind == "modernbert" and config.get("norm_bias"):
        yield Loss(Effect.changed, "it ignores the biases of layer norms (norm_bias)")
    if kind == "gemma3_text":
        pattern, layers = config["_sliding_window_pattern"], config.get("layer_types") or ()
        if any(((i + 1) % pattern > 0) != (layer == "sliding_attention") for i, layer in enumerate(layers)):
            yield Loss(Effect.changed, "it requires layers with full attention at a regular distance")


def _check_cpu_image(model: ServedModel) -> Iterator[Loss]:
    """The image for CPUs runs the graph if there is one, and else what `_check_candle` is about."""
    source = model.source
    if model.has_graph and source.kind.name in (_DENSE, _PAIRS):
        if Trait.no_vectors_in_graph in model.traits:
            yield Loss(Effect.changed, "the graph cannot leave out the tokens of the prompt (include_prompt=false)")
        return
    if Trait.truncation in model.traits:
        yield Loss(Effect.changed, "it returns all dimensions of a vector, not the first ones (truncate_dim)")
    if Trait.include_prompt in model.traits:
        yield Loss(Effect.changed, "its pooling includes the tokens of the prompt (include_prompt=false)")
    if model.model_type in ("llama", "mistral", "qwen2"):
        yield Loss(Effect.refused, f"it computes {model.model_type} on GPUs only, or from {GRAPH}")
        return
    yield from _check_candle(model)


def _check_splade(model: ServedModel, model_types: frozenset[str]) -> Iterator[Loss]:
    words = model.source.settings
    assert words is not None
    if model.model_type not in model_types:
        yield Loss(Effect.refused, f"it has no sparse vectors of {model.model_type}")
    if words.queries is not None:
        yield Loss(Effect.changed, "it encodes queries, which this model looks up in a table of words")
    if (words.pooling, words.activation) != (SparsePooling.max, SparseActivation.relu):
        yield Loss(Effect.changed, "it takes the maximum over tokens of log(1 + ReLU), which this model does not")


def _check_vllm(model: ServedModel) -> Iterator[Loss]:
    if model.is_bidirectional_decoder and model.model_type not in _VLLM_BIDIRECTIONAL:
        yield Loss(Effect.changed, f"its attention is causal in {model.model_type}")
    if model.source.kind.name == _SPARSE:
        yield from _check_splade(model, frozenset({"bert"}))
    if model.source.kind.name == _TOKENS and model.model_type not in ("bert", "modernbert"):
        yield Loss(Effect.refused, f"it has no late interaction of {model.model_type}")


def _check_llama_cpp(model: ServedModel) -> Iterator[Loss]:
    if model.source.dense and model.model_type != "gemma3_text":
        yield Loss(Effect.changed, "it converts dense heads of gemma3_text only")
    if model.model_type == "gemma3_text" and not model.config.get("use_bidirectional_attention"):
        yield Loss(Effect.changed, "its attention is bidirectional in gemma3_text")
    if model.model_type == "gemma3_text" and not model.has_sentencepiece:
        yield Loss(Effect.refused, "its converter requires the tokenizer.model of Gemma: copy it from the base model")
    if model.model_type == "llama" and (model.config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        yield Loss(Effect.refused, "its converter fails on the rotary positions of Llama 3.1 (rope_type llama3)")
    if model.source.kind.name == _PAIRS:
        if model.config.get("type_vocab_size", 1) > 1:
            yield Loss(Effect.changed, "it gives both texts of a pair the token type 0")
        yield Loss(Effect.some_texts, "it rejects pairs beyond the maximum length")
    if model.config.get("hidden_act") == "gelu":
        yield Loss(Effect.rounded, "it looks up GELU in a table in float16")
    if model.model_type in ("bert", "distilbert"):
        yield Loss(Effect.some_texts, "tokenizers of uncased models lose the vowel signs of Indic scripts")


def _check_transformers_js(model: ServedModel) -> Iterator[Loss]:
    if model.source.kind.name == _PAIRS:
        yield Loss(Effect.some_texts, "it cuts pairs beyond the maximum length with the tokens that end them")
    if model.model_type == "xlm-roberta":
        yield Loss(Effect.some_texts, "it replaces the joiners in emoji of several characters by spaces")


def _check_pylate(model: ServedModel) -> Iterator[Loss]:
    if not model.is_pylate:
        yield Loss(Effect.refused, "it does not have all settings of this model, which has the layout of its own")


# By the name of the package that a client imports, or of the program.
ENGINES: Mapping[str, Engine] = {
    "sentence_transformers": Engine(
        title="sentence-transformers",
        source="6.2",
        kinds={_DENSE: "", _PAIRS: "", _TOKENS: "", _SPARSE: "", _M3: _VECTOR_OF_M3},
        files=("modules.json", "model.safetensors", "tokenizer.json"),
        prompts="`encode_query` and `encode_document` prepend them",
    ),
    "transformers": Engine(
        title="transformers",
        source="5.23",
        kinds={_DENSE: "", _PAIRS: "", _SPARSE: "", _M3: _VECTOR_OF_M3},
        lost=_PLAIN,
        prompts=_BY_CLIENT,
    ),
    "onnxruntime": Engine(
        title="onnxruntime",
        source="1.31",
        kinds={_DENSE: "", _PAIRS: "", _TOKENS: "", _SPARSE: "", _M3: ""},
        lost=_GRAPH,
        files=_GRAPH_FILES,
        prompts=_BY_CLIENT,
        precision="float32",
    ),
    "fastembed": Engine(
        title="fastembed",
        source="0.9.1",
        kinds={_DENSE: "", _PAIRS: "", _M3: _VECTOR_OF_M3},
        lost=_GRAPH,
        files=(*_GRAPH_FILES, "tokenizer_config.json"),
        prompts=_BY_CLIENT,
        precision="float32",
    ),
    "triton": Engine(
        title="Triton",
        source="documentation of the onnxruntime backend",
        kinds={_DENSE: "", _PAIRS: "", _TOKENS: "", _SPARSE: "", _M3: ""},
        lost=_GRAPH,
        files=(GRAPH,),
        prompts="the client prepends them, and tokenizes",
        precision="float32",
    ),
    "text_embeddings_inference": Engine(
        title="text-embeddings-inference, GPU",
        source="1.9.3",
        kinds={_DENSE: "", _PAIRS: "", _SPARSE: "", _M3: _VECTOR_OF_M3},
        lost=(_PLAIN - {Trait.dense}) | {Trait.custom_code, Trait.pooling, Trait.scaled_positions},
        model_types=_ENCODERS | _DECODERS,
        prompts="`prompt_name` of a request, or `--default-prompt-name`",
        precision="float16, with `--dtype float32` float32",
        checks=_check_candle,
    ),
    "text_embeddings_inference_cpu": Engine(
        title="text-embeddings-inference, CPU",
        source="1.9.3",
        kinds={_DENSE: "", _PAIRS: "", _SPARSE: "", _M3: _VECTOR_OF_M3},
        lost=frozenset({Trait.custom_code, Trait.static, Trait.logit_scores, Trait.pooling}),
        files=(f"{GRAPH} if it exists", "config.json", "model.safetensors", "tokenizer.json"),
        prompts="`prompt_name` of a request, or `--default-prompt-name`",
        precision="float32",
        checks=_check_cpu_image,
    ),
    "vllm": Engine(
        title="vLLM",
        source="0.33",
        kinds={_DENSE: "", _PAIRS: "", _SPARSE: "", _TOKENS: "", _M3: ""},
        lost=frozenset({Trait.custom_code, Trait.include_prompt, Trait.static, Trait.logit_scores, Trait.truncation})
        | {Trait.pooling},
        model_types=_VLLM_TYPES,
        prompts="the client prepends them",
        precision="float16 for files in float32, with `--dtype float32` float32",
        checks=_check_vllm,
    ),
    "infinity_emb": Engine(
        title="infinity",
        source="0.0.78, with sentence-transformers 3 and transformers 4",
        kinds={_DENSE: "", _PAIRS: "", _M3: _VECTOR_OF_M3},
        lost=frozenset({Trait.include_prompt, Trait.is_causal, Trait.static, Trait.logit_scores, Trait.truncation})
        | {Trait.vector_length},
        prompts=_BY_CLIENT,
        precision="bfloat16 on GPUs, with `--dtype float32` float32",
    ),
    "FlagEmbedding": Engine(
        title="FlagEmbedding",
        source="1.4.2",
        kinds={_DENSE: "", _PAIRS: "", _M3: ""},
        lost=_PLAIN | {Trait.pooling},
        prompts="arguments such as `query_instruction_for_retrieval`",
        precision="float16, with `use_fp16=False` float32",
    ),
    "llama_cpp": Engine(
        title="llama.cpp",
        source="2026.10.11549 of xllamacpp",
        kinds={_DENSE: "", _PAIRS: ""},
        lost=(_PLAIN - {Trait.dense}) | {Trait.custom_code, Trait.pooling},
        model_types=frozenset({"bert", "distilbert", "gemma3_text", "llama", "mistral", "modernbert", "qwen2", "qwen3"})
        | {"roberta", "xlm-roberta"},
        files=("a GGUF file that its converter writes",),
        prompts=_BY_CLIENT,
        precision="the type of the GGUF file",
        checks=_check_llama_cpp,
    ),
    "transformers_js": Engine(
        title="transformers.js",
        source="4.3.1",
        kinds={_DENSE: "", _PAIRS: ""},
        lost=_GRAPH,
        files=(GRAPH, "config.json", "tokenizer.json", "tokenizer_config.json"),
        prompts=_BY_CLIENT,
        precision='that of the file of `dtype`, "fp32" being onnx/model.onnx',
        checks=_check_transformers_js,
    ),
    "langchain_huggingface": Engine(
        title="LangChain",
        source="langchain-huggingface 1.2.3",
        kinds={_DENSE: "", _M3: _VECTOR_OF_M3},
        files=("modules.json", "model.safetensors", "tokenizer.json"),
        prompts='`query_encode_kwargs={"prompt_name": "query"}`, `encode_kwargs` for documents',
    ),
    "llama_index": Engine(
        title="LlamaIndex",
        source="llama-index-embeddings-huggingface 0.8",
        kinds={_DENSE: "", _M3: _VECTOR_OF_M3},
        files=("modules.json", "model.safetensors", "tokenizer.json"),
        prompts="`query_instruction` and `text_instruction`; those of the directory are overridden",
    ),
    "haystack": Engine(
        title="Haystack",
        source="sentence-transformers-haystack 2.0",
        kinds={_DENSE: "", _SPARSE: "", _PAIRS: "", _M3: _VECTOR_OF_M3},
        files=("modules.json", "model.safetensors", "tokenizer.json"),
        prompts='`encode_kwargs={"prompt_name": "query"}`',
    ),
    "chromadb": Engine(
        title="Chroma",
        source="1.5.9",
        kinds={_DENSE: "", _SPARSE: "", _M3: _VECTOR_OF_M3},
        files=("modules.json", "model.safetensors", "tokenizer.json"),
        prompts='`default_prompt_name="document"`; queries are encoded outside of it',
    ),
    "txtai": Engine(
        title="txtai",
        source='9.14, `method="sentence-transformers"`',
        kinds={_DENSE: "", _M3: _VECTOR_OF_M3},
        lost=frozenset({Trait.vector_length}),
        files=("modules.json", "model.safetensors", "tokenizer.json"),
        prompts="the categories `query` and `data` prepend them",
    ),
    "pylate": Engine(
        title="PyLate",
        source="1.6",
        kinds={_TOKENS: ""},
        lost=frozenset({Trait.static}),
        files=("modules.json", "model.safetensors", "tokenizer.json"),
        prompts='prefixes always, other prompts with `prompt_name="query"`',
        checks=_check_pylate,
    ),
}
