"""The training loop of accelerate's examples (complete_nlp_example.py, checkpointing.py), for any model and loss.

Recommended values of these examples that a training leaves open: learning rate 2e-5, 100 steps of warm-up. Weight decay
is 0, as in the examples of transformers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from common import Training
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

Row = dict[str, Any]
WARMUP = 100  # steps


def train(
    training: Training,
    build: Callable[[], nn.Module],
    collate: Callable[[list[Row]], Any],
    loss: Callable[[nn.Module, Any, Accelerator], Tensor],
    save: Callable[[nn.Module], None],
) -> None:
    """Train the model of `build`, which may draw new weights, and save it.

    `loss` has the wrapped model, a batch of `collate`, and the accelerator; `save` has the model.
    """
    has_gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        mixed_precision="bf16" if training.precision == "bf16" else "no",
        cpu=not has_gpu,
        step_scheduler_with_optimizer=False,  # otherwise a step for each process, and its state is of their number
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=training.seed),
    )
    set_seed(training.seed)
    model = build()
    loader = DataLoader(
        training.rows(),  # type: ignore[arg-type]
        batch_size=training.rank_batch,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=2 if has_gpu else 0,
        pin_memory=has_gpu,
    )
    optimizer = torch.optim.AdamW(parameter_groups(model, training), fused=True)
    warmup = WARMUP if training.warmup is None else round(training.warmup * training.steps)
    scheduler = get_linear_schedule_with_warmup(optimizer, warmup, training.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = load_newest(accelerator, training) if training.resume else 0
    model.train()
    while step < training.steps:
        epoch, skipped = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            accelerator.backward(loss(model, batch, accelerator))
            if training.max_grad_norm:
                accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            training.report("step", step)
            if training.save_every and step % training.save_every == 0:
                accelerator.save_state(str(Path(training.output) / f"step_{step}"))
                training.report("saved", step)
            if step == training.steps:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        save(accelerator.unwrap_model(model))
    training.report("end", training.steps)
    accelerator.end_training()


def parameter_groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Biases and normalisations have no weight decay."""
    lr = 2e-5 if training.lr is None else training.lr
    decay = training.weight_decay or 0.0
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [
        {"params": matrices, "lr": lr, "weight_decay": decay},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
    ]


def load_newest(accelerator: Accelerator, training: Training) -> int:
    """Load the newest checkpoint, and return its step."""
    steps = [int(path.name.removeprefix("step_")) for path in Path(training.output).glob("step_*")]
    if not steps:
        return 0
    accelerator.load_state(str(Path(training.output) / f"step_{max(steps)}"))
    return max(steps)
