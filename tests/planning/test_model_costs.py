"""What a plan knows of a model: counted on the model itself, and what autograd keeps of a real pass."""

import time

import pytest
import torch
from torch import nn

from embedtrain.config.recipe import LoraConfig, Precision
from embedtrain.models.adapters import add_adapters
from embedtrain.planning import activations
from embedtrain.planning.model_costs import model_spec
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, built, facts
from tests.small import ARCHITECTURES, small_model

LENGTH = 48


def small(architecture, **changes):
    return built({**small_model(architecture).config, "hidden_size": 64, **changes})


def kept_in_reality(encoder, texts: int) -> int:
    """Bytes of the storages that autograd keeps of a real forward pass on this CPU, parameters left out."""
    ids = torch.full((texts, LENGTH), 5)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0  # else no mask is made, and attention keeps none
    own = {tensor.untyped_storage().data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers(), ids, mask)}
    held = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        vectors = encoder(ids, mask)
    assert vectors.requires_grad
    return sum(size for size, _ in held.values())


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_a_block_keeps_what_autograd_keeps_of_a_real_one(architecture):
    """Four blocks less two, in memory and with real tensors."""
    real = []
    for layers in (2, 4):
        encoder, _ = small(architecture, num_hidden_layers=layers)
        torch.manual_seed(0)
        encoder.to_empty(device="cpu").train()
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.normal_(0.0, 0.1)
        rebuilt = built_for_real(encoder)
        real.append(kept_in_reality(rebuilt, 4) / (4 * LENGTH))
    encoder, blocks = small(architecture, num_hidden_layers=4)
    found = activations.measure(
        encoder, blocks, dtype=torch.float32, tokens_per_text=LENGTH, recompute=False, gpu=False
    )
    assert found.block == pytest.approx((real[1] - real[0]) / 2, rel=0.1)


def built_for_real(encoder):
    """Buffers that `to_empty` left as garbage, made anew."""
    for module in encoder.modules():
        if hasattr(encoder.backbone, "_init_weights"):
            encoder.backbone._init_weights(module)
    return encoder


def test_the_encoder_is_left_as_it_was():
    encoder, blocks = small("llama")
    before = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in encoder.state_dict().items()}
    names = [name for name, _ in encoder.named_modules()]
    buffers = {name: buffer.device for name, buffer in encoder.named_buffers()}
    model_spec(encoder, blocks, precision=Precision.bf16, tokens_per_text=8, gpu=True).keeps(False)
    assert before == {name: (t.shape, t.dtype, t.device) for name, t in encoder.state_dict().items()}
    assert names == [name for name, _ in encoder.named_modules()]
    assert buffers == {name: buffer.device for name, buffer in encoder.named_buffers()}
    assert not any(parameter._post_accumulate_grad_hooks for parameter in encoder.parameters())


def test_recomputing_keeps_a_blocks_input_alone():
    found = facts(LLAMA_3_8B)
    assert found.keeps(True).block == pytest.approx(2 * 4096, rel=0.01)
    assert found.keeps(False).block > 20 * found.keeps(True).block
    # While a block is recomputed all that it keeps is there.
    assert found.keeps(True).backward > found.keeps(False).block


def test_a_large_model_takes_no_time():
    facts(XLMR_LARGE).keeps(False)  # what torch prepares once
    began = time.process_time()
    found = facts(LLAMA_3_8B)
    found.keeps(False)
    assert time.process_time() - began < 2
    assert found.parameters == 7_504_924_672
    assert (len(found.blocks), found.block.elements) == (32, 218_112_000)
    assert found.embedding.elements == 128256 * 4096
    assert found.root.elements == 4096


def test_adapters_leave_the_rest_frozen_and_keep_less():
    whole, blocks = small("llama")
    adapted, of_adapted = small("llama")
    add_adapters(adapted, LoraConfig(rank=4), None, torch.bfloat16)
    plain, lora = (
        model_spec(encoder, inside, precision=Precision.bf16, tokens_per_text=8, gpu=True)
        for encoder, inside in ((whole, blocks), (adapted, of_adapted))
    )
    assert lora.trained == sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert lora.parameters == plain.parameters + lora.trained
    assert lora.frozen_by_dtype == {"bfloat16": 2 * plain.parameters}
    assert lora.frozen_bytes == 2 * plain.parameters
    assert plain.frozen_by_dtype == {}
    # A frozen linear layer needs no input for a gradient of its own; norms and embeddings neither.
    assert lora.keeps(False).rest < plain.keeps(False).rest


class Stubborn(nn.Module):
    """Looks at its input, which has no content on the meta device."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden, *args, **kwargs):
        assert bool((hidden == hidden).all())
        return self.block(hidden, *args, **kwargs)


def test_code_that_cannot_run_without_memory_falls_back_to_the_rule():
    encoder, _ = small("xlm-roberta")
    layers = encoder.backbone.encoder.layer
    for place, layer in enumerate(layers):
        layers[place] = Stubborn(layer)
    found = model_spec(encoder, list(layers), precision=Precision.bf16, tokens_per_text=8, gpu=True)
    assert found.keeps(False) == activations.assumed(64, torch.bfloat16, recompute=False)
    assert [type(layer) for layer in layers] == [Stubborn] * 2


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_bound_is_above_what_is_measured(architecture):
    found = facts({**small_model(architecture).config}, length=LENGTH)
    for recompute in (False, True):
        measured, bound = found.keeps(recompute), found.bounded().keeps(recompute)
        assert bound.block >= measured.block
        assert bound.kept(2) + bound.backward >= measured.kept(2) + measured.backward
        assert bound.alone >= measured.alone
