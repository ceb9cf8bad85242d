"""Parameter groups: which parameters they have, and that they equal optimizers of their own, also after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.checkpointer import Checkpointer, read_tensors
from embedtrain.checkpoint.snapshot import optimizer_tensors
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.optim import OptimConfig, OptimizerName, ParameterGroup
from embedtrain.config.recipe import CheckpointConfig, LoraConfig, ModelConfig, Recipe
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.planning.model_costs import build_meta_encoder
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import Schedule, build_optimizer, describe_groups, logged_rates, trained_parameters
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.state import EncoderWithLoss
from tests.small import batch, parallel, small_model, small_tokenizer

STEPS, LR = 4, 1e-2


def encoder_of(model: ModelConfig) -> nn.Module:
    return build_meta_encoder(Recipe(model=model)).encoder


def settings_of(model: ModelConfig, **options: Any) -> dict[str, tuple[str, float, float]]:
    """Label, factor of the learning rate and weight decay, by name of the parameter."""
    trained = trained_parameters(encoder_of(model), OptimConfig(lr=LR, weight_decay=0.5, **options))
    return {item.name: (item.settings.label, item.settings.lr_factor, item.settings.weight_decay) for item in trained}


def test_layers_have_smaller_rates_the_deeper_they_are():
    """lr xi^(L - l) of block l, xi^(L + 1) of embeddings, 1 of the final norm and of heads; by hand for two blocks."""
    bert = settings_of(small_model("bert"), layer_decay=0.5)
    for name, expected in {
        "backbone.embeddings.word_embeddings.weight": ("embeddings", 0.125, 0.5),
        "backbone.embeddings.LayerNorm.weight": ("embeddings", 0.125, 0.0),
        "backbone.encoder.layer.0.output.dense.weight": ("layers", 0.25, 0.5),
        "backbone.encoder.layer.1.output.dense.bias": ("layers", 0.5, 0.0),
    }.items():
        assert bert[name] == expected
    llama = settings_of(small_model("llama"), layer_decay=0.5, groups=[ParameterGroup(match="norm", weight_decay=0.1)])
    assert llama["backbone.norm.weight"] == ("norm", 1.0, 0.1)
    assert llama["backbone.layers.0.input_layernorm.weight"] == ("norm", 0.25, 0.1)  # keeps the rate of its layer
    assert llama["backbone.embed_tokens.weight"] == ("embeddings", 0.125, 0.5)


def test_heads_adapters_and_the_first_match():
    classifier = small_model("bert", kind="cross_encoder")
    heads = settings_of(classifier, groups=[ParameterGroup(match="^(?!backbone)", name="head", lr=1.0)])
    assert heads["head.classifier.weight"] == ("head", 100.0, 0.5)
    assert all(name.startswith("head.") is (label == "head") for name, (label, *_) in heads.items())
    adapted = small_model("llama")
    adapted.lora = LoraConfig(rank=2)
    groups = [ParameterGroup(match="lora_B", name="b", lr=0.16), ParameterGroup(match=r"lora_|bias", lr_scale=3.0)]
    factors = {name.split(".")[-3]: rest for name, rest in settings_of(adapted, groups=groups).items()}
    assert factors == {"lora_B": ("b", 16.0, 0.5), "lora_A": ("lora_|bias", 3.0, 0.5)}


def test_muon_updates_matrices_of_blocks_only():
    optim = OptimConfig(name=OptimizerName.muon)
    trained = trained_parameters(encoder_of(small_model("llama")), optim)
    matrices = {item.name for item in trained if item.settings.rule is OptimizerName.muon}
    names = (f"{part}_proj" for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate"))
    assert matrices > {f"backbone.layers.0.{name}.weight" for name in names}
    assert all("layers." in name and "norm" not in name for name in matrices)
    assert list(describe_groups(trained, optim)) == ["encoder", "encoder (muon)"]
    adapted = small_model("llama")
    adapted.lora = LoraConfig(rank=2)
    with pytest.raises(ConfigError, match=r"optim\.name=muon"):
        trained_parameters(encoder_of(adapted), optim)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [ParameterGroup(match="nothing", lr=0.1)]}, r"groups\[0\]\.match=nothing: .*embeddings\.word_emb"),
        (
            {"groups": [ParameterGroup(match="bias", lr=0.1), ParameterGroup(match="Norm.bias", lr=0.2)]},
            r"groups\[1\]\.match=Norm\.bias: optim\.groups\[0\]",
        ),
        ({"groups": [ParameterGroup(match="^head", lr=0.1)]}, r"groups\[0\]\.match=\^head: .*backbone\.embeddings"),
    ],
    ids=["unmatched", "second", "head"],
)
def test_settings_without_parameters_are_rejected(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        settings_of(small_model("bert"), **options)


def test_groups_are_described_with_their_parameters():
    def described(**options: Any) -> dict[str, str]:
        optim = OptimConfig(lr=LR, **options)
        return describe_groups(trained_parameters(encoder_of(small_model("bert")), optim), optim)

    assert described() == {}
    lines = described(layer_decay=0.5, groups=[ParameterGroup(match="word", lr=0.0, freeze_until=5)])
    assert list(lines) == ["word", "embeddings", "layers"]
    words = small_model("bert").config["vocab_size"] * small_model("bert").config["hidden_size"]
    assert lines["word"] == f"{words:,} parameters in 1 tensor, lr 0, weight decay 0.01, frozen until step 5"
    assert "lr 0.0025 to 0.005" in lines["layers"]


def unsharded(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_in_groups(world: World, directory: Path) -> None:
    """Matrices of blocks, a part that is frozen for two steps, and the loss, against three optimizers by hand."""
    frozen = ParameterGroup(match=r"layer\.0", name="first", lr=3 * LR, weight_decay=0.3, freeze_until=0.5)
    of_loss = ParameterGroup(match="^loss", name="loss", lr=LR / 2)
    optim = OptimConfig(lr=LR, warmup=2, groups=[frozen, of_loss], max_grad_norm=None, eps=1e-3)
    loaded = load_model(small_model("bert"), parallel(), world, seed=0, tokenizer=small_tokenizer())
    loss = InfoNCE(InfoNCEConfig(temperature=0.1, learn_temperature=True)).to(world.device)
    module = EncoderWithLoss(loaded.encoder.eval(), loss)
    optimizer = build_optimizer(loaded.encoder, optim, loss)
    schedule = Schedule(optimizer, optim, STEPS)
    backward = Backward(loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy())
    expected = {name: nn.Parameter(unsharded(parameter)) for name, parameter in module.named_parameters()}

    def by_hand(scale: float, decay: float | None, part: list[str]) -> torch.optim.Optimizer:
        parameters = [expected[name] for name in part]
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01 if decay is None else decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": decay or 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=scale * LR, eps=1e-3)

    first = [name for name in expected if "layer.0." in name]
    of_loss = [name for name in expected if name.startswith("loss.")]
    rest = [name for name in expected if name not in (*first, *of_loss)]
    optimizers = [by_hand(1.0, None, rest), by_hand(3.0, 0.3, first), by_hand(0.5, None, of_loss)]
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(make_rank_batch(batch(8, step), world.rank, world.size, loaded.tokenizer, ChunkOptions(10_000)))
        for name, parameter in module.named_parameters():
            expected[name].grad = None if parameter.grad is None else unsharded(parameter.grad)
        schedule.drop_frozen_gradients(step)
        rate = schedule.apply(step)
        assert rate == LR * (0.5, 1.0, 1.0, 0.5)[step]
        rates = {"lr/first": 3 * rate if step >= 2 else 0.0, "lr/loss": rate / 2}
        assert logged_rates(optimizer) == pytest.approx(rates)
        optimizer.step()
        for scale, other in zip((1.0, 3.0, 0.5), optimizers, strict=True):
            for group in other.param_groups:
                group["lr"] = scale * rate
            if scale != 3.0 or step >= 2:
                other.step()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(unsharded(parameter), expected[name].detach(), rtol=1e-5, atol=1e-7, msg=name)
    # The state has the names of parameters, whatever the groups are.
    single = build_optimizer(loaded.encoder, OptimConfig(), loss)
    with Checkpointer(directory, CheckpointConfig(), world, metadata={}, log=print) as checkpointer:
        checkpointer.save(module, optimizer, {"step": STEPS})
        checkpointer.wait()
        checkpoint = checkpointer.newest()
        assert checkpoint is not None
        read_tensors(checkpoint, module, single)
    before, after = optimizer_tensors(module, optimizer), optimizer_tensors(module, single)
    assert before.keys() == after.keys()
    assert all(unsharded(tensor).equal(unsharded(after[name])) for name, tensor in before.items())
    first_steps = {int(unsharded(value)) for name, value in after.items() if "layer.0." in name and "step" in name}
    assert first_steps == {2} and len(before) == 3 * len(expected)


def test_groups_equal_optimizers_of_their_own(ranks, tmp_path):
    ranks(2, train_in_groups, tmp_path)
