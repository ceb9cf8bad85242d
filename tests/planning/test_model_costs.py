"""Costs of a model: counted on the model itself, and compared with what autograd keeps of a real pass."""

import time

import pytest
import torch
from torch import nn

from embedtrain.config.recipe import LoraConfig, Precision
from embedtrain.data.types import Chunk
from embedtrain.models.adapters import add_adapters
from embedtrain.models.blocks import find_blocks
from embedtrain.models.fused_kernels import fuse
from embedtrain.planning import model_costs
from embedtrain.planning.model_costs import measure_activations, model_spec
from tests.models.test_fused_kernels import torch_kernels
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, built, spec_of
from tests.small import ARCHITECTURES, small_model
from tests.vision_models import vision_encoder

LENGTH = 48


def small(architecture, **changes):
    return built({**small_model(architecture).config, "hidden_size": 64, **changes})


def measure_saved_bytes(encoder, texts: int) -> int:
    """Bytes that autograd saves in a real forward pass on this CPU, without parameters."""
    ids = torch.full((texts, LENGTH), 5)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0  # otherwise there is no mask to save
    own = {tensor.untyped_storage().data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers(), ids, mask)}
    held = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        vectors = encoder(Chunk(ids, mask))[0]
    assert vectors.requires_grad
    return sum(size for size, _ in held.values())


FUSED = ("llama", "qwen3", "gemma3_text")


@pytest.mark.parametrize(
    ("architecture", "fused"), [*((name, False) for name in ARCHITECTURES), *((name, True) for name in FUSED)]
)
def test_activations_of_a_block_equal_what_autograd_saves(architecture, fused):
    """Four blocks minus two, with real tensors."""
    real = []
    for layers in (2, 4):
        encoder, _ = small(architecture, num_hidden_layers=layers)
        torch.manual_seed(0)
        encoder.to_empty(device="cpu").train()
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.normal_(0.0, 0.1)
        rebuilt = built_for_real(encoder)
        if fused:
            fuse(find_blocks(rebuilt), torch_kernels())
        real.append(measure_saved_bytes(rebuilt, 4) / (4 * LENGTH))
    encoder, blocks = small(architecture, num_hidden_layers=4)
    model = model_costs.measure_activations(
        encoder, blocks, dtype=torch.float32, tokens_per_text=LENGTH, recompute=False, gpu=False, fused=fused
    )
    assert model.block == pytest.approx((real[1] - real[0]) / 2, rel=0.1)


@pytest.mark.parametrize("architecture", FUSED)
def test_fused_kernels_keep_less(architecture):
    """In bf16, in which the norms of modules keep fp32 besides."""
    encoder, blocks = small(architecture)
    kept = [
        model_spec(encoder, blocks, precision=Precision.bf16, tokens_per_text=LENGTH, gpu=True, fused=fused)
        .activations(False)
        .block
        for fused in (False, True)
    ]
    assert kept[1] < 0.75 * kept[0]


def built_for_real(encoder):
    """Initialise the buffers that `to_empty` left uninitialised."""
    for module in encoder.modules():
        if hasattr(encoder.backbone, "_init_weights"):
            encoder.backbone._init_weights(module)
    return encoder


def test_the_encoder_is_not_modified():
    encoder, blocks = small("llama")
    before = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in encoder.state_dict().items()}
    names = [name for name, _ in encoder.named_modules()]
    buffers = {name: buffer.device for name, buffer in encoder.named_buffers()}
    model_spec(encoder, blocks, precision=Precision.bf16, tokens_per_text=8, gpu=True).activations(False)
    assert before == {name: (t.shape, t.dtype, t.device) for name, t in encoder.state_dict().items()}
    assert names == [name for name, _ in encoder.named_modules()]
    assert buffers == {name: buffer.device for name, buffer in encoder.named_buffers()}
    assert not any(parameter._post_accumulate_grad_hooks for parameter in encoder.parameters())


def test_activation_checkpointing_keeps_only_the_input_of_a_block():
    model = spec_of(LLAMA_3_8B)
    assert model.activations(True).block == pytest.approx(2 * 4096, rel=0.01)
    assert model.activations(False).block > 20 * model.activations(True).block
    # While a block is recomputed, all of its activations exist.
    assert model.activations(True).backward > model.activations(False).block


def test_a_large_model_is_measured_quickly():
    spec_of(XLMR_LARGE).activations(False)  # one-time initialisation of torch
    began = time.process_time()
    model = spec_of(LLAMA_3_8B)
    model.activations(False)
    assert time.process_time() - began < 2
    assert model.weights.parameters == 7_504_924_672
    assert (len(model.weights.blocks), model.weights.largest_block.elements) == (32, 218_112_000)
    assert model.weights.embedding.elements == 128256 * 4096
    assert model.weights.root.elements == 4096


def test_adapters_freeze_the_base_and_keep_fewer_activations():
    whole, blocks = small("llama")
    adapted, of_adapted = small("llama")
    add_adapters(adapted, LoraConfig(rank=4), None, torch.bfloat16)
    plain, lora = (
        model_spec(encoder, inside, precision=Precision.bf16, tokens_per_text=8, gpu=True)
        for encoder, inside in ((whole, blocks), (adapted, of_adapted))
    )
    assert lora.weights.trained == sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert lora.weights.parameters == plain.weights.parameters + lora.weights.trained
    assert lora.weights.frozen_by_dtype == {"bfloat16": 2 * plain.weights.parameters}
    assert lora.weights.frozen_bytes == 2 * plain.weights.parameters
    assert plain.weights.frozen_by_dtype == {}
    # Frozen linear layers, norms and embeddings need no input for a weight gradient.
    assert lora.activations(False).rest < plain.activations(False).rest


class ValueDependent(nn.Module):
    """Reads values of its input, which has none on the meta device."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden, *args, **kwargs):
        assert bool((hidden == hidden).all())
        return self.block(hidden, *args, **kwargs)


def test_code_that_fails_on_the_meta_device_falls_back_to_the_rule_of_thumb():
    encoder, _ = small("xlm-roberta")
    layers = encoder.backbone.encoder.layer
    for index, layer in enumerate(layers):
        layers[index] = ValueDependent(layer)
    model = model_spec(encoder, list(layers), precision=Precision.bf16, tokens_per_text=8, gpu=True)
    assert model.activations(False) == model_costs.rule_of_thumb(64, torch.bfloat16, recompute=False)
    assert [type(layer) for layer in layers] == [ValueDependent] * 2


@pytest.mark.quick("gemma3_text", "modernbert", "xlm-roberta")
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_upper_bound_exceeds_the_measurement(architecture):
    model = spec_of({**small_model(architecture).config}, length=LENGTH)
    for recompute in (False, True):
        measured, bound = model.activations(recompute), model.bounded().activations(recompute)
        assert bound.block >= measured.block
        assert bound.cached(2) + bound.backward >= measured.cached(2) + measured.backward
        assert bound.no_grad >= measured.no_grad


def test_a_frozen_vision_tower_keeps_nothing():
    """Then the chunk that keeps the most is one of texts alone, which has more tokens than one of pictures."""
    encoder = vision_encoder("qwen3_vl").to("meta")
    blocks, family = find_blocks(encoder), encoder.vision
    assert family is not None
    in_vision = {id(part) for module in encoder.vision_modules for part in module.modules()}
    of_tokens = [block for block in blocks if id(block) not in in_vision]
    options = {"dtype": torch.bfloat16, "tokens_per_text": 64, "recompute": False, "gpu": True, "packed": True}
    expected = measure_activations(encoder, of_tokens, **options).cached(len(of_tokens))

    def cached() -> tuple[float, float]:
        spec = model_spec(encoder, blocks, precision=Precision.bf16, tokens_per_text=64, gpu=True, packed=True)
        return spec.activations(False).cached(len(blocks)), spec.weights.picture_cost

    trained, cost = cached()
    assert trained > cost * expected
    for module in encoder.vision_modules:
        module.requires_grad_(False)
    assert cached() == (pytest.approx(cost * expected), cost)
