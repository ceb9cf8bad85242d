"""Scores pairs of queries and documents with a cross-encoder on all ranks.

Shapes: n pairs, m windows of them, n_r pairs of rank r, W ranks.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import Unshard
from embedtrain.data.types import Pair
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.world import World
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.loading.load import LoadedModel

_PAIRS_PER_CALL = 8192  # of the tokenizer


@dataclass(frozen=True, slots=True)
class Selected(Sequence[str]):
    """Texts by their indices, read one by one: a list of millions of pairs would repeat them."""

    texts: Sequence[str]
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self.texts[number] for number in self.indices[index].tolist()]
        return self.texts[int(self.indices[index])]


@dataclass(frozen=True, slots=True)
class _Pairs(Sequence[Pair]):
    """Pairs with prompts, and perhaps a window of each document."""

    queries: Sequence[str]
    documents: Sequence[str]
    prompts: tuple[str, str]
    starts: NDArray[np.int64] | None = None  # [n], the first token of the document in each window

    def __len__(self) -> int:
        return len(self.queries)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start = None if self.starts is None else int(self.starts[index])
        return Pair(self.prompts[0] + self.queries[index], self.prompts[1] + self.documents[index], start)


class PairScorer:
    """Scores pairs with the live cross-encoder on all ranks, as `SentenceEncoder` encodes texts.

    A score is the raw output of the model in float32: no sigmoid makes the best of them equal. It has the same bits on
    any number of ranks, and equal pairs are scored once.

    All methods are collectives: every rank calls them with the same pairs.

    Args:
        encoder: maps the tokens of N pairs to float32 [N, 1]; its prompts precede the texts of pairs that have no
            others.
        windows: score a document that is too long in overlapping windows, of which the maximum counts; else its end is
            cut off.
    """

    def __init__(self, encoder: SentenceEncoder, *, windows: bool = False) -> None:
        self._encoder, self.windows, self.precision = encoder, windows, encoder.precision

    @classmethod
    def from_model(
        cls,
        model: LoadedModel,
        world: World,
        *,
        chunk_tokens: int,
        unshard: Unshard = Unshard.layer,
        windows: bool = False,
    ) -> Self:
        """The scorer of a loaded cross-encoder; arguments as of `SentenceEncoder.from_model`."""
        encoder = SentenceEncoder.from_model(model, world, chunk_tokens=chunk_tokens, unshard=unshard, truncate=False)
        return cls(encoder, windows=windows)

    @property
    def world(self) -> World:
        """The ranks that score together."""
        return self._encoder.world

    def report_progress(self, progress: ProgressCallback) -> contextlib.AbstractContextManager[None]:
        """Call `progress` after every block of chunks within the block."""
        return self._encoder.report_progress(progress)

    def score(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        label: str = "scoring pairs",
    ) -> Tensor:
        """The score of each query with the document of the same index: float32 [n] on the CPU, on every rank.

        Args:
            query_prompt, document_prompt: precede the texts; None: those of the model.
            label: what is done, for progress.

        Raises TrainingError on every rank if a score is not finite.
        """
        encoder = self._encoder
        prompts = (
            encoder.query_prompt if query_prompt is None else query_prompt,
            encoder.document_prompt if document_prompt is None else document_prompt,
        )
        pairs = _Pairs(queries, documents, prompts)
        if not self.windows:
            return encoder.encode_all(pairs, label=label)[:, 0].cpu()
        counts, strides = self._windows(pairs)
        owners = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        windows = _Pairs(Selected(queries, owners), Selected(documents, owners), prompts, numbers * strides[owners])
        scores = encoder.encode_all(windows, label=label)[:, 0].cpu()
        best = torch.full((len(counts),), -torch.inf)
        return best.scatter_reduce(0, torch.from_numpy(owners), scores, "amax")

    def _windows(self, pairs: Sequence[Pair]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The number of windows of each pair's document, and the tokens from one to the next, int64 [n] each.

        Each rank tokenizes a part of the pairs.
        """
        world, tokenizer = self.world, self._encoder.tokenizer
        first, end = (len(pairs) * rank // world.size for rank in (world.rank, world.rank + 1))
        local = [np.empty((0, 2), dtype=np.int64)]
        with world.fail_together("tokenizing"):
            batches = (range(start, min(end, start + _PAIRS_PER_CALL)) for start in range(first, end, _PAIRS_PER_CALL))
            local += [
                tokenizer.layout.windows([pairs[number] for number in batch], tokenizer.max_length) for batch in batches
            ]
        sizes = [len(pairs) * (rank + 1) // world.size - len(pairs) * rank // world.size for rank in range(world.size)]
        gathered = gather_rows(torch.from_numpy(np.concatenate(local)).to(world.device), sizes).cpu().numpy()
        return gathered[:, 0], gathered[:, 1]


def best_first(scores: Sequence[float], ids: Sequence[str]) -> list[int]:
    """Indices of documents by descending score, ties by descending id, as in trec_eval."""
    return sorted(range(len(ids)), key=lambda index: (scores[index], ids[index]), reverse=True)
