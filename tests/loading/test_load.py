"""Sharded weights equal those that transformers reads, for every format; each rank reads only its own rows."""

import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForMaskedLM

import embedtrain.distributed.sharding as weights
from embedtrain.config.recipe import LoraConfig, ModelConfig, Pooling, Strategy
from embedtrain.data.types import Chunk
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.formats.source import CommandModel, open_model_source
from embedtrain.inference.loading.command_model import open_encoder_source
from embedtrain.inference.loading.load import BLOCK_CLASS_VARIABLE, LoadedModel, load_model
from embedtrain.models.build import assemble_encoder
from embedtrain.models.encoder import prepare_backbone
from tests.small import ARCHITECTURES, model_options, parallel, save_small, small_model, small_tokenizer

TEXT = {"input_ids": [[0, 5, 9, 2, 1, 1], [0, 7, 8, 6, 12, 2]], "attention_mask": [[1, 1, 1, 1, 0, 0], [1] * 6]}


@dataclass
class Reads:
    """Records which rows of which key are read from safetensors."""

    rows: dict[str, int] = field(default_factory=dict)
    full: list[str] = field(default_factory=list)

    def open(self, *args: Any, **kwargs: Any) -> Any:
        spy, real = self, safetensors.safe_open(*args, **kwargs)

        class Slice:
            def __init__(self, key: str) -> None:
                self.key, self.slice = key, real.get_slice(key)

            def __getitem__(self, index: slice) -> torch.Tensor:
                tensor = self.slice[index]
                spy.rows[self.key] = spy.rows.get(self.key, 0) + tensor.shape[0]
                return tensor

        class File:
            def __enter__(self) -> "File":
                real.__enter__()
                return self

            def __exit__(self, *why: Any) -> None:
                real.__exit__(*why)

            def get_slice(self, key: str) -> Slice:
                return Slice(key)

            def get_tensor(self, key: str) -> torch.Tensor:
                spy.full.append(key)
                return real.get_tensor(key)

        return File()


def vectors(encoder: torch.nn.Module) -> torch.Tensor:
    ids, mask = torch.tensor(TEXT["input_ids"]), torch.tensor(TEXT["attention_mask"])
    with torch.no_grad():
        return encoder.eval()(Chunk(ids, mask))[0]


def reference(model: ModelConfig) -> torch.nn.Module:
    """The encoder in one process with the backbone as transformers reads it, in fp32."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    assert source.directory is not None
    encoder.backbone = prepare_backbone(AutoModel.from_pretrained(source.directory, dtype=torch.float32))
    return encoder.eval()


def compare(loaded: LoadedModel, expected: torch.nn.Module) -> None:
    encoder = loaded.encoder
    parameters, reference_parameters = dict(encoder.named_parameters()), dict(expected.named_parameters())
    assert parameters.keys() == reference_parameters.keys()
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(parameter.full_tensor(), reference_parameters[name], rtol=0, atol=0, msg=name)
    buffers, reference_buffers = dict(encoder.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == reference_buffers.keys()
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, reference_buffers[name], rtol=0, atol=0, msg=name)
    torch.testing.assert_close(vectors(encoder), vectors(expected), rtol=0, atol=1e-5)
    reshard(encoder)


def check_loading(world: World, cases: dict[str, tuple[ModelConfig, bool]]) -> None:
    """Each case is a model and whether its weights are read slice by slice."""
    for name, (model, in_slices) in cases.items():
        torch.manual_seed(world.rank)  # must have no effect
        spy = Reads()
        weights.safe_open = spy.open  # type: ignore[attr-defined]
        try:
            loaded = load_model(model, parallel(), world, seed=1)
        finally:
            weights.safe_open = safetensors.safe_open  # type: ignore[attr-defined]
        notes = " ".join(loaded.notes)
        assert ("its own slices" in notes) == in_slices, (name, notes)
        compare(loaded, reference(model))
        if not in_slices:
            assert not spy.rows
            continue
        # Every key once, and only this rank's rows of it.
        local = {n: p.to_local().shape[0] for n, p in loaded.encoder.named_parameters()}
        assert sum(spy.rows.values()) == sum(local.values()), name
        assert not spy.full
        for key, rows in spy.rows.items():
            assert rows in {n_rows for n, n_rows in local.items() if n.endswith(key.split(".", 1)[1])}, key


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: save_small(small_model(name), root / name, seed=i) for i, name in enumerate(ARCHITECTURES)}


def without_safetensors(directory: Path, to: Path) -> Path:
    """The same model as a pickled state dict, as in old repositories."""
    shutil.copytree(directory, to)
    torch.save(load_file(to / "model.safetensors"), to / "pytorch_model.bin")
    (to / "model.safetensors").unlink()
    return to


def at(directory: Path) -> ModelConfig:
    return model_options(path=str(directory), pooling=Pooling.mean)


@pytest.mark.parametrize(
    "names", [("xlm-roberta", "qwen3", "modernbert"), pytest.param(tuple(ARCHITECTURES), marks=pytest.mark.slow)]
)
def test_all_architectures_in_slices_and_broadcast(ranks, directories, tmp_path, names):
    cases = {}
    for name in names:
        cases[name] = (at(directories[name]), True)
        cases[f"{name}.bin"] = (at(without_safetensors(directories[name], tmp_path / name)), False)
    ranks(2, check_loading, cases)


def masked_lm(directory: Path, to: Path) -> Path:
    shutil.copytree(directory, to)
    torch.manual_seed(5)
    AutoModelForMaskedLM.from_config(open_model_source(at(directory)).config).save_pretrained(to)
    return to


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_other_formats_of_weights(ranks, directories, tmp_path, world_size):
    xlmr = directories["xlm-roberta"]
    lm = masked_lm(xlmr, tmp_path / "lm")
    assert any(key.startswith("roberta.") for key in load_file(lm / "model.safetensors"))

    several = tmp_path / "several"
    shutil.copytree(xlmr, several)
    (several / "model.safetensors").unlink()
    AutoModel.from_pretrained(xlmr).save_pretrained(several, max_shard_size="10KB")
    assert (several / "model.safetensors.index.json").is_file()
    assert len(list(several.glob("model-*.safetensors"))) > 2

    halves = tmp_path / "halves"
    AutoModel.from_pretrained(xlmr, dtype=torch.bfloat16).save_pretrained(halves)
    small_tokenizer().save_pretrained(halves)
    assert {t.dtype for t in load_file(halves / "model.safetensors").values()} == {torch.bfloat16}

    old = tmp_path / "old"  # TensorFlow's names, which only transformers maps
    shutil.copytree(xlmr, old)
    renamed = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma"): t for k, t in load_file(old / "model.safetensors").items()
    }
    save_file(renamed, old / "model.safetensors", metadata={"format": "pt"})

    cases = {
        "plain": (at(xlmr), True),
        "bin": (at(without_safetensors(xlmr, tmp_path / "bin")), False),
        "masked lm": (at(lm), True),
        "masked lm, bin": (at(without_safetensors(lm, tmp_path / "lmbin")), False),
        "several files": (at(several), True),
        "bf16": (at(halves), True),
        "bf16, bin": (at(without_safetensors(halves, tmp_path / "halvesbin")), False),
        "old names": (at(old), False),
    }
    ranks(world_size, check_loading, cases)


def from_scratch(world: World, model: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(world.rank)
    loaded = load_model(model, parallel(), world, seed=11, tokenizer=small_tokenizer())
    tensors = {name: p.full_tensor().detach() for name, p in loaded.encoder.named_parameters()}
    if world.size == 3:  # a dimension smaller than the number of ranks leaves a rank without rows
        assert any(n == 0 for n in world.gather(min(p.to_local().numel() for p in loaded.encoder.parameters())))
    tensors["vectors"] = vectors(loaded.encoder)
    return tensors


@pytest.mark.quick("gemma3_text")
@pytest.mark.parametrize("architecture", ["xlm-roberta", "gemma3_text"])
def test_random_weights_are_the_same_on_any_number_of_ranks(ranks, architecture):
    """With a hidden size of 32, and XLM-R's table of token types, of one row, sharded over three ranks."""
    changes = {"head_dim": 2, "num_attention_heads": 1} if architecture == "gemma3_text" else {}
    model = small_model(architecture)
    model = small_model(architecture, config=dict(model.config) | changes)
    answers = [answer for size in (1, 2, 3) for answer in ranks(size, from_scratch, model)]
    for answer in answers[1:]:
        assert answer.keys() == answers[0].keys()
        for name, tensor in answer.items():
            tolerance = 1e-6 if name == "vectors" else 0.0
            torch.testing.assert_close(tensor, answers[0][name], rtol=0, atol=tolerance, msg=name)
    assert any(tensor.std() > 0 for tensor in answers[0].values())


def load_error(world: World, model: ModelConfig, options: Any, variable: str | None) -> tuple[str, str]:
    if variable is not None:
        os.environ[BLOCK_CLASS_VARIABLE] = variable
    try:
        load_model(model, options, world, seed=0)
    except EmbedtrainError as error:
        return type(error).__name__, str(error)
    finally:
        os.environ.pop(BLOCK_CLASS_VARIABLE, None)
    return "", ""


def notes_of(world: World, model: ModelConfig, options: Any, variable: str) -> tuple[str, ...]:
    os.environ[BLOCK_CLASS_VARIABLE] = variable
    try:
        return load_model(model, options, world, seed=0).notes
    finally:
        os.environ.pop(BLOCK_CLASS_VARIABLE, None)


def test_layer_class_from_the_environment(ranks, directories):
    """Used and noted if the recipe sets none; blanks are ignored."""
    model = at(directories["llama"])
    for notes in ranks(2, notes_of, model, parallel(), " LlamaDecoderLayer, "):
        assert "layer class LlamaDecoderLayer: read from FSDP_TRANSFORMER_CLS_TO_WRAP in the environment" in notes
        assert any("2 LlamaDecoderLayer + root" in note for note in notes)
    (notes,) = ranks(1, notes_of, model, parallel(), " ")
    assert not any("environment" in note for note in notes)
    (notes,) = ranks(1, notes_of, model, parallel(block_class="LlamaDecoderLayer"), "BertLayer")
    assert not any("environment" in note for note in notes)


def test_wrong_layer_class_is_rejected_before_weights_are_read(ranks, directories, tmp_path):
    """The weights are unreadable, and still the error is about the class."""
    damaged = tmp_path / "damaged"
    shutil.copytree(directories["bert"], damaged)
    (damaged / "model.safetensors").write_bytes(b"not weights")
    for options, variable, source in [
        (parallel(block_class="XLMRobertaLayer"), None, "parallel.block_class=XLMRobertaLayer"),
        (parallel(), "XLMRobertaLayer", f"{BLOCK_CLASS_VARIABLE} (in the environment)=XLMRobertaLayer"),
    ]:
        (first, text), (second, follows) = ranks(2, load_error, at(damaged), options, variable)
        assert (first, second) == ("ConfigError", "FailedElsewhere")
        assert source in text
        assert "BertLayer x2" in text
        assert text in follows
    answers = ranks(2, load_error, at(damaged), parallel(), None)
    assert answers[0][0] == "ModelError"
    assert "model.safetensors" in answers[0][1]


def test_weights_that_are_not_finite_are_named(ranks, directories, tmp_path):
    """Packed texts seem to attend to each other if vectors are NaN: the weight is the cause to report."""
    folder = shutil.copytree(directories["bert"], tmp_path / "nan")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["encoder.layer.1.output.dense.weight"][-1, 3] = float("nan")  # in the rows of the last rank only
    tensors["pooler.dense.bias"][0] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    for world_size in (1, 2):
        for kind, message in ranks(world_size, load_error, at(folder), parallel(), None):
            assert kind == "ModelError"
            assert f"model.path={folder}" in message and "encoder.layer.1.output.dense.weight" in message


def test_model_without_layers(ranks, tmp_path):
    """The strategy that the message suggests, ddp, works."""
    model = small_model("bert")
    flat = at(save_small(small_model("bert", config=model.config | {"num_hidden_layers": 0}), tmp_path / "flat"))
    (answer,) = ranks(1, load_error, flat, parallel(), None)
    assert answer[0] == "ConfigError"
    assert "parallel.strategy=ddp" in answer[1]
    assert ranks(2, load_error, flat, parallel(Strategy.ddp), None) == [("", "")] * 2


def load_without_trained_weights(world: World, model: ModelConfig) -> str:
    """Load before a checkpoint's weights are read, with NaN in all memory that is not initialized."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        return type(load_model(model, parallel(), world, seed=0, read_weights=False).encoder.backbone).__name__
    finally:
        torch.use_deterministic_algorithms(False)


def test_weights_that_a_checkpoint_holds_are_not_checked_before_it_is_loaded(ranks, directories):
    model = replace(at(directories["bert"]), lora=LoraConfig(rank=2), bidirectional=True)
    assert len(ranks(2, load_without_trained_weights, model)) == 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("late_interaction", "kind=late_interaction: .* is an embedding model without the projection of this kind"),
        ("m3", "kind=m3: .* is an embedding model without the layers of this kind"),
        ("cross_encoder", "kind=cross_encoder: .*score pairs.* is an embedding model: leave kind out"),
    ],
)
def test_a_command_opens_no_model_with_random_parts(tmp_path, kind, message):
    directory = str(save_small(small_model("xlm-roberta"), tmp_path))
    with pytest.raises(ConfigError, match=message):
        open_encoder_source(CommandModel(path=directory, kind=kind))
