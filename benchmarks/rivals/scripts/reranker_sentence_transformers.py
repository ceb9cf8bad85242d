"""CrossEncoderTrainer with MultipleNegativesRankingLoss, which "Loss Overview" names for a positive and negatives.

Besides the negatives of its row, a query has four others of its rank's batch, which is the loss's default. Recommended
values that a training leaves open, of "Training Overview" and of the loss: learning rate 2e-5, 10 % warm-up, no weight
decay, a sigmoid of the logits with scale 10. A temperature divides the logits themselves.
"""

import sys
from pathlib import Path

import torch
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.cross_encoder.losses import MultipleNegativesRankingLoss

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from dense_sentence_transformers import columns
from trainer import ReportSteps, arguments, train_and_save


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    max_length = training.query_max_length + training.document_max_length
    model = CrossEncoder(training.model, max_length=max_length, device=device)
    scaled = {} if training.temperature is None else {"activation_fn": None, "scale": 1 / training.temperature}
    args = CrossEncoderTrainingArguments(
        **arguments(training, lr=2e-5, warmup=0.1, weight_decay=0.0, device=device),
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        ddp_find_unused_parameters=False,  # with its default, True, the loss's several forward passes are an error
    )
    trainer = CrossEncoderTrainer(
        model=model,
        args=args,
        train_dataset=columns(training),
        loss=MultipleNegativesRankingLoss(model, **scaled),
        callbacks=[ReportSteps(training)],
    )
    train_and_save(trainer, model, training)


if __name__ == "__main__":
    main(read_training())
