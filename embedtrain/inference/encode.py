"""Texts to vectors over all ranks, with weights that may be sharded.

Shapes: n texts, n_r of them on rank r, W ranks, D dimensions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
from embedtrain.inference.passes import EncodingPlan, PromptedTexts, plan_encoding
from embedtrain.inference.vector_cache import VectorCache

# Passes of a rank between two looks at what came out: progress is told, and vectors are stored where that is asked for.
CHUNKS_PER_BLOCK = 16

ProgressCallback = Callable[[str, int, int], None]
# Texts as the model sees them, and what each begins with that is a prompt.
_Chunk: TypeAlias = tuple[list[str], list[str]]
_EMPTY_CHUNK: _Chunk = ([], [])


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """Vectors that lie on this rank.

    Attributes:
        vectors: [n_r, D] on this rank's device; float32, unless they were finished otherwise.
        rows: int64 [n_r] on the CPU: for each vector, which of the n texts it is of. Every text is on exactly one rank.
    """

    vectors: Tensor
    rows: Tensor


class SentenceEncoder:
    """Encodes texts with the live model, all ranks together.

    Every forward pass of a sharded model is a collective. Texts are therefore cut into one list of chunks,
    the same on every rank, and chunk i is rank i % W's; who has run out of chunks runs dummies. A chunk's
    composition does not depend on W, and so neither does a single bit of any vector.

    With `unshard=model` all weights are gathered before a set of texts is encoded, and between two looks at what came
    out each rank goes through its own chunks without waiting for another: faster for a model that fits, the same bits.

    All methods are collectives: every rank calls them with the same texts.

    Args:
        encoder: token ids and mask [N, L], and the mask of those that count or None, to float32 [N, D]; it is called,
            never its `forward`.
        tokenizer: bound to the length that the model takes.
        world: the ranks.
        chunk_tokens: tokens, padding included, that one forward pass may hold.
        query_prompt: what the model wants before queries.
        document_prompt: what the model wants before documents.
        unshard: how much of sharded weights is whole at a time.

    Attributes:
        progress: called with what is being encoded, how many chunks are done, and of how many; whoever shows progress
            sets it.
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
        self.progress: ProgressCallback = lambda _what, _done, _total: None

    def encode_sharded(self, texts: Sequence[str], prompt: str = "", *, max_length: int | None = None) -> EncodedShard:
        """Encode n texts and leave each vector on the rank that made it.

        Equal texts are encoded once, so their vectors, and with them their scores, are equal to the bit.

        Args:
            texts: any number of texts.
            prompt: put before each.
            max_length: tokens of a text that are kept, where that is less than the model takes.

        Raises:
            TrainingError: on every rank, if a vector is not finite on any.
        """
        blocks = list(self.encode_blocks(texts, prompt, max_length=max_length))
        with torch.inference_mode(False):
            vectors = torch.cat([block.vectors for block in blocks])
        return EncodedShard(vectors, torch.cat([block.rows for block in blocks]))

    def encode_all(
        self,
        texts: Sequence[str],
        prompt: str = "",
        *,
        max_length: int | None = None,
        what: str = "queries",
        existing_prompt: str | Sequence[str] = "",
    ) -> Tensor:
        """Encode n texts; every rank gets all vectors, float32 [n, D], in the order of the texts.

        Args:
            texts: any number of texts.
            prompt: put before each.
            max_length: tokens of a text that are kept, where that is less than the model takes.
            what: what the texts are, for progress.
            existing_prompt: a prompt that texts begin with already, or that each does, where it differs.

        Raises:
            TrainingError: on every rank, if a vector is not finite on any.
        """
        prompted = self._with_prompt(texts, prompt, existing_prompt)
        passes = self._plan(prompted, max_length)
        blocks = list(self._encode(prompted, max_length, passes, None, what))
        with torch.inference_mode(False), torch.no_grad():
            mine = torch.cat([vectors for vectors, _ in blocks])
            everything = gather_rows(mine)
            kinds = torch.from_numpy(np.concatenate([kinds for _, kinds in blocks])).to(mine.device)
            rows, counts = passes.expand(gather_rows(kinds).cpu().numpy())
            ordered = everything.new_empty((len(rows), everything.shape[1]))
            ordered[rows.to(mine.device)] = everything.repeat_interleave(counts.to(mine.device), dim=0)
            return ordered

    def encode_blocks(
        self,
        texts: Sequence[str],
        prompt: str = "",
        *,
        max_length: int | None = None,
        vector_cache: VectorCache | None = None,
        finish: Callable[[Tensor], Tensor] = lambda vectors: vectors,
        what: str = "documents",
        existing_prompt: str = "",
    ) -> Iterator[EncodedShard]:
        """The same as `encode_sharded`, a block at a time: at least one, and as many on every rank.

        Args:
            texts: any number of texts.
            prompt: put before each.
            max_length: tokens of a text that are kept, where that is less than the model takes.
            vector_cache: where vectors are kept on disk, so that encoding that was stopped goes on.
            finish: what is made of [m, D] vectors, row by row, before they are stored and given out.
            what: what the texts are, for progress.
            existing_prompt: a prompt that texts begin with already.

        Raises:
            TrainingError: on every rank, if a vector is not finite on any.
            DataError: stored vectors cannot be written or read.
        """
        prompted = self._with_prompt(texts, prompt, existing_prompt)
        passes = self._plan(prompted, max_length)
        if vector_cache is not None:
            vector_cache = vector_cache.of(
                texts, prompt, self.tokenizer, max_length, passes.limit, prompted.existing_prompt
            )
        for raw, kinds in self._encode(prompted, max_length, passes, vector_cache, what, finish):
            rows, counts = passes.expand(kinds)
            with torch.inference_mode(False), torch.no_grad():
                vectors = raw if len(rows) == len(kinds) else raw.repeat_interleave(counts.to(raw.device), dim=0)
            yield EncodedShard(vectors, rows)

    def _with_prompt(self, texts: Sequence[str], prompt: str, existing_prompt: str | Sequence[str]) -> PromptedTexts:
        # Where prompts count like any text, what is one does not matter.
        return PromptedTexts(texts, prompt, "" if self.tokenizer.include_prompt else existing_prompt)

    def _plan(self, texts: PromptedTexts, max_length: int | None) -> EncodingPlan:
        return plan_encoding(texts, self.tokenizer, max_length, self.chunk_tokens, self.world)

    def _encode(
        self,
        texts: PromptedTexts,
        max_length: int | None,
        passes: EncodingPlan,
        vector_cache: VectorCache | None,
        what: str,
        finish: Callable[[Tensor], Tensor] = lambda vectors: vectors,
    ) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Vectors of this rank's chunks, [m, D], and the kinds of text that they are of; a block at a time."""
        left = list(range(len(passes)))
        if vector_cache is not None:
            files = vector_cache.files(self.world)
            done = {number for _, numbers in files for number in numbers}
            left = [number for number in left if number not in done]
            for vectors, kinds in vector_cache.share(files, self.world):
                yield vectors.to(self.world.device), kinds
            if not left:
                return
        total, size = len(passes), self.world.size
        # At least one pass even without texts: only a pass tells how many dimensions there are.
        with self._unsharded():
            for start in range(0, len(left) or 1, CHUNKS_PER_BLOCK * size):
                block = left[start : start + CHUNKS_PER_BLOCK * size]
                mine = [passes.chunk(number) for number in block[self.world.rank :: size]]
                rows = [passes.first[kinds].tolist() for kinds in mine]
                vectors = self._encode_block(
                    [(texts.with_prompt(some), texts.prompts(some)) for some in rows], block, max_length
                )
                self._require_finite(vectors, [texts.texts[row] for some in rows for row in some])
                kinds = np.concatenate([np.empty(0, dtype=np.int64), *mine])
                with torch.inference_mode(False), torch.no_grad():
                    vectors = finish(vectors)
                if vector_cache is not None:
                    vector_cache.write(vectors, kinds, block[self.world.rank :: size], self.world)
                self.progress(f"encoding {what}", total - len(left) + start + len(block), total)
                yield vectors, kinds

    def _encode_block(self, chunks: list[_Chunk], block: Sequence[int], max_length: int | None) -> Tensor:
        """One pass over each of this rank's chunks, and over dummies while other ranks have more."""
        turns = max(1, -(-len(block) // self.world.size))
        with _eval_mode(self.encoder, reshard_after=self.unshard is Unshard.layer):
            # Where weights are whole nobody waits for anybody; one pass is still needed to know D.
            dummies = turns - len(chunks) if self.unshard is Unshard.layer or not chunks else 0
            return torch.cat([self._forward(chunk, max_length) for chunk in [*chunks, *([_EMPTY_CHUNK] * dummies)]])

    def _unsharded(self) -> contextlib.AbstractContextManager[None]:
        """All weights, where that was asked for."""
        if self.unshard is Unshard.layer:
            return contextlib.nullcontext()
        return unsharded_weights(self.encoder, lambda: self._encode_block([_EMPTY_CHUNK], [0] * self.world.size, None))

    def _forward(self, chunk: _Chunk, max_length: int | None) -> Tensor:
        """One pass over one chunk; over a dummy whose vector is dropped where there are no texts."""
        texts, prompts = chunk
        ids = self.tokenizer.ids(texts, max_length, prompts)
        tokens = self.tokenizer.chunk(ids, range(len(ids))) if ids else self.tokenizer.dummy()
        tokens = tokens.to(self.world.device)
        vectors: Tensor = self.encoder(*tokens.inputs)
        return vectors.float()[: len(texts)]

    def _require_finite(self, vectors: Tensor, texts: list[str]) -> None:
        bad = (~torch.isfinite(vectors).all(dim=1)).nonzero().flatten().tolist()
        found = self.world.gather((len(bad), texts[bad[0]][:60]) if bad else None)
        failed = [(rank, *what) for rank, what in enumerate(found) if what is not None]
        if failed:
            rank, count, text = failed[0]
            raise TrainingError(
                f"{count} vectors on rank {rank} are not finite, the first of the text {text!r}: "
                f"the weights hold NaN or infinity, or overflow in this precision"
            )


@contextlib.contextmanager
def _eval_mode(encoder: nn.Module, *, reshard_after: bool) -> Iterator[None]:
    """Without gradient and dropout; afterwards every module's mode is as before, and weights are sharded if asked for.

    Not under inference mode, and out of it where the caller is in it: what FSDP gathers weights into is made
    once, and made there it could never be trained with ("Inplace update to inference tensor").
    An error within a forward pass leaves FSDP in the midst of it; nothing here can mend that.
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
