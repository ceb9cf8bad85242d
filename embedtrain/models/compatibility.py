"""Whether the computation around the weights of two models is the same: their settings and their tokenizers."""

from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.models.pooling import pooling_name
from embedtrain.models.types import ModelSource

# Entries of a configuration that do not change what an encoder computes.
_INERT = frozenset({
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "id2label", "label2id", "problem_type", "gradient_checkpointing", "_attn_implementation", "auto_map",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "sentence_transformers",
})  # fmt: skip
_INERT_PARTS = ("dropout", "drop_rate")
_MAX_SHOWN = 80  # characters of a value
# Texts whose tokens show lower case, special tokens and the splitting of words.
_PROBES = ("Alpha BETA", "what is 1+1?", "naïve café 東京")


def different_setting(first: ModelSource, other: ModelSource) -> str | None:
    """`NAME is VALUE, not VALUE` with the values of `other` and of `first`; None if all settings are equal."""
    expected = _settings(first) | _computing(first.config)
    actual = _settings(other) | _computing(other.config)
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            return f"{name} is {_shown(actual.get(name))}, not {_shown(expected.get(name))}"
    return None


def different_tokens(first: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """How two tokenizers differ, with the values of `other` first; None if their tokens are the same."""
    expected, actual = first.get_vocab(), other.get_vocab()
    if expected != actual:
        token = min(token for token in expected.keys() | actual.keys() if expected.get(token) != actual.get(token))
        return f"their tokenizers differ, the token {token!r} has the id {actual.get(token)}, not {expected.get(token)}"
    for text in _PROBES:
        ids = [tokenizer(text)["input_ids"] for tokenizer in (first, other)]
        if ids[0] != ids[1]:
            return (
                f"their tokenizers have the same vocabulary, but read {text!r} as {_shown(ids[1])}, "
                f"not {_shown(ids[0])}"
            )
    return None


def _settings(source: ModelSource) -> dict[str, Any]:
    """What surrounds the weights of a model, by the names of messages."""
    settings: dict[str, Any] = {
        "kind": source.kind.name,
        "pooling": pooling_name(source.pooling),
        "pooling of the prompt's tokens": source.include_prompt,
        "normalisation of vectors": source.normalize,
        "similarity of vectors": source.similarity.value,
        "number of Dense heads": len(source.dense),
        "lower case": source.tokenization.lowercase,
    }
    for index, dense in enumerate(source.dense):
        settings[f"activation of Dense head {index}"] = dense.activation
    if source.kind.name == "cross_encoder":
        settings["activation of scores"] = source.settings.activation
        settings["template of pairs"] = source.settings.template
    if source.kind.name == "sparse":
        settings["weights of words"] = source.settings.pooling.value, source.settings.activation.value
        settings["queries of the sparse model"] = source.settings.query_mode.value
    if source.kind.name == "late_interaction":
        settings["token vectors"] = source.settings
    if source.kind.name == "m3":
        settings["representations"] = source.settings
    return settings


def _computing(config: PretrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    return {
        f"{name} in config.json": value
        for name, value in values.items()
        if name not in _INERT and not any(part in name for part in _INERT_PARTS)
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
