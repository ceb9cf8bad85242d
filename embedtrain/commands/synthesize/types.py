"""What is asked of a language model, and what it answers: between those who write requests and those who send them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal, Protocol

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


class Asker(Protocol):
    """A language model at hand.

    Attributes:
        name: of the model, with whatever its answers depend on; rows carry it as `synthetic_model`.
    """

    name: str

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """The replies, in the order of the requests.

        Collective: all ranks call it with the same requests and get the same replies. Requests that were answered
        before, also in an earlier run of the same output directory, are not sent again.
        """
        ...
