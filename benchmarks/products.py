"""The matrix products of a call alone: a limit for everything that computes the same.

A call is measured beside the products of its operators, with the same shapes, strides and dtypes, forward and backward.
Counted are the products of linear layers, losses, and torch's attention on a CPU.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import Timed, interleave

T = TypeVar("T")

aten = torch.ops.aten
# The position of the first factor in the arguments of an operator.
_FACTORS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix, or a batch of them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device | None = None) -> "Factor":
        """The layout of a tensor; `device` if it is another than the tensor's."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, device or tensor.device)

    def tensor(self, role: str) -> Tensor:
        """Random numbers in this layout; only tensors of different roles never share memory."""
        size = 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        return _memory(1 << size.bit_length(), self.dtype, self.device, role).as_strided(self.shape, self.stride)


@cache
def _memory(size: int, dtype: torch.dtype, device: torch.device, role: str) -> Tensor:
    return torch.randn(size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """A call in each round, and the fraction of its time that its matrix products alone take."""

    rounds: list[Timed[T]]
    shares: list[float]


class Products(Generic[T]):
    """Records the matrix products of round 0 of `call`, and computes them alone in all rounds."""

    def __init__(self, call: Callable[[int], T]) -> None:
        self._call = call
        self.factors: list[tuple[Factor, Factor]] = []
        self._results: list[T] = []

    def call(self, round_number: int) -> T:
        """Call the function itself."""
        if round_number:
            return self._call(round_number)
        with _Recorder(self.factors):
            self._results.append(self._call(round_number))
        return self._results[0]

    def alone(self, _round_number: int) -> T:
        """Compute the products; returns the result of the call to which they belong."""
        for a, b in self.factors:
            shape = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device="meta")
            torch.matmul(a.tensor("a"), b.tensor("b"), out=Factor.of(shape, a.device).tensor("out"))
        return self._results[0]


def measure_shares(*calls: Callable[[int], T], size: Callable[[T], int] = lambda _: 1) -> list[Measured[T]]:
    """`interleave`, with the products of each call alone.

    Round 0 must call what the other rounds call; `size` says how much a call has computed, from its result.
    """
    products = [Products(call) for call in calls]
    timed = interleave(*(product.call for product in products), *(product.alone for product in products))
    measured = []
    for rounds, alone in zip(timed[: len(calls)], timed[len(calls) :], strict=True):
        shares = [_rate(b, size) / _rate(a, size) for a, b in zip(rounds, alone, strict=True)]
        measured.append(Measured(rounds, shares))
    return measured


def _rate(timed: Timed[T], size: Callable[[T], int]) -> float:
    return timed.seconds / size(timed.value)


LIMIT_HEADER = ("share of the limit, ours", "share of the limit, theirs", "ratio at the limit")


def limit_cells(ours: Measured[T], theirs: Measured[T]) -> list[str]:
    """Table cells: the shares of both sides, and the ratio if our side took no more time than its products."""
    both = zip(ours.rounds, theirs.rounds, ours.shares, strict=True)
    limit = statistics.median(b.seconds / a.seconds / share for a, b, share in both)
    return [*(f"{statistics.median(side.shares):.0%}" for side in (ours, theirs)), f"{limit:.2f}"]


class _Recorder(TorchDispatchMode):
    """Appends the factors of all matrix products to a list."""

    def __init__(self, factors: list[tuple[Factor, Factor]]) -> None:
        super().__init__()
        self._factors = factors

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACTORS:
            a, b = args[_FACTORS[func] :][:2]
            self._factors.append((Factor.of(a), Factor.of(b)))
        elif func is _ATTENTION:
            self._factors += _attention_factors(*args[:3])
        elif func is _ATTENTION_BACKWARD:
            self._factors += _backward_factors(*args[1:4])
        else:  # operators such as `linear` reach a mode only without gradients
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def _attention_factors(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Factor, Factor]]:
    """Q K^T and P V."""
    q, k, v, p = _batches(query, key, value)
    return [(Factor.of(a, query.device), Factor.of(b, query.device)) for a, b in ((q, k.mT), (p, v))]


def _backward_factors(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Factor, Factor]]:
    """Q K^T again, dO V^T, P^T dO, dS K and dS^T Q; dO is like Q, and dS like P."""
    q, k, v, p = _batches(query, key, value)
    pairs = ((q, k.mT), (q, v.mT), (p.mT, q), (p, k), (p.mT, q))
    return [(Factor.of(a, query.device), Factor.of(b, query.device)) for a, b in pairs]


def _batches(*tensors: Tensor) -> list[Tensor]:
    """Q, K, V and P of all heads on the meta device, [N H, L, S] and [N H, L, L]."""
    q, k, v = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").flatten(0, 1) for tensor in tensors)
    return [q, k, v, q.new_empty((*q.shape[:2], k.shape[1]))]
