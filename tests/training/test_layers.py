"""Losses on several layers: the vectors after l layers, and their gradients on any number of ranks, chunked and packed.

The reference is the plain computation in one process: transformers' own hidden states, every text encoded alone, the
formulas of InfoNCE and of the KL divergence, in float64.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.losses import InfoNCEConfig, LayerWeighting, MatryoshkaConfig
from embedtrain.config.recipe import Attention, LoraConfig, ModelConfig
from embedtrain.data.types import Chunk, GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.build import build_loss
from embedtrain.models.blocks import EarlyExits, exit_path
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import (
    ARCHITECTURES,
    MORE_ARCHITECTURES,
    batch,
    parallel,
    save_small,
    small_model,
    small_tokenizer,
)

LAYERS, DIMS, TEMPERATURE, KL = [1, 3], [24, 8], 0.2, 0.5
LOSS = InfoNCEConfig(
    temperature=TEMPERATURE,
    mask_duplicates=False,
    matryoshka=MatryoshkaConfig(dims=DIMS, layers=LAYERS, layer_weighting=LayerWeighting.log, layer_kl=KL),
)
Gradients = dict[str, Tensor]


def deep_model(architecture: str, **changes: object) -> ModelConfig:
    """A model of four layers with a dense head of 24 dimensions."""
    small = small_model(architecture, heads=[HeadConfig(out=24)], **changes)
    assert small.config is not None
    return replace(small, config=small.config | {"num_hidden_layers": 4})


def layer_vectors(encoder: torch.nn.Module, text: str, norm: torch.nn.Module | None, pooling: str) -> list[Tensor]:
    """The vectors [D] of a text after the last layer, and after each of LAYERS, from transformers' hidden states."""
    ids = torch.tensor([small_tokenizer()(text)["input_ids"]])
    output = encoder.backbone(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    inner = [output.hidden_states[layer] for layer in LAYERS]
    vectors = []
    for hidden in (output.last_hidden_state, *(inner if norm is None else map(norm, inner))):
        pooled = hidden[0].mean(0) if pooling == "mean" else hidden[0, -1]
        for head in encoder.dense:
            pooled = head(pooled)
        vectors.append(F.normalize(pooled, dim=0))
    return vectors


def plain(model: ModelConfig, rows: GlobalBatch) -> tuple[float, Gradients]:
    """The loss, and the gradients of all weights."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    encoder.double().eval()
    names = {name for name, _ in encoder.named_modules()}
    norm = next((encoder.get_submodule(n) for n in ("backbone.norm", "backbone.final_norm") if n in names), None)

    def encode(texts: list[str]) -> list[Tensor]:
        each = [layer_vectors(encoder, text, norm, source.vectors.pooling.value) for text in texts]
        return [torch.stack(vectors) for vectors in zip(*each, strict=True)]

    queries = encode([row.query for row in rows.rows])
    documents = encode([text for row in rows.rows for text in row.documents.texts])
    sizes = torch.tensor([len(row.documents.texts) for row in rows.rows])
    positives = sizes.cumsum(0) - sizes

    def infonce(layer: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for dim in DIMS:
            cut = [F.normalize(vectors[layer][:, :dim], dim=1) for vectors in (queries, documents)]
            total = total + F.cross_entropy(cut[0] @ cut[1].T / TEMPERATURE, positives)
        return total

    def kl(layer: int) -> Tensor:
        last = (queries[0] @ documents[0].T / TEMPERATURE).detach().log_softmax(1)
        student = (queries[layer] @ documents[layer].T / TEMPERATURE).log_softmax(1)
        return (last.exp() * (last - student)).sum(1).mean()

    weights = [1 / (1 + math.log(layer)) for layer in LAYERS]
    terms = [weight * infonce(part) + KL * kl(part) for part, weight in enumerate(weights, 1)]
    loss = infonce(0) + torch.stack(terms).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def on_ranks(
    world: World, cases: list[tuple[ModelConfig, bool, ChunkOptions]], num_rows: int
) -> list[tuple[float, Gradients]]:
    """The same of each model, with or without recomputed activations, and with chunks."""
    actual = []
    for model, checkpointing, cutting in cases:
        options = parallel(activation_checkpointing=checkpointing)
        loaded = load_model(model, options, world, seed=0)
        source = open_model_source(model)
        path = exit_path(build_encoder(source), source.config, LAYERS)
        loaded.encoder.exits = EarlyExits(loaded.encoder, path, LAYERS)
        tokenizer = loaded.tokenizer.with_parts(1 + len(LAYERS))
        assert tokenizer.packed is (model.attention is Attention.auto)
        loss = build_loss(LOSS, dimension=24, seed=0)
        backward = Backward(loaded.encoder.train(), loss, world, seed=0, dummy=tokenizer.dummy())
        output, finite = backward(make_rank_batch(batch(num_rows), world.rank, world.size, tokenizer, cutting))
        assert finite
        with pytest.raises(KeyError):  # no hidden state is left
            loaded.encoder.exits.pop()
        value = sum(world.gather(output.local_loss.item()))
        named = loaded.encoder.named_parameters()
        actual.append((value, {name: _whole(p.grad) for name, p in named if p.grad is not None}))
    return actual if world.is_main else []


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


KEPT, CACHED, PARTLY = ChunkOptions(10_000), ChunkOptions(40, 0, 8), ChunkOptions(40, 60, 8)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ModelConfig]:
    saved = {}
    for architecture in ("bert", "qwen3", "modernbert"):
        model = deep_model(architecture)
        directory = save_small(replace(model, heads=[]), tmp_path_factory.mktemp(architecture))
        saved[architecture] = replace(model, config=None, path=str(directory))
    return saved


@pytest.mark.quick("2")
@pytest.mark.parametrize(
    ("world_size", "num_rows"), [pytest.param(1, 3, marks=pytest.mark.slow), (2, 3), (3, 2)], ids=["1", "2", "no rows"]
)
def test_gradients(ranks, models, world_size, num_rows):
    """Packed and padded, cached or kept, with recomputed activations; one of three ranks has no rows."""
    bert, qwen3, modernbert = models.values()
    cases = [
        (bert, True, CACHED),
        (replace(bert, attention=Attention.padded), False, PARTLY),
        (qwen3, True, PARTLY),
        (modernbert, False, CACHED),
    ]
    expected = {model.path: plain(model, batch(num_rows)) for model in models.values()}
    answers = ranks(world_size, on_ranks, cases, num_rows, timeout=300)[0]
    for (model, *_), (value, gradients) in zip(cases, answers, strict=True):
        loss, expected_gradients = expected[model.path]
        assert value == pytest.approx(loss, rel=1e-5), model.path
        assert gradients.keys() == expected_gradients.keys(), model.path
        norm = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
        for name, expected_gradient in expected_gradients.items():
            error = (gradients[name] - expected_gradient).norm() / max(expected_gradient.norm(), 1e-3 * norm)
            assert error < 3e-5, (model.path, name, float(error))


def adapters(world: World, model: ModelConfig) -> list[float]:
    """Norms of the gradients of adapters in each block, from the loss of the last layer and from that of the first."""
    loaded = load_model(model, parallel(), world, seed=0)
    source = open_model_source(model)
    loaded.encoder.exits = EarlyExits(loaded.encoder, exit_path(build_encoder(source), source.config, [1]), [1])
    chunk = Chunk(torch.tensor([[0, 5, 6, 2]]), torch.ones(1, 4, dtype=torch.int64))
    vectors = loaded.encoder.train()(chunk)
    assert len(vectors) == 2
    assert len(loaded.encoder.eval()(chunk)) == 1
    vectors[1].sum().backward()
    norms = dict.fromkeys(range(4), 0.0)
    for name, parameter in loaded.encoder.named_parameters():
        if parameter.grad is not None:
            norms[int(name.split("layer.")[1].split(".")[0])] += float(_whole(parameter.grad).norm())
    return list(norms.values())


def test_adapters_after_an_exit_get_no_gradient_from_it(ranks, models):
    model = replace(models["bert"], heads=[], lora=LoraConfig(rank=2))
    norms = ranks(1, adapters, model)[0]
    assert norms[0] > 0
    assert norms[1:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE_ARCHITECTURES])
def test_layers_are_found(architecture):
    source = open_model_source(deep_model(architecture))
    path = exit_path(build_encoder(source), source.config, [1, 3])
    if architecture in ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "gemma"):
        assert path == ("backbone.layers", "backbone.norm")
    else:
        assert path.norm == ("backbone.final_norm" if architecture == "modernbert" else None)


def test_layers_that_do_not_exist_are_named():
    source = open_model_source(deep_model("bert"))
    with pytest.raises(ConfigError, match=r"matryoshka\.layers=\[1, 4\]: .*from 1 to 3"):
        exit_path(build_encoder(source), source.config, [1, 4])


def test_a_model_whose_layers_share_weights_is_rejected():
    source = open_model_source(small_model("albert"))
    with pytest.raises(ConfigError, match=r"matryoshka\.layers=\[1\]: .*albert"):
        exit_path(build_encoder(source), source.config, [1])


def test_a_model_that_adds_to_the_last_layer_is_rejected():
    """As T5, whose final norm is followed by dropout."""
    source = open_model_source(deep_model("bert"))
    encoder = build_encoder(source)
    encoder.backbone.encoder.register_forward_hook(
        lambda _module, _args, output: type(output)(last_hidden_state=output.last_hidden_state + 1)
    )
    with pytest.raises(ConfigError, match="one after the other"):
        exit_path(encoder, source.config, [1])
