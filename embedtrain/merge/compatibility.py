"""Whether models can be merged: the same tensors, the same tokens, and the same computation around them."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from embedtrain.errors import ModelError
from embedtrain.merge.members import Member
from embedtrain.models.tokenizer import load_tokenizer
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


def require_compatible(members: Sequence[Member]) -> list[str]:
    """Warnings about differences that do not matter for the weights.

    Raises ModelError for models that differ in tensors, in what surrounds them, or in their tokenizers, with both
    values and the names of the models.
    """
    first, *others = members
    warnings = []
    for other in others:
        _compare_tensors(first, other)
        _compare_settings(first, other)
        warnings += _differences_of_prompts(first, other)
    tokenizer = load_tokenizer(first.source)
    seen = {first.source.directory}
    for other in others:
        if other.source.directory not in seen:
            seen.add(other.source.directory)
            _compare_tokenizers(first.name, tokenizer, other.name, load_tokenizer(other.source))
    return warnings


def shown_name(name: str) -> str:
    """The name of a weight without the encoder's own prefix."""
    return name.removeprefix("backbone.")


def _compare_tensors(first: Member, other: Member) -> None:
    missing = [name for name in first.specs if name not in other.specs]
    extra = [name for name in other.specs if name not in first.specs]
    for names, owner, lacking in ((missing, first, other), (extra, other, first)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {owner.name} has the tensor {shown_name(names[0])}"
                f"{more}, which {lacking.name} lacks"
            )
    for name, spec in first.specs.items():
        if other.specs[name].shape != spec.shape:
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {shown_name(name)} has the shape "
                f"{list(other.specs[name].shape)}, not {list(spec.shape)}"
            )
        if other.specs[name].dtype.is_floating_point is not spec.dtype.is_floating_point:
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {shown_name(name)} has the type "
                f"{other.specs[name].dtype}, not {spec.dtype}"
            )


def _settings(source: ModelSource) -> dict[str, Any]:
    """What surrounds the weights of a model, by the names of messages."""
    settings: dict[str, Any] = {
        "kind": source.kind.value,
        "pooling": source.pooling.value,
        "pooling of the prompt's tokens": source.include_prompt,
        "normalisation of vectors": source.normalize,
        "number of Dense heads": len(source.dense),
        "lower case": source.tokenization.lowercase,
    }
    for index, dense in enumerate(source.dense):
        settings[f"activation of Dense head {index}"] = dense.activation
    if source.head is not None:
        settings["activation of scores"] = source.head.activation
        settings["template of pairs"] = source.head.template
    if source.words is not None:
        settings["weights of words"] = source.words.pooling.value, source.words.activation.value
        settings["queries of the sparse model"] = source.words.query_mode.value
    return settings | {"token vectors": source.token_vectors, "representations": source.m3}


def _compare_settings(first: Member, other: Member) -> None:
    expected, found = _settings(first.source), _settings(other.source)
    expected |= _computing(first.source.config)
    found |= _computing(other.source.config)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {name} is {_shown(found.get(name))}, not "
                f"{_shown(expected.get(name))}"
            )


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


def _differences_of_prompts(first: Member, other: Member) -> list[str]:
    warnings = []
    for role in sorted(first.source.prompts.keys() | other.source.prompts.keys()):
        prompts = [member.source.prompts.get(role, "") for member in (first, other)]
        if prompts[0] != prompts[1]:
            warnings.append(
                f"the prompt {role} of {other.name} is {prompts[1]!r}, that of {first.name} {prompts[0]!r}: "
                "settings_from chooses the model whose prompts are written"
            )
    return warnings


def _compare_tokenizers(
    first: str, tokenizer: PreTrainedTokenizerBase, other: str, compared: PreTrainedTokenizerBase
) -> None:
    expected, found = tokenizer.get_vocab(), compared.get_vocab()
    if expected != found:
        token = min(token for token in expected.keys() | found.keys() if expected.get(token) != found.get(token))
        raise ModelError(
            f"{other} cannot be merged with {first}: their tokenizers differ, the token {token!r} has the id "
            f"{found.get(token)}, not {expected.get(token)}"
        )
    for text in _PROBES:
        ids = [each(text)["input_ids"] for each in (tokenizer, compared)]
        if ids[0] != ids[1]:
            raise ModelError(
                f"{other} cannot be merged with {first}: their tokenizers have the same vocabulary, but read {text!r} "
                f"as {_shown(ids[1])}, not {_shown(ids[0])}"
            )
