"""Activation checkpointing changes no gradient, for any model, mesh and number of passes, and keeps what is planned."""

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers.models.bert.modeling_bert import BertIntermediate

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import SELECTIVE, ModelConfig, Pooling, Strategy
from embedtrain.data.types import Chunk, Packing
from embedtrain.distributed.block_compute import _policy, recompute_activations
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import _window_mask, enable_packing
from embedtrain.planning.model_costs import LiveBytes, measure_activations
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import batch, model_options, parallel, save_small, small_model, small_tokenizer

# The last one declares no layers, and its class does not support gradient checkpointing.
NAMES = ("bert", "modernbert", "llama", "qwen3", "gemma3_text", "mpnet")


def texts(rank: int) -> list[Chunk]:
    """Queries, documents and hard negatives of a rank, each padded to one length."""
    columns = []
    for column, length in enumerate((4, 7, 11)):
        generator = torch.Generator().manual_seed(10 * rank + column)
        ids = torch.randint(4, 30, (3, length), generator=generator)
        mask = (torch.arange(length) < torch.tensor([[length], [length - 1], [2]])).long()
        columns.append(Chunk(torch.where(mask.bool(), ids, 1), mask))
    return columns


def loss(encoder: nn.Module, rank: int, num_passes: int) -> Tensor:
    """Like a triplet loss: a forward pass per column, and one backward pass."""
    queries, *documents = (encoder(chunk)[0] for chunk in texts(rank)[:num_passes])
    return sum((1 + column) * (queries * vectors).sum() for column, vectors in enumerate(documents))


def plain(model: ModelConfig, num_passes: int, num_ranks: int) -> dict[str, Tensor]:
    """The gradient of the mean over the ranks' losses, in one process."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    for rank in range(num_ranks):
        (loss(encoder.train(), rank, num_passes) / num_ranks).backward()
    return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def relative_error(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients together."""
    assert grads.keys() == expected.keys()
    squares = sum((grads[name] - expected[name]).double().square().sum() for name in expected)
    return float((squares / sum(g.double().square().sum() for g in expected.values())).sqrt())


def same_gradients(world: World, models: dict[str, ModelConfig]) -> None:
    for name, model in models.items():
        expected = {num_passes: plain(model, num_passes, world.size) for num_passes in (2, 3)}
        for strategy, recompute in itertools.product((Strategy.ddp, Strategy.fsdp), (False, SELECTIVE, True)):
            options = parallel(strategy, activation_checkpointing=recompute)
            encoder = load_model(model, options, world, seed=0).encoder.train()
            assert sum(isinstance(part, FSDPModule) for part in encoder.modules()) == 2 + 1, (name, "blocks + root")
            configs = [part.config for part in encoder.modules() if hasattr(part, "config")]
            assert configs
            assert not any(getattr(config, "use_cache", False) for config in configs), name
            runs: list[int] = []
            for number, block in enumerate(find_blocks(encoder)):
                inner = next(part for part in block.modules() if isinstance(part, nn.Linear))
                inner.register_forward_hook(lambda *_, number=number, runs=runs: runs.append(number))
            for num_passes in (2, 3):
                runs.clear()
                encoder.zero_grad()
                loss(encoder, world.rank, num_passes).backward()
                assert sorted(runs) == sorted([0, 1] * num_passes * (2 if recompute else 1)), (
                    name,
                    strategy,
                    recompute,
                )
                grads = {n: p.grad.full_tensor() for n, p in encoder.named_parameters() if isinstance(p.grad, DTensor)}
                error = relative_error(grads, expected[num_passes])
                assert error < 1e-6, (name, strategy, recompute, num_passes)
            with torch.no_grad():
                runs.clear()
                encoder(texts(0)[0])
            assert sorted(runs) == [0, 1]


@pytest.mark.slow
def test_gradients_equal_one_process(ranks, tmp_path):
    models = {
        name: model_options(path=str(save_small(small_model(name), tmp_path / name)), pooling=Pooling.mean)
        for name in NAMES
    }
    ranks(2, same_gradients, models, timeout=400)


def without_layers(world: World, model: ModelConfig) -> None:
    with pytest.raises(ModelError, match=r"BertModel .*activation_checkpointing=false"):
        load_model(model, parallel(Strategy.ddp, activation_checkpointing=True), world, seed=0)


def test_model_without_layers(ranks, tmp_path):
    model = small_model("bert")
    flat = save_small(small_model("bert", config=model.config | {"num_hidden_layers": 0}), tmp_path / "flat")
    ranks(1, without_layers, model_options(path=str(flat), pooling=Pooling.mean))


LENGTHS = np.array([12, 12, 12, 7, 7, 5])


def model_of(architecture: str, layers: int, **changes: Any) -> ModelConfig:
    model = small_model(architecture, **changes)
    model.config |= {"hidden_size": 64, "num_hidden_layers": layers}
    return model


def trained(model: ModelConfig, recompute: bool | str, *, packed: bool, dtype: torch.dtype) -> Encoder:
    torch.manual_seed(0)
    encoder = assemble_encoder(open_model_source(model)).to(dtype).train()
    if packed:
        enable_packing(encoder)
    if recompute:
        recompute_activations(find_blocks(encoder), recompute)
    return encoder


def chunk_of(*, packed: bool, repeats: int = 1) -> Chunk:
    lengths = np.repeat(LENGTHS, repeats)
    generator = torch.Generator().manual_seed(0)
    if packed:
        ids = torch.randint(4, 60, (1, lengths.sum()), generator=generator)
        return Chunk(ids, torch.ones_like(ids), packing=Packing.of(lengths, lengths), has_padding=False)
    mask = (torch.arange(lengths.max()) < torch.from_numpy(lengths)[:, None]).long()
    return Chunk(torch.randint(4, 60, mask.shape, generator=generator), mask)


class _Kernels(TorchDispatchMode):
    """Counts products with weights, and kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(("aten::mm", "aten::addmm", "aten::_scaled_dot_product")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("architecture", "packed"),
    [("xlm-roberta", True), ("modernbert", True), ("qwen3", True), ("gemma3_text", True), ("xlm-roberta", False)],
)
def test_selective_recomputation_computes_no_product_twice(architecture, packed):
    """Gradients are equal bit by bit, with dropout; the packed attention of a CPU is not computed again either."""
    # The attention of a CPU has no fused kernel with dropout, and its matrix is recomputed.
    dropout = {"hidden_dropout_prob": 0.1} if architecture == "xlm-roberta" else {}
    model = model_of(architecture, 2)
    model.config |= dropout
    counts, gradients = [], []
    for recompute in (False, SELECTIVE, True):
        encoder = trained(model, recompute, packed=packed, dtype=torch.bfloat16)
        torch.manual_seed(1)
        with _Kernels() as kernels:
            (vectors,) = encoder(chunk_of(packed=packed))
            # Not a function of the vectors' length, which is 1.
            (vectors.float() * torch.arange(vectors.shape[1])).sum().backward()
        counts.append(kernels.counts)
        gradients.append({name: p.grad for name, p in encoder.named_parameters() if p.grad is not None})
    expected, *others = gradients
    for found in others:
        assert found.keys() == expected.keys()
        assert all(found[name].equal(gradient) for name, gradient in expected.items())
    plain, selective, full = counts
    assert selective == plain
    assert any("attention" in name for name in plain)
    assert full.total() > plain.total()


@pytest.mark.quick("qwen3-True-dtype1", "modernbert-True-dtype3")
@pytest.mark.parametrize(
    ("architecture", "packed", "dtype"),
    [
        ("xlm-roberta", True, torch.bfloat16),
        ("qwen3", True, torch.float32),
        ("gemma3_text", False, torch.bfloat16),
        ("modernbert", True, torch.bfloat16),
        ("mpnet", False, torch.float32),  # computes the attention matrix, which is not kept
    ],
)
def test_kept_bytes_are_those_of_the_plan(architecture, packed, dtype):
    """Of a block: four real ones minus two, within 8 %; less than without recomputation, and more than its input."""
    found = {}
    for recompute in (False, SELECTIVE, True):
        kept = []
        for layers in (2, 4):
            encoder = trained(model_of(architecture, layers), recompute, packed=packed, dtype=dtype)
            chunk = chunk_of(packed=packed, repeats=20)
            with LiveBytes([chunk.ids, chunk.mask, *encoder.parameters(), *encoder.buffers()]) as live:
                vectors = encoder(chunk)
                kept.append(live.bytes / chunk.ids.numel())
            del vectors
        found[recompute] = (kept[1] - kept[0]) / 2
        on_meta = build_encoder(open_model_source(model_of(architecture, 4)))
        planned = measure_activations(
            on_meta,
            find_blocks(on_meta),
            dtype=dtype,
            tokens_per_text=int(LENGTHS.max()),
            recompute=recompute,
            gpu=False,
            packed=packed,
        )
        assert planned.block == pytest.approx(found[recompute], rel=0.08), recompute
    assert 1.5 * found[True] < found[SELECTIVE] < 0.8 * found[False]


def test_a_mask_that_the_cache_has_lost_is_not_computed_again():
    """Other chunks may replace it between the forward and the backward pass: their graphs are cached as well."""
    model = model_of("gemma3_text", 2)
    model.config |= {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    encoder = trained(model, SELECTIVE, packed=True, dtype=torch.float32)
    encoder(chunk_of(packed=True))  # fills the cache
    (vectors,) = encoder(chunk_of(packed=True))
    _window_mask.cache_clear()
    vectors.sum().backward()


def test_kernels_that_are_kept():
    """Those of GPUs, which do not run here, by their names in this version of torch."""
    import torch.nn.attention.varlen  # registers its operations

    aten, kernels = torch.ops.aten, torch.ops.torch_attn
    kept = [
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        kernels._varlen_attn.default,
    ]
    recomputed = [
        aten.bmm.default,
        aten._softmax.default,
        aten._fused_sdp_choice.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        kernels._varlen_attn_backward.default,
        aten.native_layer_norm.default,
    ]
    result = torch.ones(2, 2)

    def keeps(operation: Any, *args: Any, **kwargs: Any) -> bool:
        return _policy(None, operation, *args, **kwargs) is CheckpointPolicy.MUST_SAVE

    assert all(map(keeps, kept))
    assert not any(map(keeps, recomputed))
    # With dropout, which the kernel draws: the draws of what is recomputed after it would be others.
    for name in ("flash", "efficient", "cudnn"):
        attention = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        assert keeps(attention, dropout_p=0.0)
        assert not keeps(attention, dropout_p=0.1)
    assert keeps(aten._unsafe_view.default, result, [1, 2, 2])
    assert not keeps(aten._unsafe_view.default, result[None], [1, 1, 2, 2])


class _Layer(nn.Module):
    """A projection, and something like the attention of a GPU and dropout."""

    def __init__(self, *, bias: bool, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)
        self.in_place = in_place

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        if self.in_place:
            hidden *= 0.5
        return hidden + nn.functional.dropout(_attention_with_dropout(hidden, 0.5).sin(), 0.5)


@torch.library.custom_op("embedtrain_tests::attention", mutates_args=())
def _attention_with_dropout(hidden: Tensor, dropout_p: float) -> Tensor:
    return hidden * (torch.rand_like(hidden) >= dropout_p)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (result,) = ctx.saved_tensors
    return gradient * (result != 0), None


_attention_with_dropout.register_autograd(
    _gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


def gradient_of_layers(recompute: bool | str, *, bias: bool = True, in_place: bool = False) -> Tensor:
    torch.manual_seed(0)
    layers = nn.Sequential(*(_Layer(bias=bias, in_place=in_place) for _ in range(3))).double()
    if recompute:
        recompute_activations(layers, recompute)
    layers(torch.randn(2, 3, 8, dtype=torch.float64)).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in layers.parameters()])


def test_draws_of_attention_are_repeated():
    """A kernel of GPUs draws its dropout from the generator of all others."""
    expected = gradient_of_layers(False)
    assert all(gradient_of_layers(recompute).equal(expected) for recompute in (SELECTIVE, True))


def halves_in_place(self: Any, hidden: Tensor) -> Tensor:
    """A layer that reads values, which the meta device has not, and changes the result of a product."""
    result = self.dense(hidden)
    assert bool((hidden == hidden).all())
    result *= 0.5
    activated: Tensor = self.intermediate_act_fn(result)
    return activated


def train_selectively(world: World) -> None:
    with mock.patch.object(BertIntermediate, "forward", halves_in_place):
        options = parallel(activation_checkpointing=SELECTIVE)
        loaded = load_model(small_model("bert"), options, world, seed=0, tokenizer=small_tokenizer())
        loss = InfoNCE(InfoNCEConfig())
        backward = Backward(loaded.encoder.train(), loss, world, seed=0, dummy=loaded.tokenizer.dummy())
        own = make_rank_batch(batch(2), world.rank, world.size, loaded.tokenizer, ChunkOptions(60))
        with pytest.raises(ModelError, match=r"selective is impossible with BertModel, .* in place: set it to true"):
            backward(own)


def test_what_planning_cannot_see_is_said_in_the_first_backward_pass(ranks):
    """Of code that does not run on the meta device, on every rank."""
    ranks(2, train_selectively)


@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_that_is_changed_in_place(bias):
    """Its result, which is kept, would be changed again."""
    assert gradient_of_layers(True, bias=bias, in_place=True).equal(gradient_of_layers(False, bias=bias, in_place=True))
    with pytest.raises(RuntimeError, match="mutated"):
        gradient_of_layers(SELECTIVE, bias=bias, in_place=True)
