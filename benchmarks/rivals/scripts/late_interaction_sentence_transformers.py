"""MultiVectorEncoderTrainer with MultiVectorMultipleNegativesRankingLoss, as "Training Overview" recommends.

Documents are gathered from all ranks, and a batch holds no text twice. Recommended values that a training leaves open,
of the page and of the loss: learning rate 3e-5, 5 % warm-up, no weight decay, temperature 1.
"""

import sys
from pathlib import Path

import torch
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from dense_sentence_transformers import columns
from trainer import ReportSteps, arguments, train_and_save


def open_model(training: Training, device: str) -> MultiVectorEncoder:
    """The start model; the length of expanded queries is the maximal length of queries."""
    model = MultiVectorEncoder(training.model, device=device)
    transformer = model[0]
    transformer.document_length = training.document_max_length
    if transformer.query_expansion is None:
        transformer.query_length = training.query_max_length
    else:
        transformer.query_expansion = transformer.query_expansion | {"length": training.query_max_length}
    return model


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = open_model(training, device)
    loss = MultiVectorMultipleNegativesRankingLoss(
        model, scale=1 / (training.temperature or 1), gather_across_devices=training.ranks > 1
    )
    args = MultiVectorEncoderTrainingArguments(
        **arguments(training, lr=3e-5, warmup=0.05, weight_decay=0.0, device=device),
        batch_sampler=BatchSamplers.NO_DUPLICATES,
    )
    trainer = MultiVectorEncoderTrainer(
        model=model, args=args, train_dataset=columns(training), loss=loss, callbacks=[ReportSteps(training)]
    )
    train_and_save(trainer, model, training)


if __name__ == "__main__":
    main(read_training())
