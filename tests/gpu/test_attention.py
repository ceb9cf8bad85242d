"""Attention over packed texts, outputs and gradients, against each text alone on the CPU in float64."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.data.types import PackedKeys, Packing
from embedtrain.distributed.world import World
from embedtrain.models.packing import packed_attention

LENGTHS = (67, 67, 64, 33, 33, 17, 1)
# Relative to the norm of the result. Inputs are rounded before both sides read them. The kernel rounds probabilities
# and outputs to bf16, each by up to 2^-9, and in the backward pass the gradients of scores as well.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}

# Head size, heads, heads of keys and values.
SHAPES = [(16, 4, 4), (24, 4, 2), (32, 4, 1), (64, 4, 4), (80, 4, 2), (96, 3, 1), (128, 4, 2), (192, 2, 2), (256, 4, 1)]
# Causal, window: tokens that a token attends to, itself included.
MASKS = [(False, None), (True, None), (False, 9), (True, 9), (True, 64)]
# Of each text, the tokens that are attended to; masks that leave each token one of them.
KEY_LENGTHS = (67, 40, 12, 33, 9, 5, 1)
MASKS_OF_KEYS = [(False, None), (True, None), (False, 64), (True, 64)]


def inputs(shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value [1, heads, T, S] and the gradient of the output [1, T, heads, S]."""
    size, heads, groups = shape
    random, num_tokens = torch.Generator().manual_seed(size), sum(LENGTHS)
    sizes = [(1, heads, num_tokens, size), *[(1, groups, num_tokens, size)] * 2, (1, num_tokens, heads, size)]
    return [torch.randn(*size, generator=random).to(dtype) for size in sizes]


def packed(
    world: World,
    shape: tuple[int, int, int],
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    key_lengths: tuple[int, ...] = LENGTHS,
) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    *parts, output_grad = (tensor.to(world.device) for tensor in inputs(shape, dtype))
    query, key, value = (part.requires_grad_() for part in parts)
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=world.device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(world.device)
    layer = nn.Module()
    layer.is_causal = causal  # how transformers' layers say it
    keys = PackedKeys.of(np.array(LENGTHS), np.array(key_lengths))
    keys = None if keys is None else keys.map_tensors(lambda tensor: tensor.to(world.device))
    packing = Packing(LENGTHS, starts, positions, keys)
    output, _ = packed_attention(layer, query, key, value, None, packing=packing, sliding_window=window)
    output.backward(output_grad)
    return [tensor.detach().double().cpu() for tensor in (output, query.grad, key.grad, value.grad)]


def alone(
    shape: tuple[int, int, int],
    causal: bool,
    window: int | None,
    dtype: torch.dtype,
    key_lengths: tuple[int, ...] = LENGTHS,
) -> list[Tensor]:
    """The same, each text by the formula."""
    *parts, output_grad = (tensor.double() for tensor in inputs(shape, dtype))
    query, key, value = (part.requires_grad_() for part in parts)
    size, heads, groups = shape
    outputs = []
    for start, length, num_keys in zip(itertools.accumulate((0, *LENGTHS)), LENGTHS, key_lengths, strict=False):
        text = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        visible = torch.ones(length, length, dtype=torch.bool)
        visible[:, num_keys:] = False
        if window is not None:
            visible &= distance.abs() < window
        if causal:
            visible &= distance >= 0
        keys, values = (part[0, :, text].repeat_interleave(heads // groups, dim=0) for part in (key, value))
        scores = (query[0, :, text] @ keys.transpose(1, 2)) / size**0.5
        outputs.append((F.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1) @ values).transpose(0, 1))
    output = torch.cat(outputs)[None]
    output.backward(output_grad)
    return [tensor.detach() for tensor in (output, query.grad, key.grad, value.grad)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_texts_equal_single_texts(device_ranks, shape):
    for (causal, window), dtype in itertools.product(MASKS, TOLERANCE):
        expected = alone(shape, causal, window, dtype)
        (actual,) = device_ranks(1, packed, shape, causal, window, dtype)
        for name, a, b in zip(("output", "query", "key", "value"), actual, expected, strict=True):
            error = float((a - b).norm() / b.norm())
            assert error <= TOLERANCE[dtype], (name, causal, window, dtype, error)


@pytest.mark.parametrize("shape", [(32, 4, 1), (64, 4, 4)], ids=str)
def test_tokens_that_are_not_attended_to(device_ranks, shape):
    """Expansion tokens of a query: the kernel has fewer keys than queries, other masks take another path."""
    for (causal, window), dtype in itertools.product(MASKS_OF_KEYS, TOLERANCE):
        expected = alone(shape, causal, window, dtype, KEY_LENGTHS)
        (computed,) = device_ranks(1, packed, shape, causal, window, dtype, KEY_LENGTHS)
        for name, a, b in zip(("output", "query", "key", "value"), computed, expected, strict=True):
            error = float((a - b).norm() / b.norm())
            assert error <= TOLERANCE[dtype], (name, causal, window, dtype, error)
