"""How text-embeddings-inference 1.9.3 opens a directory: the conditions of its Rust source, without its arithmetic.

Of router/src/lib.rs, backends/src/lib.rs, backends/candle/src/lib.rs and the models in backends/candle/src/models. Each
condition whose failure ends the server raises a TeiError.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swiglu", "tanh")
_BERT = (
    "vocab_size:u hidden_size:u num_hidden_layers:u num_attention_heads:u intermediate_size:u hidden_act:a "
    "hidden_dropout_prob:f max_position_embeddings:u type_vocab_size:u initializer_range:f layer_norm_eps:f "
    "pad_token_id:u classifier_dropout?:f id2label?:l"
)
_MISTRAL = (
    "vocab_size:u hidden_size:u intermediate_size:u num_hidden_layers:u num_attention_heads:u num_key_value_heads:u "
    "hidden_act:a max_position_embeddings:u initializer_range:f rms_norm_eps:f rope_theta?:f rope_parameters?:r "
    "sliding_window?:u use_bidirectional_attention?:b"
)
# Fields of the structs that serde fills from config.json, by model type: u unsigned, f float, b bool, a activation,
# r rotary parameters of all layers, l labels; optional with a question mark.
FIELDS = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "mistral": _MISTRAL,
    "llama": _MISTRAL + " head_dim?:u",
    "qwen2": _MISTRAL.replace(" initializer_range:f", "") + " use_sliding_window:b",
    "qwen3": _MISTRAL.replace(" initializer_range:f", "")
    + " attention_bias:b head_dim?:u use_sliding_window:b eos_token_id:u num_labels?:u",
    "gemma3_text": "attention_bias:b pad_token_id:u head_dim?:u hidden_activation:a hidden_size:u intermediate_size:u "
    "max_position_embeddings:u num_attention_heads:u num_hidden_layers:u num_key_value_heads:u query_pre_attn_scalar:u "
    "rms_norm_eps:f rope_local_base_freq:f rope_theta?:f rope_parameters?:r sliding_window?:u "
    "_sliding_window_pattern:u use_bidirectional_attention:b vocab_size:u",
    "modernbert": "vocab_size:u hidden_size:u intermediate_size:u num_hidden_layers:u num_attention_heads:u "
    "hidden_activation:a max_position_embeddings:u initializer_range:f initializer_cutoff_factor:f norm_eps:f "
    "norm_bias:b pad_token_id:u eos_token_id:u bos_token_id:u cls_token_id:u sep_token_id:u global_rope_theta:f "
    "attention_bias:b attention_dropout:f global_attn_every_n_layers:u local_attention:u local_rope_theta:f "
    "classifier_activation:a num_labels?:u",
}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "u": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "f": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "b": lambda value: isinstance(value, bool),
    "a": lambda value: value in ACTIVATIONS,
    "r": lambda value: isinstance(value, dict) and {"rope_theta", "rope_type"} <= value.keys(),
    "l": lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
}
_KINDS = ("weight", "bias")
_BERT_LAYER = [
    *(f"attention.self.{name}.{kind}" for name in ("query", "key", "value") for kind in _KINDS),
    *(f"{name}.{kind}" for name in ("intermediate.dense", "output.dense", "output.LayerNorm") for kind in _KINDS),
    *(f"attention.output.{name}.{kind}" for name in ("dense", "LayerNorm") for kind in _KINDS),
]  # fmt: skip
_BERT_NAMES = [f"embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")]
_DECODER_LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight", "post_attention_layernorm.weight",
]  # fmt: skip
# Names of weights outside of layers, the name of a layer, and names within it.
WEIGHTS: dict[str, tuple[list[str], str, list[str]]] = {
    "bert": (_BERT_NAMES, "encoder.layer", _BERT_LAYER),
    "llama": (["embed_tokens.weight", "norm.weight"], "layers", _DECODER_LAYER),
    "qwen3": (
        ["embed_tokens.weight", "norm.weight"],
        "layers",
        [*_DECODER_LAYER, "self_attn.q_norm.weight", "self_attn.k_norm.weight"],
    ),
    "gemma3_text": (
        ["embed_tokens.weight", "norm.weight"],
        "layers",
        [*_DECODER_LAYER, "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"],
    ),
    "modernbert": (
        ["embeddings.tok_embeddings.weight", "embeddings.norm.weight", "final_norm.weight"],
        "layers",
        ["attn.Wqkv.weight", "attn.Wo.weight", "mlp_norm.weight", "mlp.Wi.weight", "mlp.Wo.weight"],
    ),
}
WEIGHTS |= {"xlm-roberta": WEIGHTS["bert"], "roberta": WEIGHTS["bert"], "mistral": WEIGHTS["llama"]}
WEIGHTS |= {"qwen2": WEIGHTS["llama"]}
_PREFIXES = {"bert": ("", "bert."), "modernbert": ("model.", ""), "qwen3": ("model.", "")}
_PREFIXES |= dict.fromkeys(("xlm-roberta", "roberta"), ("", "roberta.", "xlm-roberta.", "camembert."))
_HEADS = {
    "bert": ("classifier.weight", "classifier.bias"),
    "modernbert": ("head.dense.weight", "head.norm.weight", "classifier.weight", "classifier.bias"),
}
_HEADS |= dict.fromkeys(
    ("xlm-roberta", "roberta"), tuple(f"classifier.{name}" for name in ("dense.weight", "out_proj.weight"))
)
_DENSE_ACTIVATIONS = ("torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity", None)
_MODULES = ("Dense", "Normalize", "Pooling", "Transformer")


class TeiError(Exception):
    """The server does not start."""


@dataclass(frozen=True)
class TeiModel:
    """What the server computes."""

    task: str  # embedding, reranker or classifier
    pooling: str
    max_length: int
    prompts: dict[str, str]
    dense: tuple[str, ...]
    is_bidirectional: bool


def open_as_tei(directory: Path, pooling: str | None = None, max_batch_tokens: int = 16384) -> TeiModel:
    """The model as the image for GPUs opens it; `pooling` is the argument of that name."""
    config = _json(directory / "config.json")
    kind = config.get("model_type")
    if not isinstance(config.get("architectures"), list) or not isinstance(kind, str):
        raise TeiError("config.json: architectures and model_type are required")
    task, pooled = _task(directory, config, pooling)
    try:
        Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:
        raise TeiError("tokenizer.json not found, or invalid") from error
    _require_config(config, kind)
    names = _weight_names(directory)
    _require_weights(names, config, kind, task, pooled)
    last = "last_token" if pooled == "last_token" else ""
    if last and kind in ("bert", "roberta", "xlm-roberta", "modernbert"):
        raise TeiError(f"`last_token` is not supported for {kind}")
    if kind == "llama" and config.get("rope_scaling"):
        raise TeiError("rope scaling is not supported for llama")
    width = config["num_attention_heads"] * (config.get("head_dim") or 0)
    if kind in ("llama", "mistral") and width not in (0, config["hidden_size"]):
        raise TeiError(f"shape mismatch of self_attn.q_proj.weight: {width} rows, not {config['hidden_size']}")
    direction = not config["is_causal"] if kind == "qwen2" else config.get("use_bidirectional_attention") or False
    is_bidirectional = direction if kind in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text") else True
    return TeiModel(
        task, pooled, _max_length(directory, config, kind, max_batch_tokens), _prompts(directory),
        _dense(directory), is_bidirectional,
    )  # fmt: skip


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TeiError(f"{path.name} not found, or invalid") from error


def _task(directory: Path, config: dict[str, Any], pooling: str | None) -> tuple[str, str]:
    for name in config["architectures"]:
        if pooling == "splade" and name.endswith("MaskedLM"):
            return "embedding", "splade"
        if name.endswith("Classification"):
            if not config.get("id2label") or not config.get("label2id"):
                raise TeiError("id2label and label2id are required")
            return ("classifier" if len(config["id2label"]) > 1 else "reranker"), "cls"
    if pooling == "splade":
        raise TeiError("not a ForMaskedLM model")
    if pooling is not None:
        return "embedding", pooling
    settings = _json(directory / "1_Pooling" / "config.json")
    if not {"pooling_mode_cls_token", "pooling_mode_mean_tokens"} <= settings.keys():
        raise TeiError("1_Pooling/config.json: fields are missing")
    for flag, name in ("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last_token"):
        if settings.get(f"pooling_mode_{flag}"):
            return "embedding", name
    raise TeiError("the pooling is not supported")


def _require_config(config: dict[str, Any], kind: str) -> None:
    if kind not in FIELDS:
        raise TeiError(f"{kind} is not supported")
    for field in FIELDS[kind].split():
        name, _, type_name = field.partition(":")
        value = config.get(name.rstrip("?"))
        if value is None and name.endswith("?"):
            continue
        if value is None or not _TYPES[type_name](value):
            raise TeiError(f"config.json: {name}={value!r}")


def _weight_names(directory: Path) -> set[str]:
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        with safe_open(directory / "model.safetensors", framework="np") as file:
            return set(file.keys())
    return set(_json(index)["weight_map"])


def _require_weights(names: set[str], config: dict[str, Any], kind: str, task: str, pooling: str) -> None:
    outside, layer, within = WEIGHTS[kind]
    needed = [*outside, *(f"{layer}.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in within)]
    prefixes = _PREFIXES.get(kind, ("",))
    if not any({prefix + name for name in needed} <= names for prefix in prefixes):
        raise TeiError(f"cannot find tensors such as {sorted(set(needed) - names)[:3]}")
    if task != "embedding" and not set(_HEADS.get(kind, ("-",))) <= names:
        raise TeiError(f"`classifier` model type is not supported for {kind}")
    if pooling == "splade":
        heads = {
            "bert": {"cls.predictions.transform.dense.weight", "cls.predictions.bias"},
            "xlm-roberta": {"lm_head.dense.weight", "lm_head.layer_norm.weight", "lm_head.bias"},
        }
        if not heads.get(kind, {"-"}) <= names:
            raise TeiError("splade is not supported")


def _max_length(directory: Path, config: dict[str, Any], kind: str, max_batch_tokens: int) -> int:
    settings = directory / "sentence_bert_config.json"
    offset = (config.get("pad_token_id") or 0) + 1 if kind in ("xlm-roberta", "roberta", "camembert") else 0
    length = _json(settings)["max_seq_length"] if settings.is_file() else config["max_position_embeddings"] - offset
    return min(length, max_batch_tokens)


def _prompts(directory: Path) -> dict[str, str]:
    path = directory / "config_sentence_transformers.json"
    prompts = (_json(path).get("prompts") or {}) if path.is_file() else {}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise TeiError("prompts are not texts")
    return prompts


def _dense(directory: Path) -> tuple[str, ...]:
    """The folders of dense heads that are applied; none if a module has an unknown type, which is only logged."""
    if not (directory / "modules.json").is_file():
        return ()
    modules = _json(directory / "modules.json")
    known = {f"sentence_transformers.models.{name}" for name in _MODULES}
    if any(module["type"] not in known for module in modules):
        return ()
    folders = tuple(module["path"] for module in modules if module["type"].endswith("Dense"))
    for folder in folders:
        settings = _json(directory / folder / "config.json")
        if settings.get("activation_function") not in _DENSE_ACTIVATIONS:
            raise TeiError(f"{folder}: unknown variant {settings['activation_function']}")
        with safe_open(directory / folder / "model.safetensors", framework="np") as file:
            if file.get_slice("linear.weight").get_shape() != [settings["out_features"], settings["in_features"]]:
                raise TeiError(f"{folder}: shape mismatch")
    return folders
