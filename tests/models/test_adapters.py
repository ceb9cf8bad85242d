"""Low-rank adapters: gradients equal one process, initial weights equal on all ranks, and PEFT's files."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModel

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import BaseDtype, LoraConfig, ModelConfig, ParallelConfig, Precision, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.world import World
from embedtrain.errors import EmbedtrainError
from embedtrain.formats.peft import open_adapter
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.adapters import without_adapters
from embedtrain.training.backward import Backward
from embedtrain.training.optimizer import clip_grad_norm
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.small import batch, model_options, parallel, save_small, small_model, small_tokenizer

TEMPERATURE = 0.2
IDS = torch.tensor([[0, 4, 5, 6, 2], [0, 9, 8, 2, 1]])
MASK = (IDS != 1).long()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models with an adapter written by PEFT, whose B is not zero and which stores norms in full."""
    folder = tmp_path_factory.mktemp("adapters")
    configs: dict[str, ModelConfig] = {}
    for name, norm in (("llama", "input_layernorm"), ("xlm-roberta", "LayerNorm")):
        small = small_model(name)
        path = save_small(small, folder / name)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, modules_to_save=[norm]
        )
        adapted = peft.get_peft_model(AutoModel.from_pretrained(path), config)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                parameter.add_(0.1 * torch.randn_like(parameter) if "modules_to_save" in key else 0.0)
        adapted.save_pretrained(str(folder / f"{name}-adapter"))
        configs[name] = replace(
            small, config=None, path=str(path), lora=LoraConfig(path=str(folder / f"{name}-adapter"))
        )
    return configs


def opened(model: ModelConfig) -> torch.nn.Module:
    """The model with its adapter opened by PEFT, in one process, float64."""
    assert model.lora.path is not None
    base = AutoModel.from_pretrained(model.path)
    return peft.PeftModel.from_pretrained(base, model.lora.path, is_trainable=True).double().eval()


def vector(backbone: torch.nn.Module, pooling: str, ids: torch.Tensor) -> torch.Tensor:
    hidden = backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return F.normalize({"last": hidden[-1], "mean": hidden.mean(0)}[pooling], dim=0)


def plain_gradient(model: ModelConfig, num_rows: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of every trained weight, by textbook InfoNCE on PEFT's model."""
    backbone, tokenizer = opened(model), small_tokenizer()
    rows = batch(num_rows).rows
    texts = [text for row in rows for text in row.documents.texts]

    def encode(texts: list[str]) -> torch.Tensor:
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        return torch.stack([vector(backbone, model.pooling.value, text_ids) for text_ids in ids])

    logits = encode([row.query for row in rows]) @ encode(texts).T / TEMPERATURE
    total, positive = torch.zeros((), dtype=torch.float64), 0
    for i, row in enumerate(rows):
        candidates = [j for j, text in enumerate(texts) if j == positive or text != row.documents.texts[0]]
        total = total - F.log_softmax(logits[i, candidates], dim=0)[candidates.index(positive)]
        positive += len(row.documents.texts)
    loss = total / num_rows
    loss.backward()
    gradients = {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    return loss.item(), {
        "backbone." + name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): gradient
        for name, gradient in gradients.items()
    }


def sharded_gradient(
    world: World, model: ModelConfig, options: ParallelConfig, cutting: ChunkOptions, num_rows: int
) -> tuple[float, dict[str, torch.Tensor], float]:
    loaded = load_model(model, options, world, seed=0)
    loaded.encoder.eval()
    loss = InfoNCE(InfoNCEConfig(temperature=TEMPERATURE))
    backward = Backward(
        loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy(), reduce_per_step=loaded.reduce_per_step
    )
    output, finite = backward(make_rank_batch(batch(num_rows), world.rank, world.size, loaded.tokenizer, cutting))
    assert finite
    assert sum(isinstance(part, FSDPModule) for part in loaded.encoder.modules()) == 2 + 1
    parameters = dict(loaded.encoder.named_parameters())
    assert all(isinstance(p, DTensor) for p in parameters.values())
    gradients = {name: p.grad.full_tensor() for name, p in parameters.items() if isinstance(p.grad, DTensor)}
    assert {name for name, p in parameters.items() if p.requires_grad} == gradients.keys()
    return output.local_loss.item(), gradients, float(clip_grad_norm(parameters.values(), None))


MESHES = [(1, "fsdp", None), (2, "fsdp", None), (2, "ddp", None), (4, "hsdp", 2)]


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("llama", MESHES[:1] + MESHES[2:]),
        ("xlm-roberta", MESHES[1:2]),
        pytest.param("llama", [(4, "fsdp", None), *MESHES[1:2]], marks=pytest.mark.slow),
        pytest.param("xlm-roberta", MESHES[:1] + MESHES[2:], marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_one_process(ranks, models, name, meshes):
    """On 1, 2 and 4 ranks, every mesh, in one pass and in chunks encoded twice; norms are trained in full."""
    model = models[name]
    loss, expected = plain_gradient(model, 8)
    assert {key.rsplit(".", 3)[-3] for key in expected} >= {"lora_A", "lora_B"}
    assert any("norm" in key.lower() for key in expected)
    for size, strategy, shard_size in meshes:
        for cutting in (ChunkOptions(10_000, pass_overhead_tokens=10_000), ChunkOptions(40, pass_overhead_tokens=4)):
            options = parallel(Strategy(strategy), shard_size=shard_size)
            answers = ranks(size, sharded_gradient, model, options, cutting, 8)
            case = f"{name} {strategy} on {size} ranks, {cutting}"
            assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-6), case
            gradients = answers[0][1]
            assert gradients.keys() == expected.keys(), case
            norm = torch.stack([g.norm() for g in expected.values()]).norm()
            for key, gradient in expected.items():
                error = (gradients[key].double() - gradient).norm() / max(gradient.norm(), 1e-2 * norm)
                assert error < 1e-5, f"{key}, {case}"
            assert answers[0][2] == pytest.approx(norm.item(), rel=1e-5), case
            assert len({answer[2] for answer in answers}) == 1


def loaded_and_encoded(world: World, model: ModelConfig, options: ParallelConfig) -> dict[str, torch.Tensor]:
    """Trained weights, vectors with and without the adapters, and the dtypes of frozen weights."""
    torch.manual_seed(100 + world.rank)  # must have no effect
    loaded = load_model(model, options, world, seed=5)
    encoder = loaded.encoder.eval()
    with torch.no_grad():
        tensors = {"with": encoder(Chunk(IDS, MASK))[0]}
        with without_adapters(encoder):
            tensors["without"] = encoder(Chunk(IDS, MASK))[0]
        again = encoder(Chunk(IDS, MASK))[0]
    assert again.equal(tensors["with"])
    for part in encoder.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    for name, parameter in encoder.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32, name
            tensors[name] = parameter.full_tensor()
        else:
            tensors[f"frozen {parameter.dtype}"] = torch.ones(1)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_initial_weights_are_equal_on_any_number_of_ranks(ranks, models):
    """B is zero, A a function of seed and name; frozen weights are bf16 if that loses nothing."""
    model = replace(
        models["llama"], lora=LoraConfig(rank=4, targets=["q_proj", "down_proj"], modules_to_save=["embeddings"])
    )
    plain = ranks(1, loaded_and_encoded, replace(model, lora=LoraConfig()), parallel())[0]
    answers = [answer for size in (1, 2, 3) for answer in ranks(size, loaded_and_encoded, model, parallel())]
    first = answers[0]
    trained = {name for name in first if "." in name and not name.startswith("frozen")}
    assert len([name for name in trained if "lora_A" in name]) == 4
    assert {name for name in trained if "lora" not in name} == {"backbone.embed_tokens.weight"}
    assert "frozen torch.float32" in first
    assert first["with"].allclose(plain["with"], atol=1e-6)
    for answer in answers[1:]:
        for name in trained:
            assert answer[name].equal(first[name]), name
    a = first["backbone.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert a.abs().max() <= 1 / 32**0.5
    assert not a.equal(first["backbone.layers.1.self_attn.q_proj.lora_A.default.weight"])
    in_bf16 = ranks(2, loaded_and_encoded, model, parallel(precision=Precision.bf16))[0]
    assert "frozen torch.bfloat16" in in_bf16
    assert "frozen torch.float32" not in in_bf16
    fp32_base = replace(model, lora=replace(model.lora, base_dtype=BaseDtype.fp32))
    in_fp32 = ranks(2, loaded_and_encoded, fp32_base, parallel(precision=Precision.bf16))[0]
    assert "frozen torch.float32" in in_fp32
    assert in_fp32["with"].equal(in_bf16["with"]), "with bf16 computation, storing bf16 gives the same vectors"


def test_vectors_equal_those_of_peft(ranks, models):
    for name, model in models.items():
        answer = ranks(2, loaded_and_encoded, model, parallel())[1]
        backbone = opened(model)
        for row in range(2):
            ids = IDS[row : row + 1, : int(MASK[row].sum())]
            with torch.no_grad():
                expected = vector(backbone, model.pooling.value, ids)
                torch.testing.assert_close(answer["with"][row].double(), expected, rtol=0, atol=1e-5, msg=name)
        assert (answer["with"] - answer["without"]).norm() > 0.1


def load_error(world: World, model: ModelConfig) -> str:
    try:
        load_model(model, parallel(), world, seed=0)
    except EmbedtrainError as error:
        return str(error)
    return ""


def with_settings(adapter: str, to: Path, **settings: object) -> str:
    """A copy of an adapter with changed settings."""
    to.mkdir()
    before = json.loads((Path(adapter) / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(before | settings))
    save_file(load_file(Path(adapter) / "adapter_model.safetensors"), to / "adapter_model.safetensors")
    return str(to)


INVALID_LORA = [
    ({"rank": 2, "targets": ["query"]}, r"model\.lora\.targets: .*query; .* q_proj x2"),
    ({"rank": 2, "targets": ["q_proj", "quey"]}, r"model\.lora\.targets: .* quey"),
    ({"rank": 2, "targets": ["embed_tokens"]}, r"model\.lora\.modules_to_save=\[embeddings\]"),
    ({"rank": 2, "targets": ["mlp"]}, "down_proj, gate_proj, up_proj"),
    ({"rank": 2, "modules_to_save": ["pooler"]}, r"model\.lora\.modules_to_save: .*pooler; .* embeddings, norms"),
    ({"path": "{other}"}, "xlm-roberta-adapter is an adapter of another model"),
    ({"path": "{empty}"}, "adapter_config.json is missing"),
    ({"path": {"use_qalora": True}}, "use_qalora=true"),
    ({"path": {"peft_type": "VBLORA"}}, "peft_type=VBLORA: shares"),
    (
        {"path": {"init_lora_weights": "pissa_niter_4"}},
        "init_lora_weights=pissa_niter_4: changes the weights of the base",
    ),
    ({"path": {"init_lora_weights": "lora_ga"}}, "init_lora_weights=lora_ga: changes"),
    ({"path": {"monteclora_config": {"n": 2}}}, "monteclora_config=.*: computes something that is not supported"),
    ({"path": {"use_tomorrows_lora": True}}, "use_tomorrows_lora=True is not known"),
    ({"path": {"r": 5}}, "is an adapter of another model: .* has the shape"),
    ({"path": {"target_modules": ["q_proj"]}}, "is only in its files"),
]


@pytest.mark.parametrize("initial", ["gaussian", "orthogonal", "eva", False])
def test_initial_values_of_the_adapter_alone_are_harmless(models, tmp_path, initial):
    path = with_settings(
        str(models["llama"].lora.path), tmp_path / "copy", init_lora_weights=initial, eva_config={"a": 1}
    )
    assert open_adapter(LoraConfig(path=path)) is not None


@pytest.mark.parametrize(("options", "pattern"), INVALID_LORA, ids=[pattern for _, pattern in INVALID_LORA])
def test_invalid_adapters(ranks, models, tmp_path, options, pattern):
    """Settings in place of a path are those of a copy of the model's own adapter."""
    own, path = str(models["llama"].lora.path), options.get("path")
    (tmp_path / "empty").mkdir()
    if isinstance(path, dict):
        options = {"path": with_settings(own, tmp_path / "copy", **path)}
    elif path is not None:
        other = str(models["xlm-roberta"].lora.path)
        options = {"path": path.format(other=other, empty=tmp_path / "empty")}
    for message in ranks(2, load_error, replace(models["llama"], lora=LoraConfig(**options))):
        assert re.search(pattern, message), message


def test_adapter_in_place_of_a_model(models, tmp_path):
    shutil.copytree(str(models["llama"].lora.path), tmp_path / "adapter")
    shutil.copy(Path(str(models["llama"].path)) / "config.json", tmp_path / "adapter")
    with pytest.raises(EmbedtrainError, match=r"model\.lora\.path="):
        open_model_source(model_options(path=str(tmp_path / "adapter"), pooling=models["llama"].pooling))
