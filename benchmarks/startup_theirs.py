"""A training with sentence-transformers up to its first step: `python -m benchmarks.startup_theirs MODEL ROWS OUTPUT`.

It imports nothing of embedtrain, so that its start is that of a user's script.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import TrainerCallback


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints the end of the first step."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        print("step 1/1", flush=True)


def main() -> None:
    path, rows, output = sys.argv[1:]
    pairs = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    model = SentenceTransformer(path)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=output, max_steps=1, per_device_train_batch_size=len(pairs), save_strategy="no", report_to="none"
    )
    SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list([{"anchor": row["query"], "positive": row["pos"][0]} for row in pairs]),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[Report()],
    ).train()


if __name__ == "__main__":
    main()
