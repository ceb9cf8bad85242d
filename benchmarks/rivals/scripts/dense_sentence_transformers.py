"""SentenceTransformerTrainer, as "Training Overview" and the page of MultipleNegativesRankingLoss recommend.

In-batch negatives are gathered from all ranks, and a batch holds no text twice. Recommended values that a training
leaves open: learning rate 2e-5, 10 % warm-up, no weight decay, scale 20.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.training_args import BatchSamplers

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from trainer import ReportSteps, arguments, train_and_save


def columns(training: Training) -> Dataset:
    """Columns anchor, positive, negative_1, ..."""
    table: dict[str, list[str]] = {"anchor": [], "positive": []}
    table.update({f"negative_{n}": [] for n in range(1, training.negatives + 1)})
    for row in training.rows():
        for column, text in zip(table.values(), [row["query"], row["pos"][0], *row["neg"]], strict=False):
            column.append(text)
    return Dataset.from_dict(table)


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(training.model, device=device)
    model.max_seq_length = training.document_max_length
    temperature = training.temperature or 1 / 20
    loss = losses.MultipleNegativesRankingLoss(model, scale=1 / temperature, gather_across_devices=training.ranks > 1)
    args = SentenceTransformerTrainingArguments(
        **arguments(training, lr=2e-5, warmup=0.1, weight_decay=0.0, device=device),
        batch_sampler=BatchSamplers.NO_DUPLICATES,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=columns(training), loss=loss, callbacks=[ReportSteps(training)]
    )
    train_and_save(trainer, model, training)


if __name__ == "__main__":
    main(read_training())
