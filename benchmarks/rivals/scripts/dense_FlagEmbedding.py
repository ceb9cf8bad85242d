"""EncoderOnlyEmbedderRunner, as `examples/finetune/embedder/encoder_only/base.sh` of FlagEmbedding recommends.

Negatives are gathered from all ranks; embeddings are pooled as the start model pools (mean) and normalised.
Recommended values that a training leaves open: learning rate 1e-5, 10 % warm-up, no weight decay, temperature 0.02. The
example's gradient checkpointing and DeepSpeed stage 0, which save memory or are for GPUs, are left out: without them it
is faster.
"""

import sys
from pathlib import Path

import torch
from FlagEmbedding.finetune.embedder.encoder_only.base import (
    EncoderOnlyEmbedderDataArguments,
    EncoderOnlyEmbedderModelArguments,
    EncoderOnlyEmbedderRunner,
    EncoderOnlyEmbedderTrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, end_process_group, read_training
from trainer import ReportSteps, arguments


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = arguments(training, lr=1e-5, warmup=0.1, weight_decay=0.0, device=device)
    runner = EncoderOnlyEmbedderRunner(
        model_args=EncoderOnlyEmbedderModelArguments(model_name_or_path=training.model),
        data_args=EncoderOnlyEmbedderDataArguments(
            train_data=[training.data],
            cache_path=str(Path(training.output) / "data"),
            train_group_size=1 + training.negatives,
            query_max_len=training.query_max_length,
            passage_max_len=training.document_max_length,
            pad_to_multiple_of=8 if device == "cuda" else None,
        ),
        training_args=EncoderOnlyEmbedderTrainingArguments(
            **{**args, "output_dir": training.trained},
            negatives_cross_device=training.ranks > 1,
            temperature=training.temperature or 0.02,
            sentence_pooling_method="mean",
            normalize_embeddings=True,
            resume_from_checkpoint=training.resume or None,
        ),
    )
    runner.trainer.add_callback(ReportSteps(training))
    runner.run()
    training.report("end", training.steps)
    end_process_group()


if __name__ == "__main__":
    main(read_training())
