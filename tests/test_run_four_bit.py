"""Frozen layers in 4 bits: equal on any number of ranks, not saved, and merged into the dequantised weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.export import run as main
from embedtrain.config import checks
from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import LoraConfig, ModelConfig, ParallelConfig, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.models.adapters import (
    FourBitLinear,
    add_adapters,
    four_bit_layers,
    initial_adapters,
    quantization_round_trip,
)
from embedtrain.models.build import assemble_encoder, full_state_dict
from tests.runs import losses, rewind_run, run
from tests.small import parallel, save_small, small_model, write_rows

quantize_4bit = pytest.importorskip("bitsandbytes").functional.quantize_4bit
IDS = torch.tensor([[0, 4, 5, 6, 2], [0, 9, 8, 2, 1]])
MASK = (IDS != 1).long()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four-bit")
    write_rows(folder / "train.jsonl", 36)
    small = small_model("llama")
    small.config |= {"hidden_size": 64, "intermediate_size": 128}
    save_small(small, folder / "llama")
    return folder


def on_ranks(world: World, model: ModelConfig, options: ParallelConfig) -> dict[str, torch.Tensor]:
    """Vectors, and the gradients of trained weights."""
    encoder = load_model(model, options, world, seed=3).encoder.eval()
    assert len(list(four_bit_layers(encoder))) == 14
    vectors = encoder(Chunk(IDS, MASK))[0]
    vectors.pow(3).sum().backward()
    tensors = {"vectors": vectors.detach()}
    for name, parameter in encoder.named_parameters():
        if isinstance(parameter.grad, DTensor):
            tensors[name] = parameter.grad.full_tensor()
    return tensors


def in_one_process(model: ModelConfig) -> dict[str, torch.Tensor]:
    """The same for a model whose linear layers have the dequantised weights."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    state = full_state_dict(source, 0)
    linear = {f"{name}.weight" for name, part in encoder.named_modules() if isinstance(part, torch.nn.Linear)}
    encoder.load_state_dict(
        {n: quantization_round_trip(tensor) if n in linear else tensor for n, tensor in state.items()}
    )
    adapted = add_adapters(encoder, replace(model.lora, load_in_4bit=False), None, torch.float32)
    assert adapted.config.r == 4

    encoder.load_state_dict(dict(initial_adapters(encoder, adapted, 3)), strict=False)
    vectors = encoder.eval()(Chunk(IDS, MASK))[0]
    vectors.pow(3).sum().backward()
    grads = {n: p.grad for n, p in encoder.named_parameters() if p.grad is not None}
    return {"vectors": vectors.detach()} | grads


@pytest.mark.parametrize(
    ("size", "strategy"),
    [(2, "fsdp"), pytest.param(1, "fsdp", marks=pytest.mark.slow), pytest.param(2, "ddp", marks=pytest.mark.slow)],
)
def test_vectors_and_gradients_equal_those_of_dequantised_weights(ranks, workshop, size, strategy):
    model = replace(
        small_model("llama"), config=None, path=str(workshop / "llama"), lora=LoraConfig(rank=4, load_in_4bit=True)
    )
    expected = in_one_process(model)
    for tensors in ranks(size, on_ranks, model, parallel(Strategy(strategy))):
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_run_is_saved_resumed_and_merged(ranks, workshop, tmp_path):
    arguments = (
        f"model.path={workshop / 'llama'}", f"data.train=[{workshop / 'train.jsonl'}]", "model.pooling=last",
        "model.lora.rank=4", "model.lora.load_in_4bit=true", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9",
        "optim.lr=2e-2", "export.check=true", "export.formats=[adapter]",
    )  # fmt: skip
    out = tmp_path / "run"
    output = ranks(2, run, *arguments, f"output_dir={out}")[0]
    assert "the others are frozen in 4 bits and float32" in output
    names = {name for path in (out / "checkpoints").rglob("weights*.safetensors") for name in load_file(path)}
    assert names
    assert all("lora_" in name for name in names)
    again = rewind_run(out, tmp_path / "again", 2)
    ranks(1, run, *arguments, f"output_dir={again}")
    assert losses(again) == pytest.approx(losses(out), rel=1e-5)
    main(compose_export([f"run={out}", f"output_dir={tmp_path / 'to'}"]))
    live, offline = (load_file(path / "model.safetensors") for path in (out / "model", tmp_path / "to"))
    base = load_file(workshop / "llama" / "model.safetensors")
    assert live.keys() == offline.keys() == base.keys()
    for name, tensor in live.items():
        torch.testing.assert_close(offline[name], tensor, rtol=0, atol=1e-6, msg=name)
    name = "layers.0.self_attn.q_proj.weight"
    adapter = load_file(out / "model" / "adapter" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.layers.0.self_attn.q_proj.lora_{which}.weight"] for which in "AB")
    torch.testing.assert_close(live[name], quantization_round_trip(base[name]) + 2 * b @ a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_the_head_of_a_cross_encoder_is_not_quantized(ranks, workshop, tmp_path, architecture):
    """The run compares its merged export with the scores of the quantized base, adapters and head."""
    small = small_model(architecture)
    small.config |= {"hidden_size": 64, "intermediate_size": 128} | (
        {"type_vocab_size": 2} if architecture == "bert" else {}
    )
    save_small(small, tmp_path / "base")
    template = 'model.pair_template={prefix: alpha, query: "{query}", document: "{document}", suffix: mu nu}'
    arguments = [
        f"model.path={tmp_path / 'base'}", f"data.train=[{workshop / 'train.jsonl'}]", "model.kind=cross_encoder",
        "model.pooling=null", "loss=softmax", "data.on_error=skip", "model.lora.rank=4", "model.lora.load_in_4bit=true",
        "train.steps=2", "optim.lr=2e-2", "export.check=true", "export.formats=[adapter]",
        *([template] if architecture == "llama" else []),
    ]  # fmt: skip
    out = tmp_path / "run"
    output = ranks(2, run, *arguments, f"output_dir={out}")[0]
    assert "frozen in 4 bits and float32" in output
    main(compose_export([f"run={out}", f"output_dir={tmp_path / 'to'}"]))
    live, offline = (load_file(path / "model.safetensors") for path in (out / "model", tmp_path / "to"))
    adapter = load_file(out / "model" / "adapter" / "adapter_model.safetensors")
    heads = [name for name in live if name.startswith(("score.", "classifier.", "bert.pooler."))]
    assert heads
    for name, tensor in live.items():
        torch.testing.assert_close(offline[name], tensor, rtol=0, atol=1e-6, msg=name)
    for name in heads:
        assert torch.equal(live[name], adapter[f"base_model.model.{name}"])


def test_reported_size_equals_memory():
    layer = FourBitLinear(torch.nn.Linear(1024, 2048, bias=False))
    layer.quantize_weight(torch.randn(2048, 1024))
    packed, scales = quantize_4bit(torch.randn(2048, 1024), blocksize=64, compress_statistics=True, quant_type="nf4")
    num_bytes = sum(tensor.nbytes for tensor in (packed, scales.absmax, scales.state2.absmax))
    assert layer.num_bytes == pytest.approx(num_bytes, rel=0.01)
    x = torch.randn(3, 1024)
    torch.testing.assert_close(layer(x), F.linear(x, layer.dequantized()))


def test_missing_package(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: None)
    arguments = ["name=t", "model.path=x", "model.pooling=last", "data.train=[x]", "train.steps=1", "model.lora.rank=4"]
    compose_recipes(arguments)
    with pytest.raises(ConfigError, match=r"model\.lora\.load_in_4bit=.*bitsandbytes"):
        compose_recipes([*arguments, "model.lora.load_in_4bit=true"])
