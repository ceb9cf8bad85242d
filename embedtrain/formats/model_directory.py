"""Model directories in the format of sentence-transformers and transformers.

A directory is written in two parts. The architecture (configuration, tokenizer, pooling, prompts) exists before the
first step and is part of every run directory. An export adds weights to a copy of it, rows at a time: all ranks of a
live run write their own rows, or one process streams them from a checkpoint. No process holds the whole model.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoConfig, AutoModel

from embedtrain.checkpoint.tensor_files import FileLayout, RowWriter, TensorSpec, file_layout
from embedtrain.config.recipe import ExportDtype, Pooling
from embedtrain.data.pairs import PairTokenizer
from embedtrain.data.token_rows import TokenRowTokenizer
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError
from embedtrain.formats.cross_encoder import stored_name, with_pair_format, write_cross_encoder_settings
from embedtrain.formats.late_interaction import write_late_interaction_settings
from embedtrain.formats.m3 import layer_locations
from embedtrain.formats.portable_files import write_config, write_rope_theta, write_tokenizer
from embedtrain.formats.sparse import (
    has_word_weights,
    query_weight_locations,
    stored_word_name,
    write_sparse_settings,
)
from embedtrain.models.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from embedtrain.models.adapter_files import peft_key
from embedtrain.models.encoder import hidden_size, prepare_backbone
from embedtrain.models.m3_files import write_m3_settings
from embedtrain.models.module_settings import SETTINGS
from embedtrain.models.static_embedding import MODEL_TYPE, STATIC_EMBEDDING, is_static, write_static_tokenizer
from embedtrain.models.stored_weights import stored_dtype, stored_tensors
from embedtrain.models.types import ModelSource
from embedtrain.utils.checksums import CHECKSUMS
from embedtrain.utils.files import write_json

# The oldest module names of sentence-transformers: every version from 2.2 on opens them.
_MODULE = "sentence_transformers.models."
_POOLING_FLAGS = {
    Pooling.cls: "pooling_mode_cls_token",
    Pooling.mean: "pooling_mode_mean_tokens",
    Pooling.last: "pooling_mode_lasttoken",
    Pooling.max: "pooling_mode_max_tokens",
    Pooling.weighted_mean: "pooling_mode_weightedmean_tokens",
}
_WEIGHTS = "model{suffix}.safetensors"
_BACKBONE = "backbone."
# Beside the architecture in a run directory, because checkpoints do not hold the pooler.
_POOLER_FILE = "untrained.safetensors"

# Folder of the PEFT adapter in a model directory, and the prefix of its weights in a WeightStream.
ADAPTER_FOLDER, ADAPTER_PREFIX = "adapter", "adapter:"

# The encoder's name of a weight, index of the first row, rows.
WeightRows: TypeAlias = tuple[str, int, Tensor]

DTYPES = {ExportDtype.fp32: torch.float32, ExportDtype.bf16: torch.bfloat16, ExportDtype.fp16: torch.float16}


def pooler_weights(source: ModelSource) -> dict[str, Tensor]:
    """The pooler weights that `prepare_backbone` removes, by the backbone's own names.

    They are those of the source if it stores them, else zeros. If an export lacked them, transformers would initialise
    them at random and report missing weights to everyone who opens the model.
    """
    with init_empty_weights(include_buffers=False):
        backbone = AutoModel.from_config(source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code)
    shapes = {name: tensor.shape for name, tensor in backbone.state_dict().items()}
    dropped = shapes.keys() - prepare_backbone(backbone).state_dict().keys()
    stored = stored_tensors(source.directory) if source.directory is not None and dropped else {}
    weights: dict[str, Tensor] = {}
    for name in sorted(dropped):
        weights[name] = torch.zeros(shapes[name])
        for key in (name, f"{backbone.base_model_prefix}.{name}"):
            if key in stored:
                with safe_open(stored[key].path, framework="pt") as file:
                    tensor = file.get_tensor(key)
                if tensor.shape == shapes[name]:
                    weights[name] = tensor.float()
    return weights


def write_architecture(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    """Write a sentence-transformers directory without its weights; records the type of the source's weights."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, source.config)
    _write_dtype(directory, stored_dtype(source))
    own, has_chat = tokenizer.tokenizer, False
    if source.kind.name == "cross_encoder" and source.settings.template is not None:
        assert isinstance(tokenizer, PairTokenizer)
        own, has_chat = with_pair_format(tokenizer, source)
    static = is_static(source.config)
    if static:
        write_static_tokenizer(directory, own, tokenizer.max_length)
    else:
        write_tokenizer(directory, own, tokenizer.max_length)
    _write_code(directory, source)
    if source.kind.name == "cross_encoder":
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        assert isinstance(tokenizer, PairTokenizer)
        write_cross_encoder_settings(directory, source, config, tokenizer, has_chat=has_chat)
        return
    if source.kind.name == "sparse":
        write_sparse_settings(directory, source, tokenizer)
        return
    if pooler := pooler_weights(source):
        (directory / _POOLER_FILE).write_bytes(save(pooler))  # files of `save_file` have the mode 0600
    if isinstance(tokenizer, TokenRowTokenizer):
        write_late_interaction_settings(directory, source, tokenizer)
        return
    if source.kind.name == "m3":
        write_m3_settings(directory, source.settings)
    modules = [("", STATIC_EMBEDDING)] if static else [("", "Transformer"), ("1_Pooling", "Pooling")]
    if not static:
        write_json(directory / "1_Pooling" / "config.json", _pooling_config(source))
        settings: dict[str, Any] = {"max_seq_length": tokenizer.max_length, "do_lower_case": False}
        write_json(directory / "sentence_bert_config.json", settings)
    for dense in source.dense:
        folder = f"{len(modules)}_Dense"
        modules.append((folder, "Dense"))
        settings = {"in_features": dense.num_in, "out_features": dense.num_out, "bias": dense.bias}
        write_json(directory / folder / "config.json", settings | {"activation_function": dense.activation})
    if source.normalize:
        folder = f"{len(modules)}_Normalize"
        modules.append((folder, "Normalize"))
        (directory / folder).mkdir(exist_ok=True)
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": _MODULE + kind}
        for index, (path, kind) in enumerate(modules)
    ]
    write_json(directory / "modules.json", entries)
    write_json(
        directory / SETTINGS,
        {
            "__version__": {},
            "prompts": {"query": "", "document": ""} | source.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": source.similarity.value,
        },
    )


@dataclass(frozen=True, slots=True)
class WeightStream:
    """The weights of a model to export."""

    specs: Mapping[str, TensorSpec]  # of the unsharded weights, by the encoder's names
    rows: Iterator[WeightRows]  # of this process; names of the adapter's weights have the prefix ADAPTER_PREFIX
    adapter: Mapping[str, TensorSpec] = field(default_factory=dict)  # specs of the adapter's weights


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The weight files of a model directory."""

    files: Mapping[str, FileLayout]  # path below the directory -> layout of the file
    locations: Mapping[str, tuple[str, str]]  # the encoder's name of a weight -> file, and name in the file


def plan_weights(
    architecture: Path,
    specs: Mapping[str, TensorSpec],
    dtype: torch.dtype,
    max_file_size: str,
    adapter: Mapping[str, TensorSpec] | None = None,
) -> WeightPlan:
    """Compute the layout of the weight files; the same in every process.

    Floating-point weights are converted to `dtype`, those of `adapter` are also written in float32 as a PEFT adapter. A
    backbone above `max_file_size`, such as `5GB`, is split into several files.
    """
    pooler = {name: TensorSpec.of(tensor) for name, _, tensor in pooler_rows(architecture)}
    converted = {name: _convert(spec, dtype) for name, spec in (pooler | dict(specs)).items()}
    queries = query_weight_locations(converted)
    # Not a difference of sets, whose order differs between processes: the files of the ranks would not fit together.
    names = _stored_names(architecture, [name for name in converted if name not in queries])
    backbone = {stored: converted[name] for name, stored in names.items()}
    split = split_state_dict_into_shards_factory(
        backbone, get_storage_size=lambda spec: spec.num_bytes, max_shard_size=max_file_size, filename_pattern=_WEIGHTS
    )
    members = {file: {name: backbone[name] for name in names} for file, names in split.filename_to_tensors.items()}
    file_of = {name: file for file, tensors in members.items() for name in tensors}
    locations = {name: (file_of[stored], stored) for name, stored in names.items()}
    for index, folder in enumerate(sorted(path.name for path in architecture.glob("*_Dense"))):
        prefix, file = f"dense.{index}.", f"{folder}/model.safetensors"
        members[file] = {name.removeprefix(prefix): spec for name, spec in converted.items() if name.startswith(prefix)}
        locations |= {prefix + name: (file, name) for name in members[file]}
    for name, (file, key) in layer_locations(converted).items():
        members.setdefault(file, {})[key] = converted[name]
        locations[name] = file, key
    for name, (file, key) in queries.items():
        members[file], locations[name] = {key: _convert(specs[name], torch.float32)}, (file, key)
    if adapter:
        file = f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}"
        keys = {name: peft_key(stored) for name, stored in _stored_names(architecture, adapter).items()}
        members[file] = {keys[name]: _convert(spec, torch.float32) for name, spec in adapter.items()}
        locations |= {ADAPTER_PREFIX + name: (file, key) for name, key in keys.items()}
    return WeightPlan({file: file_layout(tensors) for file, tensors in members.items()}, locations)


def _stored_names(architecture: Path, names: Iterable[str]) -> dict[str, str]:
    """Of each weight in the files of the backbone or classifier, its name there; other modules have other files."""
    is_table = json.loads((architecture / "config.json").read_text(encoding="utf-8")).get("model_type") == MODEL_TYPE
    if (architecture / "1_Pooling").is_dir() or (architecture / "1_Dense").is_dir() or is_table:
        return {name: name.removeprefix(_BACKBONE) for name in names if name.startswith(_BACKBONE)}
    config = AutoConfig.from_pretrained(architecture, local_files_only=True)
    stored = stored_word_name if has_word_weights(architecture) else stored_name
    return {name: stored(config)(name) for name in names}


def create_model_directory(
    directory: Path,
    architecture: Path,
    plan: WeightPlan,
    dtype: torch.dtype,
    *,
    truncate_dim: int | None = None,
    rope_theta: float | None = None,
    matryoshka_dims: Collection[int] = (),
) -> None:
    """Copy the architecture, and write the index if the weights are split into several files.

    With `truncate_dim`, sentence-transformers returns the first so many dimensions of each vector; `rope_theta` is the
    base of rotary positions if it is not that of the architecture. Of requests for fewer dimensions, vLLM accepts
    `matryoshka_dims`.
    """
    shutil.copytree(architecture, directory, ignore=shutil.ignore_patterns(_POOLER_FILE, CHECKSUMS))
    _write_dtype(directory, dtype)
    if rope_theta is not None:
        write_rope_theta(directory, rope_theta)
    if matryoshka_dims:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        dims = {"is_matryoshka": True, "matryoshka_dimensions": sorted(matryoshka_dims)}
        write_json(directory / "config.json", config | dims)
    if truncate_dim is not None:
        settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
        write_json(directory / SETTINGS, settings | {"truncate_dim": truncate_dim})
    weights = {name: file for file, name in plan.locations.values() if "/" not in file and file.startswith("model")}
    if len(set(weights.values())) > 1:
        total = sum(plan.files[file].specs[name].num_bytes for name, file in weights.items())
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        write_json(directory / "model.safetensors.index.json", content)


def write_weights(directory: Path, plan: WeightPlan, weights: Iterable[WeightRows], *, writes_header: bool) -> None:
    """Write rows of weights into the files of a directory; several processes may do so at the same time.

    One process has to write the headers of all files. Raises CheckpointError if a weight exceeds the range of the type
    in which it is stored.
    """
    with ExitStack() as stack:
        writers: dict[str, RowWriter] = {}

        def writer(file: str) -> RowWriter:
            if file not in writers:
                row_writer = RowWriter(directory / file, plan.files[file], writes_header=writes_header)
                writers[file] = stack.enter_context(row_writer)
            return writers[file]

        for file in plan.files if writes_header else ():
            writer(file)
        for key, first, rows in weights:
            file, name = plan.locations[key]
            dtype = plan.files[file].specs[name].dtype
            converted = rows.detach().to("cpu", dtype)
            if dtype == torch.float16 and not bool(converted.isfinite().all()) and bool(rows.isfinite().all()):
                raise CheckpointError(
                    f"{name} has weights up to {float(rows.abs().max()):.3g}, and float16 ends at 65504: "
                    f"export as bf16 or fp32"
                )
            writer(file).write(name, converted, first)


def stored_pooler(architecture: Path) -> dict[str, Tensor]:
    """The pooler weights that are stored beside the architecture, by the backbone's own names."""
    path = architecture / _POOLER_FILE
    return load_file(path) if path.is_file() else {}


def pooler_rows(architecture: Path) -> Iterator[WeightRows]:
    """The same as rows, by the encoder's names."""
    for name, tensor in stored_pooler(architecture).items():
        yield _BACKBONE + name, 0, tensor


def clear_pooler(architecture: Path) -> None:
    """Write zeros in place of the pooler weights, as of a source without a pooler."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in stored_pooler(architecture).items()}
    (architecture / _POOLER_FILE).write_bytes(save(zeros))


def _write_code(directory: Path, source: ModelSource) -> None:
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


def _convert(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(dtype, spec.shape) if spec.dtype.is_floating_point else spec


def _write_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Record in config.json the type in which the weights are stored."""
    path = directory / "config.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")})


def _pooling_config(source: ModelSource) -> dict[str, Any]:
    dimension = hidden_size(source.config)
    flags = {flag: kind is source.pooling for kind, flag in _POOLING_FLAGS.items()}
    unused = {"pooling_mode_mean_sqrt_len_tokens": False}
    return {"word_embedding_dimension": dimension} | flags | unused | {"include_prompt": source.include_prompt}
