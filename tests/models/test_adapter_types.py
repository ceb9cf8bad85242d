"""Every type of PEFT's adapters: gradients of one process, its files, merged weights, settings and their messages."""

import functools
import json
from dataclasses import replace
from unittest import mock

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from transformers import AutoModel

from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.export import run as export
from embedtrain.config.recipe import LoraConfig, ModelConfig, Precision, Recipe, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.block_compute import num_graphs
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.models.adapter_types import REFUSED, TYPES, config_class, setting_names
from embedtrain.models.adapters import add_adapters, copy_base_values, initial_adapters
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.planning.model_costs import build_meta_encoder
from embedtrain.training.rank_batch import ChunkOptions
from tests.marks import slow_but
from tests.models.test_adapters import IDS, MASK, plain_gradient, sharded_gradient
from tests.models.test_fused_kernels import installed
from tests.runs import losses, rewind_run, run
from tests.small import parallel, save_small, small_model, write_rows

# Settings of small adapters, by a name of the case.
CASES = {
    "lora": {"r": 3, "lora_bias": True, "lora_alpha": 5},
    "rslora": {"r": 3, "use_rslora": True},
    "dora": {"r": 3, "use_dora": True},
    "loha": {"r": 2},
    "lokr": {"r": 2, "decompose_both": True},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "vera": {"r": 8},
    "randlora": {"r": 4, "randlora_alpha": 16},
    "oft": {"oft_block_size": 8},
    "boft": {"boft_block_size": 8},
    "hra": {"r": 4},
    "fourierft": {"n_frequency": 20},
    "waveft": {"n_frequency": 20},
    "c3a": {"block_size": 8},
    "miss": {"r": 4},
    "hira": {"r": 4},
    "gralora": {"r": 4},
    "beft": {},
}


# Biases are merged into those of the layers, which Llama has not.
ARCHITECTURES = dict.fromkeys(CASES, "llama") | {"lora": "xlm-roberta", "beft": "xlm-roberta"}
TARGETS = {"llama": ["q_proj", "down_proj"], "xlm-roberta": ["query", "output.dense"]}


def peft_config(case: str, **more: object) -> peft.PeftConfig:
    """PEFT's configuration of a case."""
    kind = case if case in TYPES else "lora"
    own = {"save_projection": False} if hasattr(config_class(kind)(), "save_projection") else {}
    return config_class(kind)(**({"target_modules": TARGETS[ARCHITECTURES[case]]} | own | CASES[case] | more))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small models, and a function that lets PEFT write an adapter with random weights of a case."""
    folder = tmp_path_factory.mktemp("types")
    paths = {name: save_small(small_model(name), folder / name) for name in TARGETS}

    def write(case: str, **more: object):
        small, path = small_model(ARCHITECTURES[case]), paths[ARCHITECTURES[case]]
        torch.manual_seed(1)
        adapted = peft.get_peft_model(AutoModel.from_pretrained(path), peft_config(case, **more))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(str(folder / case))
        return replace(small, config=None, path=str(path), lora=LoraConfig(path=str(folder / case)))

    return {name: replace(small_model(name), config=None, path=str(path)) for name, path in paths.items()}, write


QUICK = ("dora", "ia3", "vera")
EACH = slow_but(QUICK, CASES)


@pytest.mark.parametrize("case", EACH)
def test_gradient_equals_peft_in_one_process(ranks, models, case):
    """On 1, 2 and 3 ranks, in one pass and in chunks that are encoded twice; PEFT wrote the files."""
    model = models[1](case)
    loss, expected = plain_gradient(model, 8)
    assert expected
    whole, twice = ChunkOptions(10_000, pass_overhead_tokens=10_000), ChunkOptions(40, pass_overhead_tokens=4)
    for size, cutting in ((1, whole), (2, twice), (3, twice)):
        answers = ranks(size, sharded_gradient, model, parallel(Strategy.fsdp), cutting, 8)
        assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-6)
        gradients = answers[0][1]
        assert gradients.keys() == expected.keys()
        norm = torch.stack([g.norm() for g in expected.values()]).norm()
        for key, gradient in expected.items():
            error = (gradients[key].double() - gradient).norm() / max(gradient.norm(), 1e-2 * norm)
            assert error < 1e-5, f"{key} on {size} ranks"


@pytest.mark.parametrize("case", slow_but(("vera",), CASES))
def test_bf16(ranks, models, case):
    """All types compute in bf16, also those with buffers in float32."""
    model = models[1](case)
    loss, expected = plain_gradient(model, 8)
    options = replace(parallel(Strategy.fsdp), precision=Precision.bf16)
    answers = ranks(2, sharded_gradient, model, options, ChunkOptions(40, pass_overhead_tokens=4), 8)
    assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=0.05)
    gradients = torch.cat([answers[0][1][name].double().flatten() for name in expected])
    plain = torch.cat([gradient.flatten() for gradient in expected.values()])
    assert torch.cosine_similarity(gradients, plain, dim=0) > 0.95


def gradient_with(world: World, model: ModelConfig, way: str) -> tuple[float, dict[str, torch.Tensor], int]:
    """The loss, the gradients, and the number of graphs, if blocks are compiled or have fused kernels."""
    torch._dynamo.reset()
    options = parallel(Strategy.fsdp, compile=way == "compiled", fused_kernels=way == "fused")
    compiler = functools.partial(torch.compile, backend="eager")
    with installed(), mock.patch.object(torch, "compile", compiler):
        loss, gradients, _ = sharded_gradient(world, model, options, ChunkOptions(40, pass_overhead_tokens=4), 8)
    graphs = num_graphs()
    torch._dynamo.reset()
    return loss, gradients, graphs


# Types whose computation dynamo traces, and one whose blocks run eagerly: `parallel.compile` names them.
TRACED, EAGER = ("lora", "ia3", "vera", "oft", "boft"), "dora"
# Layers that fused kernels read and write.
FUSED = ["q_proj", "k_proj", "gate_proj", "up_proj", "down_proj"]
WAYS = [("fused", case) for case in ("ia3", "oft")]
WAYS += [pytest.param("fused", case, marks=pytest.mark.slow) for case in ("lora", "dora", "vera", "boft")]
WAYS += [("compiled", EAGER), *(pytest.param("compiled", case, marks=pytest.mark.slow) for case in TRACED)]


@pytest.mark.parametrize(("way", "case"), WAYS)
def test_gradient_of_compiled_blocks_and_of_fused_kernels(ranks, models, way, case, monkeypatch):
    monkeypatch.setitem(CASES, "lora", {"r": 3})
    monkeypatch.setitem(ARCHITECTURES, "lora", "llama")
    model = models[1](case, target_modules=FUSED)
    loss, expected = plain_gradient(model, 8)
    ((found_loss, gradients, graphs),) = ranks(1, gradient_with, model, way, timeout=900)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert (graphs > 0) is (way == "compiled" and case in TRACED)
    assert gradients.keys() == expected.keys()
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for key, gradient in expected.items():
        error = (gradients[key].double() - gradient).norm() / max(gradient.norm(), 1e-2 * norm)
        assert error < 1e-5, key


def written_settings(case: str) -> str:
    """The value of `model.adapter` of a case."""
    kind = {"type": case, "target_modules": "all-linear"} | CASES[case]
    written = (f"{name}: {json.dumps(value)}" for name, value in kind.items() if not name.startswith("use_"))
    return "{" + ", ".join(written).replace('"', "") + "}"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_rows(folder / "train.jsonl", 36)
    for name in TARGETS:
        save_small(small_model(name), folder / name)
    return folder


@pytest.mark.quick("vera")
@pytest.mark.parametrize("case", EACH)
def test_run_is_resumed_and_exported(ranks, workshop, tmp_path, case):
    """Trained on 2 ranks, resumed on 3; PEFT opens the adapter, and its vectors are those of the merged export.

    `export.check` compares both with the trained model as well.
    """
    pooling = small_model(ARCHITECTURES[case]).pooling.value
    options = (
        f"model.path={workshop / ARCHITECTURES[case]}", f"data.train=[{workshop / 'train.jsonl'}]",
        f"model.pooling={pooling}",
        f"model.adapter={written_settings(case)}", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9",
        "optim.lr=2e-2", "export.formats=[adapter]", "export.check=true",
    )  # fmt: skip
    out = tmp_path / "run"
    output = ranks(2, run, *options, f"output_dir={out}")[0]
    assert f"on {6 if case == 'ia3' else 14 if ARCHITECTURES[case] == 'llama' else 12} linear layers" in output
    expected = losses(out)
    again, resumed = rewind_run(out, tmp_path / "again", 2), rewind_run(out, tmp_path / "resumed", 2)
    ranks(2, run, *options, f"output_dir={again}")
    assert losses(again) == expected
    adapter = "adapter/adapter_model.safetensors"
    assert (again / "model" / adapter).read_bytes() == (out / "model" / adapter).read_bytes()
    ranks(3, run, *options, f"output_dir={resumed}")
    assert losses(resumed) == pytest.approx(expected, rel=1e-4)
    export(compose_export([f"run={out}", f"output_dir={tmp_path / 'to'}", "check=true"]))

    base = AutoModel.from_pretrained(workshop / ARCHITECTURES[case])
    ids = torch.tensor([[0, 4, 5, 6, 2]])
    before = base.eval()(ids).last_hidden_state
    adapted = peft.PeftModel.from_pretrained(base, out / "model" / "adapter").eval()(ids).last_hidden_state
    assert (adapted - before).abs().max() > 1e-3
    for folder in (out / "model", tmp_path / "to"):
        merged = AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state
        torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_initial_weights_and_counts_are_those_of_peft(models, case):
    """On the meta device as in a run: the same number of trained weights, and no change of vectors unless PEFT's."""
    model = models[0][ARCHITECTURES[case]]
    targets = {"target_modules": TARGETS[ARCHITECTURES[case]]}
    recipe = Recipe(model=replace(model, adapter={"type": case} | targets | CASES[case]))
    meta = build_meta_encoder(recipe).encoder
    adapted = peft.get_peft_model(AutoModel.from_pretrained(model.path), peft_config(case))
    trained = {name: p.shape for name, p in meta.named_parameters() if p.requires_grad}
    assert sum(map(torch.Size.numel, trained.values())) == adapted.get_nb_trainable_parameters()[0]
    buffers = dict(adapted.named_buffers())
    for name, buffer in meta.named_buffers():
        other = buffers.get(name.replace("backbone.", "base_model.model.", 1))
        if other is not None:
            assert torch.equal(other, buffer), name

    encoder = assemble_encoder(source := open_model_source(recipe.model))
    encoder.load_state_dict(full_state_dict(source, 0))
    encoder.eval()
    plain = encoder(Chunk(IDS, MASK))[0].detach()
    info = add_adapters(encoder, recipe.model.adapters, None, torch.float32)
    state = encoder.state_dict()
    with torch.no_grad():
        for name, weight in initial_adapters(encoder, info, 3):
            state[name].fill_(torch.nan).copy_(weight)
        copy_base_values(state, info)
    starts = {name: state[name].clone() for name in trained}
    vectors = encoder(Chunk(IDS, MASK))[0].detach()
    own = {name.replace("base_model.model.", "backbone.", 1): p for name, p in adapted.named_parameters()}
    for name, weight in starts.items():
        torch.testing.assert_close(weight.std(), own[name].detach().std(), rtol=0.5, atol=0.02, msg=name)
    torch.manual_seed(0)
    with torch.no_grad():
        difference = (vectors - plain).abs().max()
        base, changed = (m.eval()(IDS).last_hidden_state for m in (AutoModel.from_pretrained(model.path), adapted))
    assert (difference < 1e-5) == bool((changed - base).abs().max() < 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lora", "dora", "ia3", "oft", "boft", "vera"])
def test_two_tasks_share_a_base(ranks, workshop, tmp_path, monkeypatch, case):
    """The adapters of two runs in one directory, whose vectors are compared with those of the runs."""
    monkeypatch.setitem(CASES, "lora", {"r": 3})
    monkeypatch.setitem(ARCHITECTURES, "lora", "llama")
    for seed in (1, 2):
        ranks(
            1, run, f"model.path={workshop / 'llama'}", f"data.train=[{workshop / 'train.jsonl'}]",
            f"model.adapter={written_settings(case)}", "model.pooling=last", "train.steps=2", "optim.lr=2e-2",
            "export.check=false", f"seed={seed}", f"output_dir={tmp_path / str(seed)}",
        )  # fmt: skip
    options = [f"adapters={{first: {tmp_path / '1'}, second: {tmp_path / '2'}}}", f"output_dir={tmp_path / 'to'}"]
    refused = {"vera": "VeRA, which transformers cannot load beside others", "dora": "DoRA, whose lengths of rows"}
    if case in refused:
        with pytest.raises(ConfigError, match=rf"^adapters\.first=.* trained {refused[case]}.*: export it alone$"):
            export(compose_export(options))
        return
    export(compose_export([*options, "check=true"]))
    ids = torch.tensor([[0, 4, 5, 6, 2]])
    vectors = []
    for name, seed in {"first": 1, "second": 2}.items():
        model = AutoModel.from_pretrained(tmp_path / "to")
        model.load_adapter(str(tmp_path / "to" / "adapters" / name))
        vectors.append(model.eval()(ids).last_hidden_state)
        merged = AutoModel.from_pretrained(tmp_path / str(seed) / "model").eval()(ids).last_hidden_state
        torch.testing.assert_close(vectors[-1], merged, rtol=0, atol=1e-4)
    assert (vectors[0] - vectors[1]).abs().max() > 1e-3


def test_every_type_of_peft_is_trained_or_refused():
    """A new one has to be tried."""
    types = {str(kind.value).lower() for kind in PEFT_TYPE_TO_TUNER_MAPPING}
    assert types == {*TYPES, *REFUSED}
    assert not set(TYPES) & set(REFUSED)
    assert {case if case in TYPES else "lora" for case in CASES} == set(TYPES)


SETTINGS = """
alpha alpha_pattern apply_GS block_share block_size block_size_pattern boft_block_num boft_block_size boft_dropout
coft d_initial decompose_both decompose_factor eps exclude_modules feedforward_modules
gralora_dropout gralora_k hira_dropout hybrid_r init_ia3_weights init_lora_weights init_weights layers_pattern
layers_to_transform lora_alpha lora_bias lora_dropout mini_r miss_dropout modules_to_save n_frequency
n_frequency_pattern num_cayley_neumann_terms oft_block_size projection_prng_key proportional_parameters r
randlora_alpha randlora_dropout random_loc_seed rank_dropout rank_dropout_scale rank_pattern scaling sparse
target_modules use_cayley_neumann use_dora use_effective_conv2d use_idwt use_rslora vera_dropout very_sparse
wavelet_family
"""


def test_every_setting_of_peft_is_known():
    """A new one has to be read, refused or found harmless: some change what an adapter computes."""
    names = {name for kind in TYPES for name in setting_names(kind)}
    assert names == set(SETTINGS.split())


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"type": "dorra"}, r"model\.adapter\.type=dorra: is no type of adapter, did you mean dora\?"),
        ({"type": "adalora"}, r"model\.adapter\.type=adalora: changes its ranks .*; allowed are lora, dora"),
        ({"type": "prompt_tuning"}, "prompt_tuning: .* generates text"),
        ({"type": "vblora"}, "vblora: shares trained weights"),
        ({"type": "ln_tuning"}, r"modules_to_save=\[norms\]"),
        ({"type": "dora", "rank": 4}, r"model\.adapter\.rank: lora of PEFT has no such setting"),
        ({"type": "ia3", "feedforward": ["x"]}, "did you mean feedforward_modules"),
        ({"type": "ia3", "feedforward_modules": ["up_prj"]}, "feedforward_modules: up_prj is none of the adapted"),
        ({"type": "lora", "r": "16"}, "model.adapter.r=16: must be of the type int"),
        ({"type": "lora", "r": 0}, "model.adapter.r=0: must be at least 1"),
        ({"type": "lora", "lora_dropout": 1.5}, "lora_dropout=1.5: must be from 0"),
        ({"type": "lora", "init_lora_weights": "pissa"}, "init_lora_weights=pissa: changes the weights of the base"),
        ({"type": "lora", "init_lora_weights": "eva"}, "init_lora_weights=eva: .* from data"),
        ({"type": "lora", "bias": "all"}, "model.adapter.bias=all"),
        ({"type": "loha", "module_dropout": 0.1}, "module_dropout=0.1: leaves out"),
        ({"type": "c3a", "block_size": 7}, "model.adapter: cannot add this adapter to LlamaModel: .*7"),
        (
            {"type": "dora", "target_modules": ["query"]},
            r"adapter\.target_modules: LlamaModel has no layer query",
        ),
        ({"type": "boft", "boft_n_butterfly_factor": 2}, "boft_n_butterfly_factor=2: depends on"),
        ({"type": "beft"}, "model.adapter: the adapter trains biases, .* without: layers.0"),
        ({"type": "dora", "modules_to_save": ["pooler"]}, r"model\.adapter\.modules_to_save: .*pooler"),
    ],
)
def test_invalid_settings(models, settings, pattern):
    recipe = Recipe(model=replace(models[0]["llama"], adapter=settings))
    with pytest.raises(ConfigError, match=pattern) as raised:
        build_meta_encoder(recipe)
    assert "\n" not in str(raised.value)
