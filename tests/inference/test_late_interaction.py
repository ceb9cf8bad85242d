"""Search, and encoding, with a vector per token, against a plain double loop in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from sentence_transformers.multi_vector_encoder.modules.token_pooling import HierarchicalTokenPooling

from embedtrain.config.evaluation import IndexConfig, ScanDtype, Unshard, VectorDtype, VectorPlacement
from embedtrain.data.types import Chunk, TextRole
from embedtrain.errors import TrainingError
from embedtrain.inference import index as index_module
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.kinds.late_interaction import score as late_interaction
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.encoded import Part, concatenate
from tests.evaluation.tiny import TOKEN_VECTORS, TinyTokenEncoder, token_encoder
from tests.inference.test_index import numbered, rows_of, vectors
from tests.small import small_tokenizer, text


def token_vectors(seed, sizes, dimensions=8):
    values = torch.randn(sum(sizes), dimensions, generator=torch.Generator().manual_seed(seed))
    return Part(unit_vectors(values), np.array(sizes, dtype=np.int64))


QUERIES = token_vectors(1, [3, 1, 5, 3, 8])
DOCUMENTS = token_vectors(2, [4, 1, 9, 1, 4, 2, 13, 6, 4, 1, 3])


def exact_scores(queries, documents, mean=False):
    """The definition: exact inner products, their maxima and sums, rounded to float32."""

    def texts(part):
        return [
            [[Fraction(x) for x in row] for row in rows.tolist()] for rows in part.values.split(part.sizes.tolist())
        ]

    def score(query, document):
        best = [max(sum(a * b for a, b in zip(q, d, strict=True)) for d in document) for q in query]
        return float(np.float32(float(sum(best) / (len(query) if mean else 1))))

    of_documents = texts(documents)
    return [[score(query, document) for document in of_documents] for query in texts(queries)]


def exact_rankings(queries, documents, ids, k, mean=False):
    ranked = [
        sorted(((score, ids[number], number) for number, score in enumerate(scores)), reverse=True)
        for scores in exact_scores(queries, documents, mean)
    ]
    return [[(score, number) for score, _, number in row[:k]] for row in ranked]


def search(
    world,
    queries,
    documents,
    ids,
    k,
    mean=False,
    tile_rows=None,
    config=None,
):
    """Rankings of documents that are distributed over the ranks, and the scores of all documents one by one."""
    with pytest.MonkeyPatch.context() as patch:
        if tile_rows is not None:
            patch.setattr(late_interaction, "TILE_ROWS", tile_rows)
            patch.setattr(index_module, "MAX_QUERY_ROWS", 6)
            patch.setattr(late_interaction, "BLOCK_NUMEL_CPU", 64)
            patch.setattr(late_interaction, "scanned_candidates", lambda k: 2 * k)
        index = ShardedIndex(trec_order(ids), world, config, MaxSim(mean=mean))
        for batch in np.array_split(np.arange(world.rank, len(ids), world.size), 3):
            part = documents.take(torch.from_numpy(batch), batch)
            index.add(EncodedShard(part, torch.from_numpy(batch)))
        ranking = index.search(queries, k)
        every = torch.arange(len(ids)).repeat(len(queries), 1)
        return rows_of(ranking.scores, ranking.documents), index.scores_of(queries, every).tolist()


@pytest.mark.parametrize(("mean", "tile_rows", "k"), [(False, None, 4), (True, 7, 100)])
def test_search_equals_the_double_loop_on_any_number_of_ranks(ranks, mean, tile_rows, k):
    ids = numbered(11)
    rankings = exact_rankings(QUERIES, DOCUMENTS, ids, k, mean)
    scores = exact_scores(QUERIES, DOCUMENTS, mean)
    for size in (1, 2, 3):
        for result in ranks(size, search, QUERIES, DOCUMENTS, ids, k, mean, tile_rows):
            assert result == (rankings, scores)


@pytest.mark.parametrize(
    "config",
    [IndexConfig(), IndexConfig(place=VectorPlacement.host), IndexConfig(scan_dtype=ScanDtype.fp16)],
    ids=["auto", "host", "copy"],
)
def test_search_on_a_device_gives_what_it_gives_on_the_cpu(cuda_ranks, config):
    expected = exact_rankings(QUERIES, DOCUMENTS, numbered(11), 4), exact_scores(QUERIES, DOCUMENTS)
    arguments = (QUERIES, DOCUMENTS, numbered(11), 4, False, 7, config)
    assert cuda_ranks(2, search, *arguments) == [expected] * 2


def test_ties_and_documents_that_are_closer_than_rounding_errors(ranks):
    """More equal documents than extra candidates, and the same number that differ in their last bits."""
    copies = DOCUMENTS.take(torch.tensor([0, 5] * 60), np.array([0, 5] * 60))
    close = copies.with_values(unit_vectors(copies.values + 3e-8 * torch.randn(copies.values.shape)))
    documents, ids = concatenate([copies, close]), [f"{i * 37 % 241}" for i in range(240)]
    expected = exact_rankings(QUERIES, documents, ids, 10)
    for size in (1, 3):
        for result, _ in ranks(size, search, QUERIES, documents, ids, 10):
            assert result == expected


@pytest.mark.parametrize(("dtype", "kept"), [(VectorDtype.bf16, torch.bfloat16), (VectorDtype.fp16, torch.float16)])
def test_vectors_kept_in_16_bits(ranks, dtype, kept):
    ids, rounded = numbered(11), DOCUMENTS.with_values(DOCUMENTS.values.to(kept).float())
    expected = exact_rankings(QUERIES, rounded, ids, 5), exact_scores(QUERIES, rounded)
    for size in (1, 2, 3):
        for result in ranks(size, search, QUERIES, DOCUMENTS, ids, 5, False, None, IndexConfig(dtype=dtype)):
            assert result == expected


COPIES = [
    IndexConfig(scan_dtype=ScanDtype.fp16),
    IndexConfig(scan_dtype=ScanDtype.bf16, place=VectorPlacement.host),
    IndexConfig(scan_dtype=ScanDtype.int8, place=VectorPlacement.device),
]


@pytest.mark.parametrize("config", COPIES, ids=lambda config: config.scan_dtype.value)
def test_a_smaller_copy_changes_no_result(ranks, config):
    """Among them are documents that differ by less than the error of the copy, more than candidates fit."""
    close = DOCUMENTS.take(torch.tensor([3] * 60), np.array([3] * 60))
    close = close.with_values(unit_vectors(close.values + 1e-5 * vectors(3, len(close.values), 8)))
    documents, ids = concatenate([DOCUMENTS, close]), [f"{i * 37 % 73}" for i in range(71)]
    expected = exact_rankings(QUERIES, documents, ids, 4, True), exact_scores(QUERIES, documents, True)
    for size in (1, 2, 3):
        for result in ranks(size, search, QUERIES, documents, ids, 4, True, 40, config):
            assert result == expected


@pytest.mark.parametrize("scan_dtype", list(ScanDtype))
@pytest.mark.parametrize("mean", [False, True])
def test_the_bounds_of_a_copy_hold_for_every_pair(scan_dtype, mean):
    queries = QUERIES.with_values(QUERIES.values * torch.logspace(-2, 2, len(QUERIES.values))[:, None])
    store = MaxSim(mean=mean).store(IndexConfig(scan_dtype=scan_dtype), torch.device("cpu"), len(DOCUMENTS))
    for start, end in ((0, 4), (4, len(DOCUMENTS))):
        store.add(DOCUMENTS.slice(start, end))
    ((_, tile),) = store.tiles()
    scores, exact = tile.scores(queries).double().numpy(), np.array(exact_scores(queries, DOCUMENTS, mean))
    above = store.rounding_error(queries).unsqueeze(1).numpy()
    below = store.deficit(queries, torch.arange(len(DOCUMENTS)).unsqueeze(0)).numpy()
    assert (scores - below <= exact).all() and (exact <= scores + above).all()
    if scan_dtype is ScanDtype.fp16:  # the copy is as close as its numbers are
        assert (below < 4e-3 * np.abs(queries.values).norm(dim=1).sum().item()).all()


def test_scores_equal_those_of_sentence_transformers(ranks):
    from sentence_transformers.util import maxsim

    queries, documents = (list(part.values.split(part.sizes.tolist())) for part in (QUERIES, DOCUMENTS))
    for mean in (False, True):
        scores = ranks(2, search, QUERIES, DOCUMENTS, numbered(11), 1, mean)[0][1]
        torch.testing.assert_close(torch.tensor(scores), maxsim(queries, documents, length_normalize=mean))


def test_a_score_does_not_depend_on_the_lengths_of_other_texts(ranks):
    """Neither padding of zeros, nor longer documents beside it, raise the score of a short document above its own."""
    against = Part(-QUERIES.values[:1], np.array([1]))
    documents = concatenate([against, token_vectors(3, [40, 17])])
    scores = ranks(1, search, QUERIES, documents, numbered(3), 3)[0][1]
    assert [row[0] for row in scores] == [row[0] for row in exact_scores(QUERIES, against)]
    assert scores[0][0] < 0


def search_truncated(world):
    index = ShardedIndex(trec_order(numbered(11)), world, score=MaxSim(mean=False))
    local = np.arange(world.rank, 11, world.size)
    part = DOCUMENTS.take(torch.from_numpy(local), local)
    index.add(EncodedShard(part, torch.from_numpy(local)))
    ranking = index.truncated(3).search(QUERIES.with_values(index.score.search_rows(QUERIES.values, 3)), 4)
    return rows_of(ranking.scores, ranking.documents)


def test_truncated_vectors_are_normalised_again(ranks):
    queries, documents = (part.with_values(unit_vectors(part.values[:, :3])) for part in (QUERIES, DOCUMENTS))
    assert ranks(2, search_truncated)[0] == exact_rankings(queries, documents, numbered(11), 4)


TEXTS = [text(i, 1 + i % 9) for i in range(20)]
TEXTS = [*TEXTS, TEXTS[3], "", "alpha kappa alpha", TEXTS[3], TEXTS[7]]


def alone(texts, role):
    """The vectors of each text on its own, from the ids that the tokenizer of `transformers` gives."""
    model, tokenizer, encoded = TinyTokenEncoder().eval(), small_tokenizer(), []
    skipped = set(tokenizer.convert_tokens_to_ids(list(TOKEN_VECTORS.skiplist_words)))
    for one in texts:
        ids = tokenizer(one, truncation=True, max_length=9 if role is TextRole.query else 12)["input_ids"]
        rows = [i for i, token in enumerate(ids) if role is TextRole.query or i == 0 or token not in skipped]
        mask = [1] * len(ids)
        if role is TextRole.query:
            rows, mask = list(range(9)), mask + [0] * (9 - len(ids))
            ids = ids + [tokenizer.eos_token_id] * (9 - len(ids))
        with torch.no_grad():
            chunk = Chunk(torch.tensor([ids]), torch.tensor([mask]), token_rows=torch.tensor(rows))
            encoded.append(Part(model(chunk)[0], np.array([len(rows)])))
    return concatenate(encoded)


def encode(world, role, unshard=Unshard.layer, chunk_tokens=40):
    part = token_encoder(world, chunk_tokens=chunk_tokens, unshard=unshard).encode(TEXTS, role=role)
    return part.values.tolist(), part.sizes.tolist()


@pytest.mark.parametrize("role", TextRole)
def test_the_same_vectors_on_any_number_of_ranks(ranks, role):
    results = [result for size in (1, 2, 3) for result in ranks(size, encode, role)]
    results += ranks(2, encode, role, Unshard.model)
    assert all(result == results[0] for result in results)
    expected = alone(TEXTS, role)
    assert results[0][1] == expected.sizes.tolist()
    torch.testing.assert_close(torch.tensor(results[0][0]), expected.values, atol=1e-6, rtol=0)


def search_in_two_stages(world, config, k):
    index = ShardedIndex(trec_order(numbered(11)), world, config, MaxSim(mean=False))
    local = np.arange(world.rank, 11, world.size)
    index.add(EncodedShard(DOCUMENTS.take(torch.from_numpy(local), local), torch.from_numpy(local)))
    ranking = index.search(QUERIES, k)
    return rows_of(ranking.scores, ranking.documents), index.first_stage_recall(QUERIES, k, k).tolist()


@pytest.mark.parametrize(("first_stage", "k"), [(4, 3), (2, 5), (100, 4)])
def test_a_first_stage_of_pooled_vectors(ranks, first_stage, k):
    """The best of pooled vectors are scored by all vectors; at least `k` of them, and at most all documents."""
    pooling = HierarchicalTokenPooling(pool_factor=3.0)
    pooled = [pooling.pool_one(rows) for rows in DOCUMENTS.values.split(DOCUMENTS.sizes.tolist())]
    pooled = Part(unit_vectors(torch.cat(pooled)), np.array(list(map(len, pooled))))
    assert pooled.sizes.sum() < DOCUMENTS.sizes.sum() / 2
    ids = numbered(11)
    found = [[number for _, number in row] for row in exact_rankings(QUERIES, pooled, ids, max(first_stage, k))]
    best = exact_rankings(QUERIES, DOCUMENTS, ids, 11)
    expected = [[pair for pair in row if pair[1] in of_query][:k] for row, of_query in zip(best, found, strict=True)]
    recall = [sum(number in of for _, number in row[:k]) / k for row, of in zip(best, found, strict=True)]
    assert (min(recall) < 1) is (first_stage < 11)
    config = IndexConfig(first_stage=first_stage, first_stage_pooling=3.0)
    for size in (1, 2, 3):
        for result in ranks(size, search_in_two_stages, config, k):
            assert result == (expected, recall)


def search_pooled(world, factor):
    index = ShardedIndex(trec_order(numbered(len(TEXTS))), world, IndexConfig(token_pooling=factor), MaxSim(mean=False))
    index.add_texts(token_encoder(world, chunk_tokens=16), TEXTS)
    ranking = index.search(token_vectors(1, [3, 1, 5], dimensions=16), 100)
    return ranking.scores.tolist(), ranking.documents.tolist()


def test_pooled_vectors_are_the_same_on_any_number_of_ranks(ranks):
    results = [result for size in (1, 2, 3) for result in ranks(size, search_pooled, 2.0)]
    assert all(result == results[0] for result in results)
    assert results[0] != ranks(1, search_pooled, 1.0)[0]


def blocks_with_cache(world, folder, role=TextRole.document):
    """The vectors of each text on this rank, and the number of forward passes."""
    encoder = token_encoder(world, chunk_tokens=16)
    rows = {}
    for block in encoder.encode_blocks(TEXTS, vector_cache=VectorCache(folder, {"model": "tiny"}), role=role):
        vectors = block.part.values.split(block.part.sizes.tolist())
        rows |= {row: of_text.tolist() for row, of_text in zip(block.rows.tolist(), vectors, strict=True)}
    return rows, encoder.encoder.forwards


def test_stored_vectors_are_read_by_any_number_of_ranks(ranks, tmp_path):
    stored = ranks(2, blocks_with_cache, tmp_path)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 2
    files[0].unlink()  # those of one rank are encoded again
    expected = alone(TEXTS, TextRole.document)
    for results in (stored, ranks(3, blocks_with_cache, tmp_path)):
        rows = {row: vectors for of_rank, _ in results for row, vectors in of_rank.items()}
        assert [len(rows[row]) for row in range(len(TEXTS))] == expected.sizes.tolist()
        values = torch.tensor([vector for row in range(len(TEXTS)) for vector in rows[row]])
        torch.testing.assert_close(values, expected.values, atol=1e-6, rtol=0)
        assert rows[3] == rows[20] == rows[23]
    assert ranks(1, blocks_with_cache, tmp_path)[0][1] == 0
    # The same texts as queries are other vectors.
    queries, passes = ranks(1, blocks_with_cache, tmp_path, TextRole.query)[0]
    assert passes > 0
    assert {len(vectors) for vectors in queries.values()} == {9}


def not_finite(world, factor=1.0):
    encoder = token_encoder(world)
    projection = (
        encoder.encoder.projection.weight.to_local()
        if hasattr(encoder.encoder.projection.weight, "to_local")
        else encoder.encoder.projection.weight
    )
    with torch.no_grad():
        projection[:] = math.nan
    index = ShardedIndex(trec_order(numbered(3)), world, IndexConfig(token_pooling=factor), MaxSim(mean=False))
    with pytest.raises(TrainingError) as error:
        index.add_texts(encoder, TEXTS[:3])
    return str(error.value)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_vectors_that_are_not_finite_name_their_text(ranks, factor):
    (message,) = set(ranks(2, not_finite, factor))
    assert "not finite" in message
    assert any(repr(one) in message for one in TEXTS[:3])
