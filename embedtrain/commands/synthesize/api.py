"""Asks a server that speaks OpenAI's protocol: several requests at a time, with limits per minute and repetitions.

Documents go to the address of `writer.url` alone: no proxy of the environment is used and no redirect followed, and
keys, headers and addresses of other servers, which openai takes from variables OPENAI_*, are left out.
"""

import asyncio
import contextlib
import email.utils
import importlib.util
import json
import math
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from embedtrain.commands.synthesize.types import Answer, Request, WriterConfig, is_loopback
from embedtrain.errors import ConfigError, EmbedtrainError
from embedtrain.utils.formatting import format_duration, install_command, printable

if TYPE_CHECKING:
    from embedtrain.commands.synthesize.asker import Attempt, Task, Work
    from embedtrain.distributed.world import World

# Seconds before a repetition: doubled each time. A server that asks for more than the last is not waited for.
_FIRST_WAIT, _LONGEST_WAIT, _LONGEST_RETRY_AFTER = 1.0, 60.0, 900.0
_CONNECT_SECONDS = 20.0
_POLL = 0.2  # seconds between two looks at whether a longer wait has to end
_TEMPORARY = frozenset({408, 409, 425, 429})  # and all from 500 on
_UNREAD = frozenset({429, 503})  # with these, the server has read nothing
_OF_ALL_REQUESTS = frozenset({401, 402, 404, 405, 407, 410, 421, 426, 451})  # which no other request would escape
# Requests in a row that were refused, or repeated in vain, without any answer: then none is expected.
_MOST_REFUSED, _MOST_FAILED = 20, 3
# More than any tokenizer and chat template make of a text: a token for each byte, and for each message and request.
_TOKENS_OF_MESSAGE, _TOKENS_OF_REQUEST = 32, 256
# About how many bytes of UTF-8 a token has, for estimates.
_BYTES_PER_TOKEN = 4
_SENTENCE = 300  # characters of what a server says


# Why an attempt has no answer: the kind, a sentence, and the seconds that the server asks to wait.
_Problem = tuple[str, str, float]
# Kinds that ask for the same request in another form.
_FORMS = ("changed", "plainer")


class _Malformed(Exception):
    """An answer that is not one of the protocol."""


class ApiBackend:
    """A server that speaks OpenAI's protocol.

    Raises ConfigError if the package openai, or the key, is missing.
    """

    def __init__(self, writer: WriterConfig, world: "World", option: str) -> None:
        if importlib.util.find_spec("openai") is None:
            raise ConfigError(
                f"{option}.backend=api: needs the package openai, which is not installed: "
                f"{install_command('synthesize')}"
            )
        assert writer.url is not None
        self._writer, self._option, self._key = writer, option, _read_key(writer.key_env, f"{option}.key_env")
        self.name = writer.model
        self.where = f"documents go to {writer.url} (model {writer.model}) and nowhere else"
        if self._key and urlsplit(writer.url).scheme == "http" and not is_loopback(writer.url):
            self.where += "; the connection is not encrypted, and the key can be read on its way"
        self.workers = min(world.size, writer.concurrency)
        # This rank's share.
        self._slots = writer.concurrency // self.workers + (world.rank < writer.concurrency % self.workers)
        self._dialect = _Dialect()

    def groups(self, requests: Sequence[Request]) -> list[list[int]]:
        """Each request alone."""
        return [[index] for index in range(len(requests))]

    def prompt_tokens(self, request: Request) -> int:
        """By the number of bytes."""
        return -(-_num_bytes(request) // _BYTES_PER_TOKEN)

    def run(self, work: "Work") -> None:
        """Ask all tasks of this rank."""
        asyncio.run(self._run(work))

    async def _run(self, work: "Work") -> None:
        import openai

        # A client that trusts the environment would take proxies and passwords from it as well.
        authorities = os.environ.get("SSL_CERT_FILE")
        http = openai.DefaultAsyncHttpxClient(
            trust_env=False,
            follow_redirects=False,
            timeout=openai.Timeout(self._writer.timeout, connect=min(_CONNECT_SECONDS, self._writer.timeout)),
            verify=ssl.create_default_context(cafile=authorities) if authorities else True,
        )
        with _without_variables("OPENAI_"):
            # A server without a key ignores the header; openai refuses to start without one.
            client = openai.AsyncOpenAI(
                api_key=self._key or "none", base_url=self._writer.url, max_retries=0, http_client=http
            )
        async with client:
            conversation = _Conversation(self, client, work)
            await asyncio.gather(*(conversation.ask(task) for task in work.tasks))


class _Dialect:
    """What a server has shown to understand; requests become plainer until it answers.

    Attributes:
        level: how answers are constrained: 0 by the schema, 1 to any JSON, 2 not at all.
        has_answered: whether the server has answered anything, so that it knows the parameters.
        is_proven: whether it has answered a request with a schema at this level.
        limit: its name for the most tokens of an answer.
        omitted: parameters that it does not know.
        has_system: whether its model takes system messages; otherwise their texts begin those of the user.
    """

    def __init__(self) -> None:
        self.has_system = True
        self.level, self.has_answered, self.is_proven, self.limit = 0, False, False, "max_tokens"
        self.omitted: set[str] = set()

    def body(self, request: Request, model: str, level: int) -> dict[str, Any]:
        """The body of a request."""
        # Lone surrogates, which some files have, are no UTF-8.
        messages = [(message.role, message.content.encode("utf-8", "replace").decode()) for message in request.messages]
        if not self.has_system:
            messages = [("user", "\n\n".join(content for _, content in messages))]
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            self.limit: request.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        if request.schema is not None and level == 0:
            schema = {"name": "answer", "schema": request.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif request.schema is not None and level == 1:
            body["response_format"] = {"type": "json_object"}
        return {name: value for name, value in body.items() if name not in self.omitted}

    def is_outdated(self, body: Mapping[str, Any], level: int) -> bool:
        """Whether requests are others meanwhile."""
        has_system = any(message["role"] == "system" for message in body["messages"])
        is_other = bool(self.omitted & body.keys()) or self.limit not in body or (has_system and not self.has_system)
        return level < self.level or is_other

    def adapt(self, message: str) -> bool:
        """Whether the server names something that it does not know; it is left out from now on."""
        if self.limit == "max_tokens" and "max_completion_tokens" in message:
            self.limit = "max_completion_tokens"  # as OpenAI's models that reason
            return True
        if self.has_system and "system role" in message.lower():  # of chat templates, such as Gemma's
            self.has_system = False
            return True
        unknown = {name for name in ("temperature", "seed") if name in message} - self.omitted
        self.omitted |= unknown
        return bool(unknown)


class _Conversation:
    """The requests of one call of `ask`, on one rank."""

    def __init__(self, backend: ApiBackend, client: Any, work: "Work") -> None:
        self._client, self._work = client, work
        self._writer, self._option, self._key = backend._writer, backend._option, backend._key
        self._dialect, self._workers = backend._dialect, backend.workers
        self._slots = asyncio.Semaphore(backend._slots)
        self._pace = asyncio.Lock()
        self._next = 0.0  # when the next request may be sent
        self._num_refused = self._num_failed = 0  # in a row

    async def ask(self, task: "Task") -> None:
        """Ask until there is an answer, or none can be expected. After an error, those in flight may end."""
        try:
            await self._ask(task)
        except Exception as error:
            self._work.stop(error)

    async def _ask(self, task: "Task") -> None:
        most = _num_bytes(task.request) + _TOKENS_OF_REQUEST + task.request.max_new_tokens
        level = num_failed = 0
        reserved = self._work.reserve([task], most)
        while await asyncio.wrap_future(reserved):
            async with self._slots:
                while True:
                    level = max(level, self._dialect.level)
                    problem = await self._attempt(task, most, level)
                    if problem is None:
                        return
                    kind, message, wait = problem
                    if kind not in _FORMS:
                        break
                    level += kind == "plainer"
                    reserved = self._work.reserve([task], most)
                    # At once, so that the other requests profit from what is found out. But not while others, which the
                    # budget waits for, may wait for this slot.
                    if not reserved.done():
                        break
                    if not reserved.result():
                        return
            if kind in _FORMS:
                continue
            if kind == "refused":
                self._refuse(task, message)
                return
            num_failed += 1
            if num_failed > self._writer.retries:
                self._give_up(task, kind, message, num_failed)
                return
            # Spread, so that what failed together does not come back together; by the key, so that it repeats.
            spread = 0.5 + int(task.key[:4], 16) / 0x20000
            await self._sleep(max(wait, min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (num_failed - 1)) * spread))
            reserved = self._work.reserve([task], most)

    async def _attempt(self, task: "Task", most: int, level: int) -> _Problem | None:
        """Send a request that may be sent; None if nothing is left to do."""
        await self._wait_for_turn(task.request)
        if self._work.is_stopping:
            self._work.release([task], most)
            return None
        problem = await self._send(self._work.begin(task, most), level)
        if isinstance(problem, EmbedtrainError):
            self._work.stop(problem)
            return None
        return problem

    async def _send(self, attempt: "Attempt", level: int) -> _Problem | EmbedtrainError | None:
        """Send a request; returns None with an answer, an error of the command, or what to do, why and when."""
        import openai

        request = attempt.task.request
        body = self._dialect.body(request, self._writer.model, level)
        try:
            # The time-out of the library is one of silence.
            async with asyncio.timeout(self._writer.timeout):
                response = await self._client.chat.completions.with_raw_response.create(**body)
            self._answer(attempt, response.http_response.content, level)
        except openai.APIStatusError as error:
            return self._refusal(attempt, error, body, level)
        except (openai.APIConnectionError, TimeoutError) as error:
            if _is_unreachable(error):
                self._work.end(attempt, 0)
                return "unreachable", self._sentence(_cause(error)), 0.0
            self._work.end(attempt, attempt.tokens)
            if isinstance(error, TimeoutError | openai.APITimeoutError):
                return "failed", f"no answer within {self._option}.timeout={self._writer.timeout:g} seconds", 0.0
            return "failed", self._sentence(_cause(error)), 0.0
        except (_Malformed, openai.OpenAIError) as error:
            self._work.end(attempt, attempt.tokens)
            return "failed", self._sentence(str(error)), 0.0
        return None

    def _answer(self, attempt: "Attempt", content: bytes, level: int) -> None:
        """Keep the answer."""
        request = attempt.task.request
        try:
            answer, refusal, is_counted = _read_answer(content, request)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            text = content[:100].decode("utf-8", "replace")
            raise _Malformed(f"an answer is not one of the protocol ({type(error).__name__}: {text})") from None
        if request.schema is not None and not self._dialect.is_proven:
            self._dialect.is_proven, self._dialect.level = True, level
        self._dialect.has_answered, self._num_refused, self._num_failed = True, 0, 0
        if refusal is not None:
            self._work.end(attempt, answer.prompt_tokens + answer.completion_tokens if is_counted else attempt.tokens)
            self._work.refuse(attempt.task, self._sentence(refusal))
        else:
            self._work.answer(attempt, answer, is_counted=is_counted)

    def _refusal(self, attempt: "Attempt", error: Any, body: dict[str, Any], level: int) -> _Problem | EmbedtrainError:
        """What to do about a status other than 200."""
        status: int = error.status_code
        message = self._sentence(_server_message(error))
        is_read = (status >= 500 and status not in _UNREAD) or status == 408
        self._work.end(attempt, attempt.tokens if is_read else 0)
        if 300 <= status < 400:
            target = printable(str(error.response.headers.get("location", "")))[:200]
            return EmbedtrainError(
                f"{self._where} redirects to {target or 'another address'}: documents go to no other address than "
                f"{self._option}.url; write the other one if you trust it"
            )
        if _is_code(error, "insufficient_quota"):
            return EmbedtrainError(f"{self._where}: {message}; run the same command again when there is credit")
        if status in _TEMPORARY or status >= 500:
            wait = _retry_after(error.response.headers)
            if wait > _LONGEST_RETRY_AFTER:
                return EmbedtrainError(
                    f"{self._where} asks to wait {format_duration(wait)} ({message}); run the same command again then, "
                    "it asks nothing twice"
                )
            if wait:
                self._next = max(self._next, time.monotonic() + wait)
            return "limited" if status == 429 else "failed", message, wait
        if status in _OF_ALL_REQUESTS or (status == 403 and not self._dialect.has_answered):
            return EmbedtrainError(f"{self._where}: {message}{self._hint(status)}")
        if self._dialect.is_outdated(body, level) or (not self._dialect.has_answered and self._dialect.adapt(message)):
            return "changed", message, 0.0
        if "response_format" in body and not self._dialect.is_proven:
            return "plainer", message, 0.0
        return "refused", message, 0.0

    @property
    def _where(self) -> str:
        return f"{self._option}.url={self._writer.url}"

    def _hint(self, status: int) -> str:
        if status == 401 and self._writer.key_env is None:
            return f"; write the name of the environment variable with the key as {self._option}.key_env"
        if status == 401:
            return f"; look at the key in {self._writer.key_env}"
        if status == 404:
            return f"; look at {self._option}.url, which often ends with /v1, and {self._option}.model"
        return ""

    def _refuse(self, task: "Task", message: str) -> None:
        self._num_refused += 1
        if self._num_refused >= _MOST_REFUSED and not self._dialect.has_answered:
            self._work.stop(EmbedtrainError(f"{self._where} has refused {self._num_refused} requests: {message}"))
        self._work.refuse(task, message)

    def _give_up(self, task: "Task", kind: str, message: str, num_failed: int) -> None:
        """After all repetitions: end the command if the reason is not the request."""
        self._num_failed += 1
        if kind != "failed" or self._num_failed >= _MOST_FAILED or not self._dialect.has_answered:
            what = {"unreachable": "cannot be reached", "limited": "answers no more requests"}.get(kind, "fails")
            self._work.stop(
                EmbedtrainError(
                    f"{self._where} {what} after {num_failed} attempts: {message}; run the same command again, it asks "
                    "nothing twice"
                )
            )
        self._work.fail(task, message)

    async def _wait_for_turn(self, request: Request) -> None:
        """Wait as the limits per minute, or a server that is busy, demand."""
        tokens = _num_bytes(request) / _BYTES_PER_TOKEN + request.max_new_tokens
        minutes = 0.0
        if self._writer.requests_per_minute is not None:
            minutes = self._workers / self._writer.requests_per_minute
        if self._writer.tokens_per_minute is not None:
            minutes = max(minutes, tokens * self._workers / self._writer.tokens_per_minute)
        async with self._pace:
            while (wait := self._next - time.monotonic()) > 0 and not self._work.is_stopping:
                await asyncio.sleep(min(wait, _POLL))
            self._next = max(self._next, time.monotonic()) + 60 * minutes

    async def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._work.is_stopping:
            await asyncio.sleep(min(left, _POLL))

    def _sentence(self, text: str) -> str:
        """What a server says, on one line, short, and without the key."""
        line = " ".join(text.split())
        if self._key:
            line = line.replace(self._key, "***")
        return printable(line[:_SENTENCE])


def _read_key(variable: str | None, option: str) -> str:
    """The key; empty without a variable."""
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{option}={variable}: there is no such variable in the environment, or it is empty")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{option}={variable}: its value is no key, which has printable ASCII characters alone")
    return key


@contextlib.contextmanager
def _without_variables(prefix: str) -> Iterator[None]:
    """Hide variables of the environment."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _num_bytes(request: Request) -> int:
    """Bytes of UTF-8 of the texts of a request and its schema, and what may surround each message."""
    schema = 0 if request.schema is None else len(json.dumps(request.schema))
    return schema + sum(
        len(message.content.encode("utf-8", "surrogatepass")) + _TOKENS_OF_MESSAGE for message in request.messages
    )


def _read_answer(content: bytes, request: Request) -> tuple[Answer, str | None, bool]:
    """The answer, what the model says if it refuses, and whether the server counts tokens."""
    body = json.loads(content)
    choice = body["choices"][0]
    message = choice["message"]
    text, refusal = message.get("content"), message.get("refusal")
    if text is None:
        text = ""
    if not isinstance(text, str) or not isinstance(refusal, str | None):
        raise TypeError(f"the content is {type(text).__name__}")
    usage = body.get("usage") or {}
    counts: list[Any] = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    is_counted = all(type(number) is int and number >= 0 for number in counts)
    about: list[Any] = [_num_bytes(request) // _BYTES_PER_TOKEN, min(len(text.encode()), request.max_new_tokens)]
    read, written = map(int, counts if is_counted else about)
    finish = choice.get("finish_reason")
    return Answer(text, read, written, finish if isinstance(finish, str) else "stop"), refusal or None, is_counted


def _server_message(error: Any) -> str:
    """What the server says about an error."""
    body = error.body
    if isinstance(body, dict):
        said = body.get("message") or body.get("detail") or body.get("error") or body
        body = said if isinstance(said, str) else json.dumps(said)
    text = body if isinstance(body, str) and body else error.response.text
    return f"it answers {error.status_code}: {text}" if text else f"it answers {error.status_code}"


def _is_code(error: Any, code: str) -> bool:
    return isinstance(error.body, dict) and error.body.get("code") == code


def _retry_after(headers: Any) -> float:
    """Seconds that a server asks to wait; 0 if it does not."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) / unit
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, TypeError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return 0.0


def _cause(error: BaseException) -> str:
    """The reason of an error of a connection, which openai hides."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error) or type(error).__name__


def _is_unreachable(error: BaseException) -> bool:
    """Whether no connection was made, so that the request is not the reason."""
    cause = error.__cause__
    return cause is not None and type(cause).__name__ in ("ConnectError", "ConnectTimeout")
