"""Directories of transformers: the configuration of a backbone, checked when it is read and written for all readers.

Transformers 4, text-embeddings-inference, vLLM, infinity, fastembed and llama.cpp read fields that transformers 5 no
longer writes, or writes under names and in forms that they do not know.
"""

import difflib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoConfig, PretrainedConfig

from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.tokenizer import write_tokenizer
from embedtrain.models.encoder import disable_unused
from embedtrain.models.file_references import read_json
from embedtrain.models.rope import with_rope_theta
from embedtrain.models.security import require_safe_config
from embedtrain.models.stored_weights import stored_tensors
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json
from embedtrain.utils.formatting import one_line

_CONFIG = "config.json"
# Decoders for which text-embeddings-inference reads the direction of attention under this name.
_BIDIRECTIONAL, _BIDIRECTIONAL_TYPES = "use_bidirectional_attention", ("llama", "mistral", "qwen3")
# Encoders whose implementation in vLLM requires `position_embedding_type`, which transformers 4 wrote.
_ABSOLUTE_POSITIONS = ("roberta", "xlm-roberta")
# Rotary parameters of kinds of layers, and their names in configurations of transformers 4.
_THETAS = {
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
}


def read_config(directory: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration in a model directory; a ModelError if it cannot be read, or needs code that is not trusted."""
    settings = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    if "auto_map" in settings and not trust_remote_code and str(settings.get("model_type")) not in CONFIG_MAPPING:
        raise ModelError(
            f"{directory / 'config.json'} needs Python code of the model (auto_map): review it, and if you trust its "
            "authors write trust_remote_code=true (model.trust_remote_code=true for train) on the command line"
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly anything for invalid values
        raise ModelError(
            f"cannot read a model configuration from {directory} ({type(error).__name__}: {one_line(error)})"
        ) from None
    return check_config(config, str(directory))


def check_config(config: PretrainedConfig, where: str) -> PretrainedConfig:
    """The same configuration without what training does not use; a ModelError if it is not supported."""
    if config.is_encoder_decoder:
        raise ModelError(f"{where} holds {config.model_type}, an encoder-decoder; supported are encoders and decoders")
    require_safe_config(config, where)
    disable_unused(config)
    return config


def reject_typos(values: dict[str, Any], config: PretrainedConfig) -> None:
    """Transformers accepts an unknown key silently and builds the model without it."""
    for name in values:
        matches = difflib.get_close_matches(name, config.to_dict(), n=1, cutoff=0.8)
        if matches and not hasattr(config, name):
            raise ConfigError(f"model.config.{name}: {config.model_type} has no such value; did you mean {matches[0]}?")


def write_config(directory: Path, config: PretrainedConfig) -> None:
    """Write config.json with the class of transformers that the weights of an encoder without head belong to.

    text-embeddings-inference and infinity reject a model without `architectures`, and vLLM takes a backbone whose file
    names a language model for that. Rotary positions and kinds of layers are written in the form of transformers 4,
    too, which would otherwise use its defaults.
    """
    config.save_pretrained(directory)
    stored = read_json(directory / _CONFIG)
    _write(directory, stored | _architectures(stored, config))


def write_code(directory: Path, source: ModelSource) -> None:
    """Copy a model's own Python if it is trusted, otherwise remove the references to it.

    transformers only saves the file with the configuration class, with which the model could not be opened.
    """
    if not source.trust_remote_code:
        remove_code(directory)
    elif source.directory is not None:
        for path in source.directory.glob("*.py"):
            shutil.copyfile(path, directory / path.name)


def remove_code(directory: Path) -> None:
    """Remove the Python of a model directory, and the settings of the model and its tokenizer that refer to some.

    A directory that is written without trust has no code of others, so that trust in it gives them none.
    """
    for path in directory.rglob("*.py"):
        path.unlink()
    for path in directory.rglob("*config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(settings, dict) and settings.pop("auto_map", None) is not None:
            write_json(path, settings)


def write_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Record in config.json the type in which the weights are stored."""
    path = directory / "config.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")})


def complete_older_files(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    """Write what the directory lacks if it comes from a run of a version that wrote fewer settings.

    Those wrote `architectures` for classifiers and language models only.
    """
    if not source.kind.files.is_transformers(source) or "architectures" in (stored := read_json(directory / _CONFIG)):
        return
    _write(directory, stored | _architectures(stored, source.config))
    write_tokenizer(directory, tokenizer.tokenizer, tokenizer.max_length)


def _architectures(stored: Mapping[str, Any], config: PretrainedConfig) -> dict[str, list[str]]:
    """The class of transformers that the weights belong to; empty if it has none for them."""
    model_class = MODEL_MAPPING.get(type(config), None)
    own_class = stored.get("auto_map", {}).get("AutoModel", "").rpartition(".")[2]  # of trusted Python code
    name = own_class if model_class is None else model_class.__name__
    return {"architectures": [name]} if name else {}


def _write(directory: Path, stored: Mapping[str, Any]) -> None:
    """Write config.json with the settings that other readers look for under other names."""
    settings = {**stored, **_rotary_settings(stored), **_layer_settings(stored)}
    if stored["model_type"] == "gemma3_text":
        # text-embeddings-inference requires one base in them; all readers know the names of transformers 4.
        settings.pop("rope_parameters", None)
    write_json(directory / _CONFIG, settings)


def write_rope_theta(directory: Path, theta: float) -> None:
    """Change the base of the rotary positions in config.json, in the forms of transformers 4 and 5.

    Raises ConfigError if the model has none.
    """
    stored = read_json(directory / _CONFIG)
    before = _rotary_parameters(stored)
    parameters = with_rope_theta(before, theta)
    if not before or parameters is None:
        raise ConfigError(f"export.rope_theta={theta:g}: {stored['model_type']} has no rotary positions; leave it out")
    _write(directory, {**stored, "rope_parameters": parameters})


def _rotary_parameters(stored: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a configuration that `_write` wrote; empty if the model has no rotary positions."""
    if stored["model_type"] != "gemma3_text" or "rope_parameters" in stored:
        return dict(stored.get("rope_parameters") or {})
    full = {"rope_type": "default", **(stored.get("rope_scaling") or {}), "rope_theta": stored["rope_theta"]}
    sliding = {"rope_type": "default", "rope_theta": stored["rope_local_base_freq"]}
    return {"full_attention": full, "sliding_attention": sliding}


def _rotary_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions as transformers 4 and engines with code of their own read them."""
    parameters = stored.get("rope_parameters") or {}
    if names := _THETAS.get(stored["model_type"]):
        thetas = {name: parameters[kind]["rope_theta"] for kind, name in names.items() if kind in parameters}
        scaling = {key: value for key, value in parameters.get("full_attention", {}).items() if key != "rope_theta"}
        scaled = scaling.get("rope_type", "default") != "default"
        return thetas | ({"rope_scaling": scaling} if scaled and stored["model_type"] == "gemma3_text" else {})
    if "rope_theta" not in parameters:
        return {}
    settings = {"rope_theta": parameters["rope_theta"]}
    if "partial_rotary_factor" in parameters:
        settings["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    if parameters.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {key: value for key, value in parameters.items() if key not in settings}
    return settings


def _layer_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The direction of attention, the layers with full attention and others, as other readers look for them."""
    if stored["model_type"] in _ABSOLUTE_POSITIONS:
        return {"position_embedding_type": "absolute"}
    if stored["model_type"] in _BIDIRECTIONAL_TYPES and stored.get("is_causal") is False:
        return {_BIDIRECTIONAL: True}
    if stored["model_type"] == "modernbert":
        layers = stored.get("layer_types") or ()
        is_full = [layer == "full_attention" for layer in layers]
        distances = range(1, len(layers) + 1)
        regular = [n for n in distances if is_full == [index % n == 0 for index in range(len(layers))]]
        # llama.cpp reads the constant of layer norms under the name that BERT has for it.
        constant = {"layer_norm_eps": stored["norm_eps"]}
        return constant | ({"global_attn_every_n_layers": regular[0]} if regular else {})
    return {}


def open_checked(auto_class: Any, directory: Path, source: ModelSource) -> Any:
    """The float32 model that a class of transformers loads; CheckpointError if a weight is missing or unexpected."""
    try:
        model, report = auto_class.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # a model's own code may raise anything
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in report[kind]:
            raise CheckpointError(f"transformers opens {directory}, and reports {kind.replace('_', ' ')}: {name}")
    return model


def compare_shapes(directory: Path, shapes: dict[str, list[int]]) -> None:
    """Raise CheckpointError unless the directory's weights have these names and shapes; reads no weights."""
    stored = stored_tensors(directory)
    for name in sorted(stored.keys() ^ shapes.keys()):
        raise CheckpointError(f"{directory}: {name} is {'unexpected' if name in stored else 'missing'} in its files")
    for name, location in stored.items():
        with safe_open(location.path, framework="pt") as file:
            shape = file.get_slice(location.key).get_shape()
        if shape != shapes[name]:
            raise CheckpointError(f"{location.path}: {name} has the shape {shape}, the model expects {shapes[name]}")
