"""AnglE.fit, as AnglE's README recommends for pairs (query, positive) or triplets (query, positive, negative).

The library takes one negative per row, and none from other ranks. Embeddings are pooled as the start model pools
(mean). Recommended values that a training leaves open are the defaults of `angle-trainer`: learning rate 1e-5, 100
steps of warm-up, no weight decay, temperature 1/20, loss weights 1 (in-batch), 1 (hard negative) and 0.02 (angle), two
workers. It has no way to resume, and does not average gradients over ranks: its loss calls the model that
DistributedDataParallel wraps, not the wrapper.
"""

import sys
from pathlib import Path

import torch
from angle_emb import AnglE
from datasets import Dataset
from transformers.trainer import DEFAULT_CALLBACKS

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, end_process_group, read_training
from trainer import ReportSteps, arguments

FROM_FIT = (
    "output_dir",
    "per_device_train_batch_size",
    "learning_rate",
    "bf16",
    "warmup_steps",
    "save_strategy",
    "save_steps",
)


def columns(training: Training) -> Dataset:
    """Columns query and positive, and negative if there is one."""
    table: dict[str, list[str]] = {"query": [], "positive": []} | ({"negative": []} if training.negatives else {})
    for row in training.rows():
        for column, text in zip(table.values(), [row["query"], row["pos"][0], *row["neg"]], strict=False):
            column.append(text)
    return Dataset.from_dict(table)


def main(training: Training) -> None:
    """Train and save."""
    if training.negatives > 1 or training.resume:
        raise SystemExit("AnglE takes at most one negative per row, and has no way to resume a training.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = arguments(training, lr=1e-5, warmup=100 / training.steps, weight_decay=0.0, device=device)
    fit = {name: args.pop(name) for name in FROM_FIT}
    fit["batch_size"] = fit.pop("per_device_train_batch_size")
    angle = AnglE(
        training.model, max_length=training.document_max_length, pooling_strategy="avg", train_mode=True, device=device
    )
    DEFAULT_CALLBACKS.append(ReportSteps(training))  # `fit` takes none
    tau = 1 / (training.temperature or 1 / 20)
    angle.fit(
        train_ds=columns(training),
        **fit | {"output_dir": training.trained},
        argument_kwargs=args | {"dataloader_num_workers": 2},
        loss_kwargs={"ibn_w": 1.0, "cln_w": 1.0, "angle_w": 0.02, "ibn_tau": tau},
    )
    training.report("end", training.steps)
    end_process_group()


if __name__ == "__main__":
    main(read_training())
