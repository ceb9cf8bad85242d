"""What is asked of a server, once; what is kept of it; and what is spent, whatever goes wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from embedtrain.commands.synthesize import api
from embedtrain.commands.synthesize.asker import open_answers, open_asker
from embedtrain.commands.synthesize.types import (
    Answer,
    Message,
    PriceConfig,
    Request,
    WriterBackend,
    WriterConfig,
    check_writer,
)
from embedtrain.distributed.world import World
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
    from embedtrain.distributed.world import joined_world

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
