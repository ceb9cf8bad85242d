"""Model and optimiser tensors to and from a step folder: sharded by DCP, or full as safetensors."""

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from embedtrain.config.schema import Layout
from embedtrain.distributed.weights import read_shards
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
ENCODER = "encoder."  # before the names of the encoder's weights; the loss's own are `loss.`


def write_tensors(
    path: Path, trained: nn.Module, optimizer: torch.optim.Optimizer | None, layout: Layout, world: World
) -> dict[str, Any]:
    """Write weights, and the optimiser's state unless it is None, into the folder `path`.

    Every rank must call. Returns what of the optimiser's state is not a tensor, for the manifest.
    """
    full = layout is Layout.full
    options = StateDictOptions(full_state_dict=full, cpu_offload=full, flatten_optimizer_state_dict=True)
    model = cast("dict[str, Tensor]", get_model_state_dict(trained, options=options))
    if optimizer is not None:
        _begin_all(optimizer)
    state: dict[str, Any] = {} if optimizer is None else get_optimizer_state_dict(trained, optimizer, options=options)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    if not full:
        save({"model": model, "optimizer": tensors} if tensors else {"model": model}, checkpoint_id=path)
        return plain
    with world.together(f"writing {path}"):
        if world.is_main:
            try:
                save_file({name: own_storage(tensor) for name, tensor in model.items()}, path / MODEL_FILE)
                if tensors:
                    save_file({name: own_storage(tensor) for name, tensor in tensors.items()}, path / OPTIMIZER_FILE)
            except SafetensorError as error:
                raise CheckpointError(f"writing {path} failed: {error}") from error
    return plain


def _begin_all(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that no step has reached (those of a loss whose source has not come) AdamW's first state.

    It is made when a parameter first has a gradient, but asked for of all parameters when a checkpoint is read.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def read_tensors(path: Path, trained: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Fill the sharded encoder and its loss, and the optimiser unless it is None, from the folder `path`.

    Every rank must call; each reads its own slices, whatever number of ranks wrote the folder.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the model's.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = cast("dict[str, Tensor]", get_model_state_dict(trained, options=options))
    state: dict[str, Any] = {} if optimizer is None else get_optimizer_state_dict(trained, optimizer, options=options)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    try:
        if (path / MODEL_FILE).is_file():
            read_shards(model, {name: (path / MODEL_FILE, name) for name in model})
            read_shards(tensors, {name: (path / OPTIMIZER_FILE, name) for name in tensors})
        else:
            load({"model": model, "optimizer": tensors} if tensors else {"model": model}, checkpoint_id=path)
    except (CheckpointException, Exception) as error:  # the former is a BaseException
        raise CheckpointError(f"{path} does not fit this model: {cause_of(error)}") from None
    set_model_state_dict(trained, dict(model), options=options)
    if optimizer is not None:
        set_optimizer_state_dict(trained, optimizer, state | tensors, options=options)


def own_storage(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own, which safetensors insists on; gathered shards end in a padded buffer."""
    return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def read_whole_encoder(path: Path) -> dict[str, Tensor]:
    """The encoder's weights of a step folder, whole and in memory, in one process without a process group.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if (path / MODEL_FILE).is_file():
        whole = load_file(path / MODEL_FILE)
        return {name.removeprefix(ENCODER): tensor for name, tensor in whole.items() if name.startswith(ENCODER)}
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(facts.size, dtype=facts.properties.dtype)
            for name, facts in stored.items()
            if name.startswith(f"model.{ENCODER}") and isinstance(facts, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of having no process group, which is what no_dist asks for
            load(dict(state), checkpoint_id=path, no_dist=True)
    except (CheckpointException, Exception) as error:
        raise CheckpointError(f"{path} cannot be read: {cause_of(error)}") from None
    return {name.removeprefix(f"model.{ENCODER}"): tensor for name, tensor in state.items()}


def cause_of(error: BaseException) -> str:
    """The first line that says something: DCP wraps the cause of each rank in a dictionary."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
