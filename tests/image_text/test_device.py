"""A step with pictures on the pretended device: the numbers of the CPU, without a wait for the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import SigLIPConfig
from embedtrain.config.recipe import ModelConfig
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.build import build_loss
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.image_text.models import image_text, picture_item, save_image_text
from tests.image_text.test_gradient import rows_of
from tests.pretend_cuda.device import host_reads
from tests.small import model_options, parallel, tokenised
from tests.vision_language.models import save_vision_model

NAMES = ("clip", "siglip2")  # the others are vision-language models


def steps(world: World, folder: Path, names: tuple[str, ...]) -> dict[str, tuple[float, torch.Tensor, dict[str, int]]]:
    """Of each model: the loss, all gradients one after the other, and what made the host wait."""
    results = {}
    for name in names:
        options = image_text if name in NAMES else vision_language
        loaded = load_model(options(folder / name), parallel(), world, seed=0)
        loss: Any = build_loss(SigLIPConfig(), dimension=loaded.encoder.dimension, seed=0).to(world.device)
        loaded.source.kind.share_weights(loss, loaded.encoder)
        loaded.encoder.eval()
        backward = Backward(loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy())
        rows = tokenised(rows_of("mixed", folder), loaded.tokenizer)
        batch = make_rank_batch(rows, world.rank, world.size, loaded.tokenizer, ChunkOptions(40, 60))
        batch = batch.prepared_for(loss, loaded.encoder.dimension).to(world.device)
        with host_reads() as reads:
            output, _ = backward(batch)
        grads = [p.grad.full_tensor() for p in loaded.encoder.parameters() if isinstance(p.grad, DTensor)]
        grads += [parameter.grad for parameter in loss.parameters()]
        results[name] = output.local_loss.item(), torch.cat([grad.flatten().cpu() for grad in grads]), dict(reads)
    return results


def vision_language(path: Path) -> ModelConfig:
    return model_options("dense", path=str(path), pooling="last")


@pytest.mark.parametrize(
    "names", [("clip", "qwen3_vl"), pytest.param(("siglip2", "idefics3"), marks=pytest.mark.slow)], ids=" ".join
)
def test_a_step_is_that_of_the_cpu(ranks, cuda_ranks, tmp_path, names):
    for name in names:
        (save_image_text if name in NAMES else save_vision_model)(name, tmp_path)
    for seed in range(12):
        picture_item(tmp_path, seed)
    on_cpu, on_device = ranks(2, steps, tmp_path, names), cuda_ranks(2, steps, tmp_path, names)
    for expected, actual in zip(on_cpu, on_device, strict=True):
        for name in names:
            assert actual[name][0] == pytest.approx(expected[name][0], rel=1e-4)
            torch.testing.assert_close(actual[name][1], expected[name][1], rtol=1e-3, atol=1e-4)
            assert actual[name][2] == {}
