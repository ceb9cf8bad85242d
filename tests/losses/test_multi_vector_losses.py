"""On one rank, losses of late interaction equal those of sentence-transformers and PyLate on the same vectors.

Definitions coincide for rows with the same number of documents, where options name the same: `temperature` is one over
the `scale` of in-batch negatives, `times_squared_temperature` belongs to sentence-transformers' KL divergence, and
`normalize_scores` to PyLate's. PyLate's XTR divides by another count of tokens, and is not compared. Both compute
scores in float32.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from sentence_transformers.multi_vector_encoder import losses
from sentence_transformers.multi_vector_encoder.scoring import XTRScores, colbert_scores_pairwise, mean_colbert_scores
from sentence_transformers.multi_vector_encoder.scoring import mean_colbert_kd_scores as mean_kd_scores
from torch import nn

from embedtrain.config.losses import DistillScoresConfig, Implementation, InfoNCEConfig, MarginMSEConfig, XTRConfig
from tests.losses.token_vectors import TokenCase, run, token_batch

WAYS = 3
# Five queries with three documents each; several texts have a single token.
BATCH = token_batch((WAYS,) * 5, (3, 1, 4, 2, 4), (5, 2, 1, 7, 2, 5, 3, 9, 1, 4, 4, 1, 6, 2, 8))
# Their losses know no texts, so none is a duplicate of another.
DISTINCT = {"query_keys": tuple(range(5)), "document_keys": tuple(range(15))}
BATCH = replace(BATCH, **DISTINCT)
# In PyLate padding of documents has the similarity 0, which wins against negative ones, so they need equal lengths.
EQUAL_LENGTHS = replace(token_batch((WAYS,) * 5, (3, 1, 4, 2, 4), (4,) * 15), **DISTINCT)


class Vectors(nn.Module):
    """A model whose features are the vectors themselves, padded; as theirs it masks padding after its own forward."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False

    def forward(self, features, **_):
        return {"token_embeddings": features["vectors"], "attention_mask": features["attention_mask"]}


def padded(rows, sizes):
    """The features of texts; rows of zeros are padding."""
    vectors = nn.utils.rnn.pad_sequence(list(rows.split(list(sizes))), batch_first=True)
    mask = torch.arange(vectors.shape[1]) < torch.tensor(sizes).unsqueeze(1)
    return {"vectors": vectors, "attention_mask": mask, "input_ids": mask.long()}


def features_of(queries, documents, batch=BATCH):
    """One column of queries and one of each position of the documents."""
    texts, sizes = list(documents.split(list(batch.candidate_rows))), batch.candidate_rows
    columns = [padded(torch.cat(texts[position::WAYS]), sizes[position::WAYS]) for position in range(WAYS)]
    return [padded(queries, batch.query_rows), *columns]


def assert_equal(ranks, case, loss, batch=BATCH, *, pylate=False, stacked=False):
    """PyLate's losses normalise vectors; its distillation takes all documents in one column, row by row: `stacked`."""
    queries, documents = (rows.float().requires_grad_() for rows in (batch.queries, batch.candidates))
    features = features_of(queries, documents, batch)
    if stacked:
        features = [features[0], padded(documents, batch.candidate_rows)]
    expected = loss(features, torch.tensor(batch.labels).view(5, WAYS).float())
    expected.backward()
    ((value, grads, _),) = ranks(1, run, [case], batch, [list(range(5))], torch.float64, 0)[0]
    assert value == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs, rows in zip(
        grads, (queries.grad, documents.grad), (batch.queries, batch.candidates), strict=True
    ):
        if pylate:  # the gradient through the normalisation of vectors of length 1
            ours.sub_((ours * rows).sum(dim=1, keepdim=True) * rows)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", [Implementation.plain, Implementation.tiled])
@pytest.mark.parametrize("mean", [False, True])
def test_in_batch_negatives(ranks, implementation, mean):
    case = TokenCase(InfoNCEConfig(temperature=0.5, implementation=implementation), mean)
    similarity = mean_colbert_scores if mean else None
    loss = losses.MultiVectorMultipleNegativesRankingLoss(Vectors(), scale=2.0, similarity_fct=similarity)
    assert_equal(ranks, case, loss)
    cached = losses.CachedMultiVectorMultipleNegativesRankingLoss(Vectors(), scale=2.0, similarity_fct=similarity)
    with torch.no_grad():  # without its second pass
        expected = cached(features_of(BATCH.queries.float(), BATCH.candidates.float()))
    assert case.expected(BATCH)[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("top_k", [2, 9, 256])
def test_xtr(ranks, top_k):
    case = TokenCase(XTRConfig(temperature=0.5, top_k=top_k))
    loss = losses.MultiVectorMultipleNegativesRankingLoss(Vectors(), scale=2.0, similarity_fct=XTRScores(top_k))
    assert_equal(ranks, case, loss)


@pytest.mark.parametrize("mean", [False, True])
def test_distillation(ranks, mean):
    config = DistillScoresConfig(temperature=0.5, teacher_temperature=2.0, times_squared_temperature=True)
    loss = losses.MultiVectorDistillKLDivLoss(
        Vectors(),
        student_temperature=0.5,
        teacher_temperature=2.0,
        similarity_fct=mean_kd_scores if mean else None,
    )
    assert_equal(ranks, TokenCase(config, mean), loss)


@pytest.mark.parametrize("mean", [False, True])
def test_margins(ranks, mean):
    similarity = partial(colbert_scores_pairwise, length_normalize=mean)
    assert_equal(
        ranks, TokenCase(MarginMSEConfig(), mean), losses.MultiVectorMarginMSELoss(Vectors(), similarity_fct=similarity)
    )


def test_losses_of_pylate(ranks):
    pylate = pytest.importorskip("pylate.losses")
    case = TokenCase(InfoNCEConfig(temperature=0.5))
    assert_equal(ranks, case, pylate.Contrastive(Vectors(), temperature=0.5), EQUAL_LENGTHS, pylate=True)
    for normalize in (False, True):
        case = TokenCase(DistillScoresConfig(temperature=1.0, normalize_scores=normalize))
        loss = pylate.Distillation(Vectors(), normalize_scores=normalize)
        assert_equal(ranks, case, loss, EQUAL_LENGTHS, pylate=True, stacked=True)
