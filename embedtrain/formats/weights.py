"""Model directories in the format of sentence-transformers and transformers.

A directory is written in two parts. The architecture (configuration, tokenizer, pooling, prompts) exists before the
first step and is part of every run directory. An export adds weights to a copy of it, rows at a time: all ranks of a
live run write their own rows, or one process streams them from a checkpoint. No process holds the whole model.
"""

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch
from accelerate import init_empty_weights
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoModel

from embedtrain.checkpoint.tensor_files import FileLayout, RowWriter, TensorSpec, file_layout
from embedtrain.config.code import is_code_path
from embedtrain.config.kinds import KIND_FILE, kind_of_files
from embedtrain.config.recipe import ExportDtype
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError
from embedtrain.formats.export_record import DESCRIPTIONS
from embedtrain.formats.sentence_transformers import SETTINGS
from embedtrain.formats.transformers import write_code, write_config, write_dtype, write_rope_theta
from embedtrain.models.adapters import ADAPTER_WEIGHTS, peft_key
from embedtrain.models.encoder import prepare_backbone
from embedtrain.models.stored_weights import stored_dtype, stored_tensors
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import CHECKSUMS, write_json

_WEIGHTS = "model{suffix}.safetensors"
_BACKBONE = "backbone."
# Beside the architecture in a run directory, because checkpoints do not hold the pooler.
_POOLER_FILE = "untrained.safetensors"

# Folder of the PEFT adapter in a model directory, and the prefix of its weights in a WeightStream.
ADAPTER_FOLDER, ADAPTER_PREFIX = "adapter", "adapter:"

# The encoder's name of a weight, index of the first row, rows.
WeightRows: TypeAlias = tuple[str, int, Tensor]

DTYPES = {ExportDtype.fp32: torch.float32, ExportDtype.bf16: torch.bfloat16, ExportDtype.fp16: torch.float16}
_LAYERS = ("colbert_linear.pt", "sparse_linear.pt")  # of FlagEmbedding
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


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
    """Write a sentence-transformers directory without its weights; records the type of the source's weights.

    Each tower is such a directory of its own, in a folder of its name, with the prompts and similarity of the whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = source.kind.files
    if is_code_path(source.kind.name):
        write_json(directory / KIND_FILE, {"kind": source.kind.name})
    if source.towers:
        for name, tower in source.towers.items():
            vectors = replace(tower.vectors, similarity=source.vectors.similarity)
            alone = replace(tower, prompts=source.prompts, vectors=vectors)
            write_architecture(directory / name, alone, tokenizer.of_tower(name))
        files.write(directory, source, tokenizer)
        return
    write_config(directory, source.config)
    write_dtype(directory, stored_dtype(source))
    files.write(directory, source, tokenizer)
    write_code(directory, source)
    if files.has_pooler and (pooler := pooler_weights(source)):
        (directory / _POOLER_FILE).write_bytes(save(pooler))  # files of `save_file` have the mode 0600


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
    files = kind_of_files(architecture)[0].files
    pooler = {name: TensorSpec.of(tensor) for name, _, tensor in pooler_rows(architecture)}
    specs = pooler | files.further_specs(architecture) | dict(specs)
    names = files.stored_names(specs, architecture)
    converted = {name: _convert(specs[name], torch.float32 if names[name].is_float32 else dtype) for name in names}
    # Of the backbone or classifier; other modules have files of their own.
    main = {stored.key: converted[name] for name, stored in names.items() if stored.file is None}
    split = split_state_dict_into_shards_factory(
        main, get_storage_size=lambda spec: spec.num_bytes, max_shard_size=max_file_size, filename_pattern=_WEIGHTS
    )
    members = {file: {key: main[key] for key in keys} for file, keys in split.filename_to_tensors.items()}
    file_of = {key: file for file, tensors in members.items() for key in tensors}
    locations = {}
    for name, stored in names.items():
        file = stored.file or file_of[stored.key]
        members.setdefault(file, {})[stored.key] = converted[name]
        locations[name] = file, stored.key
    if adapter:
        file = f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}"
        keys = {name: peft_key(stored.key) for name, stored in files.stored_names(adapter, architecture).items()}
        members[file] = {keys[name]: _convert(spec, torch.float32) for name, spec in adapter.items()}
        locations |= {ADAPTER_PREFIX + name: (file, key) for name, key in keys.items()}
    return WeightPlan({file: file_layout(tensors) for file, tensors in members.items()}, locations)


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
    for folder in kind_of_files(architecture)[0].files.model_folders(directory):
        write_dtype(folder, dtype)
        if rope_theta is not None:
            write_rope_theta(folder, rope_theta)
        if matryoshka_dims:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            dims = {"is_matryoshka": True, "matryoshka_dimensions": sorted(matryoshka_dims)}
            write_json(folder / "config.json", config | dims)
    for path in () if truncate_dim is None else directory.rglob(SETTINGS):  # those of towers as well
        write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"truncate_dim": truncate_dim})
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
    for folder in kind_of_files(architecture)[0].files.model_folders(architecture):
        prefix = "".join(f"{part}." for part in folder.relative_to(architecture).parts)
        for name, tensor in stored_pooler(folder).items():
            yield prefix + _BACKBONE + name, 0, tensor


def clear_pooler(architecture: Path) -> None:
    """Write zeros in place of the pooler weights, as of a source without a pooler."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in stored_pooler(architecture).items()}
    (architecture / _POOLER_FILE).write_bytes(save(zeros))


def _convert(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(dtype, spec.shape) if spec.dtype.is_floating_point else spec


def weights_digest(source: ModelSource) -> str:
    """A digest of a model's stored weights: names, sizes, and 64 samples of 64 KiB of every file.

    Enough to distinguish models, and a model before and after training; a digest of all bytes of an 8B model would take
    half a minute.
    """
    directories = [
        (prefix, directory)
        for prefix, part in source.parts.items()
        if part.directory is not None
        for directory in (part.directory, *part.module_folders.values())
    ]
    return _sampled_digest(
        (prefix + path.name, path)
        for prefix, directory in directories
        for path in sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin") or p.name in _LAYERS)
    )


def directory_digest(directory: Path) -> str:
    """The same of all files that a model is read from: weights, settings and vocabulary.

    Not of the card, of hidden files, or of those that only describe how an export was made.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = ((path.relative_to(directory).as_posix(), path) for path in files)
    return _sampled_digest(
        (name, path)
        for name, path in names
        if path.name not in DESCRIPTIONS and path.suffix != ".md" and not name.startswith(".")
    )


def _sampled_digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files:
        size = path.stat().st_size
        digest.update(f"{name} {size}".encode())
        with path.open("rb") as file:
            for number in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
