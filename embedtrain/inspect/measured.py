"""The texts of a source of training rows in figures: how long they are, and keys that tell equal ones.

R: rows; T: texts of one role, of all rows, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedtrain.data.cache.row_table import RowStore
from embedtrain.data.cache.token_store import TokenStore
from embedtrain.data.drawn import Given
from embedtrain.data.keys import text_key
from embedtrain.data.prompts import row_prompts
from embedtrain.inspect.beside import batches_of
from embedtrain.inspect.duplicates import RowKeys
from embedtrain.inspect.seen import UntruncatedTokenizer

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
    store: RowStore, tokens: TokenStore | None, given: Given, tokenizer: UntruncatedTokenizer | None
) -> TextStatistics:
    """Measure all texts of a source: in tokens where there is a tokenizer, else in characters.

    The token store knows how long every text is once it is cut. Of those that reach the limit, as many as
    MOST_SAMPLED are tokenised anew without it.

    Args:
        store: the source's rows.
        tokens: their tokens, where there is a tokenizer.
        given: what holds for all rows.
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
        limit = tokenizer.limit(given, of_queries=role == "queries")
        reach = np.flatnonzero(found >= limit)
        sample = reach[_spread(len(reach), MAX_SAMPLED_TEXTS)]
        long = _whole_lengths(store, tokens.first, texts[sample], given, tokenizer)
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
    store: RowStore, first: NDArray[np.int64], texts: NDArray[np.int64], given: Given, tokenizer: UntruncatedTokenizer
) -> NDArray[np.int32]:
    """Tokens that some texts have uncut, by their places in the token store."""
    rows = np.searchsorted(first, texts, side="right") - 1
    found = np.empty(len(texts), dtype=np.int32)
    for start in range(0, len(texts), 256):  # long ones: little is held at a time
        prompted = []
        for text, row in zip(texts[start : start + 256].tolist(), rows[start : start + 256].tolist(), strict=True):
            example, place = store[row], text - int(first[row])
            prompts = row_prompts(example, given.query_prompt, given.document_prompt, given.instruction_format)
            plain = (example.query, *example.positives, *example.negatives)[place]
            prompted.append(prompts[min(place, 1)](plain))
        found[start : start + 256] = [len(ids) for ids in tokenizer.ids(prompted)]
    return found


def _spans(starts: NDArray[np.int64], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """For each start that many numbers from it on, one after the other."""
    before = np.cumsum(counts, dtype=np.int64) - counts
    return np.repeat(starts - before, counts) + np.arange(int(np.sum(counts)))


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """All of so many places, or `most` of them, evenly spread."""
    return np.arange(count) if count <= most else np.arange(most) * count // most
