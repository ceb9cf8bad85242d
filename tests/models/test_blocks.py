"""Transformer blocks are detected in the model, whatever it declares."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling as PoolingModule
from sentence_transformers.models import Transformer
from torch import nn

from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from tests.small import ARCHITECTURES, MORE_ARCHITECTURES, save_small, small_model

BLOCKS = {
    "xlm-roberta": "XLMRobertaLayer",
    "bert": "BertLayer",
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "mistral": "MistralDecoderLayer",
    "modernbert": "ModernBertEncoderLayer",
    "mpnet": "MPNetLayer",
    "distilbert": "TransformerBlock",
    "electra": "ElectraLayer",
    "deberta-v2": "DebertaV2Layer",
}


def test_all_architectures_are_tested():
    assert BLOCKS.keys() == ARCHITECTURES.keys() | MORE_ARCHITECTURES.keys()


def encoder_of(architecture: str, num_layers: int = 3) -> nn.Module:
    model = small_model(architecture)
    return build_encoder(
        open_model_source(small_model(architecture, config=model.config | {"num_hidden_layers": num_layers}))
    )


def names(blocks: list[nn.Module]) -> list[str]:
    return [type(block).__name__ for block in blocks]


@pytest.mark.parametrize("architecture", BLOCKS)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_blocks_are_the_layers(architecture, num_layers):
    encoder = encoder_of(architecture, num_layers)
    blocks = find_blocks(encoder)
    assert names(blocks) == [BLOCKS[architecture]] * num_layers
    assert blocks == [part for part in encoder.modules() if type(part).__name__ == BLOCKS[architecture]]
    # All but embeddings, final norm and their like is in the blocks.
    assert not [n for n, _ in encoder.named_parameters() if ".attn" in n and not any_holds(blocks, encoder, n)]


def any_holds(blocks: list[nn.Module], encoder: nn.Module, name: str) -> bool:
    parameter = encoder.get_parameter(name)
    return any(parameter is p for block in blocks for p in block.parameters())


@pytest.mark.parametrize("architecture", BLOCKS)
def test_with_peft(architecture):
    backbone = encoder_of(architecture).backbone
    wrapped = get_peft_model(backbone, LoraConfig(target_modules="all-linear", r=2))
    assert names(find_blocks(wrapped)) == [BLOCKS[architecture]] * 3


@pytest.mark.parametrize("architecture", BLOCKS)
def test_inside_a_sentence_transformer(architecture, tmp_path):
    """With and without adapters, which wrap the model that declares its layers."""
    transformer = Transformer(str(save_small(small_model(architecture), tmp_path)))
    model = SentenceTransformer(modules=[transformer, PoolingModule(32)], device="cpu")
    assert names(find_blocks(model)) == [BLOCKS[architecture]] * 2
    transformer.model = get_peft_model(transformer.model, LoraConfig(target_modules="all-linear", r=2))
    assert names(find_blocks(model)) == [BLOCKS[architecture]] * 2


def test_declared_classes_that_do_not_occur():
    """A part of a larger model still declares the layers of that model, such as a vision tower's."""
    encoder = encoder_of("llama")
    for part in encoder.modules():
        if hasattr(type(part), "_no_split_modules"):
            part._no_split_modules = {"Llama4VisionEncoderLayer", "LlamaDecoderLayer"}
    assert names(find_blocks(encoder)) == ["LlamaDecoderLayer"] * 3


@pytest.mark.parametrize("declared", [None, [""], [], ["BertLayre"], "BertLayer", {"BertEmbeddings"}])
@pytest.mark.parametrize("options", [None, "", "  ", ", ,"])
def test_useless_declarations(declared, options):
    """An absent, empty or stale `_no_split_modules` must not lead to sharding only the root."""
    encoder = encoder_of("bert")
    for part in encoder.modules():
        if hasattr(type(part), "_no_split_modules"):
            part._no_split_modules = declared
    assert names(find_blocks(encoder, options)) == ["BertLayer"] * 3


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Mine(nn.Module):
    """A custom model: no declaration, and lists of other modules besides the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.activations = nn.ModuleList([nn.GELU()])
        self.layers = nn.ModuleList([*[Block() for _ in range(4)], nn.LayerNorm(4)])


def test_custom_model():
    model = Mine()
    assert find_blocks(model) == list(model.layers)[:4]
    assert find_blocks(model, "Linear, Block") == [*model.heads, *list(model.layers)[:4]]


def test_layer_in_two_lists_is_one_block():
    model = Mine()
    model.again = nn.ModuleList(model.layers)
    assert find_blocks(model, "Block") == list(model.layers)[:4]


def test_no_layers():
    with pytest.raises(ConfigError, match=r"parallel\.strategy=ddp"):
        find_blocks(nn.Linear(2, 2))
    assert find_blocks(nn.Linear(2, 2), required=False) == []


def test_wrong_class_lists_the_existing_ones():
    encoder = encoder_of("xlm-roberta")
    for options in ("BertLayer", "XLMRobertaLayer,BertLayer", " BertLayer ,"):
        with pytest.raises(ConfigError) as caught:
            find_blocks(encoder.backbone, options)
        for words in (
            "parallel.block_class=BertLayer",
            "XLMRobertaModel",
            "XLMRobertaLayer x3",
            "Write parallel.block_class=XLMRobertaLayer",
        ):
            assert words in str(caught.value)
    with pytest.raises(ConfigError, match="THE_VARIABLE=BertLayer"):
        find_blocks(encoder.backbone, "BertLayer", option="THE_VARIABLE")


def test_parts_of_a_layer_are_no_blocks():
    """accelerate's "A,B" is read with blanks; a class that is not a repeated layer is rejected."""
    encoder = encoder_of("llama")
    for options in ("LlamaDecoderLayer", " LlamaDecoderLayer , ", ",LlamaDecoderLayer"):
        assert names(find_blocks(encoder, options)) == ["LlamaDecoderLayer"] * 3
    with pytest.raises(ConfigError, match=r"=LlamaMLP: .* LlamaDecoderLayer x3"):
        find_blocks(encoder, "LlamaDecoderLayer, LlamaMLP")


def test_nested_layers():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block() for _ in range(3))

    model = nn.Module()
    model.layers = nn.ModuleList(Outer() for _ in range(2))
    assert find_blocks(model) == list(model.layers)
    assert find_blocks(model, "Outer,Block") == list(model.layers)
    assert len(find_blocks(model, "Block")) == 6


def test_blocks_on_the_meta_device():
    assert all(p.is_meta for p in encoder_of("bert").parameters())
    with torch.device("meta"):
        assert len(find_blocks(Mine())) == 4
