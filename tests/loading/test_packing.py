"""Texts are packed if the model supports it, else padded with a note, or rejected with model.attention=packed."""

import pytest
import torch

from embedtrain.config.recipe import Attention, Precision, Strategy
from embedtrain.distributed.world import joined_world
from embedtrain.errors import ConfigError, ModelError
from embedtrain.inference.loading.load import LoadedModel, load_model
from tests.small import parallel, small_model, small_tokenizer, text

REASON = "packed vectors differ"


def loaded(
    architecture: str, attention: Attention = Attention.auto, precision: Precision = Precision.fp32
) -> LoadedModel:
    options = parallel(Strategy.ddp, precision=precision)
    with joined_world() as world:
        model = load_model(
            small_model(architecture, attention=attention), options, world, seed=0, tokenizer=small_tokenizer()
        )
        model.encoder.eval()
        return model


def vectors(model: LoadedModel) -> torch.Tensor:
    tokens = model.tokenizer.tokens([text(seed, length) for seed, length in enumerate((30, 9, 2))])
    with torch.no_grad():
        return model.encoder(model.tokenizer.chunk(tokens, range(3)))[0]


@pytest.fixture
def wrong_positions(monkeypatch):
    """Makes the encoder count positions differently from the model."""
    monkeypatch.setattr("embedtrain.models.encoder.first_position", lambda backbone: 0)


@pytest.mark.parametrize("attention", [Attention.auto, Attention.packed])
def test_packed(attention):
    model, padded = loaded("xlm-roberta", attention), loaded("xlm-roberta", Attention.padded)
    assert model.tokenizer.packed and not padded.tokenizer.packed
    assert not [note for note in (*model.notes, *padded.notes) if "texts are p" in note]
    torch.testing.assert_close(vectors(model), vectors(padded), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("wrong_positions")
def test_packing_that_changes_vectors_is_disabled():
    model = loaded("xlm-roberta")
    assert not model.tokenizer.packed and REASON in model.notes[-1]
    assert model.notes[-1].startswith("texts are padded: ")
    assert vectors(model).equal(vectors(loaded("xlm-roberta", Attention.padded)))
    with pytest.raises(ModelError, match=rf"model\.attention=packed: .*{REASON}.* model\.attention=auto"):
        loaded("xlm-roberta", Attention.packed)


def test_model_with_its_own_attention_is_padded():
    assert "texts are padded: it computes attention itself" in " ".join(loaded("mpnet").notes)
    with pytest.raises(ModelError, match=r"model\.attention=packed: it computes attention itself"):
        loaded("mpnet", Attention.packed)


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp32])
def test_gpus_without_the_kernel_pad(monkeypatch, precision):
    """A T4 has neither the kernel nor bf16."""
    monkeypatch.setattr("embedtrain.inference.loading.load.compute_capability", lambda device: (7, 5))
    model = loaded("bert", precision=precision)
    assert not model.tokenizer.packed
    assert [note for note in model.notes if note.startswith("texts are padded: ") and "7.5" in note]
    with pytest.raises(ConfigError, match=r"model\.attention=packed: .*7\.5.* model\.attention=auto"):
        loaded("bert", Attention.packed, precision)
