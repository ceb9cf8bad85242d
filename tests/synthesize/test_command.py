"""The command in processes of its own: a server on loopback, two ranks, files, and what it prints."""

import json

import pytest

from embedtrain import synthesize
from embedtrain.commands.synthesize.types import Message, Request
from embedtrain.errors import ConfigError, DataError
from tests.commands import call
from tests.synthesize.scripted import about, queries_of, read_rows, write_corpus
from tests.synthesize.stub_server import Fault, Stub

QUIET = ["checks.languages=false"]


def answer(body):
    """As the scripted model answers, and the judge grades by the last digit of the query."""
    text = body["messages"][-1]["content"]
    if "Grade the query" in text:
        return json.dumps({"reason": "a rule", "grade": 1 + int(text.partition("Query: ")[2].split("\n")[0][-1]) * 2})
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
    messages = tuple(Message(each["role"], each["content"]) for each in body["messages"])
    return queries_of(
        Request(
            messages=messages, purpose="queries", schema=schema, max_new_tokens=1, temperature=1.0, seed=body["seed"]
        )
    )


def arguments(stub, corpus, out):
    return [
        f"corpus={corpus}",
        f"output_dir={out}",
        "writer.backend=api",
        f"writer.url={stub.url}",
        "writer.model=stub",
    ]


def test_two_ranks_write_rows_once(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(12)])
    with Stub(answer) as stub:
        command = [*arguments(stub, corpus, tmp_path / "out"), *QUIET, "checks.judge.min_grade=3"]
        printed = call("synthesize", *command, ranks=2)
        rows = read_rows(tmp_path / "out" / "rows.jsonl")
        # Of three queries of a document, those that end in 0 have grade 1.
        assert rows
        assert all(row["grade"] == 1 + int(row["query"][-1]) * 2 >= 3 for row in rows)
        summary = json.loads((tmp_path / "out" / "synthesis.json").read_text())
        assert len(rows) + summary["checks"]["rejected"]["grade"] == 36
        assert stub.url in printed.splitlines()[0]
        assert "documents: 12" in printed
        num_requests, before = len(stub.bodies), (tmp_path / "out" / "rows.jsonl").read_bytes()
        assert summary["usage"]["requests"] >= num_requests
        assert (tmp_path / "out" / "report.html").is_file()
        # Without its rows, the same command asks nothing again, on any number of ranks.
        for name in ("rows.jsonl", "synthesis.json", "report.html"):
            (tmp_path / "out" / name).unlink()
        call("synthesize", *command)
        assert (len(stub.bodies), (tmp_path / "out" / "rows.jsonl").read_bytes()) == (num_requests, before)


def test_the_python_function_and_the_budget(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(12)])
    with Stub(answer) as stub:
        writer = {"backend": "api", "url": stub.url, "model": "stub"}
        options = {"checks.languages": False, "max_requests": 5}
        result = synthesize(str(corpus), tmp_path / "out", writer=writer, options=options, quiet=True)
        assert len(stub.bodies) == 5
        assert result.rows == tmp_path / "out" / "rows.jsonl"
        assert result.summary["lost"] == {"no_answer_budget": 36 - len(read_rows(result.rows))}
        more = synthesize(str(corpus), tmp_path / "out", writer=writer, quiet=True, **{"checks.languages": False})
        assert more.summary["lost"] == {}
        assert len(read_rows(more.rows)) == 36
        # An attempt whose connection fails is spent, and does not arrive.
        assert len(stub.bodies) <= more.summary["usage"]["requests"]


def test_faults_end_in_a_sentence(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [about(number) for number in range(3)])
    with Stub(answer, lambda body, number: Fault(401, "no such key")) as stub:
        printed = call("synthesize", *arguments(stub, corpus, tmp_path / "out"), *QUIET, code=1)
        assert "no such key" in printed
        assert "Traceback" not in printed
        assert not (tmp_path / "out" / "rows.jsonl").exists()
    with pytest.raises(ConfigError, match=r"corpus=.* is missing|no such file"):
        synthesize(None, tmp_path / "out", writer={"model": "x"}, quiet=True)
    with pytest.raises(DataError, match="no such file or folder"):
        synthesize(str(tmp_path / "none.jsonl"), tmp_path / "out", writer={"model": str(tmp_path)}, quiet=True)
