"""AdamW over the sharded parameters, the learning rate's course, and clipping by the global norm."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.config.recipe import OptimConfig, ScheduleKind


def build_optimizer(encoder: nn.Module, optim: OptimConfig, loss: nn.Module | None = None) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `encoder` and of `loss`; matrices decay, biases and norms do not.

    Call it after sharding and before any forward pass that leaves weights gathered: an optimiser built at
    another moment holds tensors that are not the ones trained.
    """
    groups = []
    # The loss's parameters are plain tensors: in one group with shards they could not be updated together.
    for module, of_loss in ((encoder, 0.0), (loss, 1.0)):
        trained = [] if module is None else [p for p in module.parameters() if p.requires_grad]
        groups += [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": optim.weight_decay, OF_LOSS: of_loss},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, OF_LOSS: of_loss},
        ]
    beta1, beta2 = optim.betas
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True
    )


# Marks a group of parameters that the loss owns. A number, for checkpoints keep nothing else of a group.
OF_LOSS = "of_loss"


class Schedule:
    """The learning rate as a function of the step alone, so there is nothing to save or restore.

    Args:
        optimizer: whose learning rate is set.
        optim: peak learning rate, course, warm-up.
        total_steps: where linear and cosine courses reach zero.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig, total_steps: int) -> None:
        self.optimizer = optimizer
        self.peak = optim.lr
        self.loss_peak = optim.lr if optim.loss_lr is None else optim.loss_lr
        self.kind = optim.schedule
        self.total_steps = total_steps
        self.warmup_steps = round(optim.warmup if optim.warmup >= 1 else optim.warmup * total_steps)

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        left = (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps)
        match self.kind:
            case ScheduleKind.constant:
                return self.peak
            case ScheduleKind.linear:
                return self.peak * max(0.0, left)
            case ScheduleKind.cosine:
                return self.peak * 0.5 * (1.0 - math.cos(math.pi * min(1.0, max(0.0, left))))

    def apply(self, step: int) -> float:
        """Set the learning rates of step `step`, counted from 0, and return the encoder's."""
        rate = self.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.loss_peak / self.peak if group.get(OF_LOSS) else rate
        return rate


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; return the norm before.

    The norm is that of the whole gradient over all ranks and shards, the same number on every rank. It stays where it
    is computed: whoever reads it waits for that.
    """
    owned = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [parameter for parameter in owned if isinstance(parameter.grad, DTensor)]
    plain = [parameter for parameter in owned if not isinstance(parameter.grad, DTensor)]  # a loss's own
    norms: list[Tensor] = []
    for part in filter(None, (sharded, plain)):
        total = torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])
        # A norm of shards stays a DTensor of partial sums until it is asked for whole.
        norms.append(total.full_tensor() if isinstance(total, DTensor) else total)
    norm = torch.stack(norms).norm() if norms else torch.zeros(())
    if max_norm is not None:
        for part in filter(None, (sharded, plain)):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return norm
