"""Loading needs memory for a rank's shard and one tensor, not for the whole model: measured on 4 ranks.

Without the warm-up pass and the passes that verify packing: every pass gathers blocks, which here are in host memory.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from embedtrain.config.recipe import Attention, BaseDtype, LoraConfig, ModelConfig
from embedtrain.distributed.world import World
from embedtrain.inference.loading import load as loading
from embedtrain.inference.loading.load import load_model
from tests.memory import MB, memory_growth
from tests.small import parallel, save_small, small_model

# 176 MB in fp32, 67 MB of them in the embedding table.
SIZES = {
    "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
OVERHEAD = 24  # MB: modules, buffers, and memory that the allocator keeps


def loaded(world: World, models: dict[str, ModelConfig]) -> dict[str, tuple[float, float, float]]:
    """By name of the model: growth of this rank, its shard, and the largest tensor in fp32; MB."""
    sizes = {}
    for name, model in models.items():
        grown: list[float] = []
        warm_up, loading.warm_up = loading.warm_up, lambda *_: None
        try:
            with memory_growth(grown):
                encoder = load_model(model, parallel(), world, seed=0).encoder
        finally:
            loading.warm_up = warm_up
        parameters = list(encoder.parameters())
        shard = sum(p.to_local().nbytes for p in parameters if isinstance(p, DTensor)) / MB
        sizes[name] = grown[0], shard, max(4 * p.numel() for p in parameters) / MB
        del encoder, parameters
    return sizes


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    small = small_model("llama")
    small.config |= SIZES
    return save_small(small, tmp_path_factory.mktemp("large") / "model")


def test_a_rank_holds_its_shard_and_one_tensor(ranks, directory, tmp_path):
    """Each rank reads its rows from safetensors; rank 0 loads a pickle and broadcasts tensor by tensor."""
    pickled = tmp_path / "pickled"
    shutil.copytree(directory, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    model = replace(small_model("llama"), config=None, path=str(directory), attention=Attention.padded)
    models = {
        "slices": model,
        "adapters": replace(model, lora=LoraConfig(rank=4, base_dtype=BaseDtype.bf16)),
        "broadcast": replace(model, path=str(pickled)),
    }
    total = 4 * sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values()) / MB
    assert total > 160
    for rank, answers in enumerate(ranks(4, loaded, models)):
        for name, (grown, shard, largest) in answers.items():
            sizes = f"{name} on rank {rank}: {grown:.0f} MB, shard {shard:.0f}, largest {largest:.0f}, all {total:.0f}"
            assert shard < 0.3 * total, sizes
            if name == "broadcast" and rank == 0:
                continue
            assert grown <= shard + largest + OVERHEAD, sizes
            if name == "adapters":
                assert shard < 0.16 * total, sizes
