"""Inner products and unit vectors are functions of the vectors alone, bit for bit."""

import math

import pytest
import torch
import torch.nn.functional as F

from embedtrain.inference.exact import cosines, norms, pack_keys, pairwise_dot, top_keys, unit_vectors, unpack_keys


def sum_of_halves(terms: list[float]) -> float:
    """The defined order of additions: the second half is added to the first, until one term is left."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [terms[i] + terms[half + i] for i in range(half)] + terms[2 * half :]
    return terms[0]


@pytest.fixture(scope="module", params=[1, 33, 768])
def raw(request) -> torch.Tensor:
    vectors = torch.randn(50, request.param, generator=torch.Generator().manual_seed(0)) * 7
    vectors[4] = 0
    return vectors


def test_inner_products_have_a_defined_order_of_additions(raw):
    """A library's sum has another order, which may depend on the number of vectors and on the device."""
    other = raw.flip(0)
    expected = [
        sum_of_halves([a * b for a, b in zip(left, right, strict=True)])
        for left, right in zip(raw.tolist(), other.tolist(), strict=True)
    ]
    assert pairwise_dot(raw, other).tolist() == expected


def test_unit_vectors_are_rounded_once(raw):
    """From float64, unlike a library's normalisation in float32."""
    lengths = [math.sqrt(sum_of_halves([value * value for value in row])) for row in raw.tolist()]
    expected = raw.double() / torch.tensor(lengths, dtype=torch.float64).clamp(min=1e-12).unsqueeze(1)
    assert unit_vectors(raw).equal(expected.float())
    torch.testing.assert_close(unit_vectors(raw), F.normalize(raw, dim=1))
    assert unit_vectors(raw)[4].eq(0).all()


def test_unit_vectors_do_not_depend_on_the_batch_or_the_layout(raw):
    unit = unit_vectors(raw)
    assert torch.cat([unit_vectors(row[None]) for row in raw]).equal(unit)
    assert unit_vectors(raw.T.contiguous().T).equal(unit)
    assert norms(raw.T.contiguous().T).equal(norms(raw))


def test_cosines(raw):
    expected = F.cosine_similarity(raw.double(), raw.flip(0).double(), eps=1e-12)
    torch.testing.assert_close(cosines(raw, raw.flip(0)), expected)
    assert cosines(raw, raw)[4] == 0


def test_keys_sort_by_score_then_by_priority():
    """Also negative scores, and 0.0 and -0.0, which are equal: the product of a zero vector is either."""
    scores = torch.tensor([2.5, -0.0, 0.0, -0.0, -1.5, 2.5, -2.5, math.inf, -math.inf])
    priorities = torch.arange(len(scores)).flip(0)
    pairs = sorted(zip(scores.tolist(), priorities.tolist(), strict=True), reverse=True)
    keys = top_keys(pack_keys(scores, priorities)[None], len(scores))[0]
    found = [values.tolist() for values in unpack_keys(keys)]
    assert list(zip(*found, strict=True)) == pairs
