"""`parallel.fp8`: which layers compute in fp8, how far gradients are from those of bf16, and who is refused.

torchao rounds to fp8 on any device, and multiplies in fp32 where a device cannot multiply fp8.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from embedtrain.config.recipe import SELECTIVE, LoraConfig, ModelConfig, Precision, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.block_compute import EagerBlocks, num_graphs, require_fp8, use_fp8
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.loading.load import load_model
from embedtrain.models.packing import disable_packing
from embedtrain.planning.model_costs import model_spec
from embedtrain.training import setup
from tests.distributed.test_compile import open_compiled
from tests.planning.models import built
from tests.runs import run
from tests.small import parallel, save_small, small_model, small_tokenizer, write_rows
from tests.training.test_sharded_optimizer import unsharded

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao: pip install '.[fp8]'")
IDS = torch.tensor([[0, 4, 5, 6, 2], [0, 9, 8, 2, 1], [0, 7, 3, 2, 1]])
MASK = (IDS != 1).long()
# q, k, v and o of each of two layers; 120 is no multiple of 16.
NOT_CONVERTED = ["mlp.down_proj (120 x 64", "mlp.gate_proj (64 x 120", "mlp.up_proj (64 x 120"]


def model(**changes: object) -> ModelConfig:
    of = small_model("qwen3", **changes)
    assert isinstance(of.config, dict)
    return replace(of, config=of.config | {"hidden_size": 64, "intermediate_size": 120})


def computed(world: World, fp8: bool, precision: Precision, rows: int = 3, **more: object) -> dict[str, Tensor]:
    """Vectors in training and in evaluation, gradients, and the names of weights."""
    options = parallel(Strategy.fsdp, precision=precision, fp8=fp8, **more)
    loaded = open_compiled(world, model(), options, "aot_eager")
    encoder, (ids, mask) = loaded.encoder, (IDS[:rows], MASK[:rows])
    disable_packing(encoder)
    notes = [note for note in loaded.notes if note.startswith("parallel.fp8")]
    assert len(notes) == fp8
    if fp8:
        assert notes[0].startswith("parallel.fp8: 8 linear layers of blocks compute in fp8")
        assert all(name in notes[0] for name in NOT_CONVERTED), notes
        assert "below a billion" in notes[0]
    linear = [part for part in encoder.modules() if isinstance(part, nn.Linear)]
    assert sum("Fp8" in type(part).__name__ for part in linear) == 8 * fp8
    with torch.no_grad():
        found = {"evaluated": encoder.eval()(Chunk(ids, mask))[0]}
    found["trained"] = encoder.train()(Chunk(ids, mask))[0]
    (found["trained"].float() * torch.linspace(-1, 1, 64)).sum().backward()
    if options.compile:
        assert not EagerBlocks([encoder]).name(world)
        assert num_graphs()
    return {name: value.detach().float() for name, value in found.items()} | {
        name: unsharded(parameter.grad).float()
        for name, parameter in encoder.named_parameters()
        if parameter.grad is not None
    }


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients, relative to their norm."""
    assert list(found) == list(expected)  # the names of weights
    names = [name for name in expected if name not in ("evaluated", "trained")]
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in names])
    return float(difference.norm() / torch.cat([expected[name].flatten() for name in names]).norm())


@needs_torchao
def test_gradients_are_near_those_of_bf16_on_any_number_of_ranks(ranks):
    (exact,) = ranks(1, computed, False, Precision.fp32)
    (bf16,) = ranks(1, computed, False, Precision.bf16)
    (fp8,) = ranks(1, computed, True, Precision.bf16)
    # Four bits of a number against eight.
    assert distance(bf16, exact) < 0.03
    assert distance(bf16, exact) < distance(fp8, exact) < 16 * distance(bf16, exact)
    assert fp8["evaluated"].equal(bf16["evaluated"])
    assert not fp8["trained"].equal(bf16["trained"])
    # A text has the same vector, whatever else is in its chunk.
    (alone,) = ranks(1, computed, True, Precision.bf16, 1)
    assert alone["trained"][0].equal(fp8["trained"][0])
    for of_rank in ranks(2, computed, True, Precision.bf16):
        assert of_rank["trained"].equal(fp8["trained"])
        assert distance(of_rank, fp8) < 0.01


@needs_torchao
def test_recomputed_activations_have_the_same_gradients(ranks):
    (kept,) = ranks(1, computed, True, Precision.bf16)
    for which in (True, SELECTIVE):
        (found,) = ranks(1, recomputed, which)
        assert distance(found, kept) == 0


def recomputed(world: World, which: bool | str) -> dict[str, Tensor]:
    return computed(world, True, Precision.bf16, activation_checkpointing=which)


def compiled(world: World) -> dict[str, Tensor]:
    return computed(world, True, Precision.bf16, compile=True)


@needs_torchao
@pytest.mark.slow  # dynamo traces torchao's tensors for half a minute
def test_blocks_are_compiled_as_whole_graphs(ranks):
    (eager,) = ranks(1, computed, True, Precision.bf16)
    (found,) = ranks(1, compiled)
    assert distance(found, eager) < 0.1


@needs_torchao
def test_a_model_without_such_a_layer_is_refused(ranks):
    ranks(1, load_adapters)


def load_adapters(world: World) -> None:
    """Adapters are small products beside frozen layers, or none."""
    of = replace(model(), lora=LoraConfig(rank=16))
    options = parallel(precision=Precision.bf16, fp8=True)
    with pytest.raises(ConfigError, match=r"^parallel\.fp8=true: .*base_layer \(adapter\).*lora_A"):
        load_model(of, options, world, seed=3, tokenizer=small_tokenizer())
    others = {"dora": {"r": 16}, "ia3": {"feedforward_modules": ["q_proj"]}, "vera": {"r": 16}, "oft": {}, "boft": {}}
    for kind, settings in others.items():
        of = replace(model(), adapter={"type": kind, "target_modules": ["q_proj", "v_proj"], **settings})
        with pytest.raises(ConfigError, match=r"^parallel\.fp8=true: .*mlp\.up_proj \(not.*base_layer \(adapter\)"):
            load_model(of, options, world, seed=3, tokenizer=small_tokenizer())


@needs_torchao
def test_the_plan_measures_what_layers_in_fp8_keep():
    config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    measured = []
    for fp8 in (False, True):
        encoder, blocks = built(config)
        if fp8:
            use_fp8(encoder, blocks)
        spec = model_spec(encoder, blocks, precision=Precision.bf16, tokens_per_text=64, gpu=True)
        measured.append(spec.activations(False))
    plain, rounded = measured
    assert rounded.block == pytest.approx(plain.block, rel=0.1)  # inputs in bf16, for the gradients of weights
    assert rounded.backward >= plain.backward


@needs_torchao
def test_a_run_exports_the_weights_under_their_names(ranks, tmp_path):
    write_rows(tmp_path / "train.jsonl", 36)
    save_small(model(), tmp_path / "model")
    arguments = [
        f"model.path={tmp_path / 'model'}",
        "model.pooling=last",
        f"data.train=[{tmp_path / 'train.jsonl'}]",
        "train.steps=2",
        "parallel.precision=bf16",
    ]
    files = ranks(1, trained, tmp_path, arguments)[0]
    assert files[False] == files[True]


def trained(world: World, folder: Path, arguments: list[str]) -> dict[bool, list[str]]:
    """Train a small model on the CPU, which the command refuses; the exported names of weights."""
    files = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "require_fp8", lambda *_: None)
        for fp8 in (False, True):
            output = folder / f"run-{fp8}"
            run(world, *arguments, f"output_dir={output}", f"parallel.fp8={str(fp8).lower()}")
            files[fp8] = sorted(load_file(output / "model" / "model.safetensors"))
    return files


def test_a_device_that_cannot_compute_in_fp8_is_refused(ranks):
    ranks(2, require_on_cpu)


def require_on_cpu(world: World) -> None:
    with pytest.raises(ConfigError, match=r"^parallel\.fp8=true: .*8\.9.*CPU"):
        require_fp8(world, Precision.bf16)
