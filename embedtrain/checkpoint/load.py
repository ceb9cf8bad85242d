"""Reading a checkpoint's tensors into a live model and its optimiser, each rank its own rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.index import TensorReader
from embedtrain.checkpoint.snapshot import OPTIMIZER, WEIGHTS, checkpointed_weights, init_optimizer_state
from embedtrain.checkpoint.step_directory import Checkpoint
from embedtrain.distributed.weights import row_range
from embedtrain.errors import CheckpointError


def read_tensors(folder: Checkpoint, trained: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Fill the sharded encoder and its loss, and the optimiser unless it is None.

    Each rank reads its own rows, whatever number of ranks wrote the folder; no collective.

    Raises:
        CheckpointError: a tensor is missing, left over, or has another shape than the model's.
    """
    # These are the parameters' own memory, so what is read is in place at once.
    _fill(checkpointed_weights(trained), folder, WEIGHTS)
    if optimizer is None:
        return
    init_optimizer_state(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(trained, optimizer, options=options)
    _fill({name: value for name, value in state.items() if isinstance(value, Tensor)}, folder, OPTIMIZER)
    set_optimizer_state_dict(trained, optimizer, state, options=options)


def _fill(tensors: Mapping[str, Tensor], folder: Checkpoint, kind: str) -> None:
    with folder.tensors(kind) as stored, torch.no_grad():
        for name in sorted(tensors.keys() ^ stored.specs.keys()):
            place = "the checkpoint lacks it" if name in tensors else "the model lacks it"
            raise CheckpointError(f"{folder.path} does not fit this model: {name}: {place}")
        for name, tensor in tensors.items():
            spec = stored.specs[name]
            if tuple(tensor.shape) != spec.shape:
                raise CheckpointError(
                    f"{folder.path} does not fit this model: {name} has the shape {list(spec.shape)}, the model's "
                    f"{list(tensor.shape)}"
                )
            start, end = row_range(tensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            _fill_rows(local, start, stored, name, start, end)


def _fill_rows(target: Tensor, first: int, stored: TensorReader, name: str, start: int, end: int) -> None:
    """Copy rows [start, end) into a tensor whose first row is the whole's row `first`."""
    for row, values in stored.rows(name, start, end):
        if target.dim() == 0:
            target.copy_(values)
        else:
            target[row - first : row - first + len(values)].copy_(values)
