"""Rows as the model sees them: prompts and instructions in place, and what is left of a text that is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from embedtrain.data.text_format import TextFormat
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Example

_UNLIMITED = 2**30  # tokens: more than any text has


class UntruncatedTokenizer:
    """A model's tokenizer that can also tell how long a text would be uncut.

    Args:
        tokenizer: bound to the model's length.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.bound = tokenizer
        self._uncut = TextTokenizer(tokenizer.tokenizer, _UNLIMITED)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """As it was loaded."""
        return self.bound.tokenizer

    def limit(self, text_format: TextFormat, *, of_queries: bool) -> int:
        """Tokens that are kept of a source's queries, or of its documents."""
        own = text_format.query_max_length if of_queries else text_format.document_max_length
        return self.bound.max_length if own is None else min(own, self.bound.max_length)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, special tokens included, however many they are."""
        return self._uncut.ids(texts)


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text as the model sees it.

    Attributes:
        role: query, positive or negative.
        number: of the positive or negative within its row, from 1; 0 for a query.
        text: with its prompt, and with a tokenizer as its tokens say it, special ones included.
        num_tokens: of it, as far as it is kept; None without a tokenizer.
        num_untruncated: tokens that it would have uncut; None likewise.
        score: of the document, if it has one.
    """

    role: str
    number: int
    text: str
    num_tokens: int | None = None
    num_untruncated: int | None = None
    score: float | None = None


def seen(
    example: Example, text_format: TextFormat, tokenizer: UntruncatedTokenizer | None, most: int
) -> list[ShownText]:
    """A row's texts as the model sees them: the query, and up to `most` positives and `most` negatives."""
    of_query, of_documents = text_format.prompts(example)
    texts = [ShownText("query", 0, of_query(example.query))]
    for role, documents, scores in (
        ("positive", example.positives, example.positive_scores),
        ("negative", example.negatives, example.negative_scores),
    ):
        for place, document in enumerate(documents[:most]):
            texts.append(ShownText(role, place + 1, of_documents(document), score=scores[place] if scores else None))
    return texts if tokenizer is None else [_as_tokens(text, text_format, tokenizer) for text in texts]


def _as_tokens(text: ShownText, text_format: TextFormat, tokenizer: UntruncatedTokenizer) -> ShownText:
    (kept,) = tokenizer.bound.ids([text.text], tokenizer.limit(text_format, of_queries=text.role == "query"))
    (uncut,) = tokenizer.ids([text.text])
    said = tokenizer.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return replace(text, text=str(said), num_tokens=len(kept), num_untruncated=len(uncut))
