"""FLOPs of a training step, the arithmetic that the model requires, and how many a device can compute per second.

Padding, activation checkpointing and the second forward pass of gradient caching are not counted, so that a program
that avoids them reaches a higher rate. The count follows Chowdhery et al., "PaLM" (2022), appendix B: 6 FLOPs per
weight and token, and 12 per pair of tokens that attend to each other and element of their queries.
"""

import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from embedtrain.distributed.collectives import gather_vector
from embedtrain.distributed.world import World
from embedtrain.models.adapters import four_bit_layers
from embedtrain.models.attention_direction import attends_causally
from embedtrain.models.encoder import Encoder
from embedtrain.models.own_class import HEAD


def token_flops(matmul_elements: float, trained: float, attention: float) -> tuple[float, float]:
    """FLOPs of the forward and of the backward pass of a token: 2 per weight, and 2 more per gradient of a weight.

    `matmul_elements` are those of weights that the token is multiplied with, `trained` those with a gradient;
    `attention` is FLOPs of the products of queries, keys and values in the forward pass.
    """
    return 2.0 * matmul_elements + attention, 2.0 * (matmul_elements + trained) + 2.0 * attention


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Attention layers of the same kind."""

    layers: int
    width: int  # number of heads x head size, of the queries
    causal: bool  # whether a token attends only to itself and earlier tokens
    window: int | None = None  # tokens that a token attends to in each direction, without itself; None: all

    def pairs(self, lengths: Tensor) -> Tensor:
        """Pairs of tokens that attend to each other in texts of these lengths; float64, of the same shape."""
        lengths = lengths.double()
        reach = lengths if self.window is None else lengths.clamp(max=self.window + 1)
        # The first tokens attend to all earlier ones, later tokens to `reach - 1`.
        before = reach * (reach - 1) / 2 + (lengths - reach) * (reach - 1)
        return lengths + (before if self.causal else 2.0 * before)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a model as a function of text lengths."""

    matmul_elements: int  # of weights that every token is multiplied with: no embeddings, biases and norms
    trained: int  # those of them that have a gradient
    attention: tuple[AttentionLayers, ...]
    vision: "ModelFlops | None" = None  # of a vision tower, whose tokens are patches

    def of(self, lengths: Tensor, patches: Tensor | None = None) -> float:
        """FLOPs of the forward and backward pass of texts of these lengths, int64 [N], in tokens.

        `patches`, int64 [P], are those of each picture, which a vision tower computes.
        """
        attention = sum(4.0 * kind.layers * kind.width * float(kind.pairs(lengths).sum()) for kind in self.attention)
        tokens = float(lengths.sum())
        forward, backward = token_flops(tokens * self.matmul_elements, tokens * self.trained, attention)
        of_pictures = 0.0 if self.vision is None or patches is None else self.vision.of(patches)
        return of_pictures + forward + (backward if self.trained or self.vision is not None else 0.0)


def model_flops(encoder: Encoder) -> ModelFlops:
    """FLOPs of an encoder with one tower, with `requires_grad` as in training; sharded or not.

    What projects the rows of a vision tower is multiplied with rows, of which there are fewer than patches.
    """
    in_vision = {id(weight) for part in encoder.vision_modules for weight in part.parameters()}
    embeddings, has_vocabulary = {id(p) for p in lookup_weights(encoder)}, encoder.output.has_vocabulary
    weights = [
        p
        for name, p in encoder.named_parameters()
        # The head of a cross-encoder computes one vector of a pair, that of a sparse model one of each token.
        if p.dim() > 1 and id(p) not in embeddings and (has_vocabulary or not name.startswith(HEAD))
        if id(p) not in in_vision
    ]
    quantized = sum(layer.in_features * layer.out_features for _, layer in four_bit_layers(encoder))
    return ModelFlops(
        matmul_elements=sum(weight.numel() for weight in weights) + quantized,
        trained=sum(weight.numel() for weight in weights if weight.requires_grad),
        attention=_attention(encoder.backbone.config, None if encoder.vision is None else encoder.vision.is_causal),
        vision=vision_flops(encoder) if in_vision else None,
    )


def vision_flops(encoder: Encoder) -> ModelFlops:
    """FLOPs of a vision tower, by patches."""
    family = encoder.vision
    assert family is not None
    embeddings = {id(p) for p in lookup_weights(encoder)}
    tower, *projections = encoder.vision_modules
    of_rows = {id(p) for part in projections for p in part.parameters()}
    of_rows |= {id(p) for name, part in tower.named_modules() if "merger" in name for p in part.parameters()}
    elements = [0.0, 0.0]
    for weight in {p for part in encoder.vision_modules for p in part.parameters()}:
        if weight.dim() > 1 and id(weight) not in embeddings:
            per_patch = weight.numel() / (family.merge**2 if id(weight) in of_rows else 1)
            elements[0] += per_patch
            elements[1] += per_patch * weight.requires_grad
    # A window has patches on both sides of one, as that of a text.
    attention = [
        AttentionLayers(layers, family.width, causal=False, window=None if reach is None else reach // 2)
        for layers, reach in family.attention_layers
    ]
    return ModelFlops(round(elements[0]), round(elements[1]), tuple(attention))


def lookup_weights(encoder: Encoder) -> list[Tensor]:
    """Weights of embeddings that tokens look up, and are not multiplied with, as with a tied vocabulary head."""
    tied = encoder.backbone.get_input_embeddings() if encoder.tied else None
    return [
        weight
        for part in encoder.modules()
        if isinstance(part, nn.Embedding) and part is not tied
        for weight in part.parameters()
    ]


def _attention(config: PretrainedConfig, causal: bool | None = None) -> tuple[AttentionLayers, ...]:
    """From the standard attribute names of transformers' configurations (5.23); `causal`: None: as these say."""
    config = config.get_text_config()
    layers = int(getattr(config, "num_hidden_layers", 0))
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None)
    width = int(heads * size) if heads and size else int(config.hidden_size)
    causal = attends_causally(config) if causal is None else causal
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * layers)
    # The window of causal attention includes the token itself, that of bidirectional attention does not.
    reach = None if window is None else int(window) - causal
    counts = Counter(reach if kind == "sliding_attention" else None for kind in kinds)
    return tuple(AttentionLayers(number, width, causal, reach) for reach, number in counts.items())


# TFLOP/s of dense products in bf16 with sums in fp32, by the name of the device: what the datasheets say, half of the
# figure where that is for sparse matrices.
_BF16_PEAKS = (
    (r"B200", 2250.0),
    (r"H200 NVL", 835.0),
    (r"GH200|H200|H100 80GB HBM3|H100 SXM", 989.4),
    (r"H100 NVL", 835.0),
    (r"H100 PCIe", 756.0),
    (r"A100", 312.0),
    (r"L40S", 362.0),
    (r"L4", 121.0),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
)


@dataclass(frozen=True, slots=True)
class FlopsReference:
    """FLOP/s of one device in dense products, of the type that the model computes in; None if it is not known."""

    peak: float | None = None  # of the datasheet: the reference of `mfu`
    matmul: float | None = None  # measured: the reference of `matmul_fraction`


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The dense peak of the datasheet; None for other types than bf16, other devices, and parts of a device (MIG)."""
    if dtype != torch.bfloat16 or "MIG" in device_name:
        return None
    return next(
        (tflops * 1e12 for name, tflops in _BF16_PEAKS if re.search(rf"\b({name})\b", device_name)),
        None,
    )


# Sizes n of n x n matrices, of which the largest that fits into `SECONDS` is measured. Small ones do not fill a GPU.
SIZES = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
SECONDS = {"cuda": 0.4, "cpu": 0.06}
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """The measured rate."""

    flops: float  # floating point operations per second of one rank, the mean over ranks
    size: int  # n
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.flops / 1e12:,.3g} TFLOP/s per rank in products of {self.size} x {self.size} matrices in {kind}"


def matmul_rate(world: World, dtype: torch.dtype) -> MatmulRate:
    """Measure the rate on all ranks at the same time, within half a second. A collective."""
    sizes, device = SIZES[world.device.type], world.device
    _seconds(sizes[0], dtype, device, rounds=1)  # warm-up: selects kernels, loads libraries
    once = _seconds(sizes[0], dtype, device, rounds=1)
    fitting = [n for n in sizes if once * (n / sizes[0]) ** 3 * (ROUNDS + 1) <= SECONDS[device.type]]
    size = min(world.gather(max(fitting, default=sizes[0])))
    local = 2.0 * size**3 / _seconds(size, dtype, device, rounds=ROUNDS)
    rates = gather_vector(torch.tensor([local], dtype=torch.float64, device=device))
    if device.type == "cuda":  # the matrices do not count as memory of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return MatmulRate(float(rates.mean()), size, dtype)


def _seconds(size: int, dtype: torch.dtype, device: torch.device, *, rounds: int) -> float:
    """Seconds of one product: the median of `rounds`, after a warm-up."""
    # Random numbers, because zeros take less power and are multiplied faster.
    source = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, dtype=dtype, device=device, generator=source) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    return statistics.median(time_product(left, right, out) for _ in range(rounds))


def time_product(left: Tensor, right: Tensor, out: Tensor) -> float:
    """Seconds of one product."""
    if left.device.type != "cuda":
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.mm(left, right, out=out)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
