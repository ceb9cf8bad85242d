"""The layouts of static embedding models, of documents in chunks, and of vision-language models.

That of other models is `data.tokens.Layout`.

N: texts; C: chunks of documents.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from embedtrain.config.evaluation import IndexConfig
from embedtrain.config.losses import VECTOR_TEMPERATURE_BOUNDS, VectorSimilarity
from embedtrain.data.images.files import PICTURES, BadPicture, decode_picture
from embedtrain.data.images.item import Picture, chunks_of, item_parts
from embedtrain.data.images.layout import BLANK, PictureLayout
from embedtrain.data.images.processing import FixedSize, ImageProcessing, NaFlex, QwenPatches, Tiles
from embedtrain.data.tokens import UNLIMITED, FastTokenizer, Layout
from embedtrain.data.types import (
    ANSWERS,
    NO_VECTOR,
    NOT_POOLED,
    SLOT,
    STARTS_CHUNK,
    BatchTokens,
    Chunk,
    EncoderInputs,
    InputTexts,
    Packing,
    TextRole,
    Tokens,
)
from embedtrain.errors import DataError
from embedtrain.formats.chat_template import ItemTemplate, Piece
from embedtrain.inference.vectors import require_no_fp16, vector_score
from embedtrain.kinds.late_interaction.score import MaxSim, TokenVectorStore
from embedtrain.losses.encoded import Part
from embedtrain.losses.score import SENTENCE_EMBEDDING, Score
from embedtrain.models.vision_language import VisionFamily


class StaticLayout(Layout):
    """Texts without special tokens, as sentence-transformers' StaticEmbedding has them.

    A text without tokens has one that is not pooled, so that its vector is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, special_tokens=False)
        self.nothing, self.caches_flags = int(tokenizer.pad_token_id or 0), True

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts; that of a text without tokens is flagged NOT_POOLED."""
        ids = self.fast.ids(list(texts), limit) if texts else []
        tokens = Tokens.of([text or [self.nothing] for text in ids])
        return Tokens.with_unpooled(tokens.ids, tokens.lengths, np.array([not text for text in ids], dtype=np.int64))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths."""
        return (~self.nothing, "no special tokens")


Indices = NDArray[np.int64]


class ChunkedLayout(Layout):
    """Texts, and documents in chunks, which are encoded in one forward pass and have a vector of each chunk.

    Günther et al., "Late Chunking: Contextual Chunk Embeddings Using Long-Context Embedding Models" (2024). A chunk
    ends as a text ends, with the special tokens that the tokenizer writes after a text; the first begins as a text
    begins. So a document of one chunk is the text.

    A document that is longer than the model allows keeps as many whole chunks as fit, around one that answers the
    query, else from the beginning; only a chunk that is alone is cut.

    In training, the positive of a row is one of its document's chunks. The others are documents of the row as well, and
    so hard negatives; with `negatives=False` they are context, and have no vectors.
    """

    flags_tokens: ClassVar[bool] = True

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, include_prompt: bool = True, negatives: bool = True
    ) -> None:
        super().__init__(tokenizer, include_prompt=include_prompt)
        self.negatives = negatives
        self._words = FastTokenizer(tokenizer, special_tokens=False)
        own, ids = self._words.ids(["a"], UNLIMITED)[0], self.fast.ids(["a"], UNLIMITED)[0]
        start = next((n for n in range(len(ids)) if ids[n : n + len(own)] == own), 0)
        self.before, self.after = ids[:start], ids[start + len(own) :]

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts and of documents in chunks, whose chunks are flagged."""
        of_texts = [prompts] * len(texts) if isinstance(prompts, str) else list(prompts)
        documents = [chunks_of(text) for text in texts]
        whole = super().tokenize(
            ["".join(chunks) if len(chunks) == 1 else "" for chunks, _ in documents], limit, of_texts, role
        )
        if all(len(chunks) == 1 for chunks, _ in documents):
            return whole
        # The chunks of all documents become tokens together.
        split = [chunks for chunks, _ in documents if len(chunks) > 1]
        ids = iter(self._words.ids([chunk for chunks in split for chunk in chunks], UNLIMITED))
        counts = {"": 0} if self.include_prompt else self._prompt_lengths(of_texts, limit)
        parts = list[Tokens]()
        for number, ((chunks, answers), prompt) in enumerate(zip(documents, of_texts, strict=True)):
            if len(chunks) == 1:
                parts.append(whole.take([number]))
                continue
            document = self._document([next(ids) for _ in chunks], chunks, answers, limit, prompt)
            if not self.include_prompt and counts[prompt]:
                first = int(np.flatnonzero(np.append(document.flags, STARTS_CHUNK) & STARTS_CHUNK)[0])
                document.flags[: min(counts[prompt], first - 1)] |= NOT_POOLED
            parts.append(document)
        return Tokens.concatenated(parts)

    def _document(
        self, ids: list[list[int]], chunks: Sequence[str], answers: Sequence[int], limit: int, prompt: str
    ) -> Tokens:
        """The tokens of one document; its first chunk begins with the prompt."""
        room, chosen = limit - len(self.before), answers[0] if answers else 0
        lengths = [len(chunk) + len(self.after) for chunk in ids]
        kept = window(lengths, chosen, room)
        if kept.start and prompt:  # with which the first chunk begins, that is left out
            kept = window(lengths, chosen, room - len(self._words.ids([prompt], UNLIMITED)[0]) - 1)
            if kept.start:
                ids[kept.start] = self._words.ids([prompt + chunks[kept.start]], UNLIMITED)[0]
        numbers, flags = list[int](), list[int]()
        for number in kept:
            start = [] if numbers else self.before
            room = limit - len(numbers) - len(start) - len(self.after)
            own = [*start, *ids[number][: max(room, 0)], *self.after] or [self.nothing]
            flag = (int(STARTS_CHUNK) if numbers else 0) | (int(ANSWERS) if number in answers else 0)
            numbers += own
            flags += [flag, *[0] * (len(own) - 1)]
        return Tokens(
            np.array(numbers, dtype=np.int32), np.array(flags, dtype=np.uint8), np.array([len(numbers)], dtype=np.int64)
        )

    def chunk_windows(self, chunks: Sequence[str], limit: int, prompt: str = "", *, overlap: int = 0) -> list[range]:
        """As many chunks as fit, from the first on; a chunk that does not fit is alone, and cut."""
        own = self._words.ids([prompt + chunks[0], *chunks[1:]], UNLIMITED)
        ends = np.cumsum([0, *(len(chunk) + len(self.after) for chunk in own)])
        of_prompt = len(self._words.ids([prompt], UNLIMITED)[0]) + 1 if prompt else 0

        def end_of(start: int) -> int:
            room = limit - len(self.before) - (of_prompt if start else 0)
            return max(start + 1, int(np.searchsorted(ends, ends[start] + room, side="right")) - 1)

        windows = [range(end_of(0))]
        while (end := windows[-1].stop) < len(chunks):
            # Fewer chunks are repeated where the next one does not fit beside them.
            first = max(windows[-1].start + 1, end - overlap)
            start = next(start for start in range(first, end + 1) if start == end or end_of(start) > end)
            windows.append(range(start, end_of(start)))
        return windows

    def num_vectors(self, tokens: Tokens) -> Indices:
        """Chunks of each text that have a vector."""
        chunks = _Chunks(tokens)
        return np.bincount(chunks.texts[chunks.have_vectors], minlength=len(tokens))

    def inputs(self, tokens: BatchTokens, max_length: int) -> EncoderInputs:
        """What the encoder computes of a batch: each query and each document, whose chunks a loss compares."""
        inputs = super().inputs(tokens, max_length)
        laid_out = inputs.tokens(np.arange(len(inputs.lengths)))
        chunks, num_rows = _Chunks(laid_out), inputs.num_queries
        firsts = num_rows + np.cumsum(tokens.num_documents) - tokens.num_documents  # of rows that have documents
        of_positive = np.isin(chunks.texts, firsts)
        is_positive = of_positive & chunks.first_of(chunks.answer | chunks.alone)
        # Further chunks that answer the query are neither its positive nor a negative of any query.
        also_answers = of_positive & chunks.answer & ~is_positive
        is_context = np.isin(chunks.texts, chunks.texts[chunks.answer]) & ~chunks.answer
        used = ~also_answers & (self.negatives | ~is_context)
        laid_out.flags[np.repeat(~used, chunks.lengths)] |= NO_VECTOR
        texts, positives = chunks.texts[used], is_positive[used]
        in_order = np.lexsort((~positives, texts))
        order = np.empty_like(in_order)
        order[in_order] = np.arange(len(in_order))
        counts = np.bincount(texts, minlength=len(laid_out))
        keys = chunks.keys(len(self.before), len(self.after))[used][in_order]
        keys[:num_rows] = tokens.keys[:num_rows]
        num_documents = np.add.reduceat(np.append(counts[num_rows:], 0), firsts - num_rows) if num_rows else counts[:0]
        compared = InputTexts(np.where(tokens.num_documents > 0, num_documents, 0), keys, order, counts)
        return replace(inputs, tokens=laid_out.take, texts=compared)

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """N texts as one chunk, with the tokens that are pooled to the vector of each of their chunks."""
        chunk = super().chunk(tokens, rows, packed=packed)
        chunks = _Chunks(tokens)
        pooled = tokens.flags & (NOT_POOLED | NO_VECTOR) == 0
        numbers = np.repeat(np.arange(len(chunks.lengths)), chunks.lengths)[pooled]
        lengths = np.bincount(numbers, minlength=len(chunks.lengths))[chunks.have_vectors]
        chunk.segments, chunk.pooled = Packing.of(lengths, lengths), None
        chunk.sizes = np.bincount(chunks.texts[chunks.have_vectors], minlength=len(tokens))
        if not packed or not pooled.all():
            width = chunk.ids.shape[1]
            starts = np.cumsum(tokens.lengths) - tokens.lengths
            first = starts if packed else np.arange(len(tokens)) * width
            indices = np.arange(len(tokens.ids)) + np.repeat(first - starts, tokens.lengths)
            chunk.token_rows = torch.from_numpy(indices[pooled])
        return chunk

    def alone(self) -> Layout:
        """The layout of whole texts."""
        return Layout(self.tokenizer, include_prompt=self.include_prompt)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens of a text besides the tokenizer and lengths."""
        return (*super().identity, "chunks")


class BestChunk(MaxSim):
    """The similarity of a query and the chunk of a document that is closest to it. A query is one chunk.

    Losses compare chunks, each with one vector.
    """

    temperature_bounds = VECTOR_TEMPERATURE_BOUNDS
    kind = "dense"
    is_symmetric = True
    one_vector = True
    named_by_loss = True
    pools_tokens = False

    def __init__(self, similarity: VectorSimilarity) -> None:
        super().__init__(mean=False)
        self.name, self._similarity = similarity.value, similarity
        self._is_cosine = similarity is VectorSimilarity.cosine

    @property
    def views(self) -> Mapping[str, Score]:
        """Chunks alone."""
        return {"chunks": vector_score(self._similarity)}

    def search_rows(self, values: Tensor, dimension: int | None = None) -> Tensor:
        """The vectors of chunks, or their first dimensions; of length 1 for the cosine."""
        return super().search_rows(values, dimension) if self._is_cosine else values[:, :dimension].float()

    def outputs(self, part: Part) -> dict[str, Part]:
        """The vectors of texts, or of the chunks of each document."""
        return {SENTENCE_EMBEDDING: part.one_row_each() or part}

    def store(self, config: IndexConfig, device: torch.device, expected: int) -> TokenVectorStore:
        """A store of the vectors of chunks."""
        if not self._is_cosine:
            require_no_fp16(config, self.name)
        return super().store(config, device, expected)


def window(lengths: Sequence[int], chosen: int, room: int) -> range:
    """The chunks that are kept of a document with chunks of these lengths: `chosen`, and as many beside it as fit.

    They are added on both sides in turn, until neither neighbour fits.
    """
    first, end, total = chosen, chosen + 1, lengths[chosen]
    while True:
        before = first > 0 and total + lengths[first - 1] <= room
        if before:
            first -= 1
            total += lengths[first]
        after = end < len(lengths) and total + lengths[end] <= room
        if after:
            total += lengths[end]
            end += 1
        if not before and not after:
            return range(first, end)


class _Chunks:
    """The C chunks of N texts, in order.

    Attributes:
        texts: int64 [C], the text of each.
        starts, lengths: int64 [C], the first token of each among all, and how many it has.
        answer: bool [C], whether it answers the query of its row.
        alone: bool [C], whether its text has no other.
        have_vectors: bool [C].
    """

    def __init__(self, tokens: Tokens) -> None:
        self._ids = tokens.ids
        begins = tokens.flags & STARTS_CHUNK != 0
        firsts = np.cumsum(tokens.lengths) - tokens.lengths
        begins[firsts] = True
        self.starts = np.flatnonzero(begins)
        self.texts = np.searchsorted(firsts, self.starts, side="right") - 1
        self.lengths = np.diff(np.append(self.starts, len(tokens.ids)))
        self.answer = tokens.flags[self.starts] & ANSWERS != 0
        self.alone = np.bincount(self.texts, minlength=len(tokens))[self.texts] == 1
        self.have_vectors = tokens.flags[self.starts] & NO_VECTOR == 0

    def first_of(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The first chosen chunk of each text that has one: bool [C]."""
        numbers = np.flatnonzero(chosen)
        first = np.zeros(len(chosen), dtype=np.bool_)
        first[numbers[np.unique(self.texts[numbers], return_index=True)[1]]] = True
        return first

    def keys(self, num_before: int, num_after: int) -> Indices:
        """Of the tokens of each, without special tokens around: equal where these are. int64 [C], not negative."""
        positions = np.arange(len(self._ids)) - np.repeat(self.starts, self.lengths)
        is_first = np.append(True, np.diff(self.texts) != 0) if len(self.texts) else np.zeros(0, np.bool_)
        skipped, ends = np.where(is_first, num_before, 0), self.lengths - num_after
        position = positions - np.repeat(skipped, self.lengths)
        counted = (position >= 0) & (positions < np.repeat(ends, self.lengths))
        mixed = _mixed(self._ids.astype(np.uint64) << np.uint64(32) | (position + 1).astype(np.uint32))
        sums = np.add.reduceat(np.where(counted, mixed, np.uint64(0)), self.starts)
        return (_mixed(sums) >> np.uint64(1)).astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele et al., 2014): a permutation of 64-bit numbers that looks random."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ values >> np.uint64(31)
    return mixed


@dataclass(frozen=True)
class Markup:
    """What a vision-language model reads around items, and in place of pictures.

    Attributes:
        template: what stands around an item.
        image: the id that stands for each row of a picture.
        picture: all ids of a picture of so many rows and columns (`ImageProcessing.grid`), those rows among them.
    """

    template: ItemTemplate
    image: int
    picture: Callable[[int, int], Sequence[int]]


class VisionLayout(PictureLayout):
    """Items of texts and pictures in any order, as one row of tokens.

    A text and what the template writes beside it become tokens together, as in processors of transformers: a tokenizer
    may join the line break before a text with one that the text begins with. The prompt is not a part of the item.

    Args:
        family: of the model.
        max_patches: of a chunk.
    """

    roles_differ: ClassVar[bool] = False
    joins_pictures: ClassVar[bool] = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processing: ImageProcessing,
        family: VisionFamily,
        markup: Markup,
        *,
        max_patches: int = UNLIMITED,
    ) -> None:
        super().__init__(tokenizer, processing.digest, special_tokens=False)
        self.processing, self.family, self.markup = processing, family, markup
        self.further_limits = (max_patches,)
        self._picture = lru_cache(1 << 12)(self._ids_of_grid)
        self._cost = lru_cache(1 << 16)(self._cost_of_size)
        self._text_ids = lru_cache(1 << 10)(lambda text: self.fast.ids([text], UNLIMITED)[0])
        self.before, self.after = self._special_ids() if markup.template.special_tokens else ([], [])

    def _special_ids(self) -> tuple[list[int], list[int]]:
        """Those that the tokenizer adds to a text."""
        own = self._text_ids("a")
        ids = FastTokenizer(self.tokenizer).ids(["a"], UNLIMITED)[0]
        start = next((n for n in range(len(ids)) if ids[n : n + len(own)] == own), 0)
        return ids[:start], ids[start + len(own) :]

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of items with slots of their pictures; only texts are cut, from the last one on.

        A DataError for pictures that alone have more tokens than `limit`, or that the model cannot read.
        """
        prompts_of_texts = [prompts] * len(texts) if isinstance(prompts, str) else prompts
        items = [
            self.around(prompt, item_parts(text.removeprefix(prompt)), role)
            for text, prompt in zip(texts, prompts_of_texts, strict=True)
        ]
        ids = iter(
            self.fast.ids(["".join(part) for item in items for part in item if isinstance(part, Piece)], UNLIMITED)
        )
        tokenized = []
        for item in items:
            parts = [part if isinstance(part, Picture) else next(ids) for part in item]
            length = sum(self._checked(part) if isinstance(part, Picture) else len(part) for part in parts)
            excess = length + len(self.before) + len(self.after) - limit
            if excess > 0:
                parts = self._cut(item, parts, excess, limit)
            parts = [self.before, *parts, self.after]
            tokenized.append(parts if any(parts) else [[self.nothing]])
        return Tokens.of_parts(tokenized)

    def around(self, prompt: str, parts: Sequence[str | Picture], role: TextRole) -> list[Piece | Picture]:
        """The texts and pictures of an item, whose `parts` are without the prompt, and what stands around them."""
        return self.markup.template.around(prompt, parts)

    def _cut(
        self, item: Sequence[Piece | Picture], parts: Sequence[list[int] | Picture], excess: int, limit: int
    ) -> list[list[int] | Picture]:
        """Without so many tokens of the texts, of the last one first; what stands around them stays."""
        cut = list(parts)
        for number, piece in reversed(list(enumerate(item))):
            ids = cut[number]
            if isinstance(piece, Picture) or isinstance(ids, Picture):
                continue
            before, after = len(self._text_ids(piece.before)), len(self._text_ids(piece.after))
            end = len(ids) - after
            fewer = min(excess, max(0, end - before))
            cut[number], excess = ids[: end - fewer] + ids[end:], excess - fewer
        if excess > 0:
            pictures = [part for part in item if isinstance(part, Picture)]
            sizes = " and ".join(f"{part.width} x {part.height}" for part in pictures)
            what = f"pictures of {sizes} pixels, which have" if sizes else "a prompt, which has"
            where = next((f"{PICTURES.place(part)}: " for part in pictures if part != BLANK), "")
            can_shrink = bool(sizes) and isinstance(self.processing, QwenPatches)
            hint = "raise it" + ", or lower model.image.max_pixels" * can_shrink
            raise DataError(
                f"{where}an item has {what} {limit + excess} tokens with what stands around them, and "
                f"model.max_length={limit}: {hint}"
            )
        return cut

    def _checked(self, picture: Picture) -> int:
        """The tokens of a picture that the model can read."""
        if picture != BLANK:
            try:
                self.processing.check(picture.width, picture.height)
            except BadPicture as bad:
                raise DataError(f"{PICTURES.place(picture)}: {bad}") from None
        return len(self._ids(picture.width, picture.height)[0])

    def _ids(self, width: int, height: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """All ids of a picture, and where its grids of rows begin among them: one, or one for each tile."""
        return self._picture(*self.processing.grid(width, height))

    def _ids_of_grid(self, rows: int, columns: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        ids = np.array(self.markup.picture(rows, columns), dtype=np.int32)
        is_row = np.concatenate([[False], ids == self.markup.image])
        return ids, np.flatnonzero(is_row[1:] & ~is_row[:-1])

    def _grids(self, width: int, height: int) -> list[tuple[int, int]]:
        """Patches of each grid, high and wide."""
        if not isinstance(self.processing, Tiles):
            return [self.processing.grid(width, height)]
        side = self.processing.tile // self.processing.patch_size
        return [(side, side)] * self.processing.num_tiles(width, height)

    def num_tokens(self, tokens: Tokens) -> NDArray[np.int64]:
        """Tokens with those of pictures instead of their slots."""
        slots, counts = tokens.slots(), tokens.lengths.copy()
        extra = [len(self._ids(width, height)[0]) - SLOT for width, height in slots.sizes.tolist()]
        np.add.at(counts, slots.owners, np.array(extra, dtype=np.int64))
        return counts

    def chunk_costs(self, tokens: Tokens) -> NDArray[np.int64]:
        """Of a picture, what the vision tower computes besides its tokens."""
        slots, costs = tokens.slots(), self.num_tokens(tokens).astype(np.float64)
        np.add.at(costs, slots.owners, [self._cost(*size) for size in slots.sizes.tolist()])
        return np.ceil(costs).astype(np.int64)

    def inputs(self, tokens: BatchTokens, max_length: int) -> EncoderInputs:
        """With `chunk_costs`."""
        inputs = super().inputs(tokens, max_length)
        return replace(inputs, costs=self.chunk_costs(inputs.tokens(np.arange(len(inputs.lengths)))))

    def _cost_of_size(self, width: int, height: int) -> float:
        patches = np.array([rows * columns for rows, columns in self._grids(width, height)])
        return float(self.family.costs(patches).sum())

    def further_costs(self, tokens: Tokens) -> NDArray[np.int64]:
        """The patches of each item, int64 [N, 1]."""
        slots, patches = tokens.slots(), np.zeros((len(tokens), 1), dtype=np.int64)
        counts = [self.processing.num_patches(width, height) for width, height in slots.sizes.tolist()]
        np.add.at(patches[:, 0], slots.owners, np.array(counts, dtype=np.int64))
        return patches

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """Items as one chunk, with the pixels of their pictures, whose files are read now."""
        slots = tokens.slots()
        if not len(slots):
            return super().chunk(tokens, rows, packed=packed)
        ids, flags, first_rows = list[NDArray[np.int32]](), list[NDArray[np.uint8]](), list[int]()
        grids, begin, length = list[tuple[int, int]](), 0, 0
        for start, size in zip(slots.starts.tolist(), slots.sizes.tolist(), strict=True):
            of_picture, firsts = self._ids(*size)
            length += start - begin
            first_rows += (firsts + length).tolist()
            ids += [tokens.ids[begin:start], of_picture]
            flags += [tokens.flags[begin:start], self.picture_flags(of_picture)]
            grids += self._grids(*size)
            begin, length = start + SLOT, length + len(of_picture)
        ids.append(tokens.ids[begin:])
        flags.append(tokens.flags[begin:])
        expanded = Tokens(np.concatenate(ids), np.concatenate(flags), self.num_tokens(tokens))
        chunk = super().chunk(expanded, rows, packed=packed)
        width = None if packed else chunk.ids.shape[1]
        return chunk.replaced(
            pictures=self.family.picture_rows(expanded.lengths, np.array(first_rows), np.array(grids), width),
            decoded={"pixels": self._all_pixels(slots.pictures(), grids)},
        )

    def picture_flags(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The flags of all ids of a picture."""
        return np.zeros(len(ids), dtype=np.uint8)

    def _all_pixels(self, pictures: Sequence[Picture], grids: Sequence[tuple[int, int]]) -> Tensor:
        """The bytes of pictures, in memory that is allocated once: all of a chunk may be gigabytes."""
        is_patches = isinstance(self.processing, QwenPatches)
        count = sum(rows * columns for rows, columns in grids) if is_patches else len(grids)
        width, height = pictures[0].width, pictures[0].height
        shape = self.processing.pixel_shape(width, height)
        values = shape if isinstance(self.processing, FixedSize) else shape[1:]
        pixels, begin = torch.empty((count, *values), dtype=torch.uint8), 0
        for picture in pictures:
            part = self._pixels(picture)
            pixels[begin : begin + len(part)] = part
            begin += len(part)
        return pixels

    def with_further(self, chunk: Chunk) -> Chunk:
        """The chunk with a picture of zeros whose rows stand nowhere, if it has none."""
        if chunk.pictures is not None:
            return chunk
        shape = self.processing.pixel_shape(BLANK.width, BLANK.height)
        if isinstance(self.processing, QwenPatches):
            shape = (int(np.prod(self.family.dummy_grid)), *shape[1:])
        elif isinstance(self.processing, Tiles):
            shape = (1, *shape[1:])
        else:
            shape = (1, *shape)
        pixels = torch.zeros(shape, dtype=torch.uint8)
        return chunk.replaced(pictures=self.family.dummy_rows(), decoded={"pixels": pixels})

    def _pixels(self, picture: Picture) -> Tensor:
        """The bytes of a picture, which those of others are concatenated to."""
        width, height = picture.width, picture.height
        if picture == BLANK:
            pixels = torch.zeros(self.processing.pixel_shape(width, height), dtype=torch.uint8)
        else:
            pixels = self.processing.pixels(decode_picture(PICTURES.place(picture), picture), width, height)
        return pixels[None] if isinstance(self.processing, FixedSize) else pixels

    def longest_text(self, max_length: int) -> int:
        """`max_length`, which no picture exceeds."""
        return max_length

    @property
    def identity(self) -> tuple[Any, ...]:
        """What determines the tokens besides those of texts and the sizes of pictures."""
        markup, around = self.markup, (tuple(self.before), tuple(self.after))
        return (*super().identity, str(markup.template), *around, markup.image, tuple(markup.picture(2, 2)))


def to_pixels(processing: ImageProcessing) -> Callable[[Any], Tensor]:
    """What a vision tower takes of `Chunk.decoded`, as numbers."""
    if isinstance(processing, QwenPatches | NaFlex):
        return lambda decoded: processing.patches(decoded["pixels"])
    return lambda decoded: processing.normalised(decoded["pixels"])
