"""AdamW over sharded parameters, the learning rates of its groups, and clipping by the global norm."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.config.optim import OptimConfig, OptimizerName, StateDtype
from embedtrain.training.groups import FREEZE_UNTIL, LR_FACTOR, optimizer_groups, trained_parameters
from embedtrain.training.schedule import LearningRate, num_steps
from embedtrain.training.sharded_optimizer import ShardedOptimizer


def build_optimizer(encoder: nn.Module, optim: OptimConfig, loss: nn.Module | None = None) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters of `encoder` and `loss`; by default only matrices decay.

    Call it after sharding and before any forward pass that leaves weights unsharded; otherwise the optimizer holds
    tensors that are not the trained ones.
    """
    groups = list(optimizer_groups(trained_parameters(encoder, optim, loss)))
    if optim.name is not OptimizerName.adamw or optim.state_dtype is not StateDtype.fp32:
        return ShardedOptimizer(groups, optim)
    beta1, beta2 = optim.betas
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)


class Schedule:
    """The optimizer, with the learning rates of all parameter groups at every step, and the limit of the norm."""

    def __init__(self, optimizer: torch.optim.Optimizer, optim: OptimConfig, total_steps: int) -> None:
        self.optimizer, self.total_steps, self.max_grad_norm = optimizer, total_steps, optim.max_grad_norm
        self.rate = LearningRate(optim, total_steps)

    def apply(self, step: int) -> float:
        """Set the learning rates of step `step`, counted from 0, and return the encoder's."""
        rate = self.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0 if self._is_frozen(group, step) else rate * group.get(LR_FACTOR, 1.0)
        return rate

    def drop_frozen_gradients(self, step: int) -> None:
        """Leave parameters that are frozen at step `step`, and their moments, as they are: they have no gradient.

        Gradients are still reduced, so that the units of FSDP never change, but they count in no norm.
        """
        for group in self.optimizer.param_groups:
            if self._is_frozen(group, step):
                for parameter in group["params"]:
                    parameter.grad = None

    def _is_frozen(self, group: Mapping[str, Any], step: int) -> bool:
        until = group.get(FREEZE_UNTIL, 0.0)
        return bool(step < num_steps(until, self.total_steps))


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; return the norm before.

    The norm is that of the full gradient over all shards, the same number on every rank. It stays on the device of the
    shards, so that nothing waits for it; with `parallel.cpu_offload` that is the CPU, while the loss is on the GPU.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [parameter for parameter in with_grad if isinstance(parameter.grad, DTensor)]
    plain = [parameter for parameter in with_grad if not isinstance(parameter.grad, DTensor)]  # of the loss
    norms: list[Tensor] = []
    for part in filter(None, (sharded, plain)):
        total = torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])
        # The norm of shards is a DTensor of partial sums until it is reduced.
        norms.append(total.full_tensor() if isinstance(total, DTensor) else total)
    norm = torch.stack([part.to(norms[0].device) for part in norms]).norm() if norms else torch.zeros(())
    if max_norm is not None:
        for part in filter(None, (sharded, plain)):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return norm


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take a step if the boolean `finite`, of no dimension, is true; otherwise weights and state do not change.

    The value is not read, so the step of a GPU is queued before anything is known: fused AdamW leaves everything
    unchanged if its attribute `found_inf` is 1, as `ShardedOptimizer` does. GradScaler sets it in the same way (torch
    2.11 to 2.13).
    """
    # With parallel.cpu_offload the step runs on the CPU. torch would copy the value without waiting for it.
    shard = optimizer.param_groups[0]["params"][0]
    optimizer.found_inf = finite.logical_not().float().to(shard.device)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
