"""How queries and documents are given to a model (prompts, instructions, maximal lengths), and keys of equal texts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from embedtrain.config.recipe import DataConfig
from embedtrain.config.validation import TEXT_ALONE
from embedtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text before and after a query or document."""

    prefix: str = ""
    suffix: str = ""

    def __call__(self, text: str) -> str:
        """The text with its prompt."""
        return f"{self.prefix}{text}{self.suffix}"

    def around(self, prompt: "Prompt") -> "Prompt":
        """This text around that of another prompt."""
        return Prompt(self.prefix + prompt.prefix, prompt.suffix + self.suffix)


NO_PROMPT = Prompt()


class HasInstructions(Protocol):
    """A row that may carry instructions: an Example or Texts."""

    @property
    def instruction(self) -> str | None:
        """Replaces the prompt of the query; "" for none, None to keep the prompt."""
        ...

    @property
    def document_instruction(self) -> str | None:
        """Replaces the prompt of all documents of the row."""
        ...


class HasTextOptions(Protocol):
    """An element of `data.train`, or another dataclass with these options; None is the model's or the command's."""

    query_prompt: str | None
    document_prompt: str | None
    instruction_format: str | None
    query_max_length: int | None
    document_max_length: int | None


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Prompts, format of instructions and maximal lengths of the texts of one source."""

    query_prompt: str = ""  # before a query whose row has no instruction
    document_prompt: str = ""  # before a document whose row has no instruction for documents
    # Contains `{instruction}`, and `{text}` once; `{text}` alone: rows have prompts as if they had no instruction.
    instruction_format: str = DataConfig.instruction_format
    query_max_length: int | None = None  # tokens including special tokens; None: the model's
    document_max_length: int | None = None

    @classmethod
    def of(cls, source: HasTextOptions, default: "TextFormat") -> "TextFormat":
        """The format from a source's own options, and from `default` where they are not set."""
        query_prompt, document_prompt = source.query_prompt, source.document_prompt
        return cls(
            query_prompt=default.query_prompt if query_prompt is None else query_prompt,
            document_prompt=default.document_prompt if document_prompt is None else document_prompt,
            instruction_format=source.instruction_format or default.instruction_format,
            query_max_length=source.query_max_length,
            document_max_length=source.document_max_length,
        )

    def query(self, instruction: str | None) -> Prompt:
        """The prompt of a query whose row has this instruction; a ConfigError if `instruction_format` is invalid."""
        return self._prompt(instruction, self.query_prompt)

    def document(self, instruction: str | None) -> Prompt:
        """The prompt of the documents of a row with this instruction for documents; errors as in `query`."""
        return self._prompt(instruction, self.document_prompt)

    def prompts(self, row: HasInstructions) -> tuple[Prompt, Prompt]:
        """The prompts of a row's query and of its documents."""
        return self.query(row.instruction), self.document(row.document_instruction)

    def limited_to(self, max_length: int) -> "TextFormat":
        """The same format with both maximal lengths at most `max_length`."""
        lengths = (self.query_max_length, self.document_max_length)
        query, document = (max_length if length is None else min(length, max_length) for length in lengths)
        return replace(self, query_max_length=query, document_max_length=document)

    def _prompt(self, instruction: str | None, prompt: str) -> Prompt:
        if instruction is None or self.instruction_format == TEXT_ALONE:
            return Prompt(prompt)
        if not instruction:
            return NO_PROMPT
        # Split before the instruction is inserted: it may itself contain "{text}".
        prefix, text, suffix = self.instruction_format.partition("{text}")
        if not text or "{text}" in suffix or "{instruction}" not in prefix + suffix:
            raise ConfigError(
                f"data.instruction_format={self.instruction_format!r} must contain {{instruction}}, and {{text}} once, "
                "such as 'Instruct: {instruction}\\nQuery: {text}'"
            )
        return Prompt(*(part.replace("{instruction}", instruction) for part in (prefix, suffix)))


def text_key(text: str) -> int:
    """A 63-bit hash of a text: BLAKE2b (RFC 7693) of its UTF-8 bytes, truncated, without the sign bit."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def text_keys(texts: Sequence[str]) -> torch.Tensor:
    """The key of each text: int64 [N]."""
    # A Python list of millions of large integers would take five times the memory.
    return torch.from_numpy(np.fromiter(map(text_key, texts), dtype=np.int64, count=len(texts)))


def instructed_query(query: str, instruction: str | None) -> str:
    """The text that the key of a query is computed from: the query with the instruction of its own row.

    One text with two instructions is two queries: a positive of one may be a negative of the other. The prompt of a
    source is not part of the key, nor is that of documents.
    """
    return f"{instruction}\0{query}" if instruction else query
