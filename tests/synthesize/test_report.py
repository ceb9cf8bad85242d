"""The report shows what was written and thrown away, and nothing of it is more than text."""

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from embedtrain.commands.synthesize.report import SAMPLES, Written
from embedtrain.commands.synthesize.types import Draft
from embedtrain.distributed.world import joined_world
from embedtrain.errors import ConfigError, DataError
from tests.mine.runs import save_model
from tests.synthesize.scripted import about, options_of, queries_of, read_rows, run_scripted, write_corpus

SCRIPT = "<script>alert('document')</script>"


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.parts = Counter[str](), list[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action") and value]

    def handle_data(self, data):
        self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.parts).split())


def answers(request) -> str:
    """Grades below 4 for half of the queries; a query for each document, two of which are copied."""
    if request.purpose == "judge":
        grade = 2 if re.search(r"Query: unit\d*[02468] ", request.messages[-1].content) else 5
        return json.dumps({"reason": "<b>why</b>", "grade": grade})
    (subject,) = re.findall(r"unit\d+", request.messages[-1].content)
    if subject in ("unit3", "unit5"):
        return json.dumps({"queries": [re.search(r"The unit.*", request.messages[-1].content)[0]]})
    return queries_of(request)


def test_the_report_has_what_synthesis_json_has(tmp_path):
    documents = [f"{about(number)} {SCRIPT if number == 1 else ''}" for number in range(40)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    options = options_of(
        corpus, tmp_path / "<out>", "queries.per_document=1", "checks.judge.min_grade=4", "queries.kinds=question"
    )
    with joined_world() as world:
        rows, _ = run_scripted(world, options, answers)
    summary = json.loads((tmp_path / "<out>" / "synthesis.json").read_text(encoding="utf-8"))
    assert summary["checks"]["rejected"] == {"copied": 2, "grade": 20}
    assert len(rows) == 18
    html = (tmp_path / "<out>" / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags["script"] == 0
    assert page.addresses == ["data:,"]
    assert "rows 18 45.0% of 40 queries that were asked for" in page.text
    assert "copied from the document -2 5.0%" in page.text
    assert "graded too low -20 50.0%" in page.text
    assert "grade 2: <b>why</b>" in page.text
    assert "question 40 18 (45.0%) 2 (5.0%) 20 (50.0%)" in page.text
    assert "18 queries by their number of words" in page.text
    shown = [row for row in rows if row["query"] in page.text]
    assert len(shown) == SAMPLES
    assert all(row["pos"][0][:100] in page.text for row in shown)


def test_samples_are_the_same_for_any_order_and_lengths_count_each_document_once():
    def draft(number: int) -> Draft:
        text = f"query number {number}"
        return Draft(query=text, kind="a", sources=("s",), positives=("one two",), ids=("",), prompt="")

    drafts, results = [draft(number) for number in range(100)], []
    for order in (drafts, drafts[::-1]):
        written = Written()
        assert list(written.watch(order)) == order
        ((kind, samples),) = written.samples()
        assert kind == "a"
        results.append({sample.query for sample in samples})
        assert written.lengths == {"a": Counter({3: 100})}
        assert written.documents == Counter({2: 1})
    assert results[0] == results[1]
    assert len(results[0]) == SAMPLES


def command(world, folder):
    options = options_of(
        folder / "corpus.jsonl",
        folder / f"out-{world.size}",
        "queries.per_document=1",
        f"checks.round_trip.model={folder / 'model' / 'guide'}",
        "checks.round_trip.keep_rank=4",
    )
    run_scripted(world, options)


@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [1, 2])
def test_queries_that_do_not_find_their_document_are_thrown_away(ranks, tmp_path, size):
    save_model(tmp_path / "model")
    write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(30)])
    ranks(size, command, tmp_path)
    out = tmp_path / f"out-{size}"
    summary = json.loads((out / "synthesis.json").read_text(encoding="utf-8"))
    rows = read_rows(out / "rows.jsonl")
    assert summary["checks"]["rejected"] == {"round_trip": 30 - len(rows)}
    assert 0 < len(rows) < 30
    assert "its document has rank" in (out / "report.html").read_text(encoding="utf-8")
    assert not list(out.glob(".*"))


def test_a_report_of_others_is_not_replaced(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(3)])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").write_text("mine")
    with joined_world() as world, pytest.raises(DataError, match=r"out/report\.html exists and was not written by"):
        run_scripted(world, options_of(corpus, tmp_path / "out"))
    assert (tmp_path / "out" / "report.html").read_text() == "mine"


def test_a_round_trip_writes_through_no_link(tmp_path):
    save_model(tmp_path / "model")
    write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(3)])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out-1").mkdir()
    (tmp_path / "out-1" / ".round_trip").symlink_to(tmp_path / "elsewhere")
    with joined_world() as world, pytest.raises(ConfigError, match=r"\.round_trip is a link"):
        command(world, tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())
