"""Encodes texts on all ranks, with weights that may be sharded.

Shapes: n texts, n_r of them on rank r, with R vectors, W ranks, D dimensions. A text has one vector, or several in a
late-interaction model.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embedtrain.config.evaluation import Unshard
from embedtrain.data.images.item import described
from embedtrain.data.prefetch import Prefetcher
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, Pair, TextRole
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.device import return_freed_memory
from embedtrain.distributed.sharding import reshard, unsharded_weights
from embedtrain.distributed.world import World
from embedtrain.errors import DataError, TrainingError
from embedtrain.inference.encoding_plan import EncodingPlan, PromptedTexts, plan_encoding
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.inference.store import HostCopy
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.inference.vectors import Cosine
from embedtrain.losses.encoded import Part, concatenate, to_device
from embedtrain.losses.score import Score

# Chunks of a rank between two reports of progress. A thread prepares the chunks of the next block during the forward
# passes of a block, and the vectors of the previous one are checked, and cached on disk.
CHUNKS_PER_BLOCK = 16

SEVERAL_VECTORS = (
    "a document in chunks has a vector of each, and one vector of each text is needed here: write whole texts"
)
# Called with a description of the work, the number of items done, and their total.
ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """The texts of this rank; each text is on exactly one rank."""

    part: Part  # of n_r texts, on this rank's device; float32, unless `transform` returned another type
    rows: Tensor  # int64 [n_r] on the CPU, the index of each text among the n texts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A set of texts to encode."""

    texts: PromptedTexts
    max_length: int | None
    plan: EncodingPlan
    label: str
    vector_cache: VectorCache | None = None
    mapped: bool = False  # vectors stay in the files of the cache
    transform: Callable[[Part], Part] = lambda part: part


@dataclass(frozen=True, slots=True)
class _Block:
    """Chunks of this rank whose forward passes were launched, and may not have finished."""

    chunks: Sequence[int]  # numbers
    distinct: NDArray[np.int64]  # [m], numbers of the texts
    vectors: Part  # of m texts, transformed, on the device
    sizes: NDArray[np.int64] | None  # int64 [m], vectors of each text before; None: one
    is_finite: HostCopy  # bool [R], of each of these
    stored: tuple[HostCopy, ...]  # the vectors, and the ids that they have, if they are cached on disk
    num_done: int  # chunks of all ranks up to the end of this block


class SentenceEncoder:
    """Encodes texts with the live model on all ranks.

    Every forward pass of a sharded model is a collective. The texts are therefore cut into one list of chunks, the same
    on every rank, and rank i % W encodes chunk i; ranks without chunks left run dummy passes. The composition of a
    chunk does not depend on W, so vectors are bit-identical on any number of ranks.

    With `unshard=model`, all weights are gathered before a set of texts is encoded, and each rank encodes its chunks
    without waiting for the others until the end of a block: faster for a model that fits, with the same bits.

    All methods are collectives: every rank calls them with the same texts.

    Args:
        encoder: maps a `Chunk` to one part, float32 [N, D], or the vectors of tokens [R, D]; it is called directly,
            never its `forward`.
        chunk_tokens: maximum number of tokens, including padding, of one forward pass.
        query_prompt, document_prompt: defaults for callers that have no others.
        truncate_dim: only the first so many dimensions of a vector are returned, without normalising it again, as with
            sentence-transformers' option of this name.
        score: how texts are compared by their vectors; default: by cosine.
        precision: in which the encoder computes, for those who read its figures.
    """

    def __init__(
        self,
        encoder: nn.Module,
        tokenizer: TextTokenizer,
        world: World,
        *,
        chunk_tokens: int,
        query_prompt: str = "",
        document_prompt: str = "",
        unshard: Unshard = Unshard.layer,
        truncate_dim: int | None = None,
        score: Score | None = None,
        precision: str | None = None,
    ) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.world = world
        self.chunk_tokens = chunk_tokens
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt
        self.unshard = unshard
        self.truncate_dim = truncate_dim
        self.precision = precision
        self.score = score or Cosine()
        self._dummies: dict[tuple[int, bool], Chunk] = {}  # made when they are needed
        self.progress: ProgressCallback = lambda _description, _done, _total: None  # called after each block

    @classmethod
    def from_model(
        cls,
        model: LoadedModel,
        world: World,
        *,
        chunk_tokens: int,
        unshard: Unshard = Unshard.layer,
        truncate: bool = True,
    ) -> Self:
        """The encoder of a loaded model, with the model's prompts; `truncate` obeys the `truncate_dim` of its files."""
        prompts = model.source.prompts
        return cls(
            model.encoder,
            model.tokenizer,
            world,
            chunk_tokens=chunk_tokens,
            query_prompt=prompts.get("query", ""),
            document_prompt=prompts.get("document", ""),
            unshard=unshard,
            truncate_dim=model.source.vectors.truncate_dim if truncate else None,
            score=model.source.kind.score(model.source),
            precision=model.precision,
        )

    @contextlib.contextmanager
    def report_progress(self, progress: ProgressCallback) -> Iterator[None]:
        """Call `progress` instead of `self.progress` within the block."""
        before, self.progress = self.progress, progress
        try:
            yield
        finally:
            self.progress = before

    def encode_all(self, texts: Sequence[str] | Sequence[Pair], prompt: str = "", **options: Any) -> Tensor:
        """`encode` with a model that gives each text one vector: float32 [n, D].

        Raises DataError for a document in chunks, which has several.
        """
        vectors = self.encode(texts, prompt, **options).one_row_each()
        if vectors is None:
            raise DataError(SEVERAL_VECTORS)
        return vectors.values

    def encode(
        self,
        texts: Sequence[str] | Sequence[Pair],
        prompt: str = "",
        *,
        role: TextRole = TextRole.query,
        max_length: int | None = None,
        label: str = "encoding queries",
        existing_prompt: str | Sequence[str] = "",
    ) -> Part:
        """Encode n texts; returns all vectors on every rank, float32 [R, D], in the order of the texts.

        Args:
            texts: may contain duplicates, which are encoded once; pairs of texts for a cross-encoder.
            prompt: prepended to each text, not to pairs.
            role: what a late-interaction model encodes the texts as.
            max_length: in tokens, if less than the model's maximum.
            label: what is done, for progress.
            existing_prompt: a prompt that all texts already start with, or one per text.

        Raises TrainingError on every rank if a vector is not finite on any.
        """
        prompted = self._with_prompt(texts, prompt, existing_prompt, role)
        plan = plan_encoding(prompted, self.tokenizer, max_length, self.chunk_tokens, self.world)
        blocks = list(self._encode(_Work(texts=prompted, max_length=max_length, plan=plan, label=label)))
        with torch.inference_mode(False), torch.no_grad():
            local = concatenate([vectors for vectors, _ in blocks])
            vectors = gather_texts(local)
            distinct = gather_numbers(np.concatenate([distinct for _, distinct in blocks]), local.values.device)
            rows, positions = plan.expand(distinct)
            return _take(vectors, positions[np.argsort(rows.numpy())])

    def encode_blocks(
        self,
        texts: Sequence[str],
        prompt: str = "",
        *,
        role: TextRole = TextRole.document,
        max_length: int | None = None,
        vector_cache: VectorCache | None = None,
        mapped: bool = False,
        transform: Callable[[Part], Part] = lambda part: part,
        label: str = "encoding documents",
        existing_prompt: str = "",
    ) -> Iterator[EncodedShard]:
        """Encode n texts and leave each vector on the rank that encoded it; yields blocks.

        There is at least one block, and the same number on every rank. Equal texts are encoded once, so their vectors
        are bit-identical. Arguments and errors are those of `encode`, and DataError if vectors cannot be stored or
        read.

        Args:
            vector_cache: stores vectors on disk, so that interrupted encoding resumes.
            mapped: vectors stay in the files of `vector_cache`: those of the blocks are on the CPU, memory-mapped, and
                must not be written to.
            transform: applied to the vectors of texts, text by text, before they are stored and yielded.
        """
        prompted = self._with_prompt(texts, prompt, existing_prompt, role)
        keys = prompted.text_keys(self.world)
        plan = plan_encoding(prompted, self.tokenizer, max_length, self.chunk_tokens, self.world, keys)
        if vector_cache is not None:
            vector_cache = vector_cache.for_texts(prompted, keys, self.tokenizer, max_length, plan.chunk_tokens)
        del keys
        work = _Work(
            texts=prompted,
            max_length=max_length,
            plan=plan,
            label=label,
            vector_cache=vector_cache,
            mapped=mapped,
            transform=transform,
        )
        for encoded, distinct in self._encode(work):
            rows, positions = plan.expand(distinct)
            if mapped:  # only repetitions of a text are copied
                is_first = np.diff(positions, prepend=-1) > 0
                yield EncodedShard(encoded, rows[torch.from_numpy(is_first)])
                rows, positions = rows[torch.from_numpy(~is_first)], positions[~is_first]
            with torch.inference_mode(False), torch.no_grad():
                has_no_repetitions = not mapped and len(rows) == len(distinct)
                part = encoded if has_no_repetitions else _take(encoded, positions)
            yield EncodedShard(part, rows)

    def _with_prompt(
        self,
        texts: Sequence[str] | Sequence[Pair],
        prompt: str,
        existing_prompt: str | Sequence[str],
        role: TextRole,
    ) -> PromptedTexts:
        # Existing prompts only matter if prompt tokens are excluded from pooling.
        return PromptedTexts(texts, prompt, "" if self.tokenizer.layout.include_prompt else existing_prompt, role)

    def _encode(self, work: _Work) -> Iterator[tuple[Part, NDArray[np.int64]]]:
        """Yield the vectors of this rank's chunks, block by block, and the numbers of their distinct texts."""
        world, plan = self.world, work.plan
        remaining = list(range(len(plan)))
        if work.vector_cache is not None:
            files = work.vector_cache.list_files(world)
            cached_chunks = {number for _, numbers in files for number in numbers}
            remaining = [number for number in remaining if number not in cached_chunks]
            for vectors, distinct in work.vector_cache.read_local(files, world, mapped=work.mapped):
                yield vectors if work.mapped else vectors.to(world.device), distinct
            if not remaining:
                return
        num_done = len(plan) - len(remaining)
        remaining = plan.dealt(remaining, world.size)
        with self._unsharded(plan.kinds), contextlib.closing(self._prepared(work, remaining)) as prepared:
            launched: _Block | None = None
            # At least one pass even without texts: only a forward pass shows the number of dimensions.
            size = world.size * min(CHUNKS_PER_BLOCK, self.score.max_chunks_per_block)
            for start in range(0, len(remaining) or 1, size):
                block = remaining[start : start + size] or [-1] * world.size
                num_done += sum(number >= 0 for number in block)
                chunks: list[Chunk] = []
                with world.fail_together("preparing texts"):
                    chunks += itertools.islice(prepared, sum(number >= 0 for number in self._local(block)))
                previous, launched = launched, self._launch(work, chunks, block, num_done)
                # The device computes this block while the host reads the previous one.
                if previous is not None:
                    yield self._finish(work, previous)
            assert launched is not None
            yield self._finish(work, launched)

    def _prepared(self, work: _Work, remaining: Sequence[int]) -> Generator[Chunk, None, None]:
        """This rank's chunks in order, prepared by a thread at most a block ahead. A collective."""
        plan, tokenizer = work.plan, self.tokenizer
        tokenized = plan.exchange_tokens(remaining, self.world)
        local_chunks = [number for number in self._local(remaining) if number >= 0]

        def prepare(index: int) -> Chunk:
            distinct = plan.chunk(local_chunks[index])
            if tokenized is not None:
                tokens = tokenized.take(distinct)
            else:
                rows = plan.first[distinct].tolist()
                texts = work.texts
                tokens = tokenizer.tokens(texts.with_prompt(rows), work.max_length, texts.prompts(rows), texts.role)
            return pinned(tokenizer.make_chunk(tokens, range(len(distinct))), self.world.device)

        workers = int(len(local_chunks) > 1)  # a query of `embedtrain.search` needs no thread
        return iter(Prefetcher(prepare, 0, len(local_chunks), workers=workers, ahead=CHUNKS_PER_BLOCK))

    def _local(self, chunks: Sequence[int]) -> Sequence[int]:
        """Those of this rank, of chunks that are dealt; -1 where it runs a dummy pass."""
        return chunks[self.world.rank :: self.world.size]

    def _launch(self, work: _Work, chunks: Sequence[Chunk], block: Sequence[int], num_done: int) -> _Block:
        """Launch the forward passes of this rank's part of `block`. Reads nothing from the device."""
        kinds = work.plan.kinds
        passes = [kinds[max(0, number)] for number in block[:: self.world.size]]  # rank 0 has a chunk in each
        local_chunks = [number for number in self._local(block) if number >= 0]
        vectors = self._encode_block(chunks, passes, [number >= 0 for number in self._local(block)])
        distinct = [work.plan.chunk(number) for number in local_chunks]
        with torch.inference_mode(False), torch.no_grad():
            is_finite = HostCopy(torch.isfinite(vectors.values).all(dim=1))
            sizes = vectors.sizes
            vectors = work.transform(vectors)
            cached = () if work.vector_cache is None else (vectors.values, vectors.ids)
            stored = tuple(HostCopy(tensor) for tensor in cached if tensor is not None)
        numbers = np.concatenate([np.empty(0, dtype=np.int64), *distinct])
        return _Block(local_chunks, numbers, vectors, sizes, is_finite, stored, num_done)

    def _finish(self, work: _Work, block: _Block) -> tuple[Part, NDArray[np.int64]]:
        """Check and store the vectors of a block; returns them and the numbers of their texts. A collective."""
        bad_rows = (~block.is_finite.wait()).nonzero().flatten().numpy()
        report, stored = None, block.vectors
        if len(bad_rows):
            texts = block.distinct if block.sizes is None else np.repeat(block.distinct, block.sizes)
            text = work.texts.texts[int(work.plan.first[texts[bad_rows[0]]])]
            report = len(bad_rows), described(text.query if isinstance(text, Pair) else text)[:60]
        failures = [(rank, *report) for rank, report in enumerate(self.world.gather(report)) if report is not None]
        if failures:
            rank, count, text = failures[0]
            raise TrainingError(
                f"{count} vectors on rank {rank} are not finite, the first of the text {text!r}: "
                f"the weights hold NaN or infinity, or overflow in this precision"
            )
        if work.vector_cache is not None:
            values, *ids = (copy.wait() for copy in block.stored)
            stored = Part(values, block.vectors.sizes, *ids)
            stored = work.vector_cache.write(stored, block.distinct, block.chunks, self.world, mapped=work.mapped)
            return_freed_memory()
        self.progress(work.label, block.num_done, len(work.plan))
        return stored if work.mapped else block.vectors, block.distinct

    def _encode_block(
        self, chunks: Sequence[Chunk], passes: Sequence[tuple[int, bool]], has_chunk: Sequence[bool]
    ) -> Part:
        """One forward pass per chunk of this rank, and dummy passes while other ranks have more.

        `passes` has the kind of each pass (`EncodingPlan.kinds`), and `has_chunk` whether this rank has a chunk for it.
        """
        remaining = iter(chunks)
        with eval_mode(self.encoder, reshard_after=self.unshard is Unshard.layer):
            vectors = list[Part]()
            for kind, is_chunk in zip(passes, has_chunk, strict=True):
                if is_chunk:
                    vectors.append(self._forward(next(remaining)))
                # With gathered weights, ranks do not wait for each other; one pass is still needed to know D.
                elif self.unshard is Unshard.layer or not chunks:
                    vectors.append(self._forward(self._dummy(*kind)).slice(0, 0))
            return concatenate(vectors)

    def _dummy(self, tower: int, has_further: bool) -> Chunk:
        kind = tower, has_further
        if kind not in self._dummies:
            dummy = self.tokenizer.dummy(tower)
            dummy = self.tokenizer.layout.with_further(dummy) if has_further else dummy
            self._dummies[kind] = pinned(dummy, self.world.device)
        return self._dummies[kind]

    def _unsharded(self, kinds: Sequence[tuple[int, bool]]) -> contextlib.AbstractContextManager[None]:
        """Gather all weights of the modules that compute chunks of these kinds, if that is configured."""
        if self.unshard is Unshard.layer:
            return contextlib.nullcontext()
        passes = list(dict.fromkeys(kinds))
        return unsharded_weights(self.encoder, lambda: self._encode_block([], passes, [False] * len(passes)))

    def _forward(self, chunk: Chunk) -> Part:
        vectors: Tensor
        chunk = chunk.to(self.world.device)
        (vectors,) = self.encoder(chunk)
        return Part(vectors[:, : self.truncate_dim].float(), chunk.sizes, chunk.row_ids)


def _take(part: Part, texts: NDArray[np.int64]) -> Part:
    """These of the texts, which may be repeated."""
    return part.take(to_device(texts, part.values.device), texts)


def pinned(chunk: Chunk, device: torch.device) -> Chunk:
    """A chunk in the memory from which `device` copies while it computes."""
    return chunk.map_tensors(torch.Tensor.pin_memory) if device.type == "cuda" else chunk


@contextlib.contextmanager
def eval_mode(encoder: nn.Module, *, reshard_after: bool) -> Iterator[None]:
    """Disable gradients and dropout; afterwards restore each module's mode, and reshard the weights if asked to.

    Inference mode is switched off, even if the caller has it on: FSDP allocates the buffers that it gathers weights
    into once, and buffers allocated in inference mode can never be trained with ("Inplace update to inference tensor").
    An error within a forward pass leaves FSDP in the middle of it, which cannot be repaired here.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    try:
        with torch.inference_mode(False), torch.no_grad():
            encoder.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        if reshard_after:
            reshard(encoder)


def gather_texts(local: Part) -> Part:
    """The texts of all ranks, on every rank. A collective."""
    values = gather_rows(local.values)
    sizes = None if local.sizes is None else gather_numbers(local.sizes, values.device)
    return Part(values, sizes, None if local.ids is None else gather_rows(local.ids))


def gather_numbers(numbers: NDArray[np.int64], device: torch.device) -> NDArray[np.int64]:
    """The numbers of all ranks, on every rank; they travel on `device`. A collective."""
    gathered: NDArray[np.int64] = gather_rows(torch.from_numpy(numbers).to(device)).cpu().numpy()
    return gathered
