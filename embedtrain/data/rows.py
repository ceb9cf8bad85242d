"""Rows of training data, and how their texts are given to a model: prompts, instructions, lengths, keys.

Nothing here imports torch: files are also read by commands that do not compute.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.recipe import DataConfig
from embedtrain.config.validation import TEXT_ALONE
from embedtrain.data.images.item import without_answers
from embedtrain.errors import ConfigError

T = TypeVar("T")


# What rows of synthetic queries say about them, which commands that write rows keep.
ORIGIN_KEYS = ("synthetic", "synthetic_model", "synthetic_prompt", "kind", "language", "grade")


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents of a row, without prompts.

    Attributes:
        scores: one per document, in float32; empty if the row has no scores.
        ids: one per document, "" for a document without an id; empty if the row has no ids.
        num_dropped: of negatives as they are read, those that equal a positive or another negative and are left out.
    """

    texts: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    ids: tuple[str, ...] = ()
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> "Documents":
        """The documents with these numbers."""
        return Documents(take(self.texts, indices), take(self.scores, indices), take(self.ids, indices))

    def joined(self, others: "Documents") -> "Documents":
        """These documents, then the others; without an id on one side, their ids are ""."""
        ids = (*self.all_ids, *others.all_ids) if self.ids or others.ids else ()
        return Documents((*self.texts, *others.texts), (*self.scores, *others.scores), ids)

    @property
    def all_ids(self) -> tuple[str, ...]:
        """One id per document, also if the row has none."""
        return self.ids or ("",) * len(self.texts)


class RowLocation(NamedTuple):
    """Where a row is from."""

    source: int  # index in `data.train`
    file: str  # path, or id on the Hub
    line: int  # line or row number in the file, from 1


@dataclass(frozen=True, slots=True)
class Example:
    """One checked training row: no text is empty, and no negative is repeated or equal to a positive."""

    query: str  # without a prompt; or the only text of a row that has no documents
    positives: Documents = Documents()  # at least one, unless the loss needs no documents
    negatives: Documents = Documents()
    label: int | None = None
    # Of a teacher, in float32: one for all texts, or one per text in the order query, positives, negatives; or empty.
    vectors: tuple[Sequence[float], ...] = ()
    instruction: str | None = None  # replaces the prompt of the query; "" for no prompt, None to keep the source's
    document_instruction: str | None = None  # replaces the prompt of all documents
    max_negatives: int | None = None  # maximal number of hard negatives that a step uses; None: all
    origin: str | None = None  # of a query that a language model has written: ORIGIN_KEYS as a JSON object
    location: RowLocation | None = None  # None while the file is read

    @property
    def place(self) -> str:
        """`file:line`, for messages."""
        return "" if self.location is None else f"{self.location.file}:{self.location.line}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The query, the positives and the negatives."""
        return (self.query, *self.positives.texts, *self.negatives.texts)

    @property
    def documents(self) -> Documents:
        """The positives, then the negatives."""
        return self.positives.joined(self.negatives)

    @property
    def source(self) -> int:
        """The index in `data.train`."""
        return 0 if self.location is None else self.location.source

    def selected(self, positive: int, negatives: Sequence[int]) -> "Example":
        """What one step uses of the row: one positive and some hard negatives, by their indices as in `Selection`.

        Other positives that are used like negatives are negatives of the result. A row with fewer negatives has fewer
        documents: a repeated negative would count twice in the loss.
        """
        if not len(self.positives):
            return replace(self, negatives=Documents(), vectors=self.vectors[:1])
        chosen = [len(self.positives) + index for index in negatives]
        vectors = self.vectors
        if len(vectors) > 1:
            vectors = (vectors[0], *take(vectors[1:], [positive, *chosen]))
        elif vectors:  # one stands for all texts
            vectors = vectors * (2 + len(chosen))
        return replace(
            self,
            positives=self.positives.take([positive]),
            negatives=self.documents.take(chosen),
            vectors=vectors,
        )

    def with_positives(self, keep: Sequence[bool]) -> "Example":
        """The same row with some of its positives."""
        kept = [index for index, is_kept in enumerate(keep) if is_kept]
        vectors, first_negative = self.vectors, 1 + len(self.positives)
        if len(vectors) == len(self.texts) > 1:
            vectors = (vectors[0], *take(vectors[1:first_negative], kept), *vectors[first_negative:])
        return replace(self, positives=self.positives.take(kept), vectors=vectors)

    def scaled(self, by: float) -> "Example":
        """The same row with scores divided by `by`."""
        if by == 1.0 or not self.positives.scores:
            return self
        positives, negatives = (
            replace(documents, scores=tuple(score / by for score in documents.scores))
            for documents in (self.positives, self.negatives)
        )
        return replace(self, positives=positives, negatives=negatives)


def take(values: Sequence[T], indices: Sequence[int]) -> tuple[T, ...]:
    """The values with these numbers; none if there are no values."""
    return tuple(values[index] for index in indices) if values else ()


def format_row(
    row: Example,
    negatives: Sequence[str],
    ids: Sequence[str],
    scores: tuple[Sequence[float], Sequence[float]] | None,
    written: Callable[[str], Any] = str,
) -> str:
    """The row with `negatives` instead of its own, as JSON in FlagEmbedding's layout, which our reader restores.

    `ids` has one per negative, "" for none, or is empty; `scores` has float32 scores of positives and of negatives.
    `written` gives the value of an item, see `written_item`.
    """
    query, positives = written(row.query), list(map(written, row.positives.texts))
    of_negatives = list(map(written, negatives))
    fields: dict[str, Any] = {"query": query, "pos": positives, "neg": of_negatives}
    symmetric = row.document_instruction is not None and row.document_instruction == row.instruction
    if row.document_instruction is not None and (row.max_negatives is not None or not symmetric):
        document_instruction = row.document_instruction
        fields["query"] = [row.instruction or "", query]
        fields["pos"] = [[document_instruction, text] for text in positives]
        fields["neg"] = [[document_instruction, text] for text in of_negatives]
    elif row.instruction is not None:
        fields["prompt"] = row.instruction
        if symmetric:
            fields["type"] = "symmetric_sts"
    if row.max_negatives is not None:
        fields["type"] = "only_1neg"
    if row.positives.ids:
        fields["pos_id"] = [name or None for name in row.positives.ids]
    if ids:
        fields["neg_id"] = [name or None for name in ids]
    if scores is not None:
        # The shortest decimals that round to the same float32: 0.9, not 0.8999999761581421.
        fields["pos_scores"], fields["neg_scores"] = ([float(str(np.float32(s))) for s in values] for values in scores)
    if row.origin is not None:
        fields |= json.loads(row.origin)
    return json.dumps(fields, ensure_ascii=False)


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

    def prompts(self, row: Example) -> tuple[Prompt, Prompt]:
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
    """A 63-bit hash of a text: BLAKE2b (RFC 7693) of its UTF-8 bytes, truncated, without the sign bit.

    Which chunk of a document answers the query of its row does not count.
    """
    digest = hashlib.blake2b(without_answers(text).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def text_keys(texts: Sequence[str]) -> NDArray[np.int64]:
    """The key of each text: int64 [N]."""
    # A Python list of millions of large integers would take five times the memory.
    return np.fromiter(map(text_key, texts), dtype=np.int64, count=len(texts))


def instructed_query(query: str, instruction: str | None) -> str:
    """The text that the key of a query is computed from: the query with the instruction of its own row.

    One text with two instructions is two queries: a positive of one may be a negative of the other. The prompt of a
    source is not part of the key, nor is that of documents.
    """
    return f"{instruction}\0{query}" if instruction else query
