"""EncoderOnlyRerankerRunner, as `examples/finetune/reranker/encoder_only/base.sh` of FlagEmbedding recommends.

The loss is the softmax cross-entropy over the positive and the negatives of each row, so it needs negatives.
Recommended values that a training leaves open: learning rate 6e-5, 10 % warm-up, weight decay 0.01. The example's
gradient checkpointing and DeepSpeed stage 0, which save memory or are for GPUs, are left out: without them it is
faster.
"""

import sys
from pathlib import Path

import torch
from FlagEmbedding.abc.finetune.reranker import (
    AbsRerankerDataArguments,
    AbsRerankerModelArguments,
    AbsRerankerTrainingArguments,
)
from FlagEmbedding.finetune.reranker.encoder_only.base import EncoderOnlyRerankerRunner

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, end_process_group, read_training
from trainer import ReportSteps, arguments


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = arguments(training, lr=6e-5, warmup=0.1, weight_decay=0.01, device=device)
    runner = EncoderOnlyRerankerRunner(
        model_args=AbsRerankerModelArguments(model_name_or_path=training.model),
        data_args=AbsRerankerDataArguments(
            train_data=[training.data],
            cache_path=str(Path(training.output) / "data"),
            train_group_size=1 + training.negatives,
            query_max_len=training.query_max_length,
            passage_max_len=training.document_max_length,
            pad_to_multiple_of=8 if device == "cuda" else None,
        ),
        training_args=AbsRerankerTrainingArguments(
            **{**args, "output_dir": training.trained}, resume_from_checkpoint=training.resume or None
        ),
    )
    runner.trainer.add_callback(ReportSteps(training))
    runner.run()
    training.report("end", training.steps)
    end_process_group()


if __name__ == "__main__":
    main(read_training())
