"""Search with three representations, against loops in float64."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, pad

from embedtrain.config.evaluation import IndexConfig, VectorDtype
from embedtrain.config.kind_settings import HybridWeights, M3Settings
from embedtrain.errors import ConfigError
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.kinds.late_interaction import score as late_interaction
from embedtrain.kinds.m3.score import M3Score
from embedtrain.losses.encoded import Part

SETTINGS = M3Settings(dimension=6, token_dimension=4, weights=HybridWeights(0.7, 0.4, 1.1))


def texts(seed: int, sizes: list[int]) -> Part:
    """Random rows; an id has at most one weight above 0 in a text."""
    generator = torch.Generator().manual_seed(seed)
    parts, all_ids = [], []
    for size in sizes:
        dense = normalize(torch.randn(1, 6, generator=generator), dim=1)
        tokens = pad(normalize(torch.randn(size - 1, 4, generator=generator), dim=1), (0, 2))
        weights, ids = torch.rand(size, 1, generator=generator), torch.randperm(30, generator=generator)[:size]
        weights[0] = 0
        parts.append(torch.cat([torch.cat([dense, tokens]), weights], dim=1))
        all_ids.append(ids + (1 << 30))  # no float32 has all of these numbers
    return Part(torch.cat(parts), np.array(sizes, dtype=np.int64), torch.cat(all_ids))


QUERIES = texts(1, [3, 2, 6, 9])
DOCUMENTS = texts(2, [4, 2, 9, 2, 4, 3, 13, 6, 4, 2, 3, 20])
IDS = [f"d{number}" for number in range(12)]


def expected_scores(weights: tuple[float, ...]) -> torch.Tensor:
    """[T, n], in float64."""
    scores = []
    rows = [torch.cat([part.values.double(), part.ids.double().unsqueeze(1)], dim=1) for part in (QUERIES, DOCUMENTS)]
    for query in rows[0].split(QUERIES.sizes.tolist()):
        for document in rows[1].split(DOCUMENTS.sizes.tolist()):
            lexical = sum(float(q[-2] * d[-2]) for q in query for d in document if q[-1] == d[-1])
            multi = (query[1:, :4] @ document[1:, :4].T).amax(dim=1).mean()
            scores.append(
                weights[0] * float(query[0, :6] @ document[0, :6]) + weights[1] * lexical + weights[2] * multi
            )
    return torch.tensor(scores, dtype=torch.float64).view(len(QUERIES), -1)


def search(world, view, tile_rows):
    """Rankings of documents that are distributed over the ranks, and the scores of all pairs."""
    default = late_interaction.TILE_ROWS
    late_interaction.TILE_ROWS = tile_rows
    try:
        index = ShardedIndex(trec_order(IDS), world, score=M3Score(SETTINGS))
        rows = torch.arange(len(DOCUMENTS))[world.rank :: world.size]
        local = DOCUMENTS.take(rows, rows.numpy())
        for start in range(0, len(local), 2):
            part = local.slice(start, min(start + 2, len(local)))
            index.add(EncodedShard(part, rows[start : start + 2]))
        index = index if view is None else index.viewed(view)
        ranking = index.search(QUERIES, 5)
        scores = index.scores_of(QUERIES, torch.arange(len(DOCUMENTS)).expand(len(QUERIES), -1))
        return ranking.scores, ranking.documents, scores
    finally:
        late_interaction.TILE_ROWS = default


@pytest.mark.parametrize("view", [None, *HybridWeights._fields])
def test_rankings_do_not_depend_on_ranks_and_tiles(ranks, view):
    weights = SETTINGS.weights if view is None else tuple(float(view == name) for name in HybridWeights._fields)
    expected = expected_scores(weights)
    results = [ranks(size, search, view, tile_rows)[0] for size, tile_rows in ((1, 1 << 17), (3, 6))]
    for scores, documents, of_pairs in results:
        torch.testing.assert_close(of_pairs.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(scores, of_pairs.gather(1, documents))
        assert torch.equal(scores, of_pairs.topk(5, dim=1).values)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_similarities_are_those_of_the_index():
    score = M3Score(SETTINGS)
    chosen = np.array([5, 0, 6, 11])
    documents = DOCUMENTS.take(torch.from_numpy(chosen), chosen)
    expected = expected_scores(SETTINGS.weights)[torch.arange(4), torch.from_numpy(chosen)]
    torch.testing.assert_close(score.exact(QUERIES, documents).double(), expected, rtol=1e-6, atol=1e-6)


def test_the_first_stage_is_within_its_error():
    store = M3Score(SETTINGS).store(IndexConfig(), torch.device("cpu"), len(DOCUMENTS))
    store.add(DOCUMENTS)
    ((_, tile),) = store.tiles()
    difference = (tile.scores(QUERIES).double() - expected_scores(SETTINGS.weights)).abs().amax(dim=1)
    error = store.rounding_error(QUERIES)
    assert (difference <= error).all() and (error < 1e-4).all()


def test_lexical_weights_need_float32():
    with pytest.raises(ConfigError, match=r"index\.dtype=bf16: .*fp32"):
        M3Score(SETTINGS).store(IndexConfig(dtype=VectorDtype.bf16), torch.device("cpu"), 1)
