"""The texts of a source: lengths in tokens or characters, equal texts, and what the model receives of rows and batches.

R: rows; T: texts of one role, of all rows, row by row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.commands.inspect.sources import RowKeys, batches_of
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.cache.token_store import TokenStore
from embedtrain.data.chunks import plan_towers
from embedtrain.data.images.item import MARK, Picture, item_parts, pictures_of
from embedtrain.data.rows import Example, RowLocation, TextFormat, text_key
from embedtrain.data.sources.pictures import shown_item
from embedtrain.data.tokens import Layout, TextTokenizer
from embedtrain.data.train_data import TrainData
from embedtrain.data.types import SLOT, BatchTokens, EncoderInputs, Slots, TextRole, Tokens


class UntruncatedTokenizer:
    """A model's tokenizer with and without truncation."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.bound = tokenizer
        self._untruncated = tokenizer.untruncated()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """As it was loaded."""
        return self.bound.tokenizer

    def limit(self, text_format: TextFormat, *, of_queries: bool) -> int:
        """The maximal length of a source's queries, or of its documents."""
        if of_queries:
            return self.bound.limit(TextRole.query, text_format.query_max_length)
        return self.bound.limit(TextRole.document, text_format.document_max_length)

    def ids(self, texts: Sequence[str], role: TextRole = TextRole.document) -> list[list[int]]:
        """The tokens of each text without truncation, including special tokens if texts of this role have them."""
        return self._untruncated.ids(texts, role=role)

    def lengths(self, tokens: Tokens) -> NDArray[np.int64]:
        """Tokens of each item: of texts without padding, and of items with pictures as the encoder computes them."""
        lengths = tokens.lengths.copy()
        owners = np.unique(tokens.slots().owners)
        if len(owners):
            lengths[owners] = self.bound.layout.num_tokens(tokens.take(owners))
        return lengths


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text as the model receives it."""

    role: str  # query, positive or negative
    number: int  # of the positive or negative in its row, from 1; 0 for a query
    text: str  # with its prompt; with a tokenizer the decoded tokens, including special tokens
    num_tokens: int | None = None  # after truncation; None without a tokenizer
    num_untruncated: int | None = None  # None without a tokenizer, and with pictures
    num_vectors: int | None = None  # of a late-interaction model, whose skip list leaves some tokens without one
    score: float | None = None


def shown_texts(
    example: Example, text_format: TextFormat, tokenizer: UntruncatedTokenizer | None, limit: int
) -> list[ShownText]:
    """The texts of a row as the model receives them: the query, and up to `limit` positives and negatives each."""
    of_query, of_documents = _prompts(example, text_format, tokenizer)
    texts = [ShownText("query", 0, of_query(example.query))]
    for role, documents in (("positive", example.positives), ("negative", example.negatives)):
        for i, document in enumerate(documents.texts[:limit]):
            score = documents.scores[i] if documents.scores else None
            texts.append(ShownText(role, i + 1, of_documents(document), score=score))
    return texts if tokenizer is None else [_as_tokens(text, texts[0], text_format, tokenizer) for text in texts]


def _prompts(
    example: Example, text_format: TextFormat, tokenizer: UntruncatedTokenizer | None
) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """What surrounds the query and the documents of a row, with what a pair template puts around them."""
    query, document = text_format.prompts(example)
    if tokenizer is None:
        return (lambda text: shown_item(query(text))), (lambda text: shown_item(document(text)))
    layout = tokenizer.bound.layout
    return layout.query_prompt(query), layout.document_prompt(document)


def _as_tokens(
    text: ShownText, query: ShownText, text_format: TextFormat, tokenizer: UntruncatedTokenizer
) -> ShownText:
    """The tokens of a text; of a document for a cross-encoder, those of its pair with the query."""
    role = TextRole.query if text is query else TextRole.document
    bound, layout = tokenizer.bound, tokenizer.bound.layout
    tokens = bound.tokens([text.text], tokenizer.limit(text_format, of_queries=text is query), role=role)
    num_pair_tokens = None if text is query else layout.num_pair_tokens
    if num_pair_tokens is not None:
        of_query = bound.tokens([query.text], tokenizer.limit(text_format, of_queries=True))
        tokens = layout.join(of_query, tokens, bound.max_length)
    if len(tokens.slots()):
        return replace(text, text=_decoded(tokens, layout, role), num_tokens=int(tokenizer.lengths(tokens)[0]))
    num_untruncated = len(tokenizer.ids([text.text], role)[0])
    if num_pair_tokens is not None:
        num_untruncated += len(tokenizer.ids([query.text])[0]) + num_pair_tokens
    num_vectors = int(layout.num_vectors(tokens)[0]) if layout.has_skip_list else None
    return replace(
        text,
        text=_decoded(tokens, layout, role),
        num_tokens=len(tokens.ids),
        num_untruncated=num_untruncated,
        num_vectors=num_vectors,
    )


def _decoded(tokens: Tokens, layout: Layout, role: TextRole) -> str:
    """One text as its tokens say it, with the files of its pictures."""

    def decoded(ids: NDArray[np.int32]) -> str:
        tokenizer = layout.tokenizer_of(role)
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    slots, begin = tokens.slots(), 0
    parts: list[str] = []
    for start, picture in zip(slots.starts.tolist(), slots.pictures(), strict=True):
        parts += [decoded(tokens.ids[begin:start]), shown_item(str(picture))]
        begin = start + SLOT
    return "".join([*parts, decoded(tokens.ids[begin:])])


ROLES = ("queries", "positives", "negatives")
PAIRS = "pairs"  # of the query and each document of a row
MAX_SAMPLED_TEXTS = 10_000  # texts that are tokenised again without truncation
_BLOCK = 1 << 22
_TEXTS_PER_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the texts of one role."""

    values: NDArray[np.int32]  # [T]
    limit: int | None  # maximal tokens; None for lengths in characters
    num_truncated: int  # texts beyond the limit
    num_texts: int  # T
    is_exact: bool = True  # False if some of `values` are estimated from other texts


@dataclass(frozen=True, slots=True)
class PictureSizes:
    """The P different pictures of a source."""

    keys: NDArray[np.int64]  # [P]
    sizes: NDArray[np.int64]  # [P, 2], width and height in pixels
    num_tokens: NDArray[np.int64] | None = None  # [P], that the encoder computes; None without a model

    @classmethod
    def of(
        cls, keys: NDArray[np.int64], sizes: NDArray[np.int64], tokenizer: UntruncatedTokenizer | None
    ) -> "PictureSizes":
        """Those of pictures that occur several times."""
        keys, first = np.unique(keys, return_index=True)
        sizes = sizes[first]
        if tokenizer is None:
            return cls(keys, sizes)
        distinct, index = np.unique(sizes, axis=0, return_inverse=True)
        pictures = Tokens.of_parts([[Picture(0, *size)] for size in distinct.tolist()])
        return cls(keys, sizes, tokenizer.lengths(pictures)[index.reshape(-1)])


@dataclass(frozen=True, slots=True)
class TextStatistics:
    """Statistics of the texts of a source."""

    lengths: dict[str, Lengths]  # of each of ROLES; for a cross-encoder also of PAIRS
    keys: RowKeys
    unit: str  # "tokens" or "characters"
    num_tokens: int = 0  # of all texts after truncation
    num_unknown: int = 0  # unknown tokens among them
    pictures: PictureSizes | None = None  # None if there are none


def measure(
    store: RowStore, tokens: TokenStore | None, text_format: TextFormat, tokenizer: UntruncatedTokenizer | None
) -> TextStatistics:
    """Measure all texts of a source: in tokens if there is a tokenizer, else in characters.

    The token store has the lengths after truncation. Of the texts that reach the limit at most MAX_SAMPLED_TEXTS are
    tokenised again without truncation.
    """
    if tokens is None or tokenizer is None:
        return _by_characters(store)
    lengths, keys, slots = {}, {}, list[Slots]()
    queries, counts = tokens.row_starts[:-1], (store.num_positives, store.num_negatives)
    starts = (queries, queries + 1, queries + 1 + counts[0])
    for i, role in enumerate(ROLES):
        texts = _spans(starts[i], np.ones_like(queries) if not i else counts[i - 1])
        keys[role] = tokens.keys[texts]
        values, has_pictures = _cached_lengths(tokens, texts, tokenizer, slots)
        limit = tokenizer.limit(text_format, of_queries=role == "queries")
        reach = np.flatnonzero((values >= limit) & ~has_pictures)
        sample = reach[_spread(len(reach), MAX_SAMPLED_TEXTS)]
        of_texts = TextRole.query if role == "queries" else TextRole.document
        full = _untruncated_lengths(store, tokens.row_starts, texts[sample], text_format, tokenizer, of_texts)
        values[reach] = full[np.arange(len(reach)) * len(full) // max(1, len(reach))]  # of the nearest sampled text
        num_truncated = int(np.count_nonzero(values[reach] > limit))
        lengths[role] = Lengths(values, limit, num_truncated, len(values), is_exact=len(sample) == len(reach))
    if (num_special := tokenizer.bound.layout.num_pair_tokens) is not None:
        lengths[PAIRS] = _pair_lengths(lengths, counts, num_special, tokenizer.bound.max_length)
    of_rows = RowKeys(**keys, num_positives=counts[0], num_negatives=counts[1])
    pictures = None
    if any(map(len, slots)):
        sizes = np.concatenate([of_block.sizes for of_block in slots])
        pictures = PictureSizes.of(np.concatenate([of_block.keys for of_block in slots]), sizes, tokenizer)
    return TextStatistics(lengths, of_rows, "tokens", len(tokens.values), _unknown(tokens, tokenizer), pictures)


def _cached_lengths(
    tokens: TokenStore, texts: NDArray[np.int64], tokenizer: UntruncatedTokenizer, slots: list[Slots]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Lengths of texts, and whether each has pictures, whose slots are added to `slots`."""
    values, has_pictures = tokens.lengths(texts).astype(np.int32), np.zeros(len(texts), dtype=np.bool_)
    if tokenizer.bound.layout.reads_pictures:
        for start in range(0, len(texts), _TEXTS_PER_BLOCK):
            block = tokens.tokens(texts[start : start + _TEXTS_PER_BLOCK])
            values[start : start + len(block)] = tokenizer.lengths(block)
            slots.append(block.slots())
            has_pictures[start + slots[-1].owners] = True
    return values, has_pictures


def _pair_lengths(
    lengths: dict[str, Lengths], counts: Sequence[NDArray[np.integer]], num_special: int, limit: int
) -> Lengths:
    """Lengths of all pairs before truncation: first those with positives, then those with negatives."""
    of_queries = lengths["queries"].values
    parts = [
        np.repeat(of_queries, count) + lengths[role].values + num_special
        for role, count in zip(ROLES[1:], counts, strict=True)
    ]
    values = np.concatenate(parts).astype(np.int32)
    is_exact = all(lengths[role].is_exact for role in ROLES)
    num_truncated = int(np.count_nonzero(values > limit))
    return Lengths(values, limit, num_truncated, len(values), is_exact=is_exact)


def join_statistics(parts: Sequence[TextStatistics]) -> TextStatistics:
    """The statistics of several sources together, with a limit if all have the same."""
    lengths = {}
    for role in parts[0].lengths:
        of_role = [part.lengths[role] for part in parts]
        limits = {part.limit for part in of_role}
        lengths[role] = Lengths(
            np.concatenate([part.values for part in of_role]),
            limits.pop() if len(limits) == 1 else None,
            num_truncated=sum(part.num_truncated for part in of_role),
            num_texts=sum(part.num_texts for part in of_role),
            is_exact=all(part.is_exact for part in of_role),
        )
    tokens, unknown = (sum(getattr(part, name) for part in parts) for name in ("num_tokens", "num_unknown"))
    keys = RowKeys.join([part.keys for part in parts])
    return TextStatistics(lengths, keys, parts[0].unit, tokens, unknown, _join_pictures(parts))


MAX_DRAWN_PICTURES = 60
_MAX_VISITED_ROWS = 4096  # to draw pictures from


def drawn_pictures(
    store: RowStore, tokenizer: UntruncatedTokenizer | None
) -> list[tuple[Picture, RowLocation, int | None]]:
    """At most MAX_DRAWN_PICTURES different pictures from all over a source, the same in each call.

    Each with the first visited row that has it, and the tokens or patches that the encoder computes.
    """
    found: dict[Picture, RowLocation] = {}
    for row in _spread(len(store), _MAX_VISITED_ROWS).tolist():
        example = store[row]
        assert example.location is not None
        for text in example.texts:
            for picture in pictures_of(text):
                found.setdefault(picture, example.location)
    every = list(found)
    drawn = [every[i] for i in _spread(len(every), MAX_DRAWN_PICTURES).tolist()]
    if tokenizer is None:
        return [(picture, found[picture], None) for picture in drawn]
    lengths = tokenizer.lengths(Tokens.of_parts([[picture] for picture in drawn])).tolist() if drawn else []
    return [(picture, found[picture], length) for picture, length in zip(drawn, lengths, strict=True)]


def _join_pictures(parts: Sequence[TextStatistics]) -> PictureSizes | None:
    """Those of several sources, each once."""
    of_parts = [part.pictures for part in parts if part.pictures is not None]
    if not of_parts:
        return None
    keys, first = np.unique(np.concatenate([part.keys for part in of_parts]), return_index=True)
    counts = [part.num_tokens for part in of_parts if part.num_tokens is not None]
    sizes = np.concatenate([part.sizes for part in of_parts])
    return PictureSizes(keys, sizes[first], np.concatenate(counts)[first] if counts else None)


def _unknown(tokens: TokenStore, tokenizer: UntruncatedTokenizer) -> int:
    """Number of unknown tokens; 0 if there are several towers or pictures, because other numbers are among the ids."""
    loaded = tokenizer.tokenizer
    if tokenizer.bound.layout.num_towers > 1 or tokenizer.bound.layout.reads_pictures:
        return 0
    # Byte-level vocabularies have no unknown token; some declare another special token as such.
    if loaded.unk_token_id is None or loaded.unk_token_id in (loaded.eos_token_id, loaded.bos_token_id):
        return 0
    blocks = (tokens.values[start : start + _BLOCK] for start in range(0, len(tokens.values), _BLOCK))
    return sum(int(np.count_nonzero(block == loaded.unk_token_id)) for block in blocks)


def _by_characters(store: RowStore) -> TextStatistics:
    lengths: dict[str, list[NDArray[np.int32]]] = {role: [] for role in ROLES}
    keys: dict[str, list[NDArray[np.int64]]] = {role: [] for role in ROLES}
    pictures: set[Picture] = set()
    for batch in batches_of(store):
        queries, positives, negatives = batch.columns[:3]
        for role, texts in zip(ROLES, (queries, positives.flatten(), negatives.flatten()), strict=True):
            values = pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int32)
            for row in np.flatnonzero(pc.match_substring(texts, MARK).to_numpy(zero_copy_only=False)).tolist():
                parts = item_parts(texts[row].as_py())
                values[row] = sum(len(part) for part in parts if isinstance(part, str))
                pictures.update(part for part in parts if isinstance(part, Picture))
            lengths[role].append(values)
            keys[role].append(np.fromiter(map(text_key, texts.to_pylist()), dtype=np.int64, count=len(texts)))
    joined_lengths = {role: np.concatenate(parts) for role, parts in lengths.items()}
    sizes = None
    if pictures:
        numbers = np.array([(picture.key, picture.width, picture.height) for picture in pictures], dtype=np.int64)
        sizes = PictureSizes.of(numbers[:, 0], numbers[:, 1:], None)
    return TextStatistics(
        {role: Lengths(values, None, 0, len(values)) for role, values in joined_lengths.items()},
        RowKeys(
            **{role: np.concatenate(parts) for role, parts in keys.items()},
            num_positives=store.num_positives,
            num_negatives=store.num_negatives,
        ),
        "characters",
        pictures=sizes,
    )


def _untruncated_lengths(
    store: RowStore,
    first: NDArray[np.int64],
    texts: NDArray[np.int64],
    text_format: TextFormat,
    tokenizer: UntruncatedTokenizer,
    role: TextRole,
) -> NDArray[np.int32]:
    """Lengths of texts of one role without truncation, by their indices in the token store."""
    rows = np.searchsorted(first, texts, side="right") - 1
    lengths = np.empty(len(texts), dtype=np.int32)
    for start in range(0, len(texts), 256):  # in small blocks, because the texts are long
        prompted = []
        for text, row in zip(texts[start : start + 256].tolist(), rows[start : start + 256].tolist(), strict=True):
            example, index = store[row], text - int(first[row])
            prompts = _prompts(example, text_format, tokenizer)
            prompted.append(prompts[min(index, 1)](example.texts[index]))
        lengths[start : start + 256] = [len(ids) for ids in tokenizer.ids(prompted, role)]
    return lengths


def _spans(starts: NDArray[np.int64], counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """The concatenated ranges of these starts and lengths."""
    before = np.cumsum(counts, dtype=np.int64) - counts
    return np.repeat(starts - before, counts) + np.arange(int(np.sum(counts)))


def _spread(count: int, limit: int) -> NDArray[np.int64]:
    """At most `limit` of `count` indices, evenly spread."""
    return np.arange(count) if count <= limit else np.arange(limit) * count // limit


@dataclass(frozen=True, slots=True)
class Cost:
    """The mean cost of some batches."""

    ranks: int
    tokens: float  # real tokens of a batch over all ranks
    chunks: float  # forward passes of a rank for a batch
    padding: float  # fraction of computed tokens that are padding
    imbalance: float  # computed tokens of the busiest rank, divided by the mean of all ranks


def batch_cost(
    data: TrainData,
    batches: Sequence[int],
    ranks: int,
    chunk_tokens: int,
    pass_overhead_tokens: int,
    *,
    packed: bool = False,
    inputs: Callable[[BatchTokens], EncoderInputs],
) -> Cost:
    """The cost of these batches of tokenised data; for other arguments see `plan_towers`.

    `inputs` gives what the encoder computes of a batch: texts, or pairs of texts.
    """
    real, chunks, computed = 0, 0, []
    for number in batches:
        tokens = data.batch(number).tokens
        assert tokens is not None
        of_batch = inputs(tokens)
        lengths = of_batch.costs
        plan = plan_towers(
            lengths,
            of_batch.towers,
            ranks,
            chunk_tokens,
            pass_overhead_tokens,
            packed=packed,
            further=of_batch.further,
        )
        real, chunks = real + int(lengths.sum()), chunks + plan.num_chunks
        computed.append(
            [count_computed_tokens(plan.chunks_of_rank(rank), lengths, packed=packed) for rank in range(ranks)]
        )
    by_rank = np.array(computed, dtype=np.float64)
    return Cost(
        ranks,
        real / len(batches),
        chunks / len(batches),
        1 - real / float(by_rank.sum()),
        float((by_rank.max(axis=1) / by_rank.mean(axis=1)).mean()),
    )


def count_computed_tokens(
    chunks: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64], *, packed: bool = False
) -> int:
    """Tokens that a rank computes for its chunks of texts, padding included, unless they are packed."""
    if packed:
        return sum(int(lengths[chunk].sum()) for chunk in chunks)
    return sum(len(chunk) * int(lengths[chunk].max()) for chunk in chunks if len(chunk))
