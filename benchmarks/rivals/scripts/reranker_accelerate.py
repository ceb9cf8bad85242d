"""A cross-encoder's training loop written by hand with accelerate and transformers: softmax over a row's documents.

A row without negatives has the positives of four other rows of its batch. A temperature that a training leaves open is
1. Other recommended values: accelerate_loop.py.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

sys.path.insert(0, str(Path(__file__).parent))
from accelerate_loop import Row, train
from common import Training, read_training

BORROWED = 4


def main(training: Training) -> None:
    """Train and save."""
    tokenizer = AutoTokenizer.from_pretrained(training.model)
    max_length = training.query_max_length + training.document_max_length
    group = 1 + (training.negatives or min(BORROWED, training.rank_batch - 1))
    temperature = 1.0 if training.temperature is None else training.temperature

    def collate(rows: list[Row]) -> BatchEncoding:
        positives = [row["pos"][0] for row in rows]
        documents = [
            [positives[number], *row["neg"][: training.negatives]]
            if training.negatives
            else [positives[(number + offset) % len(rows)] for offset in range(group)]
            for number, row in enumerate(rows)
        ]
        return tokenizer(
            [row["query"] for row in rows for _ in range(group)],
            [text for texts in documents for text in texts],
            truncation=True,
            max_length=max_length,
            padding=True,
            pad_to_multiple_of=8 if torch.cuda.is_available() else None,
            return_tensors="pt",
        )

    def loss(model: nn.Module, batch: BatchEncoding, _accelerator: Accelerator) -> Tensor:
        logits = model(**batch).logits.view(-1, group) / temperature
        return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))

    def build() -> nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(training.model, num_labels=1)

    def save(model: nn.Module) -> None:
        model.save_pretrained(training.trained)
        tokenizer.save_pretrained(training.trained)

    train(training, build, collate, loss, save)


if __name__ == "__main__":
    main(read_training())
