"""CrossEncoderTrainer with ListNetLoss, the softmax over the documents of a query, which is the others' loss as well.

A label of 30 makes the softmax of the labels 1 for the positive, as in the other libraries. "Loss Overview" names other
losses first: MultipleNegativesRankingLoss for a positive and negatives, which scores further documents that it draws at
random, and LambdaLoss for lists. Recommended values that a training leaves open, of "Training Overview": learning rate
2e-5, 10 % warm-up, no weight decay.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import ListNetLoss

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from trainer import ReportSteps, arguments, train_and_save


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    max_length = training.query_max_length + training.document_max_length
    model = CrossEncoder(training.model, max_length=max_length, device=device)
    rows = training.rows()
    lists = {
        "query": [row["query"] for row in rows],
        "docs": [[row["pos"][0], *row["neg"][: training.negatives]] for row in rows],
        "labels": [[30.0] + [0.0] * training.negatives for _ in rows],
    }
    trainer = CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(
            **arguments(training, lr=2e-5, warmup=0.1, weight_decay=0.0, device=device),
            ddp_find_unused_parameters=False,  # its default, True, is an error with losses of CrossEncoder
        ),
        train_dataset=Dataset.from_dict(lists),
        loss=ListNetLoss(model, mini_batch_size=-1),
        callbacks=[ReportSteps(training)],
    )
    train_and_save(trainer, model, training)


if __name__ == "__main__":
    main(read_training())
