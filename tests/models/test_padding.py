"""Padded texts have the vectors of transformers' own forward pass, which reads the mask; the encoder reads nothing."""

import pytest
import torch

from embedtrain.config.recipe import ModelConfig, Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk
from embedtrain.formats.source import open_model_source
from embedtrain.models.build import assemble_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.models.packing import enable_packing
from tests.custom_code import model_with_remote_code
from tests.models.test_packing import CASES, gradients, options
from tests.small import model_options, small_model, small_tokenizer, text
from tests.training.test_waits import Reads

# Attention outside of transformers' interface, and without an SDPA implementation.
OWN_ATTENTION = {
    "mpnet": small_model("mpnet"),
    "gemma2": model_options(config=small_model("gemma3_text").config | {"model_type": "gemma2"}, pooling=Pooling.mean),
}
LENGTHS = {"padded": (39, 25, 11, 11, 1), "equal": (25, 25, 25), "short": (3, 3), "one": (39,)}


def encoder_of(model: ModelConfig) -> Encoder:
    torch.manual_seed(0)
    return assemble_encoder(open_model_source(model)).eval()


def chunk_of(lengths: tuple[int, ...]) -> Chunk:
    tokenizer = TextTokenizer(small_tokenizer(), 48)
    return tokenizer.chunk(
        tokenizer.tokens([text(seed, length) for seed, length in enumerate(lengths)]), range(len(lengths))
    )


def check(encoder: Encoder) -> None:
    for name, lengths in LENGTHS.items():
        chunk = chunk_of(lengths)
        assert chunk.has_padding == (name == "padded") == bool((chunk.mask == 0).any())
        hidden = encoder.backbone(input_ids=chunk.ids, attention_mask=chunk.mask).last_hidden_state
        expected = encoder.output(hidden, chunk)[0]
        expected_grads = gradients(encoder, expected)
        with Reads() as reads:
            vectors = encoder(chunk)[0]
            grads = gradients(encoder, vectors)
        assert not reads.counts, name
        assert vectors.equal(expected), name
        assert grads.keys() == expected_grads.keys()
        assert all(grad.equal(expected_grads[key]) for key, grad in grads.items()), name


@pytest.mark.parametrize("pooling", Pooling)
def test_pooling_reads_nothing(pooling):
    check(encoder_of(small_model("bert", pooling=pooling)))


@pytest.mark.parametrize("packable", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_padded_texts_equal_those_of_transformers(case, packable):
    encoder = encoder_of(options(case))
    if packable:
        enable_packing(encoder)
    check(encoder)


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_their_own_attention(name):
    check(encoder_of(OWN_ATTENTION[name]))


def test_custom_code_receives_a_mask(tmp_path):
    source = open_model_source(
        model_options(path=str(model_with_remote_code(tmp_path / "m")), trust_remote_code=True, pooling=Pooling.mean)
    )
    check(assemble_encoder(source).eval())


def test_transformers_alone_reads_the_mask():
    """Otherwise the tests above would prove nothing."""
    encoder, chunk = encoder_of(small_model("llama")), chunk_of(LENGTHS["padded"])
    with Reads() as reads:
        encoder.backbone(input_ids=chunk.ids, attention_mask=chunk.mask)
    assert reads.counts
