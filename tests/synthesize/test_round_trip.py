"""Queries that do not find their documents are those of the plain definition, on any number of ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from embedtrain.commands.synthesize.checks import ROUND_TRIP, Tally, without_unfound
from embedtrain.commands.synthesize.types import Draft
from embedtrain.config.parsing import parse_corpus
from embedtrain.distributed.world import World
from embedtrain.mining.options import FilterOptions
from tests.mine.runs import more_documents, positive, query, save_model, words, write_jsonl

KEEP_RANK = 2
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


def _found(world: World, options: FilterOptions) -> tuple[list[str], Tally]:
    tally = Tally()
    kept = without_unfound(DRAFTS, options, KEEP_RANK, tally)
    return [each.query for each in kept], tally


@pytest.mark.parametrize("size", [1, 2])
def test_drafts_whose_documents_rank_low_are_counted(folder, ranks, size):
    expected = expected_ranks(folder)
    kept = [each.query for each, rank in zip(DRAFTS, expected, strict=True) if rank <= KEEP_RANK]
    assert 3 < len(kept) < len(DRAFTS) - 3
    for found, tally in ranks(size, _found, search(folder, f"out-{size}")):
        assert found == kept
        assert tally.num_rejected(ROUND_TRIP) == len(DRAFTS) - len(kept)
        worst = next(rank for rank in expected if rank > KEEP_RANK)
        assert tally.samples[ROUND_TRIP][0].why == f"its document has rank {worst}"


def test_other_drafts_begin_again_and_the_same_ones_do_not(folder, capsys):
    options = search(folder, "again")
    assert without_unfound([], options, KEEP_RANK, Tally()) == []
    first = without_unfound(DRAFTS, options, KEEP_RANK, Tally())
    assert "already holds" not in capsys.readouterr().out
    assert without_unfound(DRAFTS, options, KEEP_RANK, Tally()) == first
    assert "already holds" in capsys.readouterr().out
    others = [replace(each, query=each.query[::-1]) for each in DRAFTS]
    without_unfound(others, options, 1000, Tally())
    assert len(list(Path(options.output_dir).glob("ranks-*"))) == 1
