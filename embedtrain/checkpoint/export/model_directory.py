"""Model directories that sentence-transformers and transformers open: everything but the training of them.

A directory is written in two parts. The architecture (configuration, tokenizer, pooling, prompts) is known
before the first step and lies in every run directory; weights are added to a copy of it, rows at a time: by all
ranks of a live run, each its own, or from a checkpoint's files by one process, later and elsewhere. So nobody
holds the whole model.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from embedtrain.checkpoint.weight_files import FileLayout, RowWriter, TensorSpec, file_layout
from embedtrain.config.recipe import ExportDtype, Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError
from embedtrain.models.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from embedtrain.models.adapter_files import peft_key
from embedtrain.models.build import stored_dtype, stored_tensors
from embedtrain.models.encoder import hidden_size, prepare_backbone
from embedtrain.models.source import ModelSource


def pooler_tensors(source: ModelSource) -> dict[str, Tensor]:
    """The backbone's tensors that `prepare_backbone` takes away, by the backbone's own names.

    They are the source's where it stores them, else zeros. Left out of an export, transformers would make
    them up at random and print a report of missing weights at everyone who opens the model.
    """
    with init_empty_weights(include_buffers=False):
        backbone = AutoModel.from_config(source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code)
    shapes = {name: tensor.shape for name, tensor in backbone.state_dict().items()}
    dropped = shapes.keys() - prepare_backbone(backbone).state_dict().keys()
    stored = stored_tensors(source.directory) if source.directory is not None and dropped else {}
    found: dict[str, Tensor] = {}
    for name in sorted(dropped):
        found[name] = torch.zeros(shapes[name])
        for key in (name, f"{backbone.base_model_prefix}.{name}"):
            if key in stored:
                with safe_open(stored[key].path, framework="pt") as file:
                    tensor = file.get_tensor(key)
                if tensor.shape == shapes[name]:
                    found[name] = tensor.float()
    return found


# The oldest names that sentence-transformers gave its modules: every version from 2.2 on opens them.
_MODULE = "sentence_transformers.models."
_POOLING_FLAGS = {
    Pooling.cls: "pooling_mode_cls_token",
    Pooling.mean: "pooling_mode_mean_tokens",
    Pooling.last: "pooling_mode_lasttoken",
}
_WEIGHTS = "model{suffix}.safetensors"
_BACKBONE = "backbone."
# Beside the architecture, for it is weights that no checkpoint holds.
_UNTRAINED = "untrained.safetensors"

# An adapter as PEFT reads it, in its own folder of a model directory; and what begins the names of its pieces.
ADAPTER_FOLDER, ADAPTER_PREFIX = "adapter", "adapter:"

# The encoder's name of a weight, the first row, and rows.
WeightRows: TypeAlias = tuple[str, int, Tensor]

DTYPES = {ExportDtype.fp32: torch.float32, ExportDtype.bf16: torch.bfloat16, ExportDtype.fp16: torch.float16}


def write_architecture(directory: Path, source: ModelSource, tokenizer: TextTokenizer) -> None:
    """Write all of a sentence-transformers directory but the weights.

    Args:
        directory: made if missing.
        source: what the encoder was built from; the type its weights are stored in is noted.
        tokenizer: with the length that texts are cut to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source.config.save_pretrained(directory)
    _write_code(directory, source)
    write_dtype(directory, stored_dtype(source))
    if untrained := pooler_tensors(source):
        save_file(untrained, directory / _UNTRAINED)
    tokenizer.tokenizer.model_max_length = tokenizer.max_length
    tokenizer.tokenizer.save_pretrained(directory)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    _write_json(directory / "1_Pooling" / "config.json", _pooling_config(source))
    for dense in source.dense:
        folder = f"{len(modules)}_Dense"
        modules.append((folder, "Dense"))
        _write_json(
            directory / folder / "config.json",
            {
                "in_features": dense.num_in,
                "out_features": dense.num_out,
                "bias": dense.bias,
                "activation_function": dense.activation,
            },
        )
    if source.normalize:
        folder = f"{len(modules)}_Normalize"
        modules.append((folder, "Normalize"))
        (directory / folder).mkdir(exist_ok=True)
    _write_json(
        directory / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": _MODULE + kind}
            for index, (path, kind) in enumerate(modules)
        ],
    )
    _write_json(
        directory / "sentence_bert_config.json", {"max_seq_length": tokenizer.max_length, "do_lower_case": False}
    )
    _write_json(
        directory / "config_sentence_transformers.json",
        {
            "__version__": {},
            "prompts": {"query": "", "document": ""} | source.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )


@dataclass(frozen=True, slots=True)
class WeightStream:
    """What is to be written of a model.

    Attributes:
        specs: of the model's weights, whole, by the encoder's names.
        rows: this process's; names of an adapter's begin with OF_ADAPTER.
        adapter: of the weights that make up its adapter, if it has one.
    """

    specs: Mapping[str, TensorSpec]
    rows: Iterator[WeightRows]
    adapter: Mapping[str, TensorSpec] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Which file of a model directory has which weight, under which name.

    Attributes:
        files: path below the directory -> what the file looks like.
        places: the encoder's name of a weight -> file, and name in it.
    """

    files: Mapping[str, FileLayout]
    places: Mapping[str, tuple[str, str]]


def plan_weights(
    architecture: Path,
    specs: Mapping[str, TensorSpec],
    dtype: torch.dtype,
    largest: str,
    adapter: Mapping[str, TensorSpec] | None = None,
) -> WeightPlan:
    """Lay out the weight files of a directory, alike in every process.

    Args:
        architecture: written by `write_architecture`.
        specs: of the encoder's weights (`backbone.*`, `dense.<index>.*`), whole.
        dtype: what floating-point weights are stored in.
        largest: the backbone is split into files of at most that size, such as `5GB`.
        adapter: of weights that are written once more as an adapter of PEFT's, by the encoder's names; float32.
    """
    stored = {name: _stored(spec, dtype) for name, spec in (pooler_specs(architecture) | dict(specs)).items()}
    backbone = {name.removeprefix(_BACKBONE): spec for name, spec in stored.items() if name.startswith(_BACKBONE)}
    split = split_state_dict_into_shards_factory(
        backbone, get_storage_size=lambda spec: spec.num_bytes, max_shard_size=largest, filename_pattern=_WEIGHTS
    )
    members = {file: {name: backbone[name] for name in names} for file, names in split.filename_to_tensors.items()}
    places = {_BACKBONE + name: (file, name) for file, names in members.items() for name in names}
    for index, folder in enumerate(sorted(path.name for path in architecture.glob("*_Dense"))):
        prefix, file = f"dense.{index}.", f"{folder}/model.safetensors"
        members[file] = {name.removeprefix(prefix): spec for name, spec in stored.items() if name.startswith(prefix)}
        places |= {prefix + name: (file, name) for name in members[file]}
    if adapter:
        file = f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}"
        members[file] = {peft_key(name): _stored(spec, torch.float32) for name, spec in adapter.items()}
        places |= {ADAPTER_PREFIX + name: (file, peft_key(name)) for name in adapter}
    return WeightPlan({file: file_layout(tensors) for file, tensors in members.items()}, places)


def create_model_directory(directory: Path, architecture: Path, plan: WeightPlan, dtype: torch.dtype) -> None:
    """Make the directory: a copy of the architecture, and the index where weights lie in several files.

    Raises:
        OSError: it exists, or cannot be written.
    """
    shutil.copytree(architecture, directory, ignore=shutil.ignore_patterns(_UNTRAINED))
    write_dtype(directory, dtype)
    weights = {name: file for key, (file, name) in plan.places.items() if key.startswith(_BACKBONE)}
    if len(set(weights.values())) > 1:
        total = sum(plan.files[file].specs[name].num_bytes for name, file in weights.items())
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        _write_json(directory / "model.safetensors.index.json", content)


def write_weights(directory: Path, plan: WeightPlan, pieces: Iterable[WeightRows], *, begins: bool) -> None:
    """Write rows of weights into the files of a directory; several processes may do so side by side.

    Args:
        directory: made by `create_model_directory`.
        plan: the same in every process.
        pieces: what this process has: the encoder's name of a weight, the first row, and rows on whatever device. They
            are cast one piece at a time.
        begins: whether this process begins the files and adds weights that no checkpoint holds; one of them has to.

    Raises:
        CheckpointError: a weight is too large for the type it is to be stored in.
        OSError: the directory cannot be written.
    """
    with ExitStack() as stack:
        writers: dict[str, RowWriter] = {}

        def writer(file: str) -> RowWriter:
            if file not in writers:
                writers[file] = stack.enter_context(RowWriter(directory / file, plan.files[file], begins=begins))
            return writers[file]

        for file in plan.files if begins else ():
            writer(file)
        for key, first, rows in pieces:
            file, name = plan.places[key]
            dtype = plan.files[file].specs[name].dtype
            cast = rows.detach().to("cpu", dtype)
            if dtype == torch.float16 and not bool(cast.isfinite().all()) and bool(rows.isfinite().all()):
                raise CheckpointError(
                    f"{name} has weights up to {float(rows.abs().max()):.3g}, and float16 ends at 65504: "
                    f"export as bf16 or fp32"
                )
            writer(file).write(name, cast, first)


def pooler_specs(architecture: Path) -> dict[str, TensorSpec]:
    """Type and shape of weights that the architecture holds itself, by the encoder's names."""
    return {name: TensorSpec.of(tensor) for name, _, tensor in pooler_rows(architecture)}


def pooler_rows(architecture: Path) -> Iterator[WeightRows]:
    """The weights that the architecture holds itself, for no checkpoint does."""
    if (architecture / _UNTRAINED).is_file():
        for name, tensor in load_file(architecture / _UNTRAINED).items():
            yield _BACKBONE + name, 0, tensor


def _write_code(directory: Path, source: ModelSource) -> None:
    """The Python that a model comes with, where it may run; else config.json no longer speaks of it.

    transformers writes the file of the configuration's class alone, and nobody could open the model.
    """
    if source.trust_remote_code and source.directory is not None:
        for path in source.directory.glob("*.py"):
            shutil.copyfile(path, directory / path.name)
        return
    path = directory / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.pop("auto_map", None) is not None:
        _write_json(path, settings)


def _stored(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(dtype, spec.shape) if spec.dtype.is_floating_point else spec


def write_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Say in config.json what type the weights are stored in."""
    path = directory / "config.json"
    _write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")})


def _pooling_config(source: ModelSource) -> dict[str, Any]:
    dimension = hidden_size(source.config)
    flags = {flag: kind is source.pooling for kind, flag in _POOLING_FLAGS.items()}
    none = {"pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}
    return {"word_embedding_dimension": dimension} | flags | none | {"include_prompt": source.include_prompt}


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
