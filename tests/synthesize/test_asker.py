"""What is asked of a server, once; what is kept of it; and what is spent, whatever goes wrong."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embedtrain.commands.synthesize import api
from embedtrain.commands.synthesize.answers import AnswerLog, open_answers
from embedtrain.commands.synthesize.asker import open_asker
from embedtrain.commands.synthesize.types import (
    Answer,
    Message,
    PriceConfig,
    Refusal,
    RefusalReason,
    Request,
    WriterBackend,
    WriterConfig,
    check_writer,
)
from embedtrain.distributed.world import World, joined_world
from embedtrain.errors import ConfigError, EmbedtrainError
from tests.synthesize.stub_server import Fault, Stub, digest

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def requests(count: int, first: int = 0, **changes: Any) -> list[Request]:
    options: dict[str, Any] = {"purpose": "queries", "schema": SCHEMA, "max_new_tokens": 20, "temperature": 0.5}
    options |= {"seed": 1} | changes
    return [Request(messages=(Message("user", f"document {i}"),), **options) for i in range(first, first + count)]


def writer(stub: Stub | str, **changes: Any) -> WriterConfig:
    url = stub if isinstance(stub, str) else stub.url
    options: dict[str, Any] = {"backend": WriterBackend.api, "model": "m", "url": url, "concurrency": 4, "retries": 2}
    config = WriterConfig(**options | changes)
    check_writer(config, "writer.")
    return config


def ask(world: World, folder: Path, config: WriterConfig, asked: list[Request], **limits: int | None) -> Any:
    """The replies, what was spent, and the progress."""
    progress: list[tuple[str, int, int]] = []
    api._FIRST_WAIT = 0.01
    with open_answers(folder, world, **limits) as answers:
        asker = open_asker(config, answers, progress=lambda *now: progress.append(now))
        replies = asker.ask(asked)
        return replies, asker.usage(), progress


def expected(stub: Stub, asked: list[Request]) -> list[str]:
    return [
        digest(
            {
                "model": "m",
                "messages": [{"role": m.role, "content": m.content} for m in request.messages],
                "temperature": request.temperature,
                "seed": request.seed,
            }
        )
        for request in asked
    ]


def texts(replies: list[Any]) -> list[str]:
    return [reply.text if isinstance(reply, Answer) else str(reply) for reply in replies]


@pytest.mark.parametrize("size", [1, 3])
def test_each_request_is_sent_once_and_all_ranks_get_the_answers(ranks, tmp_path, size):
    asked = requests(7)
    asked += asked[:3] + requests(2, 7, purpose="judge")
    with Stub() as stub:
        outcomes = ranks(size, ask, tmp_path, writer(stub, price=PriceConfig(input=1e6, output=2e6)), asked)
        assert len(stub.bodies) == 9
        assert all(texts(replies) == expected(stub, asked) for replies, _, _ in outcomes)
        (_, usage, progress), *_ = outcomes
        assert usage["requests"] == 9
        assert usage["tokens"] == stub.tokens
        counts = usage["models"]["m"]
        assert counts["answers"] == 9
        assert usage["price"] == counts["prompt_tokens"] + 2 * counts["completion_tokens"]
        assert progress[-1] == (f"asking m, {usage['price']:.2f} spent", 9, 9)
        # Again, on another number of ranks: nothing is sent.
        outcomes = ranks(2, ask, tmp_path, writer(stub, url="http://127.0.0.1:9/v1"), asked + requests(1))
        assert all(texts(replies[:-1]) == expected(stub, asked) for replies, _, _ in outcomes)
        assert len(stub.bodies) == 9


def test_what_is_sent(ranks, tmp_path, monkeypatch):
    """No key, header or address of another server, and no documents to a proxy."""
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "another-secret")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-other: another-secret")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("THE_KEY", "the-secret")
    with Stub() as stub:
        single(ask, tmp_path, writer(stub, key_env="THE_KEY"), requests(1))
        (body,), (headers,) = stub.bodies, stub.headers
        assert body["messages"] == [{"role": "user", "content": "document 0"}]
        assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("m", 20, 0.5, 1)
        assert body["response_format"]["json_schema"]["schema"] == SCHEMA
        assert headers["authorization"] == "Bearer the-secret"
        assert "another-secret" not in json.dumps(headers)
        assert "the-secret" not in "".join(path.read_text() for path in (tmp_path / "answers").iterdir())


def single(function: Any, *args: Any, **options: Any) -> Any:
    """A function on one rank in this process, where its environment is."""
    with joined_world() as world:
        return function(world, *args, **options)


FAULTS = {
    "busy": Fault(429, headers={"retry-after": "0.01"}),
    "failing": Fault(500),
    "overloaded": Fault(503, headers={"retry-after-ms": "10"}),
    "cut": Fault(cut=True),
    "no JSON": Fault(content=b"<html>no</html>"),
    "an error in an answer": Fault(content=b'{"error": {"message": "no"}}'),
    "another JSON": Fault(content=b'{"choices": [{"message": {"content": ["a"]}}]}'),
    "empty": Fault(content=b""),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_that_passes_is_repeated(tmp_path, fault):
    failed: set[str] = set()

    def once(body: dict[str, Any], number: int) -> Fault | None:
        text = body["messages"][-1]["content"]
        if text in failed:
            return None
        failed.add(text)
        return fault

    asked = requests(5)
    with Stub(fault=once) as stub:
        replies, usage, _ = single(ask, tmp_path, writer(stub), asked)
        assert texts(replies) == expected(stub, asked)
        assert len(stub.bodies) == usage["requests"] == 10
        assert usage["tokens"] >= stub.tokens


def test_slow_answers_are_given_up_and_repeated(tmp_path):
    with Stub(fault=lambda body, number: Fault(seconds=1.5) if number == 1 else None) as stub:
        replies, usage, _ = single(ask, tmp_path, writer(stub, timeout=0.5, concurrency=1), requests(2))
        assert texts(replies) == expected(stub, requests(2))
        assert usage["requests"] == len(stub.bodies) == 3


def ends_in(stub: Stub | str, folder: Path, count: int = 30, **changes: Any) -> str:
    """The sentence that ends the command."""
    with pytest.raises(EmbedtrainError) as error:
        single(ask, folder, writer(stub, **changes), requests(count))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_server_that_answers_nothing_ends_the_command_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_KEY", "the-secret")
    wrong = Fault(401, "Incorrect API key provided: the-secret\n\x1b[31m")
    with Stub(fault=lambda body, number: wrong) as stub:
        said = ends_in(stub, tmp_path / "key", key_env="THE_KEY")
        assert "look at the key in THE_KEY" in said
        assert "***" in said
        assert "the-secret" not in said
        assert "\x1b" not in said
        assert len(stub.bodies) <= 4  # those in flight
        assert "writer.key_env" in ends_in(stub, tmp_path / "no-key")
    with Stub(fault=lambda body, number: Fault(404, "no model m")) as stub:
        assert "no model m; look at writer.url" in ends_in(stub, tmp_path / "model")
    with Stub(fault=lambda body, number: Fault(429, "pay", code="insufficient_quota")) as stub:
        assert "when there is credit" in ends_in(stub, tmp_path / "quota")
        assert len(stub.bodies) <= 4
    with Stub(fault=lambda body, number: Fault(429, headers={"retry-after": "86400"})) as stub:
        assert "asks to wait 24 h" in ends_in(stub, tmp_path / "day")
    with Stub(fault=lambda body, number: Fault(500, "out of order")) as stub:
        assert "fails after 3 attempts: it answers 500: out of order" in ends_in(stub, tmp_path / "down")
    with Stub(fault=lambda body, number: Fault(content=b"<html>login</html>")) as stub:
        assert "login" in ends_in(stub, tmp_path / "html")
    with Stub(fault=lambda body, number: Fault(400, "no such thing")) as stub:
        assert "no such thing" in ends_in(stub, tmp_path / "refused", 100)
        assert len(stub.bodies) < 100
        # A few are too few to give up at once.
        assert "m has answered no request" in ends_in(stub, tmp_path / "few", 2)
    assert "cannot be reached after 3 attempts" in ends_in("http://127.0.0.1:9/v1", tmp_path / "nobody")


def test_documents_are_not_sent_to_where_a_server_redirects(tmp_path):
    with Stub() as other, Stub(fault=lambda body, number: Fault(307, headers={"location": f"{other.url}/x"})) as stub:
        assert f"redirects to {other.url}/x" in ends_in(stub, tmp_path)
        assert not other.bodies


def test_a_server_without_schemas_gets_plainer_requests(tmp_path):
    def fault(body: dict[str, Any], number: int) -> Fault | None:
        known = body.get("response_format", {}).get("type") != "json_schema"
        return None if known else Fault(400, "no such type")

    with Stub(fault=fault) as stub:
        replies, _, _ = single(ask, tmp_path / "a", writer(stub, concurrency=1), requests(5))
        assert texts(replies) == expected(stub, requests(5))
        forms = [body.get("response_format", {}).get("type") for body in stub.bodies]
        assert forms == ["json_schema", *["json_object"] * 5]
    with Stub(fault=lambda body, number: Fault(422) if "response_format" in body else None) as stub:
        replies, _, _ = single(ask, tmp_path / "b", writer(stub), requests(5))
        assert texts(replies) == expected(stub, requests(5))
        assert "response_format" not in stub.bodies[-1]


def test_a_server_of_other_parameters(tmp_path):
    said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."

    def fault(body: dict[str, Any], number: int) -> Fault | None:
        if "max_tokens" in body:
            return Fault(400, said)
        return Fault(422, "extra inputs are not permitted: seed") if "seed" in body else None

    with Stub(lambda body: "a", fault) as stub:
        replies, usage, _ = single(ask, tmp_path, writer(stub), requests(6))
        assert texts(replies) == ["a"] * 6
        assert stub.bodies[-1].keys() == {
            "model",
            "messages",
            "max_completion_tokens",
            "temperature",
            "response_format",
        }
        assert usage["requests"] == len(stub.bodies)


def test_a_model_without_system_messages(tmp_path):
    def fault(body: dict[str, Any], number: int) -> Fault | None:
        return Fault(400, "System role not supported") if len(body["messages"]) > 1 else None

    messages = (Message("system", "Write."), Message("user", "a document"))
    asked = [replace(request, messages=messages) for request in requests(1)]
    with Stub(fault=fault) as stub:
        replies, _, _ = single(ask, tmp_path, writer(stub), asked)
        assert isinstance(replies[0], Answer)
        assert stub.bodies[-1]["messages"] == [{"role": "user", "content": "Write.\n\na document"}]


def test_a_request_that_is_refused_for_good(tmp_path):
    """It has no answer, also later, and the others do."""

    def fault(body: dict[str, Any], number: int) -> Fault | None:
        return Fault(400, "too long: seed, temperature") if body["messages"][0]["content"] == "document 2" else None

    with Stub(fault=fault) as stub:
        for _ in range(2):
            replies, usage, _ = single(ask, tmp_path, writer(stub, concurrency=1), requests(5))
            assert replies.pop(2) == Refusal(RefusalReason.refused, "it answers 400: too long: seed, temperature")
            assert texts(replies) == expected(stub, [*requests(2), *requests(2, 3)])
            assert len(stub.bodies) == usage["requests"] == 5
        # One that fails each time is asked again by the next run.
        stub.fault = lambda body, number: Fault(500) if body["messages"][0]["content"] == "document 5" else None
        replies, _, _ = single(ask, tmp_path, writer(stub), requests(3, 4))
        assert [type(reply) for reply in replies] == [Answer, Refusal, Answer]
        assert replies[1].reason is RefusalReason.failed
        stub.fault = lambda body, number: None
        replies, _, _ = single(ask, tmp_path, writer(stub), requests(3, 4))
        assert texts(replies) == expected(stub, requests(3, 4))


def limited(world: World, folder: Path, config: WriterConfig, asked: list[Request], *limits: int | None) -> Any:
    return ask(world, folder, config, asked, max_requests=limits[0], max_tokens=limits[1])


@pytest.mark.parametrize("size", [1, 2])
def test_budgets_are_never_exceeded(ranks, tmp_path, size):
    """Counted at the server, whatever fails, and in several runs; the first requests have the answers."""

    def fault(body: dict[str, Any], number: int) -> Fault | None:
        return Fault(500) if number % 3 == 0 else None

    with Stub(fault=fault) as stub:
        for limit in (4, 9):
            (replies, usage, _), *_ = ranks(size, limited, tmp_path / "n", writer(stub), requests(20), limit, None)
            assert len(stub.bodies) == usage["requests"] == limit
        assert {reply.reason for reply in replies if isinstance(reply, Refusal)} == {RefusalReason.budget}
    for has_usage in (True, False):
        with Stub(fault=fault, has_usage=has_usage) as stub:
            folder = tmp_path / f"t{has_usage}"
            (replies, usage, _), *_ = ranks(size, limited, folder, writer(stub), requests(20), None, 2000)
            assert 0 < stub.tokens <= usage["tokens"] <= 2000
    with Stub() as stub:  # without faults, those that are answered do not depend on the ranks
        (replies, usage, _), *_ = ranks(size, limited, tmp_path / "order", writer(stub), requests(30), None, 600)
        answered = [isinstance(reply, Answer) for reply in replies]
        assert answered == sorted(answered, reverse=True)
        # Each needs 9 tokens, and can need 405.
        assert (answered.count(True), usage["tokens"], stub.tokens) == (22, 198, 198)


def test_concurrency_and_limits_per_minute(ranks, tmp_path):
    with Stub(fault=lambda body, number: Fault(seconds=0.2)) as stub:
        ranks(2, ask, tmp_path / "at once", writer(stub, concurrency=3), requests(9))
        assert stub.most_at_once <= 3
    with Stub() as stub:
        ranks(2, ask, tmp_path / "rate", writer(stub, requests_per_minute=600), requests(10))
        assert max(stub.times) - min(stub.times) > 4 * 0.2 - 0.05
    with Stub() as stub:
        single(ask, tmp_path / "tokens", writer(stub, tokens_per_minute=60_000), requests(5, max_new_tokens=200))
        assert max(stub.times) - min(stub.times) > 4 * 0.2 - 0.05


def test_files_that_were_cut_off_or_damaged(tmp_path):
    with Stub() as stub:
        single(ask, tmp_path, writer(stub, concurrency=1), requests(4))
        path = tmp_path / "answers" / "00000.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if b'"answer":1' not in line]
        assert len(kept) == len(lines) - 1
        damaged = kept[2].replace(b'"text":"', b'"text":"x')
        path.write_bytes(b"".join([*kept[:2], damaged, *kept[3:]])[:-7])
        replies, usage, _ = single(ask, tmp_path, writer(stub), requests(4))
        assert texts(replies) == expected(stub, requests(4))
        assert len(stub.bodies) == usage["requests"] > 4


def test_two_commands_do_not_write_to_one_folder(tmp_path):
    with Stub() as stub, open_first(tmp_path), pytest.raises(ConfigError, match="another command writes there"):
        single(ask, tmp_path, writer(stub), requests(1))


def open_first(folder: Path) -> Any:
    return closing(AnswerLog(folder / "answers", 0, 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": ""}, "model"),
        ({"url": None}, "url"),
        ({"url": "localhost:8000"}, "url=localhost:8000"),
        ({"url": "https://me:the-secret@host/v1"}, "url: has a user"),
        ({"url": "https://host/v1?key=the-secret"}, "url: has a user, a password or a query"),
        ({"key_env": "sk-the-secret"}, "key_env: is not the name"),
        ({"trust_remote_code": True}, "trust_remote_code: is of writer.backend=local"),
        ({"backend": WriterBackend.local}, "url: is of writer.backend=api"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_options_that_cannot_work(options, said):
    with pytest.raises(ConfigError) as error:
        writer("http://localhost/v1", **options)
    assert f"writer.{said}" in str(error.value)
    assert "the-secret" not in str(error.value)


def test_a_key_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    assert "writer.key_env=THE_KEY" in ends_in("http://127.0.0.1:9/v1", tmp_path, key_env="THE_KEY")
