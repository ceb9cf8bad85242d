"""Optimizers besides torch's fused AdamW: moments in bf16, StableAdamW, Lion and Muon, on the shards of FSDP2.

All but Muon are elementwise on the local rows, apart from one sum per tensor of StableAdamW: the number of ranks only
changes rounding. Moments are computed in fp32, whatever type they are stored in.

Muon makes each matrix orthogonal as a whole, on one rank, whatever the number of ranks. The iteration of Newton and
Schulz needs the whole matrix; on a shard of its rows it would have another result. Ranks send their rows of each matrix
to its owner, which computes and returns rows of the result to the ranks that hold them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.config.optim import OptimConfig, OptimizerName, StateDtype
from embedtrain.distributed.collectives import exchange_rows
from embedtrain.training.groups import RULE

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


# Of the quintic iteration, by Keller Jordan (2024): singular values end between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_EPS = 1e-7


def orthogonalize(matrix: Tensor) -> Tensor:
    """The matrix with all of its singular values near 1, in its own type: five iterations of Newton-Schulz."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if is_tall else matrix
    x = x / torch.linalg.matrix_norm(x).clamp(min=_EPS)
    for _ in range(_NUM_ITERATIONS):
        gram: Tensor = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def update_scale(shape: Sequence[int]) -> float:
    """The factor with which updates of a matrix have the RMS of those of AdamW (Liu et al., 2025)."""
    return 0.2 * math.sqrt(max(shape))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Where the rows of a matrix are: in each replica, shard s holds `rows[s]` of them."""

    index: int
    shape: tuple[int, int]
    rows: tuple[int, ...]
    owner: int  # rank that computes

    def size(self, shard: int) -> int:
        """Elements of a shard."""
        return self.rows[shard] * self.shape[1]


def orthogonal_updates(
    parameters: Sequence[nn.Parameter], updates: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The local rows of `orthogonalize` of each matrix of which `updates` are the local rows. A collective.

    Args:
        parameters: matrices, sharded by rows on one mesh of replicas and shards.
        dtype: of the products of matrices.
    """
    if not parameters:
        return []
    first = parameters[0]
    assert isinstance(first, DTensor)
    grid, me = first.device_mesh.mesh, dist.get_rank()
    positions = {int(rank): (r, s) for r, row in enumerate(grid.tolist()) for s, rank in enumerate(row)}
    # With parallel.cpu_offload the updates are in host memory.
    num_shards, device = grid.shape[1], torch.device(first.device_mesh.device_type)
    matrices = _assign([(int(p.shape[0]), int(p.shape[1])) for p in parameters], list(positions), num_shards)
    ranks, (replica, shard) = sorted(positions), positions[me]

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.empty(0, device=device)

    # An owner receives rows from the shards of its own replica.
    outgoing = {rank: [m for m in matrices if m.owner == rank] for rank in ranks if positions[rank][0] == replica}
    sent = [sum(m.size(shard) for m in outgoing.get(rank, [])) for rank in ranks]
    owned = [m for m in matrices if m.owner == me]
    received = [
        sum(m.size(positions[rank][1]) for m in owned) if positions[rank][0] == replica else 0 for rank in ranks
    ]
    flat = [updates[m.index].reshape(-1).float().to(device) for rank in ranks for m in outgoing.get(rank, [])]
    arrived = exchange_rows(joined(flat), sent, received).split(received)
    by_shard = {
        positions[rank][1]: part for rank, part in zip(ranks, arrived, strict=True) if positions[rank][0] == replica
    }
    results = _results(owned, by_shard, dtype)
    # The owner sends the rows of the result to all replicas.
    parts = [results[m.index][positions[rank][1]] for rank in ranks for m in owned]
    sent = [sum(m.size(positions[rank][1]) for m in owned) for rank in ranks]
    received = [sum(m.size(shard) for m in matrices if m.owner == rank) for rank in ranks]
    returned = exchange_rows(joined(parts), sent, received)
    local: dict[int, Tensor] = {}
    sizes = [(m.index, m.size(shard)) for rank in ranks for m in matrices if m.owner == rank]
    for (index, _), part in zip(sizes, returned.split([size for _, size in sizes]), strict=True):
        local[index] = part.view_as(updates[index]).to(updates[index].device)
    return [local[index] for index in range(len(parameters))]


def _assign(shapes: Sequence[tuple[int, int]], ranks: Sequence[int], num_shards: int) -> list[_Matrix]:
    """An owner for each matrix: the largest first, to the rank with the least work."""
    work, owners = dict.fromkeys(sorted(ranks), 0), {}
    for index in sorted(range(len(shapes)), key=lambda index: (-_cost(shapes[index]), index)):
        owners[index] = min(work, key=lambda rank: (work[rank], rank))
        work[owners[index]] += _cost(shapes[index])
    return [
        _Matrix(index, shape, tuple(_rows(shape[0], num_shards)), owners[index]) for index, shape in enumerate(shapes)
    ]


def _cost(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * min(shape)


def _rows(rows: int, num_shards: int) -> list[int]:
    """Rows of each shard: FSDP2 splits like `torch.chunk`."""
    part = -(-rows // num_shards)
    return [max(0, min(part, rows - part * shard)) for shard in range(num_shards)]


def _results(owned: Sequence[_Matrix], by_shard: dict[int, Tensor], dtype: torch.dtype) -> dict[int, list[Tensor]]:
    """The rows of each shard of the orthogonal matrices, flattened."""
    pieces = {
        shard: dict(zip([m.index for m in owned], part.split([m.size(shard) for m in owned]), strict=True))
        for shard, part in by_shard.items()
    }
    results = {}
    for matrix in owned:
        whole = torch.cat([pieces[shard][matrix.index] for shard in range(len(matrix.rows))]).view(matrix.shape)
        flat = orthogonalize(whole.to(dtype)).float().reshape(-1)
        results[matrix.index] = list(flat.split([matrix.size(shard) for shard in range(len(matrix.rows))]))
    return results
