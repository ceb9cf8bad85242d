"""Weights of words against transformers' own classes, and the head against its plain formula in float64."""

import copy

import pytest
import torch
from torch import Tensor

from embedtrain.config.kind_settings import SparseActivation, SparsePooling
from embedtrain.config.recipe import ModelConfig
from embedtrain.data.types import Packing
from embedtrain.formats.source import open_model_source
from embedtrain.kinds.sparse.model import WordHead
from embedtrain.models.build import assemble_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.models.own_class import language_model_class, own_class_mismatch, own_name
from embedtrain.models.packing import enable_packing
from embedtrain.models.sparse_head import TokenSpans, word_weights
from tests.small import small_model, text, text_tokenizer

ARCHITECTURES = ["bert", "xlm-roberta", "distilbert", "modernbert", "mpnet", "electra", "albert", "qwen3", "llama"]
PADDED = {"mpnet"}  # it computes attention itself
TEXTS = [text(seed, length) for seed, length in enumerate((30, 19, 19, 4, 1))]


def sparse_model(architecture: str, *, tied: bool = True, **options: object) -> ModelConfig:
    model = small_model(architecture, kind="sparse", pooling=None, **options)
    model.config["tie_word_embeddings"] = tied
    return model


def build(model: ModelConfig) -> Encoder:
    torch.manual_seed(0)
    encoder = assemble_encoder(open_model_source(model))
    assert isinstance(encoder.output, WordHead)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name.startswith("head.") and name.endswith("bias"):
                parameter.normal_()  # all zero otherwise
        # Zero otherwise, so that all tokens have the same logit.
        encoder.backbone.get_input_embeddings().weight[1].normal_(std=0.1)
    return encoder.eval()


def whole_class(encoder: Encoder) -> torch.nn.Module:
    """Transformers' class with the weights of `encoder`."""
    config = copy.deepcopy(encoder.backbone.config)
    model = language_model_class(config).from_config(config)
    weights = {own_name(n, model.base_model_prefix): w for n, w in encoder.state_dict().items()}
    report = model.load_state_dict(weights, strict=False)
    assert not report.unexpected_keys
    model.tie_weights()
    return model.eval()


def plain_weights(logits: Tensor, pooling: SparsePooling, activation: SparseActivation) -> Tensor:
    weights = logits.relu().log1p()
    if activation is SparseActivation.log1p_relu:
        weights = weights.log1p()
    return weights.amax(dim=-2) if pooling is SparsePooling.max else weights.sum(dim=-2)


def grads(module: torch.nn.Module, weights: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    (weights * torch.linspace(-1, 2, weights.numel()).view_as(weights)).sum().backward()
    # With both names of a tied weight.
    named = module.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_gradients_are_those_of_the_whole_class(architecture, tied):
    encoder = build(sparse_model(architecture, tied=tied))
    reference = whole_class(encoder)
    ids = text_tokenizer().ids(TEXTS)
    logits = [reference(input_ids=torch.tensor([row])).logits[0] for row in ids]
    expected = torch.stack([plain_weights(row, SparsePooling.max, SparseActivation.relu) for row in logits])
    expected_grads = grads(reference, expected)
    assert encoder.tied is tied
    assert own_class_mismatch(encoder, torch.device("cpu")) is None
    (padded,) = text_tokenizer().chunks(TEXTS, 10_000)
    chunks = [padded]
    if architecture not in PADDED:
        chunks += text_tokenizer().with_packing(True).chunks(TEXTS, 10_000)
    for chunk in chunks:
        if chunk.packing is not None:
            enable_packing(encoder)
        weights = encoder(chunk)[0]
        rows = torch.tensor(chunk.rows)
        assert 0.05 < float((weights > 0).float().mean()) < 0.95
        torch.testing.assert_close(weights[rows.argsort()], expected, rtol=1e-4, atol=2e-5)
        own = grads(encoder, weights[rows.argsort()])
        own = {own_name(n, reference.base_model_prefix): grad for n, grad in own.items()}
        assert own.keys() <= expected_grads.keys()
        assert len(own) == len({id(grad) for grad in expected_grads.values()})
        for name, grad in own.items():
            torch.testing.assert_close(grad, expected_grads[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("activation", list(SparseActivation))
@pytest.mark.parametrize("pooling", list(SparsePooling))
@pytest.mark.parametrize("offset", [0.0, -9.0], ids=["most_active", "few_active"])
def test_head_is_its_formula_in_float64(offset, pooling, activation, bias, monkeypatch):
    """In blocks of words; few active words take another way back than many."""
    monkeypatch.setattr("embedtrain.models.sparse_head._CPU_CELLS", 200)
    lengths = (7, 5, 5, 3, 1)
    generator = torch.Generator().manual_seed(1)
    hidden, weight, words, output = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((21, 4), (50, 4), (50,), (5, 50))
    )
    hidden[:, 0] = 1.0  # so that the first column of the weight is a constant
    weight[:, 0] = offset
    hidden[3, 1:] = 3.0 * weight[7, 1:]  # active in any case
    parameters = [hidden.requires_grad_(), weight.requires_grad_(), *([words.requires_grad_()] if bias else [])]
    logits = hidden @ weight.T + (words if bias else 0.0)
    expected = torch.stack([plain_weights(part, pooling, activation) for part in logits.split(lengths)])
    assert (float((expected > 0).double().mean()) < 1 / 16) is (offset < 0)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    spans = TokenSpans.of_packed(Packing(lengths, starts, torch.zeros(1, 21, dtype=torch.int64)))
    weights = word_weights(hidden, weight, words if bias else None, spans, pooling, activation)
    torch.testing.assert_close(weights, expected, rtol=1e-13, atol=1e-13)
    pairs = zip(
        torch.autograd.grad(weights, parameters, output), torch.autograd.grad(expected, parameters, output), strict=True
    )
    for own, plain in pairs:
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)
