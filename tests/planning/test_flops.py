"""Operations of a model's passes: those that torch counts in a real one, pairs that a real mask lets through."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, masking_utils

from embedtrain.config.recipe import LoraConfig
from embedtrain.data.types import Chunk
from embedtrain.formats.source import open_model_source
from embedtrain.models.adapters import add_adapters
from embedtrain.models.build import assemble_encoder
from embedtrain.models.vision_language import vision_family
from embedtrain.planning.flops import AttentionLayers, model_flops
from tests.planning.models import LLAMA_3_8B, XLMR_LARGE, built
from tests.small import ARCHITECTURES, MORE_ARCHITECTURES, small_model
from tests.vision_models import chunk_of, items, vision_encoder

LENGTH = 24


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE_ARCHITECTURES])
def test_operations_are_those_of_a_real_pass(architecture):
    """Of attention torch counts the whole square: so all layers see all tokens here."""
    decoder = architecture in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text")
    model = small_model(architecture, bidirectional=True if decoder else None)
    if architecture == "modernbert":
        model.config["local_attention"] = 64
    encoder = assemble_encoder(open_model_source(model))
    encoder.backbone.set_attn_implementation("eager")  # whose products torch counts on every device
    ids = torch.full((1, LENGTH), 5)
    with FlopCounterMode(display=False) as counted:
        encoder(Chunk(ids, torch.ones_like(ids)))[0].sum().backward()
    found = model_flops(encoder).of(torch.tensor([LENGTH]))
    # Besides there is a model's product of rotary frequencies and positions.
    assert found == pytest.approx(counted.get_total_flops(), rel=0.005)
    assert model_flops(encoder).of(torch.tensor([LENGTH] * 3)) == pytest.approx(3 * found)


@pytest.mark.parametrize(("architecture", "tied"), [("bert", True), ("qwen3", True), ("qwen3", False)])
def test_a_vocabulary_head_is_counted(architecture, tied):
    """Most words are active, so that all products are those of whole matrices."""
    torch.manual_seed(0)
    decoder = architecture == "qwen3"
    model = small_model(architecture, kind="sparse", pooling=None, bidirectional=True if decoder else None)
    model.config["tie_word_embeddings"] = tied
    encoder = assemble_encoder(open_model_source(model))
    encoder.backbone.set_attn_implementation("eager")
    ids = torch.arange(4, 4 + LENGTH).unsqueeze(0)
    with FlopCounterMode(display=False) as counted:
        encoder(Chunk(ids, torch.ones_like(ids)))[0].sum().backward()
    added_in_place = 2 * 64 * 32 * LENGTH  # `addmm_`, which torch does not count
    found = model_flops(encoder).of(torch.tensor([LENGTH]))
    assert found == pytest.approx(counted.get_total_flops() + added_in_place, rel=0.005)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 40])
def test_pairs_are_those_of_the_mask(causal, window):
    """transformers' own windows: looking back one counts the token itself, looking both ways it does not."""
    if window is None:
        seen = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    elif causal:
        seen = masking_utils.sliding_window_causal_mask_function(window + 1)
    else:
        seen = masking_utils.sliding_window_bidirectional_mask_function(window)
    lengths = torch.tensor([1, 2, 5, 17, 40])
    expected = [
        sum(bool(seen(0, 0, torch.tensor(i), torch.tensor(j))) for i in range(n) for j in range(n))
        for n in lengths.tolist()
    ]
    assert AttentionLayers(1, 1, causal, window).pairs(lengths).tolist() == expected


def test_layers_with_windows_are_told_from_the_others():
    def layers(architecture, **changes):
        model = small_model(architecture)
        encoder, _ = built({**model.config, **changes})
        return {(kind.layers, kind.causal, kind.window) for kind in model_flops(encoder).attention}

    assert layers("bert") == {(2, False, None)}
    assert layers("llama") == {(2, True, None)}
    assert layers("modernbert", num_hidden_layers=4) == {(2, False, None), (2, False, 4)}
    assert layers("mistral", sliding_window=8) == {(2, True, 7)}
    assert layers("gemma3_text", num_hidden_layers=6, sliding_window=8) == {(5, True, 7), (1, True, None)}
    assert layers("qwen3", sliding_window=8, use_sliding_window=False) == {(2, True, None)}


def test_published_models():
    """0.52, 1.85 and 42 GFLOP a token are what others count for texts of a few hundred tokens."""
    large, llama = (model_flops(built(config)[0]) for config in (XLMR_LARGE, LLAMA_3_8B))
    assert large.of(torch.tensor([128])) / 128 == pytest.approx(1.85e9, rel=0.02)
    assert llama.of(torch.tensor([128])) / 128 == pytest.approx(42e9, rel=0.01)
    # Two texts of half the length have half of attention's part.
    attention = 12 * 24 * 1024
    assert large.of(torch.tensor([512])) - large.of(torch.tensor([256, 256])) == attention * (512**2 - 2 * 256**2)


def test_frozen_weights_have_no_gradient_of_their_own():
    whole, _ = built(small_model("llama").config)
    adapted, _ = built(small_model("llama").config)
    add_adapters(adapted, LoraConfig(rank=4), None, torch.bfloat16)
    plain, lora = model_flops(whole), model_flops(adapted)
    small = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert (plain.trained, lora.trained) == (plain.matmul_elements, small)
    assert lora.matmul_elements == plain.matmul_elements + small
    one = torch.tensor([1])
    assert lora.of(one) - plain.of(one) == 6 * small - 2 * plain.matmul_elements


@pytest.mark.parametrize("architecture", ["qwen3_vl", "modernvbert"])
def test_a_vision_tower_computes_patches(architecture):
    """The products with weights are those of a real pass; of patches, the input has no gradient."""
    encoder, chosen = vision_encoder(architecture), items(architecture)
    chunk, counted = chunk_of(architecture, encoder, chosen), model_flops(encoder)
    assert counted.vision is not None and chunk.pictures is not None
    tokens, patches = sum(len(item.ids) for item in chosen), sum(chunk.pictures.patches)
    with FlopCounterMode(display=False) as real:
        encoder(chunk)[0].sum().backward()
    found = {str(name): number for name, number in real.get_flop_counts()["Global"].items()}
    products = sum(found[f"aten.{name}"] for name in ("mm", "addmm") if f"aten.{name}" in found)
    first = found["aten.convolution"]
    expected = 6 * (tokens * counted.matmul_elements + patches * counted.vision.matmul_elements) - 3 * first
    assert products == pytest.approx(expected, rel=0.02)
    lengths, sizes = torch.tensor([len(item.ids) for item in chosen]), torch.tensor(chunk.pictures.patches)
    assert counted.of(lengths, sizes) > expected
    for module in encoder.vision_modules:
        module.requires_grad_(False)
    frozen = model_flops(encoder)
    assert frozen.vision is not None
    assert frozen.vision.of(sizes) == pytest.approx(counted.vision.of(sizes) / 3, rel=0.01), "no backward pass"


def test_the_vision_tower_of_published_models():
    """Forward TFLOP of 768 tokens: of tower and language model, by hand."""
    text = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=text | {"num_hidden_layers": 28, "intermediate_size": 6144},
        vision_config={"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048},
    )
    family = vision_family(config)
    assert family is not None
    # (1.86 + 0.93) of the tower's layers, over 2.17 of the products of 768 tokens with weights.
    assert family.costs(np.array([3072])) == pytest.approx(768 * 2.79 / 2.17, rel=0.01)
