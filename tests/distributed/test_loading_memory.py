"""Loading takes a rank's share of the weights and one tensor, not the model: measured on 4 ranks.

Without the pass of one token that follows, and those that ask whether texts can be packed: like every pass they gather
blocks, in the memory of the device, which is the host's here alone.
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
from embedtrain.loading import load as loading
from embedtrain.loading.load import load_model
from tests.memory import MB, memory_growth
from tests.small import parallel, save_small, small_model

# 210 MB in fp32, 67 of them the vocabulary's.
SIZES = {
    "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
EXTRA_COLUMNS = 24  # MB: modules, buffers, and what the allocator keeps


def loaded(world: World, models: dict[str, ModelConfig]) -> dict[str, tuple[float, float, float]]:
    """By name of the model: growth of this rank, its share, and the largest tensor as it is read; MB."""
    found = {}
    for name, model in models.items():
        grown: list[float] = []
        passes, loading.warm_up = loading.warm_up, lambda *_: None
        try:
            with memory_growth(grown):
                encoder = load_model(model, parallel(), world, seed=0).encoder
        finally:
            loading.warm_up = passes
        parameters = list(encoder.parameters())
        share = sum(p.to_local().nbytes for p in parameters if isinstance(p, DTensor)) / MB
        found[name] = grown[0], share, max(4 * p.numel() for p in parameters) / MB
        del encoder, parameters
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    small = small_model("llama")
    small.config |= SIZES
    return save_small(small, tmp_path_factory.mktemp("large") / "model")


def test_a_rank_holds_its_share_and_one_tensor(ranks, directory, tmp_path):
    """From safetensors each rank reads its rows; of a pickle rank 0 has the model, and hands out tensor by tensor."""
    pickled = tmp_path / "pickled"
    shutil.copytree(directory, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    model = replace(small_model("llama"), config=None, path=str(directory), attention=Attention.padded)
    models = {
        "slices": model,
        "adapters": replace(model, lora=LoraConfig(rank=4, base_dtype=BaseDtype.bf16)),
        "handed out": replace(model, path=str(pickled)),
    }
    whole = 4 * sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values()) / MB
    assert whole > 200
    for rank, answers in enumerate(ranks(4, loaded, models)):
        for name, (grown, share, largest) in answers.items():
            told = f"{name} on rank {rank}: {grown:.0f} MB, share {share:.0f}, largest {largest:.0f}, all {whole:.0f}"
            assert share < 0.3 * whole, told
            if name == "handed out" and rank == 0:
                continue
            assert grown <= share + largest + EXTRA_COLUMNS, told
            if name == "adapters":
                assert share < 0.16 * whole, told
