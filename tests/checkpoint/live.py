"""Models to save, a real encoder and one of all that is odd to a checkpoint, and the checkpoints of a run."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.checkpointer import Checkpointer
from embedtrain.checkpoint.snapshot import init_optimizer_state
from embedtrain.checkpoint.step_directory import Checkpoint, list_steps, open_checkpoint, step_path, verify_checksums
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import CheckpointConfig, OptimConfig, ParallelConfig
from embedtrain.distributed.mesh import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.planning.strategy import mesh_shape
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.state import EncoderWithLoss
from tests.small import small_model, small_tokenizer


class Odd(nn.Module):
    """Tied and frozen weights, low-rank additions, buffers, and tensors of fewer rows than there are ranks."""

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

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.out(x).sum() + self.scale * (self.frozen(x) + self.up(self.down(x))).sum()


class Live:
    """A model in training on this rank: `step` changes it."""

    def __init__(self, world: World, parallel: ParallelConfig, *, odd: bool, seed: int = 0, **sizes: int) -> None:
        self.odd = odd
        if odd:
            torch.manual_seed(seed)
            encoder: Any = Odd()
            with torch.no_grad():  # otherwise zero, and what is read could not be told from what was there
                encoder.table += seed
            shape = mesh_shape(parallel.strategy, parallel, world.size, world.local_size)
            fully_shard(encoder, mesh=ParallelLayout(parallel.strategy, *shape, "").mesh(world.device))
        else:
            model = small_model("xlm-roberta")
            model.config |= sizes
            encoder = load_model(model, parallel, world, seed=seed, tokenizer=small_tokenizer()).encoder
        self.trained = EncoderWithLoss(
            encoder, InfoNCE(InfoNCEConfig(learn_temperature=True, temperature=0.1 + seed / 10))
        )
        self.optimizer = build_optimizer(encoder, OptimConfig(lr=1e-2), self.trained.loss)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        """One of the optimiser, from real gradients; the loss's parameters have none, as before their source comes."""
        ids = torch.tensor([[1, 2, 3]])
        self.trained.encoder(*((ids,) if self.odd else (ids, torch.ones_like(ids)))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self, *, optimizer: bool = True) -> dict[str, str]:
        """A digest of every whole tensor of the model and of the optimiser's state, by name. A collective."""
        found: dict[str, Any] = dict(get_model_state_dict(self.trained))
        if optimizer:
            init_optimizer_state(self.optimizer)
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            found |= get_optimizer_state_dict(self.trained, self.optimizer, options=options)
        return {name: digest(value) for name, value in found.items() if isinstance(value, Tensor)}


def digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    content = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(content).hexdigest()}"


def state_of(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "samples": 10 * step} | more


def opened(root: Path, world: World, said: list[str] | None = None, **options: Any) -> Checkpointer:
    return Checkpointer(
        root, CheckpointConfig(**options), world, metadata={}, say=(said if said is not None else []).append, timeout=60
    )


def sound(root: Path, step: int) -> Checkpoint:
    folder = open_checkpoint(step_path(root, step))
    verify_checksums(folder, 0, 1)
    return folder


def steps(root: Path) -> list[int]:
    return [step for step, _ in list_steps(root)]


@contextmanager
def held_back(checkpoints: Checkpointer) -> Iterator[threading.Event]:
    """Keep the thread that writes busy, as a slow disk would, until the event is set."""
    free = threading.Event()
    checkpoints._thread.submit(free.wait)
    try:
        yield free
    finally:
        free.set()
