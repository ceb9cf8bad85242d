"""Encodes texts on all ranks, with weights that may be sharded.

Shapes: n texts, n_r of them on rank r, W ranks, D dimensions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embedtrain.config.evaluation import Unshard
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.sharding import reshard, unsharded_weights
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError
from embedtrain.inference.encoding_plan import EncodingPlan, PromptedTexts, plan_encoding
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.loading.load import LoadedModel

# Chunks of a rank between two reports of progress; vectors are checked, and cached on disk, after each such block.
CHUNKS_PER_BLOCK = 16

# Called with a description of the work, the number of items done, and their total.
ProgressCallback = Callable[[str, int, int], None]
# Texts as the model sees them, and the prompt that each starts with.
_Chunk: TypeAlias = tuple[list[str], list[str]]
_EMPTY_CHUNK: _Chunk = ([], [])


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """The vectors on this rank; each text is on exactly one rank."""

    vectors: Tensor  # [n_r, D] on this rank's device; float32, unless `transform` returned another type
    rows: Tensor  # int64 [n_r] on the CPU, the index of each vector's text among the n texts


class SentenceEncoder:
    """Encodes texts with the live model on all ranks.

    Every forward pass of a sharded model is a collective. The texts are therefore cut into one list of chunks, the same
    on every rank, and rank i % W encodes chunk i; ranks without chunks left run dummy passes. The composition of a
    chunk does not depend on W, so vectors are bit-identical on any number of ranks.

    With `unshard=model`, all weights are gathered before a set of texts is encoded, and each rank encodes its chunks
    without waiting for the others until the end of a block: faster for a model that fits, with the same bits.

    All methods are collectives: every rank calls them with the same texts.

    Args:
        encoder: maps token ids and mask [N, L], and the mask of tokens to pool or None, to float32 [N, D]; it is called
            directly, never its `forward`.
        chunk_tokens: maximum number of tokens, including padding, of one forward pass.
        query_prompt: default for callers that have no other; likewise `document_prompt`.
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
    ) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.world = world
        self.chunk_tokens = chunk_tokens
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt
        self.unshard = unshard
        self.progress: ProgressCallback = lambda _description, _done, _total: None  # called after each block

    @classmethod
    def from_model(
        cls, model: LoadedModel, world: World, *, chunk_tokens: int, unshard: Unshard = Unshard.layer
    ) -> Self:
        """The encoder of a loaded model, with the model's prompts."""
        prompts = model.source.prompts
        return cls(
            model.encoder,
            model.tokenizer,
            world,
            chunk_tokens=chunk_tokens,
            query_prompt=prompts.get("query", ""),
            document_prompt=prompts.get("document", ""),
            unshard=unshard,
        )

    @contextlib.contextmanager
    def report_progress(self, progress: ProgressCallback) -> Iterator[None]:
        """Call `progress` instead of `self.progress` within the block."""
        before, self.progress = self.progress, progress
        try:
            yield
        finally:
            self.progress = before

    def encode_all(
        self,
        texts: Sequence[str],
        prompt: str = "",
        *,
        max_length: int | None = None,
        label: str = "queries",
        existing_prompt: str | Sequence[str] = "",
    ) -> Tensor:
        """Encode n texts; returns all vectors on every rank, float32 [n, D], in the order of the texts.

        Args:
            texts: may contain duplicates, which are encoded once.
            prompt: prepended to each text.
            max_length: in tokens, if less than the model's maximum.
            label: what the texts are, for progress.
            existing_prompt: a prompt that all texts already start with, or one per text.

        Raises TrainingError on every rank if a vector is not finite on any.
        """
        prompted = self._with_prompt(texts, prompt, existing_prompt)
        plan = plan_encoding(prompted, self.tokenizer, max_length, self.chunk_tokens, self.world)
        blocks = list(self._encode(prompted, max_length, plan, None, label))
        with torch.inference_mode(False), torch.no_grad():
            local_vectors = torch.cat([vectors for vectors, _ in blocks])
            vectors = gather_rows(local_vectors)
            local_distinct = torch.from_numpy(np.concatenate([distinct for _, distinct in blocks]))
            distinct = gather_rows(local_distinct.to(local_vectors.device)).cpu().numpy()
            rows, counts = plan.expand(distinct)
            ordered = vectors.new_empty((len(rows), vectors.shape[1]))
            ordered[rows.to(vectors.device)] = vectors.repeat_interleave(counts.to(vectors.device), dim=0)
            return ordered

    def encode_blocks(
        self,
        texts: Sequence[str],
        prompt: str = "",
        *,
        max_length: int | None = None,
        vector_cache: VectorCache | None = None,
        transform: Callable[[Tensor], Tensor] = lambda vectors: vectors,
        label: str = "documents",
        existing_prompt: str = "",
    ) -> Iterator[EncodedShard]:
        """Encode n texts and leave each vector on the rank that encoded it; yields blocks.

        There is at least one block, and the same number on every rank. Equal texts are encoded once, so their vectors
        are bit-identical. Arguments and errors are those of `encode_all`, and DataError if vectors cannot be stored or
        read.

        Args:
            vector_cache: stores vectors on disk, so that interrupted encoding resumes.
            transform: applied row by row to vectors [m, D] before they are stored and yielded.
        """
        prompted = self._with_prompt(texts, prompt, existing_prompt)
        plan = plan_encoding(prompted, self.tokenizer, max_length, self.chunk_tokens, self.world)
        if vector_cache is not None:
            vector_cache = vector_cache.for_texts(prompted, self.tokenizer, max_length, plan.chunk_tokens)
        for encoded, distinct in self._encode(prompted, max_length, plan, vector_cache, label, transform):
            rows, counts = plan.expand(distinct)
            with torch.inference_mode(False), torch.no_grad():
                has_duplicates = len(rows) != len(distinct)
                vectors = encoded.repeat_interleave(counts.to(encoded.device), dim=0) if has_duplicates else encoded
            yield EncodedShard(vectors, rows)

    def _with_prompt(self, texts: Sequence[str], prompt: str, existing_prompt: str | Sequence[str]) -> PromptedTexts:
        # Existing prompts only matter if prompt tokens are excluded from pooling.
        return PromptedTexts(texts, prompt, "" if self.tokenizer.include_prompt else existing_prompt)

    def _encode(
        self,
        texts: PromptedTexts,
        max_length: int | None,
        plan: EncodingPlan,
        vector_cache: VectorCache | None,
        label: str,
        transform: Callable[[Tensor], Tensor] = lambda vectors: vectors,
    ) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Yield vectors [m, D] of this rank's chunks, block by block, and the numbers of their distinct texts."""
        remaining = list(range(len(plan)))
        if vector_cache is not None:
            files = vector_cache.list_files(self.world)
            cached_chunks = {number for _, numbers in files for number in numbers}
            remaining = [number for number in remaining if number not in cached_chunks]
            for vectors, distinct in vector_cache.read_local(files, self.world):
                yield vectors.to(self.world.device), distinct
            if not remaining:
                return
        total, size = len(plan), self.world.size
        # At least one pass even without texts: only a forward pass shows the number of dimensions.
        with self._unsharded():
            for start in range(0, len(remaining) or 1, CHUNKS_PER_BLOCK * size):
                block = remaining[start : start + CHUNKS_PER_BLOCK * size]
                local_chunks = block[self.world.rank :: size]
                local_distinct = [plan.chunk(number) for number in local_chunks]
                rows = [plan.first[distinct].tolist() for distinct in local_distinct]
                chunks = [(texts.with_prompt(chunk_rows), texts.prompts(chunk_rows)) for chunk_rows in rows]
                vectors = self._encode_block(chunks, block, max_length)
                self._require_finite(vectors, [texts.texts[row] for chunk_rows in rows for row in chunk_rows])
                distinct = np.concatenate([np.empty(0, dtype=np.int64), *local_distinct])
                with torch.inference_mode(False), torch.no_grad():
                    vectors = transform(vectors)
                if vector_cache is not None:
                    vector_cache.write(vectors, distinct, local_chunks, self.world)
                self.progress(f"encoding {label}", total - len(remaining) + start + len(block), total)
                yield vectors, distinct

    def _encode_block(self, chunks: list[_Chunk], block: Sequence[int], max_length: int | None) -> Tensor:
        """One forward pass per chunk of this rank, and dummy passes while other ranks have more."""
        num_passes = max(1, -(-len(block) // self.world.size))
        with _eval_mode(self.encoder, reshard_after=self.unshard is Unshard.layer):
            # With gathered weights, ranks do not wait for each other; one pass is still needed to know D.
            num_dummies = num_passes - len(chunks) if self.unshard is Unshard.layer or not chunks else 0
            return torch.cat([self._forward(chunk, max_length) for chunk in [*chunks, *([_EMPTY_CHUNK] * num_dummies)]])

    def _unsharded(self) -> contextlib.AbstractContextManager[None]:
        """Gather all weights, if that is configured."""
        if self.unshard is Unshard.layer:
            return contextlib.nullcontext()
        return unsharded_weights(self.encoder, lambda: self._encode_block([_EMPTY_CHUNK], [0] * self.world.size, None))

    def _forward(self, chunk: _Chunk, max_length: int | None) -> Tensor:
        """One forward pass; an empty chunk runs a dummy text, whose vector is dropped."""
        texts, prompts = chunk
        ids = self.tokenizer.ids(texts, max_length, prompts)
        tokens = self.tokenizer.chunk(ids, range(len(ids))) if ids else self.tokenizer.dummy()
        vectors: Tensor = self.encoder(*tokens.to(self.world.device).inputs)
        return vectors.float()[: len(texts)]

    def _require_finite(self, vectors: Tensor, texts: list[str]) -> None:
        bad_rows = (~torch.isfinite(vectors).all(dim=1)).nonzero().flatten().tolist()
        reports = self.world.gather((len(bad_rows), texts[bad_rows[0]][:60]) if bad_rows else None)
        failures = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
        if failures:
            rank, count, text = failures[0]
            raise TrainingError(
                f"{count} vectors on rank {rank} are not finite, the first of the text {text!r}: "
                f"the weights hold NaN or infinity, or overflow in this precision"
            )


@contextlib.contextmanager
def _eval_mode(encoder: nn.Module, *, reshard_after: bool) -> Iterator[None]:
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
