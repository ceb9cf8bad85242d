"""The (replicate, shard) device mesh: DDP, FSDP and HSDP differ only in its shape."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # a private name, checked on torch 2.13

from embedtrain.config.recipe import Strategy


@dataclass(frozen=True)
class ParallelLayout:
    """How weights are distributed over the ranks, and which memory savings apply."""

    strategy: Strategy
    replicate: int  # number of copies
    shard: int  # number of shards of each copy
    reason: str  # why this layout was chosen, for the user
    # Whether a block frees its unsharded weights after the forward pass; no effect with one shard.
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False  # whether a block's activations are recomputed in the backward pass
    # Whether weights, gradients and optimizer state are kept in host memory and copied on demand.
    cpu_offload: bool = False

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The device mesh with dimensions (replicate, shard). A collective."""
        # DTensor caches sharding decisions by mesh, and treats the mesh of a destroyed process group (of an earlier job
        # of a multirun, or test) as equal to this one: "Could not resolve the process group".
        _clear_sharding_prop_cache()
        return init_device_mesh(device.type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))
