"""Packed items with pictures against transformers' own classes on single items."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from embedtrain.config.recipe import LoraConfig, Pooling
from embedtrain.models import packing
from embedtrain.models.adapters import add_adapters
from embedtrain.models.blocks import find_blocks
from embedtrain.models.packing import disable_packing, packed_attention
from embedtrain.models.vision_language import FAMILIES, grid_positions
from tests.vision_models import (
    HIDDEN,
    IMAGE,
    QWEN,
    chunk_of,
    class_hidden,
    item_of,
    items,
    random_model,
    vision_encoder,
)

EXACT = {torch.float32: 1e-6, torch.float64: 1e-13}


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The norm of the difference, relative to that of the right one."""
    return float((left - right).detach().norm() / right.detach().norm())


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_packed_items_are_those_of_the_class_alone(architecture: str, dtype: torch.dtype) -> None:
    # Gemma's norms are in float32.
    tolerance = EXACT[torch.float32 if architecture == "paligemma" else dtype]
    encoder, model, chosen = vision_encoder(architecture, dtype), random_model(architecture, dtype), items(architecture)
    weights = torch.randn(len(chosen), HIDDEN, generator=torch.Generator().manual_seed(1), dtype=dtype)
    (vectors,) = encoder(chunk_of(architecture, encoder, chosen))
    (vectors * weights).sum().backward()
    alone = F.normalize(torch.stack([class_hidden(architecture, model, item)[-1] for item in chosen]), dim=-1)
    (alone * weights).sum().backward()
    assert difference(vectors, alone) <= tolerance
    packed, single = gradients(encoder.backbone), gradients(model)
    assert packed.keys() == single.keys()
    largest = max(float(grad.norm()) for grad in single.values())
    # Some gradients are zero but for rounding, such as that of a bias of keys.
    scales = {name: max(float(grad.norm()), 1e-3 * largest) for name, grad in single.items()}
    assert max(float((packed[name] - grad).norm()) / scales[name] for name, grad in single.items()) <= 4 * tolerance


@pytest.mark.parametrize("architecture", FAMILIES)
def test_padded_items_are_the_packed_ones(architecture: str) -> None:
    encoder, chosen = vision_encoder(architecture, pooling=Pooling.mean), items(architecture)
    with torch.no_grad():
        (packed,) = encoder(chunk_of(architecture, encoder, chosen))
        disable_packing(encoder)
        (padded,) = encoder(chunk_of(architecture, encoder, chosen, width=44))
    assert difference(padded, packed) <= 1e-6


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_pass_without_pictures_on_this_rank_has_zero_gradients_in_the_tower(architecture: str) -> None:
    encoder = vision_encoder(architecture)
    texts = [item for item in items(architecture) if not item.pixels]
    (plain,) = encoder(chunk_of(architecture, encoder, texts, dummy=False))
    (vectors,) = encoder(chunk_of(architecture, encoder, texts))
    assert torch.equal(vectors, plain)
    vectors.sum().backward()
    of_tower = [weight for part in encoder.vision_modules for weight in part.parameters()]
    assert of_tower
    assert all(weight.grad is not None and not weight.grad.any() for weight in of_tower)
    encoder.zero_grad(set_to_none=True)
    encoder(chunk_of(architecture, encoder, texts, dummy=False))[0].sum().backward()
    assert all(weight.grad is None for weight in of_tower)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_frozen_tower_keeps_nothing_for_a_backward_pass(architecture: str) -> None:
    encoder = vision_encoder(architecture)
    kept = list[torch.Tensor]()
    for part in encoder.vision_modules:
        part.requires_grad_(False)
        part.register_forward_hook(lambda _module, _inputs, output: kept.extend(outputs_of(output)))
    encoder(chunk_of(architecture, encoder, items(architecture)))[0].sum().backward()
    assert kept
    assert not any(output.requires_grad for output in kept)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj"], ["q_proj", "qkv"]])
@pytest.mark.parametrize("architecture", QWEN)
def test_adapters_are_rooted_at_the_language_model(architecture: str, targets: str | list[str]) -> None:
    encoder = vision_encoder(architecture)
    add_adapters(encoder, LoraConfig(rank=2, targets=targets), None, torch.float32)
    adapted = {name.split(".lora_A")[0] for name, _ in encoder.backbone.named_parameters() if ".lora_A" in name}
    in_tower = {name for name in adapted if name.startswith("visual.")}
    assert adapted - in_tower
    assert in_tower == ({f"visual.blocks.{layer}.attn.qkv" for layer in range(3)} if "qkv" in targets else set())


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("idefics3", {"Idefics3EncoderLayer": 2, "LlamaDecoderLayer": 3}),
        ("smolvlm", {"SmolVLMEncoderLayer": 2, "LlamaDecoderLayer": 3}),
        ("qwen2_vl", {"Qwen2VLVisionBlock": 3, "Qwen2VLDecoderLayer": 3}),
        ("qwen3_vl", {"Qwen3VLVisionBlock": 3, "Qwen3VLVisionPatchMerger": 2, "Qwen3VLTextDecoderLayer": 3}),
    ],
)
def test_layers_of_both_towers_are_blocks(architecture: str, expected: dict[str, int]) -> None:
    blocks = find_blocks(vision_encoder(architecture))
    assert Counter(type(block).__name__ for block in blocks) == expected


@pytest.mark.parametrize("architecture", QWEN)
def test_positions_are_those_of_the_class(architecture: str) -> None:
    model, random = random_model(architecture), np.random.default_rng(0)
    chosen = [item_of(architecture, random_shape(random), random) for _ in range(60)]
    lengths = np.array([len(item.ids) for item in chosen])
    starts = np.cumsum(lengths) - lengths
    first_rows = [start + row for start, item in zip(starts.tolist(), chosen, strict=True) for row in item.first_rows]
    cells = np.array([grid for item in chosen for grid in item.grids]) // 2
    expected = []
    for item in chosen:
        ids, grids = torch.tensor([item.ids]), torch.tensor([(1, *grid) for grid in item.grids] or [(1, 2, 2)])
        expected.append(model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grids)[0][:, 0].numpy())
    assert np.array_equal(grid_positions(lengths, np.array(first_rows), cells), np.concatenate(expected, axis=1))


@pytest.mark.parametrize("architecture", QWEN)
def test_a_layer_of_the_tower_calls_attention_once_and_reads_nothing(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, calls = vision_encoder(architecture), list[object]()
    counted = lambda *args, **options: calls.append(options) or packed_attention(*args, **options)  # noqa: E731
    monkeypatch.setattr(packing, "packed_attention", counted)
    chunk = chunk_of(architecture, encoder, items(architecture))
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the pass reads a tensor"))
    with torch.no_grad():
        encoder(chunk)
    assert len(calls) == 3


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def outputs_of(output: object) -> list[torch.Tensor]:
    found = [output] if isinstance(output, torch.Tensor) else list(getattr(output, "values", list)())
    return [value for value in found if isinstance(value, torch.Tensor)]


def random_shape(random: np.random.Generator) -> list[int | tuple[int, int]]:
    shape: list[int | tuple[int, int]] = []
    for _ in range(int(random.integers(1, 5))):
        shape.append(int(random.integers(1, 20)))
        if random.random() < 0.7:
            shape.append((2 * int(random.integers(1, 12)), 2 * int(random.integers(1, 12))))
    return shape
