"""Which texts a run's sample has: from all over sets and sources, bounded, cut, with the prompts of each."""

import json

import pytest

from embedtrain.config.compose import compose_recipes
from embedtrain.data.cache.cache import Cache
from embedtrain.data.train_data import load_recipe_data
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    Corpus,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
)
from embedtrain.report.sample import PairRelation, Role, read_texts, write_texts
from embedtrain.training.run_reporter import TEXT_LENGTH, choose_sample


@pytest.fixture
def data(tmp_path):
    """Two sources: one of 900 rows, one of three with instructions of their own and a long text."""

    def load(*more: str):
        rows = [{"query": f"q{n}", "pos": [f"p{n}", "other"], "neg": [f"n{n}", f"m{n}", f"o{n}"]} for n in range(900)]
        (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"query": f"w{n}", "pos": ["x" * 9000], "neg": [], "prompt": f"task {n}"} for n in range(3)]
        (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = f"[{tmp_path / 'many.jsonl'},{tmp_path / 'few.jsonl'}]"
        (recipe,) = compose_recipes(
            ["name=t", "model.path=none", "train.steps=1", "train.global_batch_size=4", f"data.train={sources}", *more]
        )
        return load_recipe_data(recipe, {"query": "Q: ", "document": "D: "}, Cache(directory=tmp_path / "cache"))

    return load


def retrieval(name: str, queries: int, documents: int) -> LoadedSet:
    """Query i is answered by documents 3i, 3i + 1, 3i + 2, and judged not to be by the next."""
    judged = {f"q{n}": {f"d{(3 * n + k) % documents}": 0 if k == 3 else 1 for k in range(4)} for n in range(queries)}
    texts = {f"q{n}": f"question {n}" for n in range(queries)}
    corpus = Corpus.from_dict({f"d{n}": f"document {n}" for n in range(documents)})
    return LoadedSet(RetrievalSet(name, texts, corpus, judged), document_prompt="own: ", query_max_length=9)


def test_a_sample_is_bounded_and_from_all_over(data):
    actual, losses = data()
    sets = [retrieval(f"set{n}", 500, 4000) for n in range(20)]
    sample = choose_sample(sets, actual, losses, {"query": "Q: ", "document": "D: "})
    assert sample == choose_sample(sets, actual, losses, {"query": "Q: ", "document": "D: "})
    assert len(sample.texts) < 500
    assert len(sample.pairs) == len(set(sample.pairs))
    origins = {text.origin for text in sample.texts}
    assert len(origins) == 8 + 2
    assert {"many", "few"} < origins
    for pair in sample.pairs:
        query, document = sample.texts[pair.first], sample.texts[pair.second]
        assert (query.role, document.role, query.origin) == (Role.query, Role.document, document.origin)
        if query.held_out:
            number, other = int(query.text.split()[1]), int(document.text.split()[1])
            known = other - 3 * number
            assert (known in (0, 1, 2)) == (pair.relation is PairRelation.positive)
            assert (query.before, document.before, query.max_length) == ("Q: ", "own: ", 9)
    from_many = [text.text for text in sample.texts if text.origin == "many" and text.role is Role.query]
    assert int(from_many[0][1:]) < 50
    assert int(from_many[-1][1:]) > 850, "not the first rows alone"
    assert "other" not in {text.text for text in sample.texts}, "one positive of a row"


def test_instructions_and_long_texts(data, tmp_path):
    actual, losses = data()
    sample = choose_sample([], actual, losses, {})
    few = [text for text in sample.texts if text.origin == "few"]
    queries = [text for text in few if text.role is Role.query]
    assert [text.before for text in queries] == [f"Instruct: task {n}\nQuery: " for n in range(3)]
    assert [len(text.text) for text in few if text.role is Role.document] == [TEXT_LENGTH]
    write_texts(tmp_path / "sample", sample)
    assert read_texts(tmp_path / "sample") == sample


def test_sets_of_other_kinds(data):
    actual, losses = data()
    sets = [
        LoadedSet(
            ScoredPairs("sts", [f"a{n}" for n in range(90)], [f"b{n}" for n in range(90)], [n % 9 for n in range(90)])
        ),
        LoadedSet(Bitext("bitext", [f"c{n}" for n in range(90)], [f"d{n}" for n in range(90)])),
        LoadedSet(ClassificationSet("classes", ["x"], [0], [f"e{n}" for n in range(900)], [n % 3 for n in range(900)])),
        LoadedSet(ClusteringSet("clusters", [f"f{n}" for n in range(900)], [[n % 4, n] for n in range(900)])),
    ]
    sample = choose_sample(sets, actual, losses, {"query": "Q: "})
    pairs = [(sample.texts[p.first], sample.texts[p.second], p.relation) for p in sample.pairs]
    relations = {first.origin: {r for f, _, r in pairs if f.origin == first.origin} for first, *_ in pairs}
    assert relations["sts"] == {PairRelation.high, PairRelation.middle, PairRelation.low}
    assert relations["bitext"] == {PairRelation.positive}
    for first, second, relation in pairs:
        if first.origin == "sts":
            assert first.text[1:] == second.text[1:]
            third = (PairRelation.low, PairRelation.middle, PairRelation.high)[
                min(2, int(int(first.text[1:]) % 9 / 8 * 3))
            ]
            assert relation is third
    labels = {text.origin: {t.label for t in sample.texts if t.origin == text.origin} for text in sample.texts}
    assert labels["classes"] == {"0", "1", "2"}
    assert labels["clusters"] == {"0", "1", "2", "3"}
    assert {text.before for text in sample.texts if text.held_out} == {"Q: "}
