"""What is asked for a document depends on the seed and its text alone; rows are the same on any number of ranks."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from embedtrain.commands.synthesize.prompts import Prompts
from embedtrain.commands.synthesize.synthesis import synthesize
from embedtrain.commands.synthesize.types import RefusalReason
from embedtrain.commands.synthesize.writing import (
    Documents,
    ExampleQuery,
    QueryWriter,
    neighbours,
    read_example_queries,
    windows_of,
)
from embedtrain.config.columns import DataPath
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.rows import text_key
from embedtrain.data.sources.layouts import TEXTS_ONLY
from embedtrain.distributed.world import joined_world
from embedtrain.errors import ConfigError, DataError
from embedtrain.tracking.console import Console
from tests.synthesize.scripted import (
    ScriptedAsker,
    about,
    options_of,
    queries_of,
    read_rows,
    refuse,
    run_scripted,
    write_corpus,
)


@pytest.fixture
def world():
    with joined_world() as world:
        yield world


def asked_of(world, tmp_path, texts, *more, examples=()):
    """What is asked for each document, in order."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    options = options_of(corpus, tmp_path / "out", *more)
    writer = QueryWriter(options, Prompts(options.prompts, list(options.queries.kinds)), examples)
    (block,) = Documents(options.corpus).blocks()
    return writer.requests(block, world), writer


def test_windows_cover_the_text_and_have_the_overlap():
    for num_words in (1, 9, 10, 11, 18, 19, 27, 100):
        text = "\n".join(f"w{number}," for number in range(num_words))
        windows = windows_of(text, 10, 2)
        words = [window.split() for window in windows]
        assert all(len(of_window) <= 10 for of_window in words)
        joined = words[0] + [word for of_window in words[1:] for word in of_window[2:]]
        assert joined == text.split()
        assert all(first[-2:] == second[:2] for first, second in pairwise(words))
        assert all(len(of_window) > 2 for of_window in words[1:])  # else it repeats the window before
    assert windows_of(" short  text ", 10, 2) == [" short  text "]


def test_windows_of_text_without_spaces():
    text = "汉字" * 50
    assert [len(window) for window in windows_of(text, 20, 0)] == [40, 40, 20]
    assert [len(window) for window in windows_of("x" * 1000, 10, 0)] == [400, 400, 200]


def test_what_is_asked_depends_on_the_seed_and_the_document_alone(world, tmp_path):
    texts = [about(number) for number in range(30)]
    kinds = "queries.kinds={question: 1, keywords: 1, instruction: 1}"
    first, _ = asked_of(world, tmp_path, texts, kinds)
    others, _ = asked_of(world, tmp_path, [about(99), *reversed(texts), about(98)], kinds)
    requests = {each.request.key("x") for each in first}
    assert requests < {each.request.key("x") for each in others}
    with_seed, _ = asked_of(world, tmp_path, texts, kinds, "seed=1")
    assert not requests & {each.request.key("x") for each in with_seed}
    assert len(requests) == len(first)


def test_kinds_have_their_shares(world, tmp_path):
    texts = [about(number) for number in range(1000)]
    asked, writer = asked_of(world, tmp_path, texts, "queries.kinds={question: 3, title: 1, sentence: 0}")
    counts = Counter()
    for each in asked:
        counts[each.kind] += each.count
    assert counts.total() == writer.num_asked == 3000
    assert set(counts) == {"question", "title"}
    assert counts["question"] / 3000 == pytest.approx(0.75, abs=0.04)  # five standard deviations


def test_languages_take_turns(world, tmp_path):
    texts = [about(number) for number in range(200)]
    asked, _ = asked_of(world, tmp_path, texts, "queries.kinds=cross_lingual", "queries.languages=[de,fr]")
    counts = Counter(each.language for each in asked for _ in range(each.count))
    assert counts["de"] + counts["fr"] == 600
    assert counts["de"] / 600 == pytest.approx(0.5, abs=0.11)
    assert all({"de": "German", "fr": "French"}[each.language] in each.request.messages[1].content for each in asked)


def test_windows_of_a_long_document_take_turns(world, tmp_path):
    text = " ".join(f"unit{number}" for number in range(100))
    asked, _ = asked_of(world, tmp_path, [text], "window={words: 20, overlap: 0}", "queries.per_document=10")
    counts = Counter(each.sources[0] for each in asked for _ in range(each.count))
    assert sorted(counts) == sorted(windows_of(text, 20, 0))
    assert set(counts.values()) == {2}
    assert {each.positives for each in asked} == {(text,)}
    assert {each.ids for each in asked} == {("d0",)}
    options = ["window={words: 20, overlap: 0, positive: window}", "queries.per_document=10"]
    asked, _ = asked_of(world, tmp_path, [text, "a short one"], *options)
    assert all(each.positives == each.sources for each in asked)
    assert {each.ids[0] for each in asked} == {*(f"d0#{number}" for number in range(1, 6)), "d1"}


def test_the_second_document_is_the_nearest_one(world, tmp_path):
    texts = ["red apples and green pears", "a steel bridge over water", "green apples", "bridge of steel", "unrelated"]
    asked, _ = asked_of(world, tmp_path, texts, "queries.kinds=multi_hop", "queries.per_document=1")
    pairs = {each.ids for each in asked}
    # The last one shares no word with any other: the one beside it.
    assert pairs == {("d0", "d2"), ("d2", "d0"), ("d1", "d3"), ("d3", "d1"), ("d4", "d3")}
    assert all(text in each.request.messages[1].content for each in asked for text in each.sources)
    asked, writer = asked_of(world, tmp_path, texts[:1], "queries.kinds=multi_hop")
    assert (asked, writer.counts["alone"]) == ([], 3)


def check_neighbours(world, path):
    (block,) = Documents([DataPath(path=path)]).blocks()
    return sorted(neighbours(block, range(len(block)), world).items())


def test_all_ranks_have_the_same_neighbours(ranks, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(40)])
    first, second, third = ranks(3, check_neighbours, str(corpus))
    assert first == second == third
    assert len(first) == 40


def test_examples_are_of_other_documents(world, tmp_path):
    texts = [about(number) for number in range(20)]
    examples = [ExampleQuery(f"example {number}", text, text_key(text)) for number, text in enumerate(texts)]
    asked, _ = asked_of(world, tmp_path, texts, "queries.num_examples=4", examples=examples)
    shown = Counter()
    for each in asked:
        found = re.findall(r"Query: example (\d+)", each.request.messages[1].content)
        assert len(found) == len(set(found)) == 4
        assert each.ids[0].removeprefix("d") not in found
        shown.update(found)
    assert len(shown) == 20


def test_examples_are_read_from_rows(tmp_path):
    rows = [{"query": "q1", "pos": ["one two three", "other"]}, {"query": "q2", "positive": "four"}]
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
    sources = [TrainSource(path=str(tmp_path / f"{number}.jsonl")) for number in range(2)]
    read = read_example_queries(sources, 2)
    assert [(each.query, each.document) for each in read] == [("q1", "one two"), ("q2", "four")]
    (tmp_path / "texts.jsonl").write_text('{"text": "alone"}')
    with pytest.raises(DataError, match=r"texts.jsonl:1: a row needs a query and a positive"):
        read_example_queries([TrainSource(path=str(tmp_path / "texts.jsonl"))], 2)


# Documents.


def test_documents_are_read_as_mine_and_search_read_them(tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", ["first", "second", "first", " "])
    (tmp_path / "titled.jsonl").write_text('{"_id": "t", "title": "Title", "text": "third"}\n{"text": "no id"}\n')
    (tmp_path / "rows.jsonl").write_text('{"query": "q", "pos": ["second", "fourth"], "neg": ["fifth"]}\n')
    (tmp_path / "table.csv").write_text("id,text\n7,sixth\n")
    names = ("corpus.jsonl", "titled.jsonl", "rows.jsonl", "table.csv")
    documents = Documents([DataPath(path=str(tmp_path / name)) for name in names])
    read = [(document.id, document.text) for document in documents]
    assert read == [
        *[("d0", "first"), ("d1", "second"), ("t", "Title third"), ("", "no id")],
        *[("", "fourth"), ("", "fifth"), ("7", "sixth")],
    ]
    assert documents.counts == {"documents": 7, "duplicates": 2, "empty": 1}
    digest = documents.digest
    assert [document.text for document in documents] == [text for _, text in read]
    assert documents.digest == digest
    limited = Documents([DataPath(path=str(tmp_path / names[0]))], max_documents=1)
    assert [document.text for document in limited] == ["first"]
    assert limited.digest != digest


def test_a_document_that_cannot_be_used_stops_or_is_skipped(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"_id": "a", "text": "good"}\n{"_id": "b", "text": 7}\n{"_id": "c", "text": "too"}\n')
    with pytest.raises(DataError, match=r"corpus.jsonl:2: "):
        list(Documents([DataPath(path=str(corpus))]))
    documents = Documents([DataPath(path=str(corpus))], OnError.skip)
    assert [document.id for document in documents] == ["a", "c"]
    assert documents.counts["skipped"] == 1
    assert documents.skipped.startswith(f"{corpus}:2: ")
    corpus.write_text('{"_id": "a", "text": " "}\n')
    with pytest.raises(DataError, match="no document with a text"):
        list(Documents([DataPath(path=str(corpus))]))


# The whole command, with a model that answers by a rule.

KINDS = "queries.kinds={question: 2, keywords: 1, multi_hop: 1, instruction: 1, cross_lingual: 1}"


def run_command(world, corpus, out, *more):
    rows, num_requests = run_scripted(world, options_of(corpus, out, *more))
    return len(rows), num_requests


def test_rows_are_the_same_on_any_number_of_ranks(ranks, tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(50)])
    for size in (1, 2, 3):
        results = ranks(size, run_command, str(corpus), str(tmp_path / f"{size}"), KINDS, "queries.languages=[de]")
        assert results == [results[0]] * size
    one = (tmp_path / "1" / "rows.jsonl").read_bytes()
    assert one == (tmp_path / "2" / "rows.jsonl").read_bytes() == (tmp_path / "3" / "rows.jsonl").read_bytes()
    rows = read_rows(tmp_path / "1" / "rows.jsonl")
    assert len(rows) == 150
    assert not list((tmp_path / "1").glob(".*"))
    for row in rows:
        assert row["synthetic"] is True
        assert row["synthetic_model"] == "scripted"
        assert re.fullmatch("[0-9a-f]{12}", row["synthetic_prompt"])
        assert row["query"].split()[0] in row["pos"][0]
        assert len(row["pos"]) == len(row["pos_id"]) == (2 if row["kind"] == "multi_hop" else 1)
        assert ("prompt" in row) == (row["kind"] == "instruction")
        assert row.get("language") == ("de" if row["kind"] == "cross_lingual" else None)
    assert len({row["kind"] for row in rows}) == 5


def test_training_reads_the_rows(world, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(10)])
    rows, _ = run_scripted(world, options_of(corpus, tmp_path / "out", KINDS, "queries.languages=[de]"))
    path = tmp_path / "out" / "rows.jsonl"
    (store,) = read_sources(
        [TrainSource(path=str(path))], OnError.stop, TEXTS_ONLY, Cache(directory=tmp_path / "cache")
    )
    assert [(row.query, list(row.positives.texts), row.instruction) for row in store] == [
        (row["query"], row["pos"], row.get("prompt")) for row in rows
    ]


def test_the_same_command_does_nothing_and_other_options_write_new_rows(world, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(10)])
    first = run_scripted(world, options_of(corpus, tmp_path / "out"))
    assert first[1] > 0
    assert run_scripted(world, options_of(corpus, tmp_path / "out")) == (first[0], 0)
    other = run_scripted(world, options_of(corpus, tmp_path / "out", "seed=7"))
    assert other[1] > 0
    assert other[0] != first[0]
    # Other documents are another identity, not other files.
    moved = write_corpus(tmp_path / "moved.jsonl", [about(number) for number in range(10)])
    assert run_scripted(world, options_of(moved, tmp_path / "out", "seed=7")) == (other[0], 0)
    write_corpus(tmp_path / "moved.jsonl", [about(number) for number in range(11)])
    assert len(run_scripted(world, options_of(moved, tmp_path / "out", "seed=7"))[0]) == 33


def test_what_has_no_answer_is_counted_and_asked_again(world, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(10)])
    out = tmp_path / "out"

    def half(request):
        return queries_of(request) if request.seed % 2 else refuse(RefusalReason.budget)

    rows, asked = run_scripted(world, options_of(corpus, out), half)
    summary = json.loads((out / "synthesis.json").read_text())
    assert summary["lost"] == {"no_answer_budget": summary["unanswered"]}
    assert 0 < len(rows) == summary["rows"] == 30 - summary["unanswered"] < 30
    again, asked_again = run_scripted(world, options_of(corpus, out))
    assert (len(again), asked_again) == (30, asked)
    assert json.loads((out / "synthesis.json").read_text())["lost"] == {}


def test_grades_without_an_answer_are_asked_for_again(world, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(4)])
    options = options_of(corpus, tmp_path / "out", "checks.judge.min_grade=3", "max_requests=20")

    def spent(request):
        if request.purpose == "queries":
            return queries_of(request)
        return '{"grade": 5}' if request.seed % 2 else refuse(RefusalReason.budget)

    asker = ScriptedAsker(spent)
    synthesize(options, world, Console(), asker, asker.usage)
    lines = capsys.readouterr().out
    requests = sum(request.purpose == "queries" for request in asker.requests)
    assert f"requests for queries: {requests}, " in lines
    over = "; max_requests=20 may end them earlier" if requests + 12 > 20 else ""
    assert f"then up to 12 for grades, of about as many tokens each{over}\n" in lines
    summary = json.loads((tmp_path / "out" / "synthesis.json").read_text())
    assert 0 < summary["unanswered"] == summary["checks"]["rejected"]["no_grade"] < 12
    again = ScriptedAsker(lambda request: queries_of(request) if request.purpose == "queries" else '{"grade": 5}')
    assert len(read_rows(synthesize(options, world, Console(enabled=False), again, again.usage))) == 12


def test_what_is_thrown_away_is_counted(world, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(6)])
    answers = iter(
        [
            '{"queries": ["unit0 a", "unit0 b", "unit0 c"]}',
            '```json\n{"queries": ["unit1 a", "unit1 b", "unit1 c", "unit1 d"]}',
            "I do not know.",
            '{"queries": [["unit3 a"], 7, "  "]}',
            '{"queries": ["unit4 a"]}',
            '{"queries": [{"query": "unit5 a"}, {"Question": "\\"unit5 b\\""}, null]}',
        ]
    )
    options = options_of(corpus, tmp_path / "out", "queries.kinds=question")
    rows, _ = run_scripted(world, options, lambda _: next(answers))
    assert [row["query"] for row in rows] == [
        *("unit0 a", "unit0 b", "unit0 c", "unit1 a", "unit1 b", "unit1 c", "unit4 a", "unit5 a", "unit5 b"),
    ]
    summary = json.loads((tmp_path / "out" / "synthesis.json").read_text())
    assert summary["lost"] == {"unreadable": 3, "no_text": 4, "missing": 2}
    assert summary["asked"] == 18 == len(rows) + sum(summary["lost"].values())
    assert summary["repaired_answers"] == 1


def test_no_row_is_an_error_and_leaves_no_file(world, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(0)])
    with pytest.raises(DataError, match="no row is left of 3 queries that were asked for: 3 answers without JSON"):
        run_scripted(world, options_of(corpus, tmp_path / "out"), lambda _: "no")
    assert not (tmp_path / "out" / "rows.jsonl").exists()


def test_files_of_others_are_not_replaced(world, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(0)])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows.jsonl").write_text("mine")
    with pytest.raises(DataError, match=r"rows.jsonl exists and was not written by this command"):
        run_scripted(world, options_of(corpus, tmp_path / "out"))
    assert (tmp_path / "out" / "rows.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["queries.kinds={question: -1}"], "queries.kinds.question=-1: must be at least 0"),
        (["queries.kinds={question: 0}"], "queries.kinds={'question': 0}: has no kind"),
        (["queries.kinds=[question]"], "queries.kinds=['question']: write one kind"),
        (["queries.kinds={a/b: 1}"], "'a/b' is no name of a kind"),
        (["queries.kinds=cross_lingual"], "queries.languages=[]: queries.kinds has cross_lingual"),
        (["queries.languages=[de]"], "queries.languages=[de]: has no effect without"),
        (["queries.kinds=cross_lingual", "queries.languages=[German]"], "'German' is no ISO 639-1 code"),
        (["window.words=50", "window.overlap=50"], "window.overlap=50: must be below window.words=50"),
        (["queries.per_document=0"], "queries.per_document=0: must be from 1 to 1000"),
        (["output_dir="], "output_dir='': is missing"),
        (["corpus=null"], "corpus=[]: is missing"),
        (["writer.model="], "writer.model='': is missing"),
        (["max_requests=0"], "max_requests=0: must be at least 1; null for no limit"),
    ],
)
def test_options_that_cannot_work_are_named(tmp_path, options, expected):
    with pytest.raises(ConfigError) as caught:
        options_of("c.jsonl", tmp_path, *options)
    assert str(caught.value).startswith(expected) or expected in str(caught.value)


def test_a_kind_without_a_prompt_is_named(world, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(0)])
    with pytest.raises(ConfigError, match=r"queries.kinds.riddle: there is no prompt of this name"):
        run_scripted(world, options_of(corpus, tmp_path / "out", "queries.kinds=riddle"))


def test_the_output_is_not_among_the_documents(tmp_path):
    with pytest.raises(ConfigError, match="whose files are all read as documents"):
        options_of(tmp_path, tmp_path / "out")
