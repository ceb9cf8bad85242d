"""Exports of models of three representations: a sentence-transformers directory of the dense vector, and two layers.

FlagEmbedding reads the layers as `colbert_linear.pt` and `sparse_linear.pt`; beside them are the same as safetensors.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain.data.m3 import M3Tokenizer
from embedtrain.models.encoder import Encoder, hidden_size
from embedtrain.models.m3 import M3Encoder
from embedtrain.models.m3_files import LAYERS, read_m3_layers, write_m3_layer
from embedtrain.models.tokenizer import resolve_max_length
from embedtrain.models.types import ModelSource


def layer_locations(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Of each weight of the layers among these of the encoder, its file and its name there."""
    split = {name: name.split(".", 1) for name in names if name.startswith(LAYERS)}
    return {name: (f"{layer}.safetensors", key) for name, (layer, key) in split.items()}


def convert_layers(directory: Path) -> None:
    """Write the layers for FlagEmbedding, if the directory has them as safetensors."""
    for name in LAYERS:
        if (directory / f"{name}.safetensors").is_file():
            write_m3_layer(directory / f"{name}.pt", load_file(directory / f"{name}.safetensors"))


def m3_encoder(backbone: torch.nn.Module, source: ModelSource) -> M3Encoder:
    """The encoder of a backbone and the layers of a directory."""
    assert source.kind.name == "m3"
    assert source.directory is not None
    encoder = M3Encoder(backbone, source.settings)
    for name, weight in read_m3_layers(source.directory, hidden_size(source.config)).items():
        encoder.get_parameter(name).data.copy_(weight)
    return encoder.eval()


def probe_m3(encoder: Encoder, tokenizer: M3Tokenizer, texts: tuple[str, ...], device: torch.device) -> Tensor:
    """Of each text its dense vector, the mean of its token vectors, and the mean lexical weight: [N, D + d + 1].

    One text per forward pass; a collective if the encoder is sharded.
    """
    assert isinstance(encoder, M3Encoder)
    settings, ids, outputs = encoder.settings, tokenizer.ids(texts), []
    for row in range(len(ids)):
        with torch.no_grad():
            rows = encoder(tokenizer.chunk(ids, [row]).to(device)).cpu()
        means = rows[1:, : settings.token_dimension].mean(dim=0), rows[:, -2].mean(dim=0, keepdim=True)
        outputs.append(torch.cat([rows[0, : settings.dimension], *means]))
    return torch.stack(outputs)


def m3_of_transformers(
    encoder: Encoder, source: ModelSource, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]
) -> Tensor:
    """`probe_m3` of an encoder whose backbone and tokenizer transformers has opened."""
    own = M3Tokenizer(tokenizer, resolve_max_length(source, tokenizer))
    return probe_m3(encoder.eval(), own, texts, torch.device("cpu"))
