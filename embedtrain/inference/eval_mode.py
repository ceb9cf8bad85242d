"""The mode in which a live encoder computes embeddings or scores, between steps of training."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from embedtrain.distributed.sharding import reshard


@contextlib.contextmanager
def eval_mode(encoder: nn.Module, *, reshard_after: bool) -> Iterator[None]:
    """Disable gradients and dropout; afterwards restore each module's mode, and reshard the weights if asked to.

    Inference mode is switched off, even if the caller has it on: FSDP allocates the buffers that it gathers weights
    into once, and buffers allocated in inference mode can never be trained with ("Inplace update to inference tensor").
    An error within a forward pass leaves FSDP in the middle of it, which cannot be repaired here.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    try:
        with torch.inference_mode(False), torch.no_grad():
            encoder.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        if reshard_after:
            reshard(encoder)
