"""The texts of a source: lengths in tokens or characters, keys of equal texts, and rows as the model receives them.

R: rows; T: texts of one role, of all rows, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.token_store import TokenStore
from embedtrain.data.keys import text_key
from embedtrain.data.text_format import TextFormat
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Example
from embedtrain.inspect.rows import RowKeys, batches_of

_UNLIMITED = 2**30  # tokens: more than any text has


class UntruncatedTokenizer:
    """A model's tokenizer with and without truncation.

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
        """The maximal length of a source's queries, or of its documents."""
        own = text_format.query_max_length if of_queries else text_format.document_max_length
        return self.bound.max_length if own is None else min(own, self.bound.max_length)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text without truncation, including special tokens."""
        return self._uncut.ids(texts)


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text as the model receives it.

    Attributes:
        role: query, positive or negative.
        number: index of the positive or negative in its row, from 1; 0 for a query.
        text: with its prompt; with a tokenizer the decoded tokens, including special tokens.
        num_tokens: number of tokens after truncation; None without a tokenizer.
        num_untruncated: number of tokens before truncation; None without a tokenizer.
        score: of the document, if it has one.
    """

    role: str
    number: int
    text: str
    num_tokens: int | None = None
    num_untruncated: int | None = None
    score: float | None = None


def shown_texts(
    example: Example, text_format: TextFormat, tokenizer: UntruncatedTokenizer | None, limit: int
) -> list[ShownText]:
    """The texts of a row as the model receives them: the query, and up to `limit` positives and negatives each."""
    of_query, of_documents = text_format.prompts(example)
    texts = [ShownText("query", 0, of_query(example.query))]
    for role, documents, scores in (
        ("positive", example.positives, example.positive_scores),
        ("negative", example.negatives, example.negative_scores),
    ):
        for place, document in enumerate(documents[:limit]):
            texts.append(ShownText(role, place + 1, of_documents(document), score=scores[place] if scores else None))
    return texts if tokenizer is None else [_as_tokens(text, text_format, tokenizer) for text in texts]


def _as_tokens(text: ShownText, text_format: TextFormat, tokenizer: UntruncatedTokenizer) -> ShownText:
    (kept,) = tokenizer.bound.ids([text.text], tokenizer.limit(text_format, of_queries=text.role == "query"))
    (uncut,) = tokenizer.ids([text.text])
    decoded = tokenizer.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return replace(text, text=str(decoded), num_tokens=len(kept), num_untruncated=len(uncut))


ROLES = ("queries", "positives", "negatives")
MAX_SAMPLED_TEXTS = 10_000  # texts that are tokenised anew for their whole length
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the texts of one role are.

    Attributes:
        values: int32 [T], or of a sample of them.
        limit: tokens that are kept of each; None for lengths in characters.
        num_truncated: how many of `values` are longer than that.
        num_texts: T.
        is_exact: whether every text was measured whole; else `values` are partly like those of others.
    """

    values: NDArray[np.int32]
    limit: int | None
    num_truncated: int
    num_texts: int
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class TextStatistics:
    """The texts of a source, measured.

    Attributes:
        lengths: of each of ROLES.
        keys: what tells equal texts.
        unit: "tokens" or "characters".
        num_tokens: of all texts as they are kept; 0 where no tokens are.
        num_unknown: of them, those that stand for what the vocabulary lacks.
    """

    lengths: dict[str, Lengths]
    keys: RowKeys
    unit: str
    num_tokens: int = 0
    num_unknown: int = 0


def measure(
    store: RowStore, tokens: TokenStore | None, text_format: TextFormat, tokenizer: UntruncatedTokenizer | None
) -> TextStatistics:
    """Measure all texts of a source: in tokens where there is a tokenizer, else in characters.

    The token store knows how long every text is once it is cut. Of those that reach the limit, as many as
    MOST_SAMPLED are tokenised anew without it.

    Args:
        store: the source's rows.
        tokens: their tokens, where there is a tokenizer.
        text_format: of its texts.
        tokenizer: the model's.
    """
    if tokens is None or tokenizer is None:
        return _by_characters(store)
    lengths, keys = {}, {}
    first, counts = tokens.first[:-1], (store.num_positives, store.num_negatives)
    starts = (first, first + 1, first + 1 + counts[0])
    for place, role in enumerate(ROLES):
        texts = _spans(starts[place], np.ones_like(first) if not place else counts[place - 1])
        keys[role] = tokens.keys[texts]
        found = tokens.lengths(texts).astype(np.int32)
        limit = tokenizer.limit(text_format, of_queries=role == "queries")
        reach = np.flatnonzero(found >= limit)
        sample = reach[_spread(len(reach), MAX_SAMPLED_TEXTS)]
        long = _whole_lengths(store, tokens.first, texts[sample], text_format, tokenizer)
        found[reach] = long[np.arange(len(reach)) * len(long) // max(1, len(reach))]  # each as the one measured near it
        num_truncated = int(np.count_nonzero(found[reach] > limit))
        lengths[role] = Lengths(found, limit, num_truncated, len(found), is_exact=len(sample) == len(reach))
    of_rows = RowKeys(**keys, num_positives=counts[0], num_negatives=counts[1])
    return TextStatistics(lengths, of_rows, "tokens", len(tokens.values), _unknown(tokens, tokenizer))


def joined(parts: Sequence[TextStatistics]) -> TextStatistics:
    """The texts of several sources together; a limit stays where it is that of all."""
    lengths = {}
    for role in ROLES:
        those = [part.lengths[role] for part in parts]
        limits = {one.limit for one in those}
        lengths[role] = Lengths(
            np.concatenate([one.values for one in those]),
            limits.pop() if len(limits) == 1 else None,
            num_truncated=sum(one.num_truncated for one in those),
            num_texts=sum(one.num_texts for one in those),
            is_exact=all(one.is_exact for one in those),
        )
    tokens, unknown = (sum(getattr(part, name) for part in parts) for name in ("num_tokens", "num_unknown"))
    return TextStatistics(lengths, RowKeys.joined([part.keys for part in parts]), parts[0].unit, tokens, unknown)


def _unknown(tokens: TokenStore, tokenizer: UntruncatedTokenizer) -> int:
    """How many of a source's tokens stand for what the vocabulary lacks."""
    loaded = tokenizer.tokenizer
    # Vocabularies of bytes lack nothing; some name another special token for it.
    if loaded.unk_token_id is None or loaded.unk_token_id in (loaded.eos_token_id, loaded.bos_token_id):
        return 0
    blocks = (tokens.values[start : start + _BLOCK] for start in range(0, len(tokens.values), _BLOCK))
    return sum(int(np.count_nonzero(block == loaded.unk_token_id)) for block in blocks)


def _by_characters(store: RowStore) -> TextStatistics:
    lengths: dict[str, list[NDArray[np.int32]]] = {role: [] for role in ROLES}
    keys: dict[str, list[NDArray[np.int64]]] = {role: [] for role in ROLES}
    for batch in batches_of(store):
        queries, positives, negatives = batch.columns[:3]
        for role, texts in zip(ROLES, (queries, positives.flatten(), negatives.flatten()), strict=True):
            lengths[role].append(pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int32))
            keys[role].append(np.fromiter(map(text_key, texts.to_pylist()), dtype=np.int64, count=len(texts)))
    found = {role: np.concatenate(parts) for role, parts in lengths.items()}
    return TextStatistics(
        {role: Lengths(values, None, 0, len(values)) for role, values in found.items()},
        RowKeys(
            **{role: np.concatenate(parts) for role, parts in keys.items()},
            num_positives=store.num_positives,
            num_negatives=store.num_negatives,
        ),
        "characters",
    )


def _whole_lengths(
    store: RowStore,
    first: NDArray[np.int64],
    texts: NDArray[np.int64],
    text_format: TextFormat,
    tokenizer: UntruncatedTokenizer,
) -> NDArray[np.int32]:
    """Tokens that some texts have uncut, by their places in the token store."""
    rows = np.searchsorted(first, texts, side="right") - 1
    found = np.empty(len(texts), dtype=np.int32)
    for start in range(0, len(texts), 256):  # long ones: little is held at a time
        prompted = []
        for text, row in zip(texts[start : start + 256].tolist(), rows[start : start + 256].tolist(), strict=True):
            example, place = store[row], text - int(first[row])
            prompts = text_format.prompts(example)
            plain = (example.query, *example.positives, *example.negatives)[place]
            prompted.append(prompts[min(place, 1)](plain))
        found[start : start + 256] = [len(ids) for ids in tokenizer.ids(prompted)]
    return found


def _spans(starts: NDArray[np.int64], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """For each start that many numbers from it on, one after the other."""
    before = np.cumsum(counts, dtype=np.int64) - counts
    return np.repeat(starts - before, counts) + np.arange(int(np.sum(counts)))


def _spread(count: int, limit: int) -> NDArray[np.int64]:
    """All of so many places, or `most` of them, evenly spread."""
    return np.arange(count) if count <= limit else np.arange(limit) * count // limit
