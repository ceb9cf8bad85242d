"""Model directories that sentence-transformers and transformers open: everything but the training of them.

A directory is written in two parts. The architecture (configuration, tokenizer, pooling, prompts) is known
before the first step and lies in every run directory; weights are added to a copy of it. So an export from
a live run and one from a checkpoint, later and elsewhere, are the same few lines.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedtrain.checkpoint.tensors import own_storage
from embedtrain.config.schema import ExportDtype, Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.models.build import stored_dtype
from embedtrain.models.encoder import hidden_size
from embedtrain.models.source import ModelSource
from embedtrain.models.untrained import untrained_tensors

# The oldest names that sentence-transformers gave its modules: every version from 2.2 on opens them.
_MODULE = "sentence_transformers.models."
_POOLING_FLAGS = {
    Pooling.cls: "pooling_mode_cls_token",
    Pooling.mean: "pooling_mode_mean_tokens",
    Pooling.last: "pooling_mode_lasttoken",
}
_LARGEST_FILE = "5GB"
# Beside the architecture, for it is weights that no checkpoint holds.
_UNTRAINED = "untrained.safetensors"

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
    note_dtype(directory, stored_dtype(source))
    if untrained := untrained_tensors(source):
        save_file(untrained, directory / _UNTRAINED)
    tokenizer.tokenizer.model_max_length = tokenizer.max_length
    tokenizer.tokenizer.save_pretrained(directory)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    _write_json(directory / "1_Pooling" / "config.json", _pooling_config(source.pooling, hidden_size(source.config)))
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


def write_model(directory: Path, architecture: Path, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Copy the architecture and add the weights, cast to `dtype`.

    Args:
        directory: must not exist.
        architecture: written by `write_architecture`.
        state: the encoder's whole state dict (`backbone.*`, `dense.<index>.*`).
        dtype: what floating-point weights are stored in.
    """
    shutil.copytree(architecture, directory, ignore=shutil.ignore_patterns(_UNTRAINED))
    if (architecture / _UNTRAINED).is_file():
        state = {"backbone." + name: tensor for name, tensor in load_file(architecture / _UNTRAINED).items()} | dict(
            state
        )
    note_dtype(directory, dtype)

    def stored(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): own_storage(tensor.to(dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in state.items()
            if name.startswith(prefix)
        }

    save_torch_state_dict(stored("backbone."), directory, max_shard_size=_LARGEST_FILE, metadata={"format": "pt"})
    for index, folder in enumerate(sorted(directory.glob("*_Dense"))):
        save_file(stored(f"dense.{index}."), folder / "model.safetensors")


def note_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Say in config.json what type the weights are stored in."""
    path = directory / "config.json"
    _write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")})


def _pooling_config(pooling: Pooling, dimension: int) -> dict[str, Any]:
    flags = {flag: kind is pooling for kind, flag in _POOLING_FLAGS.items()}
    none = {"pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}
    return {"word_embedding_dimension": dimension} | flags | none | {"include_prompt": True}


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
