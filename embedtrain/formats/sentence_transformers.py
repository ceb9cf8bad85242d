"""Directories of sentence-transformers: their modules and settings, and models that it opens from them."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedtrain.config.recipe import Pooling
from embedtrain.errors import CheckpointError
from embedtrain.formats.verify import PROBES
from embedtrain.models.encoder import hidden_size
from embedtrain.models.module_settings import OWN_POOLING
from embedtrain.models.pooling import POOLING
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import write_json

TRANSFORMER_SETTINGS = "sentence_bert_config.json"
TRANSFORMER_MODULE = "sentence_transformers.base.modules.transformer.Transformer"
# The oldest module names of sentence-transformers: every version from 2.2 on opens them.
OLD_MODULE = "sentence_transformers.models."

# Texts that it encodes at a time. It sorts them by length, but more of them would all be padded to the longest probe
# text; with one of them, padding would not be tested.
BATCH_SIZE = 2


def write_modules(directory: Path, kinds: Mapping[str, str]) -> None:
    """Write modules.json, from the folders of the modules and their types."""
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write_json(directory / "modules.json", entries)


def write_pooling(directory: Path, source: ModelSource) -> None:
    """Write the settings of the module Pooling."""
    if not isinstance(source.pooling, Pooling):
        write_json(directory / "config.json", {OWN_POOLING: source.pooling, "include_prompt": source.include_prompt})
        return
    flags = {mode.flag: kind is source.pooling for kind, mode in POOLING.items()}
    unused = {"pooling_mode_mean_sqrt_len_tokens": False}
    dimension = {"word_embedding_dimension": hidden_size(source.config)}
    write_json(directory / "config.json", dimension | flags | unused | {"include_prompt": source.include_prompt})


def load_model(class_name: str, directory: Path, source: ModelSource) -> Any:
    """The model of a directory as a class of sentence-transformers, in float32 on the CPU.

    Raises whatever the library raises.
    """
    import sentence_transformers  # only here, because it takes seconds

    return getattr(sentence_transformers, class_name)(
        str(directory),
        device="cpu",
        local_files_only=True,
        trust_remote_code=source.trust_remote_code,
        model_kwargs={"dtype": "float32"},
    )


@contextlib.contextmanager
def opening(directory: Path) -> Iterator[None]:
    """Turn an exception of the library into a CheckpointError that names the directory."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot open {directory}: {type(error).__name__}: {error}"
        ) from error


def probes_of_sentence_transformer(model: Any) -> Tensor:
    """Embeddings of PROBES, [len(PROBES), D], without a prompt, even if the model has one by default."""
    vectors = model.encode(
        list(PROBES), prompt="", batch_size=BATCH_SIZE, convert_to_tensor=True, show_progress_bar=False
    )
    return torch.as_tensor(vectors).float().cpu()
