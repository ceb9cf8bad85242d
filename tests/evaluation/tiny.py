"""A small sharded encoder for tests of evaluation, untouched: no forward pass has run on it yet."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertModel

from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.inference.encode import SentenceEncoder
from tests.small import small_tokenizer


class TinyEncoder(nn.Module):
    """BERT with random weights and dropout, mean pooling, normalised."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            max_position_embeddings=64, initializer_range=0.1, pad_token_id=1,
        )  # fmt: skip
        self.backbone = BertModel(config, add_pooling_layer=False)
        self.forwards = 0

    def forward(self, ids: Tensor, mask: Tensor | None, pooled: Tensor | None = None) -> Tensor:
        self.forwards += 1
        mask = torch.ones_like(ids) if mask is None else mask
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = (mask if pooled is None else pooled).unsqueeze(-1).float()
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def sharded_encoder(world: World) -> TinyEncoder:
    encoder = TinyEncoder()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in encoder.backbone.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(encoder, mesh=mesh)
    return encoder


def sentence_encoder(world: World, *, chunk_tokens: int = 40, **options: Any) -> SentenceEncoder:
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    return SentenceEncoder(sharded_encoder(world), tokenizer, world, chunk_tokens=chunk_tokens, **options)
