"""Shared by libraries whose trainer is, or derives from, the one of transformers."""

from typing import Any

from common import Training, end_process_group
from transformers import TrainerCallback


class ReportSteps(TrainerCallback):  # type: ignore[misc]
    """Reports the end of each step and of each save."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """After the optimizer step."""
        self.training.report("step", state.global_step)

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """After a checkpoint."""
        self.training.report("saved", state.global_step)


def arguments(training: Training, *, lr: float, warmup: float, weight_decay: float, device: str) -> dict[str, Any]:
    """Arguments of transformers' TrainingArguments; the last four are used where `training` leaves them open."""
    return {
        "output_dir": training.output,
        "max_steps": training.steps,
        "per_device_train_batch_size": training.rank_batch,
        "learning_rate": lr if training.lr is None else training.lr,
        "warmup_steps": round((warmup if training.warmup is None else training.warmup) * training.steps),
        "weight_decay": weight_decay if training.weight_decay is None else training.weight_decay,
        "lr_scheduler_type": "linear",
        "max_grad_norm": training.max_grad_norm,
        "bf16": training.precision == "bf16",
        "seed": training.seed,
        "dataloader_drop_last": True,
        "save_strategy": "steps" if training.save_every else "no",
        "save_steps": training.save_every or 500,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        **({"ddp_backend": "gloo"} if device == "cpu" else {}),
    }


def train_and_save(trainer: Any, model: Any, training: Training) -> None:
    """Train a model of sentence-transformers, or resume from the newest checkpoint, and save it on rank 0."""
    trainer.train(resume_from_checkpoint=training.resume or None)
    if trainer.is_world_process_zero():
        model.save_pretrained(training.trained)
    training.report("end", training.steps)
    end_process_group()
