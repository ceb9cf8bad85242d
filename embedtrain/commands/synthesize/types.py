"""What is asked of a language model, and what it answers: between those who write requests and those who send them."""

import hashlib
import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from embedtrain.config.command_options import FastPrecisionOptions, ModelOptions
from embedtrain.config.options import check_values, option
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError

Role = Literal["system", "user"]
Purpose = Literal["queries", "judge", "paraphrase", "negatives"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to a language model.

    Attributes:
        messages: the conversation so far, of which the model writes the next message.
        purpose: what the answer is for; it counts for reports only, never for the answer.
        schema: the JSON schema of the answer; None for free text.
        max_new_tokens: the largest number of tokens of the answer.
        temperature: of sampling; 0 takes the most probable token each time.
        seed: of sampling. Two requests with the same messages and different seeds have different answers.
    """

    messages: tuple[Message, ...]
    purpose: Purpose
    schema: dict[str, Any] | None = None
    max_new_tokens: int
    temperature: float
    seed: int

    def key(self, writer: str) -> str:
        """The SHA-256, in hex, of all that determines the answer of the model with this name.

        The name has whatever else the answer depends on, such as a revision. The address of a server and the purpose
        do not count: the same question to the same model is asked once.
        """
        asked = asdict(self)
        del asked["purpose"]
        text = json.dumps({"writer": writer, **asked}, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a language model answered.

    Attributes:
        text: the message that it wrote.
        prompt_tokens: tokens that it read.
        completion_tokens: tokens that it wrote.
        finish: why it stopped: `stop`, `length` at max_new_tokens, or the server's own word.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish: str = "stop"


class RefusalReason(Enum):
    """Why a request has no answer."""

    budget = "the budget is spent"
    refused = "the server refused it"
    failed = "every attempt failed"
    stopped = "a signal ended the command"


@dataclass(frozen=True, slots=True)
class Refusal:
    """No answer, for good in this process.

    Attributes:
        reason: why.
        message: one sentence, such as the server's own; empty if the reason says it all.
    """

    reason: RefusalReason
    message: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.message}" if self.message else self.reason.value


Reply = Answer | Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A query that a language model has written: a row, if it passes the checks.

    Attributes:
        query: its text.
        kind: of query, which is the name of its prompt: question, keywords, ...
        sources: what the language model has read: a window of each document.
        positives, ids: the texts and ids of the documents, in the same order; an id is "" where a document has none.
        language: the ISO 639-1 code that was asked for; None for that of the document.
        instruction: what the query is for, of kinds with one.
        prompt: the first 12 hex digits of the hash of the prompt's template.
        negatives: texts that look relevant and are not.
        grade: of the judge, from 1 to 5.
    """

    query: str
    kind: str
    sources: tuple[str, ...]
    positives: tuple[str, ...]
    ids: tuple[str, ...]
    prompt: str
    language: str | None = None
    instruction: str | None = None
    negatives: tuple[str, ...] = ()
    grade: int | None = None

    def row(self, model: str) -> dict[str, Any]:
        """The row as it is written; `model` is the name of the language model."""
        row: dict[str, Any] = {"query": self.query, "pos": list(self.positives)}
        if any(self.ids):
            row["pos_id"] = list(self.ids)
        if self.negatives:
            row["neg"] = list(self.negatives)
        if self.instruction is not None:
            row["prompt"] = self.instruction
        row |= {"synthetic": True, "synthetic_model": model, "synthetic_prompt": self.prompt, "kind": self.kind}
        optional = {"language": self.language, "grade": self.grade}
        return row | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What requests will cost, before the first one is sent.

    Attributes:
        requests: those that are not answered yet.
        answered: those that are, of which an answer is kept.
        prompt_tokens: tokens to read, about; of a server, by the length of the texts.
        completion_tokens: the most tokens to write.
        price: the most that it costs, in the currency of `writer.price`.
    """

    requests: int
    answered: int
    prompt_tokens: int
    completion_tokens: int
    price: float


class Asker(Protocol):
    """A language model at hand.

    Attributes:
        name: of the model, with whatever its answers depend on; rows carry it as `synthetic_model`.
        where: a sentence that says where documents go.
    """

    name: str
    where: str

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """The replies, in the order of the requests.

        Collective: all ranks call it with the same requests and get the same replies. Requests that were answered
        before, also in an earlier run of the same output directory, are not sent again.
        """
        ...

    def estimate(self, requests: Sequence[Request]) -> Estimate:
        """What these requests will cost; none is sent. Collective."""
        ...


class WriterBackend(str, Enum):
    """Where the language model runs."""

    local = "local"  # a causal language model of transformers, on the ranks of this command
    api = "api"  # a server that speaks OpenAI's protocol: vLLM, llama.cpp, TGI, Ollama, or a hosted one


@dataclass(kw_only=True)
class PriceConfig:
    """What a server charges, in any currency."""

    input: float = option(0.0, at_least=0)  # for a million tokens that the model reads
    output: float = option(0.0, at_least=0)  # for a million tokens that it writes


@dataclass(kw_only=True)
class WriterConfig(FastPrecisionOptions, ModelOptions):
    """A language model that writes: of `local` a directory or Hub id, of `api` the name that the server knows."""

    backend: WriterBackend = WriterBackend.local
    # Of api: the address, such as http://localhost:8000/v1. Documents go there and nowhere else.
    url: str | None = option(None, in_result=False)
    # Of api: the NAME of the environment variable with the key, never the key itself; default: there is no key.
    key_env: str | None = option(None, in_result=False)
    # Of api: requests in flight of all ranks together. Of local: texts that a rank writes at a time.
    concurrency: int = option(16, at_least=1, in_result=False)
    # Of api, of all ranks together; null: no limit.
    requests_per_minute: int | None = option(None, at_least=1, in_result=False)
    tokens_per_minute: int | None = option(None, at_least=1, in_result=False)  # read, and the most that may be written
    timeout: float = option(300.0, above=0, in_result=False)  # of api: seconds for one answer
    retries: int = option(6, within=(0, 100), in_result=False)  # of api: attempts after the first one of a request
    temperature: float = option(0.7, within=(0, 2))  # 0 takes the most probable token each time
    max_new_tokens: int = option(512, at_least=1)  # of one answer
    price: PriceConfig = option(factory=PriceConfig, in_result=False)


_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_OF_API = ("url", "key_env", "requests_per_minute", "tokens_per_minute")
_OF_LOCAL = ("revision", "trust_remote_code", "precision")


def check_writer(writer: WriterConfig, prefix: str) -> None:
    """Raise a ConfigError for options that cannot work; `prefix`, such as `writer.`, precedes their names."""
    check_values(writer, prefix)
    check = OptionChecks(writer, prefix)
    is_api = writer.backend is WriterBackend.api
    what = "the name of a model that the server has" if is_api else "the directory or Hub id of a language model"
    check.require(bool(writer.model), "model", f"is missing; write {what}")
    defaults = {each.name: each.default for each in fields(writer)}
    for name in _OF_LOCAL if is_api else _OF_API:
        is_default = getattr(writer, name) == defaults[name]
        # Not by `check`, which prints the value: it may be a key.
        if not is_default:
            other = WriterBackend.local if is_api else WriterBackend.api
            raise ConfigError(f"{prefix}{name}: is of {prefix}backend={other.value} only; leave it out")
    if not is_api:
        return
    if writer.key_env is not None and not _VARIABLE.fullmatch(writer.key_env):
        raise ConfigError(
            f"{prefix}key_env: is not the name of an environment variable, such as OPENAI_API_KEY (capital letters, "
            "digits and _); write the name, never the key"
        )
    _check_url(writer.url or "", f"{prefix}url")


def _check_url(url: str, name: str) -> None:
    """Raise a ConfigError for an address that is none, or that has a key in it, which is not printed."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_address = urlsplit(""), False
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{name}: has a user, a password or a query; write the address alone, and the key by key_env")
    if not is_address:
        raise ConfigError(f"{name}={url}: is not an address; write one such as http://localhost:8000/v1")


def is_loopback(url: str) -> bool:
    """Whether an address is of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
