"""Rows with the same query share its candidates; its positives are never negatives, under any instruction."""

from pathlib import Path

import numpy as np
import pytest

from embedtrain.commands.mine import compose as compose_mine
from embedtrain.data.cache.cache import Cache
from embedtrain.distributed.world import World
from embedtrain.mining.inputs import UniqueQueries, join_pairs, prepare_inputs
from embedtrain.mining.pool import corpus_parts, read_mining_sources
from tests.mine.runs import positive, write_jsonl
from tests.ranks import RankFailed

LABELS = ["alpha", "beta", " alpha"]
NUM_ROWS = 300


def read_queries(world: World, folder: Path) -> dict[str, object]:
    options = compose_mine(["model=m", f"data=[{folder / 'rows.jsonl'}]", f"output_dir={folder / 'to'}"])
    (source,) = read_mining_sources(options, {"query": "q: "}, Cache(directory=folder / f"cache-{world.size}"))
    prepared = prepare_inputs(folder / f"prepared-{world.size}", [source], [], world, lambda *_: None)
    rows = list(source.store)
    queries = UniqueQueries.of(rows, source, prepared, keep_existing=True)
    return {
        "inputs": list(queries.inputs),
        "texts": list(queries.texts),
        "of_row": queries.of_row.tolist(),
        "answers": [
            sorted(prepared.pool[n] for n in queries.answers.documents[queries.answers.slice_of(number)].tolist())
            for number in range(len(queries.texts))
        ],
        "excluded": [
            {prepared.pool[n] for n in queries.excluded.documents[queries.excluded.slice_of(number)].tolist()}
            for number in range(len(queries.texts))
        ],
        "existing": [
            [prepared.pool[n] for n in queries.existing.documents[queries.existing.slice_of(row)].tolist()]
            for row in range(len(rows))
        ],
        "existing_pairs": len(queries.existing_pairs.owners),
    }


@pytest.fixture
def rows():
    rows = [
        {"query": LABELS[i % 3], "pos": [f"{positive(i)} {i}"], "neg": ["w", "w ", "beta"]} for i in range(NUM_ROWS)
    ]
    rows[0]["prompt"] = "Find its opposite"
    return rows


def test_each_query_is_searched_once(ranks, rows, tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (result,) = ranks(1, read_queries, tmp_path)
    assert result["texts"] == ["alpha", "beta", " alpha", "alpha"]
    assert result["inputs"][1:] == ["q: beta", "q:  alpha", "q: alpha"]
    assert result["of_row"] == [0, *([1, 2, 3] * NUM_ROWS)[: NUM_ROWS - 1]]
    by_label = [{row["pos"][0] for row in rows if row["query"].strip() == label} for label in ("alpha", "beta")]
    # Margins know instructions and blanks; what may be no negative does not.
    assert [len(answers) for answers in result["answers"]] == [1, 100, 100, 99]
    assert result["excluded"] == [by_label[0], by_label[1] | {"beta"}, by_label[0], by_label[0]]
    assert result["existing"][:3] == [["w", "beta"], ["w"], ["w", "beta"]]
    assert result["existing_pairs"] == 7


def test_duplicate_pairs_are_joined_once():
    """A document that 100,000 rows have as a positive would otherwise give as many pairs squared."""
    many = np.zeros(100_000, dtype=np.int64)
    keys, items = join_pairs(many, many + 1, many + 1, many + 2)
    assert (keys.tolist(), items.tolist()) == ([0], [2])


def read_excluded(world: World, folder: Path, *more: str) -> dict[str, set[str]]:
    """The documents that are no negatives of each query."""
    arguments = ["model=m", f"data=[{folder / 'rows.jsonl'}]", f"output_dir={folder / 'to'}", *more]
    options = compose_mine([*arguments, f"corpus={folder / 'corpus.jsonl'}"])
    cache = Cache(directory=folder / "cache")
    (source,) = read_mining_sources(options, {}, cache)
    parts = corpus_parts(options.corpus)
    directory = folder / f"prepared-{len(more)}"
    prepared = prepare_inputs(directory, [source], parts, world, lambda *_: None, options.exclude_same)
    queries = UniqueQueries.of(list(source.store), source, prepared, keep_existing=True)
    return {
        text: {prepared.pool[n] for n in queries.excluded.documents[queries.excluded.slice_of(number)].tolist()}
        for number, text in enumerate(queries.texts)
    }


def test_documents_of_the_group_of_a_positive_are_no_negatives(ranks, tmp_path):
    """Other pages of the document that answers a query, or other chunks of it, may answer it as well."""
    rows = [{"query": "q1", "pos": ["a1"]}, {"query": "q2", "pos": ["b1", "alone"]}, {"query": "q3", "pos": ["other"]}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    groups = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b", "c1": "c", "alone": None, "nobody": None}
    corpus = [{"_id": text, "text": text, "pdf": group} for text, group in groups.items()]
    write_jsonl(tmp_path / "corpus.jsonl", [*corpus, {"_id": "7", "text": "b1", "pdf": "c"}])  # a text of two groups
    (plain,) = ranks(1, read_excluded, tmp_path)
    assert plain == {"q1": {"a1"}, "q2": {"b1", "alone"}, "q3": {"other"}}
    (excluded,) = ranks(1, read_excluded, tmp_path, "exclude_same=pdf")
    assert excluded == {"q1": {"a1", "a2", "a3"}, "q2": {"b1", "b2", "c1", "alone"}, "q3": {"other"}}
    with pytest.raises(RankFailed, match=r'corpus.jsonl:1: no "page" in this document, which exclude_same names'):
        ranks(1, read_excluded, tmp_path, "exclude_same=page", "seed=1")
