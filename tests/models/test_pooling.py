"""A text has the same vector alone and in any batch, with padding on the left or on the right."""

import pytest
import torch
import torch.nn.functional as F

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.formats.source import open_model_source
from embedtrain.models.build import assemble_encoder
from embedtrain.models.pooling import POOLING, PooledTokens
from tests.small import ARCHITECTURES, small_model

LENGTHS = [3, 1, 7, 5]


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    return POOLING[pooling].pool(hidden, PooledTokens(mask))


def padded(left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [4, 7] and mask: texts of LENGTHS, padded with id 1."""
    ids = torch.full((len(LENGTHS), 7), 1)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(LENGTHS):
        positions = slice(7 - n, 7) if left else slice(0, n)
        ids[i, positions] = torch.arange(n) * 5 % 40 + 4 + i
        mask[i, positions] = 1
    return ids, mask


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pooling", Pooling)
def test_pool_reads_the_mask(pooling, left):
    torch.manual_seed(0)
    _, mask = padded(left)
    hidden = torch.randn(4, 7, 6, dtype=torch.float64)
    for i, vector in enumerate(pool(hidden, mask, pooling)):
        real = hidden[i, mask[i].bool()]
        weights = torch.arange(1.0, len(real) + 1, dtype=torch.float64)[:, None]
        weighted_mean = (weights * real).sum(0) / weights.sum()
        expected = {"cls": real[0], "last": real[-1], "mean": real.mean(0), "max": real.amax(0)}.get(
            pooling.value, weighted_mean
        )
        torch.testing.assert_close(vector, expected)


def test_pool_is_float32_and_finite_for_a_text_without_tokens():
    hidden, mask = torch.randn(2, 3, 4, dtype=torch.bfloat16), torch.tensor([[1, 1, 0], [0, 0, 0]])
    for pooling in Pooling:
        vectors = pool(hidden, mask, pooling)
        assert vectors.dtype == torch.float32
        assert vectors.isfinite().all()
    torch.testing.assert_close(pool(hidden, mask, Pooling.mean)[0], hidden[0, :2].float().mean(0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_single_texts_equal_batches(architecture):
    torch.manual_seed(1)
    encoder = assemble_encoder(open_model_source(small_model(architecture))).eval()
    # BERT and DistilBERT number positions from the left whatever is padding: this is why padding stands on the right.
    sides = (False,) if architecture in ("bert", "distilbert") else (False, True)
    for pooling in Pooling:
        encoder.output.pooling = pooling
        for left in sides:
            ids, mask = padded(left)
            with torch.no_grad():
                combined = encoder(Chunk(ids, mask))[0]
                for i, n in enumerate(LENGTHS):
                    alone = encoder(Chunk(ids[i][mask[i].bool()][None], torch.ones(1, n, dtype=torch.int64)))[0][0]
                    torch.testing.assert_close(combined[i], alone, atol=1e-5, rtol=0)


def test_tokens_outside_the_pooling_mask_are_attended_to():
    torch.manual_seed(0)
    encoder = assemble_encoder(open_model_source(small_model("bert", normalize=False))).eval()
    ids, mask = padded(left=False)
    pooled = mask * (torch.arange(7) > 1)
    pooled[1, 0] = 1  # the text of one token
    with torch.no_grad():
        actual, hidden = (
            encoder(Chunk(ids, mask, pooled=pooled))[0],
            encoder.backbone(ids, attention_mask=mask).last_hidden_state,
        )
        expected = torch.stack([hidden[0, 2:3].mean(0), hidden[1, 0], hidden[2, 2:7].mean(0), hidden[3, 2:5].mean(0)])
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(encoder(Chunk(ids, mask, pooled=mask))[0], encoder(Chunk(ids, mask))[0])
        # As sentence-transformers does: the first that counts, and the last.
        torch.testing.assert_close(pool(hidden, pooled, Pooling.cls)[2], hidden[2, 2])
        torch.testing.assert_close(pool(hidden, pooled, Pooling.last)[2], hidden[2, 6])


def test_heads_and_normalisation():
    encoder = assemble_encoder(open_model_source(small_model("bert", normalize=False))).eval()
    ids, mask = padded(left=False)
    with torch.no_grad():
        plain = encoder(Chunk(ids, mask))[0]
        encoder.output.normalize = True
        torch.testing.assert_close(encoder(Chunk(ids, mask))[0], F.normalize(plain, dim=-1))
    assert not torch.allclose(plain.norm(dim=-1), torch.ones(4))
