"""Ranks of documents by their queries are those of the plain definition, on any number of ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from embedtrain.commands.synthesize.checks import document_ranks
from embedtrain.commands.synthesize.types import Draft
from embedtrain.config.parsing import parse_corpus
from embedtrain.distributed.world import World
from embedtrain.mining.options import FilterOptions
from tests.mine.runs import more_documents, positive, query, save_model, words, write_jsonl

CORPUS = more_documents(40)


def draft(text: str, *documents: str) -> Draft:
    return Draft(
        query=text,
        kind="question",
        sources=documents,
        positives=documents,
        ids=tuple("" for _ in documents),
        prompt="0" * 12,
    )


DRAFTS = [
    *(draft(query(number), positive(number)) for number in range(12)),
    *(draft(query(number), words(3 * number, 5 * number + 1, number)) for number in range(12, 20)),
    *(draft(query(number), positive(number), positive(number + 30)) for number in range(20, 24)),
    draft(query(3), positive(60)),  # the positive of another draft with this query is no other document
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("round_trip")
    save_model(folder / "model")
    write_jsonl(folder / "corpus.jsonl", [{"_id": str(i), "text": text} for i, text in enumerate(CORPUS)])
    return folder


def search(folder: Path, output_dir: str) -> FilterOptions:
    return FilterOptions(
        model=str(folder / "model" / "guide"),
        corpus=parse_corpus([str(folder / "corpus.jsonl")]),
        output_dir=str(folder / output_dir),
        cache_dir=str(folder / "cache"),
    )


def expected_ranks(folder: Path) -> list[int]:
    """For each draft, the worst rank of its documents, by vectors of sentence-transformers in float64."""
    model = SentenceTransformer(str(folder / "model" / "guide"), device="cpu")
    documents = list(dict.fromkeys([*(text for each in DRAFTS for text in each.positives), *CORPUS]))
    vectors = dict(zip(documents, model.encode(documents, batch_size=1).astype(np.float64), strict=True))
    ranks = []
    for each in DRAFTS:
        of_query = model.encode([each.query], batch_size=1)[0].astype(np.float64)
        answers = {text for other in DRAFTS if other.query == each.query for text in other.positives}
        scores = [of_query @ vectors[text] for text in documents if text not in answers]
        own = [of_query @ vectors[text] + 1e-9 for text in each.positives]
        ranks.append(max(1 + sum(score > of_positive for score in scores) for of_positive in own))
    return ranks


def _ranks(world: World, options: FilterOptions) -> list[int]:
    return document_ranks(DRAFTS if world.is_main else [], options)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_are_those_of_comparing_with_all_documents(folder, ranks, size):
    expected = expected_ranks(folder)
    assert 3 < sum(rank == 1 for rank in expected) < len(DRAFTS) - 3
    for found in ranks(size, _ranks, search(folder, f"out-{size}")):
        assert found == expected


def test_other_drafts_begin_again_and_the_same_ones_do_not(folder, capsys):
    options = search(folder, "again")
    assert document_ranks([], options) == []
    first = document_ranks(DRAFTS, options)
    assert "already holds" not in capsys.readouterr().out
    assert document_ranks(DRAFTS, options) == first
    assert "already holds" in capsys.readouterr().out
    others = [replace(each, query=each.query[::-1]) for each in DRAFTS]
    assert len(document_ranks(others, options)) == len(DRAFTS)
    assert "already holds" not in capsys.readouterr().out
    assert len(list(Path(options.output_dir).glob("ranks-*"))) == 1
