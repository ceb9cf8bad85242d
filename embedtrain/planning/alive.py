"""Counting the bytes of tensors that are alive, on the meta device, where they take none."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # private names, checked on torch 2.13
from torch.utils._pytree import tree_iter


class Alive(TorchDispatchMode):
    """While it is entered, counts the storages that operations make, forward and backward, each once.

    A storage is counted until its last tensor is gone, as an allocator would: what autograd keeps for the backward
    pass is what is left after the forward pass.

    Args:
        known: tensors that were there before; their views make nothing new.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, self._gone(key, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            self._seen.pop(key, None)
            self.bytes -= size

        return gone
