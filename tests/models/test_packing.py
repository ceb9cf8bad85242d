"""Packed texts have the vectors and gradients of single texts, and models that do not support packing are detected."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import MistralConfig

from embedtrain.config.recipe import ModelConfig, Pooling, Precision
from embedtrain.data.tokens import Layout, TextTokenizer
from embedtrain.data.types import Chunk, Tokens
from embedtrain.formats.source import open_model_source
from embedtrain.models.attention import CPU, KERNEL_CAPABILITY
from embedtrain.models.build import assemble_encoder, build_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import check_packing, disable_packing, enable_packing, packing_mismatch, window_mismatch
from tests.small import ARCHITECTURES, model_options, small_model, small_tokenizer, text

DEVICE = torch.device("cpu")
WINDOWED = {"sliding_window": 6}
# Texts have up to 41 tokens, so windows are shorter than most of them.
CASES = {
    "bert": {},
    "xlm-roberta": {},
    "modernbert": {},
    "distilbert": {},
    "llama": {},
    "llama, bidirectional": {"bidirectional": True},
    "qwen2": {},
    "qwen2, window": {"config": {"use_sliding_window": True, "max_window_layers": 1} | WINDOWED},
    "qwen3": {},
    "qwen3, bidirectional": {"bidirectional": True},
    "mistral": {},
    "mistral, window": {"config": WINDOWED},
    "mistral, window, bidirectional": {"config": WINDOWED, "bidirectional": True},
    "gemma3_text": {},
    "gemma3_text, window": {"config": WINDOWED},
    "gemma3_text, window, bidirectional": {"config": WINDOWED, "bidirectional": True},
}


def options(case: str, **changes: object) -> ModelConfig:
    other_options = {key: value for key, value in CASES[case].items() if key != "config"}
    model = small_model(case.partition(",")[0], **other_options | changes)
    return dataclasses.replace(model, config=model.config | CASES[case].get("config", {}))


def encoder_of(model: ModelConfig) -> Encoder:
    torch.manual_seed(0)
    encoder = assemble_encoder(open_model_source(model)).eval()
    enable_packing(encoder)
    return encoder


def texts(tokenizer: TextTokenizer, prompt: str = "") -> Tokens:
    """Sorted by length, several of the same length, and one of a single word."""
    rows = [prompt + text(seed, length) for seed, length in enumerate((39, 39, 25, 11, 11, 11, 7, 1))]
    return tokenizer.tokens(rows, prompts=prompt)


def gradients(encoder: Encoder, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
    encoder.zero_grad()
    output_grads = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
    (vectors * output_grads).sum().backward()
    return {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_packed_texts_equal_single_texts(case):
    encoder = encoder_of(options(case))
    tokenizer = TextTokenizer(small_tokenizer(), 48, packed=True)
    ids = texts(tokenizer)
    packed = encoder(tokenizer.chunk(ids, range(len(ids))))[0]
    packed_grads = gradients(encoder, packed)
    disable_packing(encoder)
    single = torch.cat(
        [
            encoder(Chunk(torch.tensor([text_ids]), torch.ones(1, len(text_ids), dtype=torch.int64)))[0]
            for text_ids in ids.lists()
        ]
    )
    single_grads = gradients(encoder, single)
    torch.testing.assert_close(packed, single, atol=1e-5, rtol=0)
    assert packed_grads.keys() == single_grads.keys()
    largest = max(float(grad.abs().max()) for grad in single_grads.values())
    for name, grad in single_grads.items():
        assert float((packed_grads[name] - grad).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_packed_pooling_equals_padded_pooling(pooling, include_prompt):
    encoder = encoder_of(small_model("bert", pooling=pooling))
    vectors = []
    for packed in (True, False):
        layout = Layout(small_tokenizer(), include_prompt=include_prompt)
        tokenizer = TextTokenizer(small_tokenizer(), 48, layout, packed=packed)
        ids = texts(tokenizer, prompt="alpha beta ")
        chunk = tokenizer.chunk(ids, range(len(ids)))
        assert (chunk.packing is not None) is packed and (chunk.pooled is None) is include_prompt
        assert chunk.lengths.sum() == len(ids.ids) and bool(chunk.ids.numel() == chunk.lengths.sum()) is packed
        vectors.append(encoder(chunk)[0])
    torch.testing.assert_close(*vectors, atol=1e-6, rtol=0)


@pytest.mark.parametrize("option", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_packed_texts_have_dropout(option):
    model = small_model("bert")
    encoder = encoder_of(dataclasses.replace(model, config=model.config | {option: 0.5})).train()
    tokenizer = TextTokenizer(small_tokenizer(), 48, packed=True)
    chunk = tokenizer.chunk(texts(tokenizer), range(8))
    first, again, other = (torch.manual_seed(seed) and encoder(chunk)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other, atol=1e-2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp32])
def test_architectures_support_packing(architecture, precision):
    source = open_model_source(small_model(architecture))
    assert check_packing(build_encoder(source), precision=precision, capability=CPU).padding_reason is None
    encoder = assemble_encoder(source).eval()
    enable_packing(encoder)
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    assert packing_mismatch(encoder.to(dtype), source.config, precision, DEVICE) is None


@pytest.mark.parametrize("window", [6, 4096])
@pytest.mark.parametrize("architecture", ["modernbert", "qwen2", "mistral", "gemma3_text", "qwen2_moe", "phi3", "bert"])
def test_texts_that_are_longer_than_a_window_are_compared(architecture, window):
    """qwen2_moe does not pass its window to the function that computes attention."""
    config = {"model_type": architecture, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    if architecture != "bert":
        config |= {"local_attention" if architecture == "modernbert" else "sliding_window": window}
    if architecture.startswith("qwen"):
        config |= {"use_sliding_window": True, "max_window_layers": 1}
    if architecture == "phi3":
        config |= {"pad_token_id": 0}
    config = open_model_source(model_options(config=config, pooling=Pooling.mean)).config
    state = torch.random.get_rng_state()
    reason = window_mismatch(config, Precision.fp32, DEVICE)
    assert torch.equal(torch.random.get_rng_state(), state)
    if architecture == "qwen2_moe":
        assert reason is not None
        assert "differ by" in reason
    else:
        assert reason is None


class Unknown(MistralConfig):
    model_type = "unknown"


def test_a_window_that_cannot_be_compared_is_named():
    reason = window_mismatch(Unknown(sliding_window=6), Precision.fp32, DEVICE)
    assert "window (sliding_window=6) could not be compared" in reason


def test_model_with_its_own_attention_is_padded():
    support = check_packing(
        build_encoder(open_model_source(small_model("mpnet"))), precision=Precision.fp32, capability=CPU
    )
    assert "attention" in support.padding_reason


def test_limits_of_the_gpu_kernel():
    encoder = build_encoder(open_model_source(small_model("bert", dropout=0.1)))
    assert (
        "parallel.precision=fp32"
        in check_packing(encoder, precision=Precision.fp32, capability=KERNEL_CAPABILITY).padding_reason
    )
    assert check_packing(encoder, precision=Precision.bf16, capability=KERNEL_CAPABILITY).dropout == 0.1
    odd = build_encoder(open_model_source(small_model("qwen3", config=small_model("qwen3").config | {"head_dim": 20})))
    assert "size 20" in check_packing(odd, precision=Precision.bf16, capability=KERNEL_CAPABILITY).padding_reason


class Leaking(nn.Module):
    """A layer that adds to each token a little of the previous one, also across texts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self.layer(hidden, *args, **kwargs) + 1e-3 * hidden.roll(1, dims=1)


def test_texts_that_attend_to_each_other_are_detected():
    source = open_model_source(small_model("llama"))
    encoder = assemble_encoder(source).eval()
    encoder.backbone.layers[0] = Leaking(encoder.backbone.layers[0])
    enable_packing(encoder)
    assert check_packing(encoder, precision=Precision.fp32, capability=CPU).padding_reason is None
    assert "attend to each other" in packing_mismatch(encoder, source.config, Precision.fp32, DEVICE)


def test_wrong_positions_are_detected(monkeypatch):
    source = open_model_source(small_model("xlm-roberta"))
    encoder = assemble_encoder(source).eval()
    enable_packing(encoder)
    monkeypatch.setattr("embedtrain.models.encoder.first_position", lambda backbone: 0)
    assert "differ by" in packing_mismatch(encoder, source.config, Precision.fp32, DEVICE)


def test_unsupported_attention_features_are_detected():
    config = small_model("gemma3_text").config | {"model_type": "gemma2"}
    encoder = assemble_encoder(open_model_source(model_options(config=config, pooling=Pooling.mean)))
    assert check_packing(encoder, precision=Precision.fp32, capability=CPU).padding_reason is not None
    enable_packing(encoder)
    assert "softcap" in check_packing(encoder, precision=Precision.fp32, capability=CPU).padding_reason


@pytest.mark.slow
def test_compiled_blocks_are_compiled_once_for_all_batches():
    """The lengths of a batch's texts do not cause recompilation."""
    encoder = encoder_of(options("llama"))
    tokenizer = TextTokenizer(small_tokenizer(), 48, packed=True)
    ids = texts(tokenizer)
    chunks = [tokenizer.chunk(ids, rows) for rows in ([0, 2, 3], [1, 4, 5, 6], [2, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7])]
    expected = [encoder(chunk)[0] for chunk in chunks]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in encoder.backbone.layers:
        block.compile(dynamic=True, backend="aot_eager")
    graphs = set()
    for chunk, vectors in zip(chunks, expected, strict=True):
        output = encoder(chunk)[0]
        output.sum().backward()
        torch.testing.assert_close(output, vectors, atol=1e-6, rtol=0)
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    (number,) = graphs
    assert number > 0
