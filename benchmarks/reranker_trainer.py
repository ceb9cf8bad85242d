"""The training of `make demo-reranker` with sentence-transformers' CrossEncoderTrainer: same rows, steps and batch.

python -m benchmarks.reranker_trainer MODEL ROWS OUTPUT_DIR

Each row of ROWS, as `embedtrain mine` writes them, gives the positive and three of its negatives, drawn at random, to a
softmax over these four scores. `embedtrain evaluate reranker=OUTPUT_DIR` measures the result.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments, losses

STEPS, BATCH_SIZE, LEARNING_RATE, MAX_LENGTH, NUM_NEGATIVES = 200, 32, 1.5e-4, 64, 3


class OwnNegatives(losses.MultipleNegativesRankingLoss):
    """The softmax over the documents of the row alone, as `loss=softmax` has it."""

    def get_in_batch_negatives(self, anchors: list[str], candidates: list[list[str]]) -> Iterator[list[str]]:
        """None."""
        return iter(())


def training_rows(path: str) -> Dataset:
    """A column of queries, of positives, and of each negative."""
    draw = random.Random(0)
    columns: dict[str, list[str]] = {name: [] for name in ("query", "positive", "first", "second", "third")}
    with open(path, encoding="utf-8") as file:
        for row in map(json.loads, file):
            if len(row["neg"]) >= NUM_NEGATIVES:
                texts = (row["query"], row["pos"][0], *draw.sample(row["neg"], NUM_NEGATIVES))
                for column, text in zip(columns.values(), texts, strict=True):
                    column.append(text)
    return Dataset.from_dict(columns)


def main(model_path: str, rows: str, output_dir: str) -> None:
    """Train in one process with one thread, in bf16 autocast, and print the CPU seconds."""
    torch.set_num_threads(1)
    model = CrossEncoder(model_path, num_labels=1, max_length=MAX_LENGTH)
    options: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": True, "seed": 42}
    arguments = CrossEncoderTrainingArguments(
        output_dir=f"{output_dir}-trainer",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        warmup_steps=STEPS // 10,
        dataloader_drop_last=True,
        **options,
    )
    loss = OwnNegatives(model, num_negatives=0, scale=1.0, activation_fn=None)
    started = time.process_time()
    CrossEncoderTrainer(model=model, args=arguments, train_dataset=training_rows(rows), loss=loss).train()
    print(f"{time.process_time() - started:.0f} CPU s")
    model.save_pretrained(output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
