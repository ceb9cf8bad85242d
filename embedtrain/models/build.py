"""Builds an encoder without memory for its weights, and locates each weight in the model's files."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from embedtrain.config.validation import written
from embedtrain.data.types import Chunk
from embedtrain.errors import ModelError
from embedtrain.models.cross_encoder import HEAD, CrossEncoder, classifier_name, split_classifier
from embedtrain.models.encoder import Encoder, hidden_size, prepare_backbone
from embedtrain.models.heads import build_heads, initial_head_weights, is_pickled, pickled_head_weights
from embedtrain.models.hub import one_line
from embedtrain.models.late_interaction import LateInteractionEncoder
from embedtrain.models.m3 import M3Encoder
from embedtrain.models.m3_files import LAYERS, read_m3_layers
from embedtrain.models.module_settings import DenseSource
from embedtrain.models.score_head import HeadSource
from embedtrain.models.sparse_encoder import language_model_class, sparse_encoder_of
from embedtrain.models.static_embedding import TABLE, StaticEncoder, is_static, read_table
from embedtrain.models.static_queries import QUERY_WEIGHTS, read_query_weights
from embedtrain.models.stored_weights import TensorLocation, shapes_match, stored_tensors
from embedtrain.models.types import ModelSource

_MAX_PARAMETERS_PER_BYTE = 8  # one bit each
_MAX_TENSOR = 1 << 26  # numbers of a stored tensor that a small model may leave unused
# The weight of a score of tokens, and where the rows that it starts from are stored.
_SCORE, _VOCABULARY_HEAD, _EMBEDDINGS = f"{HEAD}score.weight", "lm_head.weight", "embed_tokens.weight"
_NO_VOCABULARY_HEAD = (
    "; model.kind=sparse weighs words with the vocabulary head of a masked language model, which embedding models do "
    "not keep: start from one that has it, such as the model that this one was made from"
)


def build_encoder(source: ModelSource) -> Encoder:
    """The encoder with parameters on the meta device and buffers in memory, ready to be sharded.

    Buffers are real because many are in no checkpoint (position ids, rotary frequencies): after `to_empty` they would
    contain garbage.
    """
    with init_empty_weights(include_buffers=False):
        return assemble_encoder(source)


def assemble_encoder(source: ModelSource) -> Encoder:
    """The encoder in memory with random weights, or on the meta device within torch's or accelerate's contexts."""
    try:
        model = _auto_class(source).from_config(
            source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code
        )
        heads = build_heads(source.dense)
    except Exception as error:  # torch and transformers raise nearly anything for invalid sizes
        raise ModelError(
            f"cannot build a model from this {source.config.model_type} configuration "
            f"({type(error).__name__}: {one_line(error)})"
        ) from None
    if source.kind.name == "cross_encoder":
        return CrossEncoder(*split_classifier(model), source.pooling)
    if source.kind.name == "late_interaction":
        return LateInteractionEncoder(prepare_backbone(model), heads)
    if source.kind.name == "m3":
        return M3Encoder(prepare_backbone(model), source.settings)
    if source.kind.name == "sparse":
        return sparse_encoder_of(model, source.settings)
    kind = StaticEncoder if is_static(source.config) else Encoder
    return kind(prepare_backbone(model), source.pooling, normalize=source.normalize, dense=heads)


def full_state_dict(source: ModelSource, seed: int) -> dict[str, Tensor]:
    """All weights of the encoder, unsharded and in memory, with the keys of `build_encoder`.

    Without a directory they are random, a function of `seed`; else transformers reads them, in any format it supports,
    and weights that it cannot read or find raise a ModelError. For one rank, which distributes them to the others.
    """
    if source.directory is not None:
        _require_plausible_size(source, source.directory)
    torch.manual_seed(seed)
    encoder = assemble_encoder(source)
    for name, weight in initial_head_weights(source.dense, seed).items():
        encoder.get_parameter(name).data.copy_(weight)
    if source.directory is None:
        return dict(encoder.state_dict())
    has_tokens = source.kind.name == "cross_encoder" and bool(source.settings.tokens)
    weights, missing = (_read_causal_weights if has_tokens else _read_weights)(source, source.directory)
    if source.kind.name == "cross_encoder" and source.settings.linear is not None:
        location = _linear_location(source.settings.linear)
        with safe_open(location.path, framework="pt") as file:
            weights[_SCORE] = file.get_tensor(location.key)
        missing = missing - {_SCORE}
    absent = sorted(missing & encoder.state_dict().keys())
    new = [
        name
        for name in absent
        if source.kind.name == "cross_encoder" and source.settings.is_new and name.startswith(HEAD)
    ]
    if len(absent) > len(new):
        first = min(set(absent) - set(new)).removeprefix("backbone.").removeprefix(HEAD)
        has_backbone = not any(name.startswith("backbone.") for name in absent)
        raise ModelError(
            f"{source.directory} lacks {len(absent) - len(new)} of {len(weights)} weights, such as {first}: "
            f"they would be random{_NO_VOCABULARY_HEAD if source.kind.name == 'sparse' and has_backbone else ''}"
        )
    encoder.load_state_dict({name: weight for name, weight in weights.items() if name not in missing}, strict=False)
    for index, dense in enumerate(source.dense):  # a new one keeps its initial weights
        for name, location in _dense_locations(index, dense).items():
            with safe_open(location.path, framework="pt") as file:
                encoder.get_parameter(name).data.copy_(file.get_tensor(location.key))
    others = _m3_weights(source) | _query_weights(source) | pickled_head_weights(source.dense)
    for name, weight in others.items():  # new layers keep random weights
        encoder.get_parameter(name).data.copy_(weight)
    return dict(encoder.state_dict())


def _read_weights(source: ModelSource, directory: Path) -> tuple[dict[str, Tensor], set[str]]:
    """The weights without Dense heads, by the encoder's names, and the names of those that the files lack."""
    if is_static(source.config):
        return read_table(directory), set()
    config = source.config
    if source.kind.name == "cross_encoder" and source.settings.labels:
        config = copy.deepcopy(config)
        config.num_labels = source.settings.num_labels
    try:
        model, report = _auto_class(source).from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
            weights_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = one_line(error)
        if type(error).__name__ == "UnpicklingError":  # torch's message explains how to execute its content
            reason = "they are a pickle with more than tensors; ask the authors for safetensors"
        raise ModelError(f"cannot read weights from {directory}: {reason}") from None
    if source.kind.name not in {"cross_encoder", "sparse"}:
        weights = {f"backbone.{name}": weight for name, weight in prepare_backbone(model).state_dict().items()}
        return weights, {f"backbone.{name}" for name in report["missing_keys"]}
    if source.kind.name == "sparse":
        encoder: Encoder = sparse_encoder_of(model, source.settings)
    else:
        encoder = CrossEncoder(*split_classifier(model), source.pooling)
    weights = encoder.state_dict()
    if source.kind.name == "cross_encoder" and source.settings.labels:
        weights = _weights_of_labels(encoder, source, source.settings)
    names = {name: classifier_name(name, model.base_model_prefix) for name in weights}
    return weights, {name for name, own in names.items() if own in report["missing_keys"]}


def _weights_of_labels(encoder: Encoder, source: ModelSource, head: HeadSource) -> dict[str, Tensor]:
    """The weights of the class of one label whose score is that of the labels of `encoder`.

    Its last layer is the rows of the labels. A ModelError if scores of random vectors differ, as in a class of other
    layers.
    """
    single = build_encoder(source).eval()
    shapes = {name: tensor.shape for name, tensor in single.state_dict().items()}
    weights = {
        name: _score_of([weight[label] for label in head.labels])
        if weight.shape != shapes.get(name) and weight.shape[:1] == (head.num_labels,)
        else weight
        for name, weight in encoder.state_dict().items()
    }
    vectors = torch.randn(4, 1, hidden_size(source.config), generator=torch.Generator().manual_seed(0))
    chunk = Chunk(torch.zeros((4, 1), dtype=torch.int64), torch.ones((4, 1), dtype=torch.int64), has_padding=False)
    try:
        single.load_state_dict(weights, assign=True)
        with torch.no_grad():
            scores = single.text_vectors(vectors, chunk)
            logits = encoder.eval().text_vectors(vectors, chunk)
    except RuntimeError as error:
        raise ModelError(f"{source.directory}: model.score_labels: {one_line(error)}") from None
    expected = _score_of([logits[:, label] for label in head.labels]).T
    if not torch.allclose(scores, expected, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{source.directory}: model.score_labels={written(list(head.labels))}: the scores of "
            f"{source.config.model_type} for a single label are computed in another way than its logits of several"
        )
    return weights


def _read_causal_weights(source: ModelSource, directory: Path) -> tuple[dict[str, Tensor], set[str]]:
    """The same from a causal language model, with the score of its tokens."""
    assert source.kind.name == "cross_encoder"
    model = _causal_model(source, directory)
    vocabulary = model.get_output_embeddings().weight.detach()
    rows = [vocabulary[token] for token in source.settings.tokens]
    weights = {f"backbone.{name}": weight for name, weight in prepare_backbone(model.base_model).state_dict().items()}
    return weights | {_SCORE: _score_of(rows)}, set()


def _causal_model(source: ModelSource, directory: Path) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
            weights_only=True,
            output_loading_info=True,
        )
        vocabulary = model.get_output_embeddings()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ModelError(f"cannot read weights from {directory}: {one_line(error)}") from None
    if vocabulary is None or getattr(vocabulary, "bias", None) is not None:
        raise ModelError(
            f"{directory}: {type(model).__name__} has no vocabulary head without a bias, which scores need"
        )
    for name in sorted(report["missing_keys"]):
        raise ModelError(f"{directory} lacks weights of {type(model).__name__}, such as {name}: they would be random")
    return model


def vocabulary_head(source: ModelSource) -> Tensor:
    """The vocabulary head [V, H] in float32, of a model whose score is that of tokens."""
    assert source.directory is not None
    stored = stored_tensors(source.directory)
    if not stored:
        return _causal_model(source, source.directory).get_output_embeddings().weight.detach()  # type: ignore[no-any-return]
    key = _vocabulary_key(source, stored)
    with safe_open(stored[key].path, framework="pt") as file:
        head: Tensor = file.get_tensor(key)
    return head.float()


def head_weights(source: ModelSource) -> dict[str, Tensor]:
    """The weights of heads that are not in safetensors files under their names, by the encoder's names.

    They are the weight [1, H] of the score that starts from tokens, the layers of BGE-M3, the weights of queries, the
    table of Model2Vec, or dense heads of `pytorch_model.bin`.
    """
    others = _query_weights(source) | _model2vec_table(source) | pickled_head_weights(source.dense)
    return _score_weights(source) | _m3_weights(source) | others


def _model2vec_table(source: ModelSource) -> dict[str, Tensor]:
    if not is_static(source.config) or source.directory is None:
        return {}
    return read_table(source.directory, if_stored_otherwise=True)


def _m3_weights(source: ModelSource) -> dict[str, Tensor]:
    if source.kind.name != "m3" or source.settings.is_new or source.directory is None:
        return {}
    return read_m3_layers(source.directory, hidden_size(source.config))


def _query_weights(source: ModelSource) -> dict[str, Tensor]:
    if source.kind.name != "sparse" or source.settings.queries is None:
        return {}
    return {QUERY_WEIGHTS: read_query_weights(source.settings.queries, source.directory, source.dimension)}


def _score_weights(source: ModelSource) -> dict[str, Tensor]:
    """The weight [1, H] of the head that starts from tokens, by the encoder's name; nothing for other models.

    Only the rows of these tokens are read, from safetensors. A ModelError if the directory has no vocabulary head.
    """
    if source.kind.name != "cross_encoder" or not source.settings.tokens or source.directory is None:
        return {}
    stored = stored_tensors(source.directory)
    key = _vocabulary_key(source, stored)
    with safe_open(stored[key].path, framework="pt") as file:
        rows = [file.get_slice(key)[token : token + 1][0] for token in source.settings.tokens]
    return {_SCORE: _score_of(rows)}


def _vocabulary_key(source: ModelSource, stored: Mapping[str, TensorLocation]) -> str:
    """The name of the vocabulary head in the files, of the embedding table if both are tied; ModelError without one."""
    keys = [key for key in (_VOCABULARY_HEAD,) if key in stored]
    if getattr(source.config.get_text_config(), "tie_word_embeddings", False):
        keys = [key for key in stored if key.split(".", 1)[-1] == _EMBEDDINGS or key == _EMBEDDINGS]
    if len(keys) != 1 or keys[0].replace(".weight", ".bias") in stored:
        raise ModelError(
            f"{source.directory} has no vocabulary head without a bias ({_VOCABULARY_HEAD}), whose rows the score of "
            "tokens starts from; set model.score_head=classification to train a new head"
        )
    return keys[0]


def _score_of(rows: list[Tensor]) -> Tensor:
    return (rows[0].float() - sum(row.float() for row in rows[1:]))[None]


def _auto_class(source: ModelSource) -> Any:
    if source.kind.name == "sparse":
        return language_model_class(source.config)
    return AutoModel if source.kind.name != "cross_encoder" else AutoModelForSequenceClassification


def _require_plausible_size(source: ModelSource, directory: Path) -> None:
    """Reject a configuration far larger than the stored weights before allocating memory."""
    stored = sum(path.stat().st_size for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
    needed = sum(parameter.numel() for parameter in build_encoder(source).parameters())
    if stored and needed > _MAX_PARAMETERS_PER_BYTE * stored:
        raise ModelError(
            f"{directory / 'config.json'} describes {needed:,} parameters, but the weights have only {stored:,} bytes: "
            "they belong to another model"
        )
    # transformers reads a tensor before it compares the shapes.
    for location in stored_tensors(directory).values():
        with safe_open(location.path, framework="pt") as file:
            numbers = math.prod(file.get_slice(location.key).get_shape())
        if numbers > max(needed, _MAX_TENSOR):
            raise ModelError(
                f"{location.path}: {location.key} has {numbers:,} numbers, and the whole model that config.json "
                f"describes {needed:,} parameters: it belongs to another model"
            )


def locate_weights(source: ModelSource, shapes: Mapping[str, torch.Size]) -> dict[str, TensorLocation] | None:
    """The location of each of the encoder's tensors, or None if they cannot be read one by one.

    They can if the directory has safetensors files with the model's own keys, possibly with its prefix (`roberta.`,
    `bert.`, `model.`), and equal shapes. Old names and pickles are left to `full_state_dict`. The weight of a score of
    tokens has no location, see `head_weights`.
    """
    if source.directory is None:
        return None
    stored = stored_tensors(source.directory)
    locations: dict[str, TensorLocation] = {}
    for index, dense in enumerate(source.dense):
        locations |= _dense_locations(index, dense)
    names = [name.removeprefix("backbone.") for name in shapes if name.startswith("backbone.")]
    prefixes = {key.removesuffix(names[0]) for key in stored if key.endswith(names[0])}
    for prefix in sorted(prefixes, key=len):
        if all(prefix + name in stored for name in names):
            locations |= {"backbone." + name: stored[prefix + name] for name in names}
            break
    heads = [name for name in shapes if name.startswith(HEAD)]
    locations |= {name: stored[key] for name in heads if (key := classifier_name(name, "")) in stored}
    if source.kind.name == "cross_encoder" and source.settings.linear is not None:
        locations[_SCORE] = _linear_location(source.settings.linear)
    computed = {_SCORE} if source.kind.name == "cross_encoder" and source.settings.tokens else set()
    computed |= {QUERY_WEIGHTS} & set(shapes)
    pickled = tuple(f"dense.{index}." for index, dense in enumerate(source.dense) if is_pickled(dense))
    computed |= {name for name in shapes if name.startswith(pickled)} if pickled else set()
    if source.kind.name == "m3" and not source.settings.is_new:
        computed = {name for name in shapes if name.startswith(LAYERS)}
    if is_static(source.config) and TABLE not in locations:
        computed = {TABLE}
    if set(locations) != set(shapes) - computed or not shapes_match(locations, shapes):
        return None
    return locations


def _dense_locations(index: int, dense: DenseSource) -> dict[str, TensorLocation]:
    if dense.directory is None or is_pickled(dense):
        return {}
    stored = stored_tensors(dense.directory)
    shapes = {"linear.weight": torch.Size([dense.num_out, dense.num_in])}
    if dense.bias:
        shapes["linear.bias"] = torch.Size([dense.num_out])
    if dense.is_inline:
        stored = {name: location for name, location in stored.items() if name in shapes}
    if set(stored) != set(shapes) or not shapes_match(stored, shapes):
        expected = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ModelError(
            f"{dense.directory / 'model.safetensors'} should contain {expected}: this head would be random"
        )
    return {f"dense.{index}.{key}": location for key, location in stored.items()}


def _linear_location(directory: Path) -> TensorLocation:
    """The weight of the Dense module that is the head of a cross-encoder."""
    stored = stored_tensors(directory)
    if "linear.weight" not in stored:
        raise ModelError(f"{directory / 'model.safetensors'} has no linear.weight: this head would be random")
    return stored["linear.weight"]
