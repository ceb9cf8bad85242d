"""Opens an exported directory with plain transformers."""

from pathlib import Path
from typing import cast

from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from embedtrain.checkpoint.export.cross_encoder import open_checked
from embedtrain.checkpoint.export.m3 import m3_encoder
from embedtrain.errors import CheckpointError
from embedtrain.models.encoder import Dense, Encoder
from embedtrain.models.late_interaction import LateInteractionEncoder
from embedtrain.models.stored_weights import stored_tensors
from embedtrain.models.types import ModelSource


def open_encoder(directory: Path, source: ModelSource) -> Encoder:
    """The fp32 backbone that transformers loads from a directory, with our pooling and heads."""
    return add_heads(open_checked(AutoModel, directory, source), source)


def add_heads(backbone: nn.Module, source: ModelSource) -> Encoder:
    """An encoder of a backbone with a directory's pooling, dense heads and normalisation."""
    heads = []
    for dense in source.dense:
        head = Dense(dense.num_in, dense.num_out, bias=dense.bias, activation=dense.activation)
        assert dense.directory is not None
        for name, location in stored_tensors(dense.directory).items():
            with safe_open(location.path, framework="pt") as file:
                head.get_parameter(name).data.copy_(file.get_tensor(location.key))
        heads.append(head)
    own = cast("PreTrainedModel", backbone)
    if source.token_vectors is not None:
        return LateInteractionEncoder(own, heads).eval()
    if source.m3 is not None:
        return m3_encoder(own, source)
    return Encoder(own, source.pooling, normalize=source.normalize, dense=heads).eval()


def open_tokenizer(directory: Path, source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer as plain transformers loads it from a directory."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise CheckpointError(f"transformers cannot open {directory}: {type(error).__name__}: {error}") from error
    return tokenizer


def tokenize_padded(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], documents: list[str] | None = None
) -> BatchEncoding:
    """One padded batch [N, L] of texts, or of their pairs with `documents`, cut to the model's maximum length."""
    return tokenizer(texts, documents, padding=True, truncation=True, return_tensors="pt")
