"""The (replicate, shard) mesh: DDP, FSDP and HSDP are its shapes, and nothing else tells them apart."""

import os
from dataclasses import dataclass

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # a private name, checked on torch 2.13

from embedtrain.config.recipe import Strategy
from embedtrain.distributed.world import World


@dataclass(frozen=True)
class ParallelLayout:
    """How weights lie over the ranks, and what is saved of their memory.

    Attributes:
        strategy: the name of the shape.
        replicate: copies.
        shard: parts that each copy is cut into.
        reason: why.
        reshard_after_forward: whether a block's unsharded weights are freed after its forward pass; no effect where
            weights are replicated.
        activation_checkpointing: whether a block's activations are recomputed in the backward pass.
        cpu_offload: whether weights, gradients and optimiser lie in host memory, and travel when they are needed.
    """

    strategy: Strategy
    replicate: int
    shard: int
    reason: str
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The device mesh of this shape, named (replicate, shard). A collective: every rank must call it."""
        # DTensor keeps what it knows of an operation by mesh, and takes the mesh of a process group that has ended
        # (an earlier job of a multirun, or test) for an equal one: "Could not resolve the process group".
        _clear_sharding_prop_cache()
        return init_device_mesh(device.type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))


def free_memory_of_rank(world: World) -> int:
    """Bytes of memory that one rank may still take: of its GPU, or its part of what the node has left."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0])
    return int(psutil.virtual_memory().available) // world.local_size


def memory_of_rank(world: World) -> int:
    """Bytes of memory that one rank may count on: its GPU's, or its part of the node's."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size
