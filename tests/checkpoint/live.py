"""Models to save, a real encoder and one with everything unusual for a checkpoint, and a run's checkpoints."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint import checkpointer
from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.snapshot import init_optimizer_state
from embedtrain.checkpoint.step_directory import Checkpoint, list_steps, open_checkpoint, step_path, verify_checksums
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import CheckpointConfig, ParallelConfig
from embedtrain.data.types import Chunk
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.planning.strategy import mesh_shape
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.state import EncoderWithLoss
from tests.small import small_model, small_tokenizer


class Odd(nn.Module):
    """Tied and frozen weights, low-rank layers, buffers, and tensors with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight
        self.frozen = nn.Linear(4, 3).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.arange(10.0).reshape(5, 2))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("rounded", torch.arange(6).bfloat16())

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        x = self.words(ids)
        return (self.out(x).sum() + self.scale * (self.frozen(x) + self.up(self.down(x))).sum(),)


class Live:
    """A model in training on this rank."""

    def __init__(self, world: World, parallel: ParallelConfig, *, odd: bool, seed: int = 0, **sizes: int) -> None:
        self.odd, self.device = odd, world.device
        if odd:
            torch.manual_seed(seed)
            encoder: Any = Odd()
            with torch.no_grad():  # distinguishes models of different seeds
                encoder.table += seed
            shape = mesh_shape(parallel.strategy, parallel, world.size, world.local_size)
            fully_shard(encoder, mesh=ParallelLayout(parallel.strategy, *shape, "").mesh(world.device))
        else:
            model = small_model("xlm-roberta")
            model.config |= sizes
            encoder = load_model(model, parallel, world, seed=seed, tokenizer=small_tokenizer()).encoder
        self.trained = EncoderWithLoss(
            encoder, InfoNCE(InfoNCEConfig(learn_temperature=True, temperature=0.1 + seed / 10)).to(world.device)
        )
        self.optimizer = build_optimizer(encoder, OptimConfig(lr=1e-2), self.trained.loss)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        """One optimizer step with real gradients; the loss's parameters have none, as before a batch of its source."""
        ids = torch.tensor([[1, 2, 3]], device=self.device)
        (part,) = self.trained.encoder(ids if self.odd else Chunk(ids, torch.ones_like(ids)))
        part.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def local_values(self) -> list[list[float]]:
        """This rank's part of every trained parameter."""
        local = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters]
        return [part.detach().cpu().flatten().tolist() for part in local]

    def digests(self, *, optimizer: bool = True) -> dict[str, str]:
        """A digest of every unsharded tensor of the model and of the optimizer state, by name. A collective."""
        tensors: dict[str, Any] = dict(get_model_state_dict(self.trained))
        if optimizer:
            init_optimizer_state(self.optimizer)
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            tensors |= get_optimizer_state_dict(self.trained, self.optimizer, options=options)
        return {name: digest(value) for name, value in tensors.items() if isinstance(value, Tensor)}


def digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    content = whole.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(content).hexdigest()}"


def state_of(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "samples": 10 * step} | more


def open_checkpoints(root: Path, world: World, log: list[str] | None = None, **options: Any) -> Checkpointer:
    messages = [] if log is None else log
    return Checkpointer(root, CheckpointConfig(**options), world, metadata={}, log=messages.append, timeout=60)


def verified(root: Path, step: int) -> Checkpoint:
    checkpoint = open_checkpoint(step_path(root, step))
    verify_checksums(checkpoint, 0, 1)
    return checkpoint


def steps_in(root: Path) -> list[int]:
    return [step for step, _ in list_steps(root)]


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Delay the writing of tensors, as a slow disk would, until the event is set."""
    resumed, write = threading.Event(), checkpointer.write_local_shards

    def delayed(*arguments: Any) -> dict[str, int]:
        resumed.wait()
        return write(*arguments)

    checkpointer.write_local_shards = delayed
    try:
        yield resumed
    finally:
        resumed.set()
        checkpointer.write_local_shards = write
