"""New dense heads of a recipe: their initial weights, training beside adapters, and exports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from embedtrain.config.kind_settings import HeadActivation, HeadConfig, HeadInit
from embedtrain.config.losses import InfoNCEConfig, MatryoshkaConfig
from embedtrain.config.recipe import LoraConfig, ModelConfig, Pooling, Recipe
from embedtrain.data.types import Chunk
from embedtrain.errors import ConfigError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.verify import PROBES
from embedtrain.models.adapters import add_adapters
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.training.inputs import check_dimensions
from tests.checkpoint.exporting import architecture_of, export_model
from tests.small import model_options, save_small, small_model

IDS, MASK = torch.tensor([[0, 5, 6, 7, 2], [0, 9, 2, 1, 1]]), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_small(small_model("bert"), tmp_path_factory.mktemp("heads") / "model")


def with_heads(model: Path, *heads: HeadConfig) -> ModelConfig:
    return model_options(path=str(model), pooling=Pooling.mean, heads=list(heads))


def opened(model: Path, *heads: HeadConfig) -> Encoder:
    source = open_model_source(with_heads(model, *heads))
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    return encoder.eval()


@pytest.mark.parametrize("sizes", [(32,), (48, 32), (40, 48, 32), (48, 48, 32), (48,), (48, 40)])
def test_identity_leaves_vectors_as_they_were(model, sizes):
    """Dimensions beyond those of the pooling are 0; hidden ones that the last head drops get a gradient."""
    encoder = opened(model, *(HeadConfig(out=out, bias=out != 32) for out in sizes))
    vectors = encoder(Chunk(IDS, MASK))[0]
    torch.testing.assert_close(vectors[:, :32], opened(model)(Chunk(IDS, MASK))[0], rtol=0, atol=1e-6)
    assert vectors.shape == (2, sizes[-1]) and not vectors[:, 32:].any()
    if sizes == (48, 32):
        (vectors * torch.arange(32)).sum().backward()
        first, second = (head.linear.weight for head in encoder.dense)
        assert first[32:].any() and second.grad[:, 32:].all()


def test_the_first_dimensions_of_a_smaller_identity_are_kept(model):
    narrow, whole = opened(model, HeadConfig(out=8))(Chunk(IDS, MASK))[0], opened(model)(Chunk(IDS, MASK))[0][:, :8]
    torch.testing.assert_close(narrow, torch.nn.functional.normalize(whole, dim=1), rtol=0, atol=1e-6)


def test_normal_weights_are_a_function_of_seed_and_name(model):
    heads = [HeadConfig(out=400, init=HeadInit.normal), HeadConfig(out=400, bias=True, init=HeadInit.normal)]
    source = open_model_source(with_heads(model, *heads))
    first, again, other = (full_state_dict(source, seed) for seed in (1, 1, 2))
    for index, inputs in ((0, 32), (1, 400)):
        name = f"dense.{index}.linear.weight"
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])
        assert first[name].std().item() == pytest.approx(inputs**-0.5, rel=0.03)
    assert not first["dense.1.linear.bias"].any()
    assert torch.equal(
        first["backbone.embeddings.word_embeddings.weight"], other["backbone.embeddings.word_embeddings.weight"]
    )
    alone = full_state_dict(open_model_source(with_heads(model, heads[0])), seed=1)
    assert torch.equal(alone["dense.0.linear.weight"], first["dense.0.linear.weight"])


def test_heads_are_trained_beside_adapters(model):
    encoder = opened(model, HeadConfig(out=48), HeadConfig(out=32))
    adapted = add_adapters(encoder, LoraConfig(rank=2), None, torch.float32)
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"dense.0.linear.weight", "dense.1.linear.weight"}
    assert adapted.heads


@pytest.mark.parametrize("activation", HeadActivation)
def test_sentence_transformers_opens_an_export(model, tmp_path, activation):
    heads = [HeadConfig(out=48, activation=activation, init=HeadInit.normal), HeadConfig(out=24, bias=True)]
    architecture = architecture_of(tmp_path / "architecture", with_heads(model, *heads))
    export_model(tmp_path / "out", architecture)
    reopened = SentenceTransformer(str(tmp_path / "out"))
    assert [type(module).__name__ for module in reopened] == ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    assert np.allclose(reopened.encode(list(PROBES), prompt=""), architecture.vectors, atol=1e-5)
    with pytest.raises(ConfigError, match=r"model\.heads\[0\]\.out=48: .*Dense"):
        open_model_source(with_heads(tmp_path / "out", *heads))


def test_losses_train_on_the_dimensions_of_the_last_head(model):
    source = open_model_source(with_heads(model, HeadConfig(out=48)))
    recipe = Recipe(name="a", loss=InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[48, 8])))
    check_dimensions(recipe, source)
    recipe.loss = InfoNCEConfig(matryoshka=MatryoshkaConfig(dims=[49, 8]))
    with pytest.raises(ConfigError, match="49"):
        check_dimensions(recipe, source)
