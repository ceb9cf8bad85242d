"""SparseEncoderTrainer with SpladeLoss around SparseMultipleNegativesRankingLoss, as "Training Overview" recommends.

Vectors are gathered from all ranks, a batch holds no text twice, and the trainer raises the regulariser's weights over
the first third of the steps. Recommended values, of the page and of the loss: weights 5e-5 of queries and 3e-5 of
documents; where a training leaves them open, learning rate 2e-5, 10 % warm-up, no weight decay, temperature 1.
"""

import sys
from pathlib import Path

import torch
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from dense_sentence_transformers import columns
from trainer import ReportSteps, arguments, train_and_save


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SparseEncoder(training.model, device=device)
    model.max_seq_length = training.document_max_length
    ranking = SparseMultipleNegativesRankingLoss(
        model, scale=1 / (training.temperature or 1), gather_across_devices=training.ranks > 1
    )
    loss = SpladeLoss(model, ranking, document_regularizer_weight=3e-5, query_regularizer_weight=5e-5)
    args = SparseEncoderTrainingArguments(
        **arguments(training, lr=2e-5, warmup=0.1, weight_decay=0.0, device=device),
        batch_sampler=BatchSamplers.NO_DUPLICATES,
    )
    trainer = SparseEncoderTrainer(
        model=model, args=args, train_dataset=columns(training), loss=loss, callbacks=[ReportSteps(training)]
    )
    train_and_save(trainer, model, training)


if __name__ == "__main__":
    main(read_training())
