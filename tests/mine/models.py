"""Small teachers."""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from tests.small import small_tokenizer


def save_cross_encoder(folder: Path, num_labels: int = 1) -> Path:
    """BERT with random weights that reads two texts together."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.2, pad_token_id=1, num_labels=num_labels,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder
