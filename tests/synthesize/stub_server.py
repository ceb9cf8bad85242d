"""A server of OpenAI's protocol that writes what a function says, counts what it gets, and fails as it is told."""

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What a request gets instead of an answer.

    status: of HTTP, with `message` as OpenAI's servers write it, and `headers`.
    content: the body as it is, whatever it is; None: an error with `message`.
    cut: close the connection in the middle of the answer.
    seconds: wait before anything else; without another fault the answer follows.
    """

    status: int = 200
    message: str = "something is wrong"
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    cut: bool = False
    seconds: float = 0.0
    code: str | None = None


def digest(body: dict[str, Any]) -> str:
    """An answer that depends on everything that matters."""
    asked = [body["model"], body["messages"], body.get("temperature"), body.get("seed")]
    return json.dumps({"query": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]})


class Stub:
    """The server.

    Args:
        answer: from the body of a request to the text of the answer.
        fault: from the body and the number of the request, from 1 on, to what goes wrong, or None.
        has_usage: whether it counts tokens: a token for each four bytes.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], str] = digest,
        fault: Callable[[dict[str, Any], int], Fault | None] = lambda body, number: None,
        *,
        has_usage: bool = True,
    ) -> None:
        self.answer, self.fault, self.has_usage = answer, fault, has_usage
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.most_at_once = self.tokens = 0
        self._now = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    @property
    def asked(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def __enter__(self) -> "Stub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextlib.contextmanager
    def _counted(self, body: dict[str, Any], headers: Mapping[str, str]) -> Iterator[int]:
        with self._lock:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            self.times.append(time.monotonic())
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            number = len(self.bodies)
        try:
            yield number
        finally:
            with self._lock:
                self._now -= 1

    def _reply(self, body: dict[str, Any]) -> bytes:
        text = self.answer(body)
        read = sum(len(message["content"].encode()) for message in body["messages"]) // 4
        limit = body.get("max_tokens") or body["max_completion_tokens"]
        written = min(limit, -(-len(text.encode()) // 4))
        with self._lock:
            self.tokens += read + written
        message = {"role": "assistant", "content": text}
        reply: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        reply["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        if self.has_usage:
            counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
            reply["usage"] = counts
        return json.dumps(reply).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with stub._counted(body, self.headers) as number:
                    fault = stub.fault(body, number)
                    if fault is not None:
                        time.sleep(fault.seconds)
                    is_answer = fault is None or (fault.status == 200 and fault.content is None and not fault.cut)
                    content = stub._reply(body) if is_answer else (fault.content if fault else None)
                    if content is None:
                        error = {"message": fault.message, "code": fault.code}
                        content = json.dumps({"error": error}).encode()
                with contextlib.suppress(OSError):
                    self.send_response(200 if fault is None else fault.status)
                    for name, value in ({} if fault is None else fault.headers).items():
                        self.send_header(name, value)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    if fault is not None and fault.cut:
                        self.wfile.write(content[:10])
                        self.wfile.flush()
                        self.connection.shutdown(socket.SHUT_RDWR)
                        self.close_connection = True
                        return
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        return Handler
