"""Optimizers besides torch's fused AdamW: moments in bf16, StableAdamW, Lion and Muon, on the shards of FSDP2.

All but Muon are elementwise on the local rows, apart from one sum per tensor of StableAdamW: the number of ranks only
changes rounding. Moments are computed in fp32, whatever type they are stored in.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.config.optim import OptimConfig, OptimizerName, StateDtype
from embedtrain.training.groups import RULE
from embedtrain.training.muon import orthogonal_updates, update_scale

_DTYPES = {StateDtype.fp32: torch.float32, StateDtype.bf16: torch.bfloat16}
STEP, MOMENT, SECOND_MOMENT, MOMENTUM = "step", "exp_avg", "exp_avg_sq", "momentum_buffer"
_STATE = {
    OptimizerName.adamw: (MOMENT, SECOND_MOMENT),
    OptimizerName.stable_adamw: (MOMENT, SECOND_MOMENT),
    OptimizerName.lion: (MOMENT,),
    OptimizerName.muon: (MOMENTUM,),
}


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups have a rule each; `found_inf` works as that of fused AdamW.

    If the attribute `found_inf` is set to a tensor that is not 0, a step leaves weights and state unchanged. The host
    never reads it.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], optim: OptimConfig) -> None:
        super().__init__(groups, {"lr": optim.lr})
        self._optim = optim
        self._state_dtype = _DTYPES[optim.state_dtype]

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state before the first step, sharded as the parameter."""
        rule = next(self._rule(group) for group in self.param_groups if any(p is parameter for p in group["params"]))
        return self._initial_state(parameter, rule)

    def _initial_state(self, parameter: nn.Parameter, rule: OptimizerName) -> dict[str, Tensor]:
        state = {
            name: torch.zeros_like(parameter, dtype=self._state_dtype, requires_grad=False) for name in _STATE[rule]
        }
        if SECOND_MOMENT in state:
            state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return state

    @staticmethod
    def _rule(group: dict[str, Any]) -> OptimizerName:
        return OptimizerName(group[RULE])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            rule = self._rule(group)
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = self._initial_state(parameter, rule)
            match rule:
                case OptimizerName.adamw:
                    self._adamw(parameters, group)
                case OptimizerName.stable_adamw:
                    self._stable_adamw(parameters, group)
                case OptimizerName.lion:
                    self._lion(parameters, group)
                case OptimizerName.muon:
                    self._muon(parameters, group)

    def _replace(self, target: Tensor, value: Tensor) -> None:
        """Set the local rows, unless the step is to have no effect."""
        if self.found_inf is None:
            target.copy_(value)
        else:
            target.copy_(torch.where(self.found_inf.to(target.device) == 0, value.to(target.dtype), target))

    def _directions(self, parameters: list[nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
        """Update the moments of Adam; its direction and the unbiased second moment of each parameter's local rows."""
        beta1, beta2 = self._optim.betas
        directions = []
        for parameter in parameters:
            grad, state = _local(_grad(parameter)), self.state[parameter]
            step = state[STEP] + 1
            moment = _local(state[MOMENT]).float().lerp(grad, 1 - beta1)
            second = beta2 * _local(state[SECOND_MOMENT]).float() + (1 - beta2) * grad.square()
            unbiased = second / (1 - beta2**step)
            directions.append((moment / (1 - beta1**step) / (unbiased.sqrt() + self._optim.eps), unbiased))
            for name, value in ((STEP, step), (MOMENT, moment), (SECOND_MOMENT, second)):
                self._replace(_local(state[name]), value)
        return directions

    def _adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter, (direction, _) in zip(parameters, self._directions(parameters), strict=True):
            self._update(parameter, direction, group["lr"], group["weight_decay"])

    def _stable_adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        directions = self._directions(parameters)
        # The mean of g^2 / v of each tensor over all its rows: one collective for all tensors.
        ratios = [
            (_local(_grad(parameter)).square() / unbiased.clamp(min=self._optim.eps**2)).sum()
            for parameter, (_, unbiased) in zip(parameters, directions, strict=True)
        ]
        if not ratios:
            return
        sums = torch.stack(ratios)
        if isinstance(parameters[0], DTensor):
            mesh = parameters[0].device_mesh
            total = sums.to(mesh.device_type)
            dist.all_reduce(total, group=mesh["shard"].get_group())
            sums = total.to(sums.device)
        for parameter, (direction, _), total in zip(parameters, directions, sums, strict=True):
            rms = (total / parameter.numel()).sqrt()
            self._update(parameter, direction, group["lr"] / rms.clamp(min=1.0), group["weight_decay"])

    def _lion(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        beta1, beta2 = self._optim.betas
        for parameter in parameters:
            grad, stored = _local(_grad(parameter)), _local(self.state[parameter][MOMENT])
            moment = stored.float()
            self._update(parameter, moment.lerp(grad, 1 - beta1).sign(), group["lr"], group["weight_decay"])
            self._replace(stored, moment.lerp(grad, 1 - beta2))

    def _muon(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        updates = []
        for parameter in parameters:
            grad, stored = _local(_grad(parameter)), _local(self.state[parameter][MOMENTUM])
            momentum = stored.float().lerp(grad, 1 - self._optim.momentum)
            updates.append(grad.lerp(momentum, self._optim.momentum))
            self._replace(stored, momentum)
        directions = orthogonal_updates(parameters, updates, _DTYPES[self._optim.muon_dtype])
        for parameter, direction in zip(parameters, directions, strict=True):
            self._update(parameter, direction * update_scale(parameter.shape), group["lr"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, direction: Tensor, rate: float | Tensor, decay: float) -> None:
        """Decoupled weight decay, and a step in the direction."""
        local = _local(parameter)
        self._replace(local, local * (1 - rate * decay) - rate * direction)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    """The rows of this rank, in memory that the tensor shares."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
