"""`lightning-ir fit --config FILE` for every kind, with a file that follows the recipes of Lightning IR's guide.

What the library has not: negatives from other ranks, and a temperature. Recommended values that a training leaves open:
learning rate 1e-5 (every recipe), weight decay 0.01 (`configs/optimizer.yaml`), no warm-up (no recipe has one), one
worker (`configs/data/fine-tune-msmarco.yaml`). AdamW is not fused, as it is in the other trainers, because Lightning
rejects that together with clipping in bf16.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning_ir.main import LightningIRCLI, LightningIRSaveConfigCallback, LightningIRTrainer
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from common import Training
from training_file import write_once


class ReportSteps(Callback):  # type: ignore[misc]
    """Reports the end of each step and of each save, which is over when the next step or the training's end begins."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.saving = 0

    def on_train_batch_start(self, *_: Any) -> None:
        """Before a step."""
        if self.saving:
            self.training.report("saved", self.saving)
            self.saving = 0

    on_train_end = on_train_batch_start

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """After the optimizer step."""
        self.training.report("step", trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        """When a checkpoint begins."""
        self.saving = trainer.global_step


def run_rows(training: Training) -> Iterator[dict[str, Any]]:
    """The rows of the run file that is the training file: each has a document of a query."""
    for number, row in enumerate(training.rows()):
        for rank, text in enumerate([row["pos"][0], *row["neg"][: training.negatives]]):
            names = {"query_id": f"q{number}", "doc_id": f"d{number}-{rank}", "query": row["query"], "text": text}
            yield {**names, "rank": rank + 1, "score": float(rank == 0)}


def config(training: Training, model: dict[str, Any], losses: list[Any], callbacks: list[Any]) -> dict[str, Any]:
    """What the configuration file says; `model` is the module's part of it."""
    group = 1 + training.negatives
    checkpoints = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {
            "dirpath": f"{training.output}/checkpoints",
            "every_n_train_steps": training.save_every,
            "save_last": True,
        },
    }
    return {
        "seed_everything": training.seed,
        "trainer": {
            "accelerator": "gpu" if torch.cuda.is_available() else "cpu",
            "devices": training.ranks,
            "strategy": "auto",
            "precision": "bf16-mixed" if training.precision == "bf16" else "32-true",
            "max_steps": training.steps,
            "gradient_clip_val": training.max_grad_norm or None,
            "callbacks": [*callbacks, checkpoints] if training.save_every else callbacks,
            "enable_checkpointing": bool(training.save_every),
            "enable_progress_bar": False,
            "logger": False,
        },
        "model": {
            "class_path": model["class_path"],
            "init_args": model["init_args"] | {"model_name_or_path": training.model, "loss_functions": losses},
        },
        "data": {
            "class_path": "lightning_ir.LightningIRDataModule",
            "init_args": {
                "num_workers": 1,
                "train_batch_size": training.rank_batch,
                "train_dataset": {
                    "class_path": "lightning_ir.RunDataset",
                    "init_args": {
                        "run_path_or_id": write_once(Path(training.output) / "train.jsonl", run_rows(training)),
                        "depth": group,
                        "sample_size": group,
                        "targets": "score",
                    },
                },
            },
        },
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {
                "lr": training.lr or 1e-5,
                "weight_decay": 0.01 if training.weight_decay is None else training.weight_decay,
            },
        },
        "lr_scheduler": {
            "class_path": "lightning_ir.LinearLRSchedulerWithLinearWarmup",
            "init_args": {"num_warmup_steps": round((training.warmup or 0) * training.steps)},
        },
    }


def fit(
    training: Training,
    model: dict[str, Any],
    losses: list[Any],
    callbacks: Sequence[Any] = (),
    save: Callable[[Training, dict[str, torch.Tensor]], None] | None = None,
) -> None:
    """Train and save; a run that resumes continues from the last checkpoint of Lightning's ModelCheckpoint.

    `save` gets the weights by name; without it they are saved as the start model names them.
    """
    file = Path(training.output) / f"fit-{os.environ.get('RANK', '0')}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config(training, model, losses, list(callbacks))), encoding="utf-8")
    resume = ["--ckpt_path", "last"] if training.resume else []
    cli = LightningIRCLI(
        trainer_class=LightningIRTrainer,
        save_config_callback=LightningIRSaveConfigCallback,
        save_config_kwargs={"config_filename": "pl_config.yaml", "overwrite": True},
        trainer_defaults={"callbacks": [ReportSteps(training)]},
        args=["fit", "--config", str(file), *resume],
    )
    if cli.trainer.is_global_zero:
        (save or save_like_start)(training, cli.model.model.state_dict())
    training.report("end", training.steps)


def save_like_start(training: Training, weights: dict[str, torch.Tensor]) -> None:
    """Save in the layout of the start model, since transformers does not read the one of Lightning IR."""
    shutil.copytree(training.model, training.trained, dirs_exist_ok=True)
    save_file(weights, Path(training.trained) / "model.safetensors", metadata={"format": "pt"})
