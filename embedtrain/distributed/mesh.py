"""The (replicate, shard) mesh: DDP, FSDP and HSDP are its shapes, and nothing else tells them apart."""

import os
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # a private name, checked on torch 2.13

from embedtrain.config.schema import Accumulate, ParallelConfig, Strategy
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError

# Master weight, gradient and two Adam moments in fp32.
_BYTES_IN_TRAINING = 16
# Master weight, and the copy that is computed with.
_BYTES_IN_EVALUATION = 6
# A replicated model may take this share of a rank's memory; the rest is for activations and the batch.
_REPLICATED_SHARE = 0.35
# Unreduced gradients of the whole model, in fp32, may take this share while a step has chunks to come.
_WHOLE_GRADIENTS_SHARE = 0.1


@dataclass(frozen=True)
class Layout:
    """How weights lie over the ranks, and what is saved of their memory.

    Attributes:
        strategy: the name of the shape.
        replicate: copies.
        shard: parts that each copy is cut into.
        reason: why.
        reshard: whether a block's gathered weights are given back after its forward pass; of no effect on whole copies.
        activation_checkpointing: whether a block's activations are recomputed in the backward pass.
        cpu_offload: whether weights, gradients and optimiser lie in host memory, and travel when they are needed.
    """

    strategy: Strategy
    replicate: int
    shard: int
    reason: str
    reshard: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The device mesh of this shape, named (replicate, shard). A collective: every rank must call it."""
        # DTensor keeps what it knows of an operation by mesh, and takes the mesh of a process group that has ended
        # (an earlier job of a multirun, or test) for an equal one: "Could not resolve the process group".
        _clear_sharding_prop_cache()
        return init_device_mesh(device.type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))


def choose_layout(
    parallel: ParallelConfig, world: World, num_parameters: int, memory: int, *, trains: bool = True
) -> Layout:
    """Turn `parallel.strategy` into a shape of the mesh.

    `auto` replicates where weights, gradients and Adam's moments of the whole model take at most a third of
    a rank's memory, for then every forward pass saves its all-gathers; else it shards over all ranks.

    Args:
        parallel: the recipe's options.
        world: the ranks.
        num_parameters: of the whole model.
        memory: `memory_of_rank` of the rank that has least, so that all ranks choose alike.
        trains: whether there will be gradients and Adam's moments.

    Raises:
        ConfigError: `parallel.shard_size` does not divide the number of ranks, or is set without hsdp.
    """
    if parallel.shard_size is not None and parallel.strategy is not Strategy.hsdp:
        raise ConfigError(
            f"parallel.shard_size={parallel.shard_size} is only for parallel.strategy=hsdp, "
            f"not {parallel.strategy.value}"
        )
    need, have = num_parameters * (_BYTES_IN_TRAINING if trains else _BYTES_IN_EVALUATION), memory
    what = "weights, gradients and Adam moments" if trains else "weights"
    told = f"{_gib(need)} of {what}, {_gib(have)} of memory a rank"
    layout = _shape(parallel, world, fits=need <= _REPLICATED_SHARE * have, told=told)
    return replace(
        layout,
        reshard=parallel.reshard is not False,
        activation_checkpointing=bool(parallel.activation_checkpointing),
        cpu_offload=bool(parallel.cpu_offload),
    )


def _shape(parallel: ParallelConfig, world: World, *, fits: bool, told: str) -> Layout:
    match parallel.strategy:
        case Strategy.ddp:
            return Layout(Strategy.ddp, world.size, 1, f"asked for; {told}")
        case Strategy.fsdp:
            return Layout(Strategy.fsdp, 1, world.size, f"asked for; {told}")
        case Strategy.hsdp:
            size = world.local_size if parallel.shard_size is None else parallel.shard_size
            if size < 1 or world.size % size:
                raise ConfigError(
                    f"parallel.shard_size={size} does not divide the {world.size} ranks: "
                    f"allowed are {', '.join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)}"
                )
            return Layout(Strategy.hsdp, world.size // size, size, f"asked for, {size} ranks a copy; {told}")
        case Strategy.auto if fits:
            return Layout(Strategy.ddp, world.size, 1, f"it fits on every rank: {told}")
        case Strategy.auto:
            return Layout(Strategy.fsdp, 1, world.size, f"it is too large to replicate: {told}")


def keeps_gradients_whole(parallel: ParallelConfig, layout: Layout, num_trained: int, memory: int) -> bool:
    """Turn `parallel.accumulate` into whether a rank holds whole gradients between the chunks of a step.

    Where weights are replicated its part is the whole in any case.

    Args:
        parallel: the recipe's options.
        layout: how the weights lie.
        num_trained: parameters that have a gradient.
        memory: as for `choose_layout`.
    """
    match parallel.accumulate:
        case Accumulate.whole:
            return True
        case Accumulate.sharded:
            return False
        case Accumulate.auto:
            return layout.shard == 1 or 4 * num_trained <= _WHOLE_GRADIENTS_SHARE * memory


def memory_of_rank(world: World) -> int:
    """Bytes of memory that one rank may count on: its GPU's, or its part of the node's."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
