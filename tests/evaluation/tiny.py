"""A small sharded encoder for tests of evaluation, untouched: no forward pass has run on it yet."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from embedtrain.config.kind_settings import Expansion, QueryExpansion, TokenVectors
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.distributed.world import World
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.kinds.cross_encoder.model import PairFormat, PairLayout
from embedtrain.kinds.late_interaction.model import TokenVectorLayout
from embedtrain.kinds.late_interaction.score import MaxSim
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
        self.dimension = config.hidden_size

    def forward(self, chunk: Chunk) -> tuple[Tensor]:
        self.forwards += 1
        hidden = self.backbone(input_ids=chunk.ids, attention_mask=chunk.mask).last_hidden_state
        weights = (chunk.mask if chunk.pooled is None else chunk.pooled).unsqueeze(-1).float()
        return (nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1),)


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


class TinyTokenEncoder(nn.Module):
    """The same with a normalised vector of 16 dimensions for each of the tokens that `token_rows` names."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = TinyEncoder().backbone
        self.projection = nn.Linear(32, 16, bias=False)
        self.forwards = 0

    def forward(self, chunk: Chunk) -> tuple[Tensor]:
        self.forwards += 1
        hidden = self.backbone(input_ids=chunk.ids, attention_mask=chunk.mask).last_hidden_state
        return (nn.functional.normalize(self.projection(hidden.flatten(0, 1)[chunk.token_rows]), dim=-1),)


# Queries have 9 vectors, and documents none of two words.
TOKEN_VECTORS = TokenVectors(
    document_length=12,
    expansion=Expansion(strategy=QueryExpansion.fixed, length=9),
    skiplist_words=("alpha", "kappa"),
)


def token_encoder(world: World, *, chunk_tokens: int = 40, mean: bool = False, **options: Any) -> SentenceEncoder:
    """A late-interaction model on all ranks."""
    encoder = TinyTokenEncoder()
    fully_shard(encoder, mesh=init_device_mesh("cpu", (world.size,)))
    tokenizer = TextTokenizer(small_tokenizer(), 16, TokenVectorLayout(small_tokenizer(), TOKEN_VECTORS))
    score = MaxSim(mean=mean)
    return SentenceEncoder(encoder, tokenizer, world, chunk_tokens=chunk_tokens, score=score, **options)


class TinyCrossEncoder(nn.Module):
    """BERT with random weights, token types and the head of its class; one score per pair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            max_position_embeddings=64, initializer_range=0.2, pad_token_id=1, num_labels=1,
        )  # fmt: skip
        self.model = BertForSequenceClassification(config)
        self.scored = 0

    def forward(self, chunk: Chunk) -> tuple[Tensor]:
        self.scored += len(chunk.ids)
        return (self.model(input_ids=chunk.ids, attention_mask=chunk.mask, token_type_ids=chunk.types).logits,)


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """`small_tokenizer` with pairs as those of BERT."""
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def pair_encoder(world: World, *, max_length: int = 24, chunk_tokens: int = 60, **prompts: str) -> SentenceEncoder:
    """A sharded cross-encoder, whose vectors are scores."""
    encoder, own = TinyCrossEncoder(), pair_tokenizer()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in encoder.model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(encoder, mesh=mesh)
    tokenizer = TextTokenizer(own, max_length, PairLayout(own, PairFormat.of(own, token_types=True)))
    return SentenceEncoder(encoder, tokenizer, world, chunk_tokens=chunk_tokens, **prompts)


def pair_scorer(world: World, *, windows: bool = False, **options: Any) -> PairScorer:
    """The same as a scorer of pairs."""
    return PairScorer(pair_encoder(world, **options), windows=windows)


def save_tiny_cross_encoder(directory: Path) -> Path:
    """The same as a directory of transformers."""
    TinyCrossEncoder().model.save_pretrained(directory)
    pair_tokenizer().save_pretrained(directory)
    settings = directory / "tokenizer_config.json"  # tokenizers do not write which inputs they make
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | names))
    return directory
