"""PyLate's Contrastive loss with SentenceTransformerTrainer, as its page "ColBERT Training" recommends.

Documents are gathered from all ranks. Recommended values that a training leaves open, of the page and of the loss:
learning rate 3e-6, no warm-up, no weight decay, temperature 1.
"""

import sys
from pathlib import Path

import torch
from pylate import losses, models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training
from dense_sentence_transformers import columns
from trainer import ReportSteps, arguments, train_and_save


def main(training: Training) -> None:
    """Train and save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = models.ColBERT(
        training.model,
        query_length=training.query_max_length,
        document_length=training.document_max_length,
        device=device,
    )
    loss = losses.Contrastive(model, temperature=training.temperature or 1.0, gather_across_devices=training.ranks > 1)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            **arguments(training, lr=3e-6, warmup=0.0, weight_decay=0.0, device=device)
        ),
        train_dataset=columns(training),
        loss=loss,
        data_collator=utils.ColBERTCollator(model.tokenize),
        callbacks=[ReportSteps(training)],
    )
    train_and_save(trainer, model, training)


if __name__ == "__main__":
    main(read_training())
