"""What rank 0 has all ranks do while mteb runs on it alone: encode, index, search. The others wait for its orders.

Texts travel in portions, so that no rank holds a corpus; documents' vectors stay where they were made.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import FailedElsewhere
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, dtype_of
from embedtrain.inference.vector_cache import VectorCache

# How long the other ranks wait while rank 0 fits a classifier or downloads a data set. One that died is noticed at
# once, so this only ends ranks that nobody will ever call again.
_COMMAND_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class StartTask:
    """Another task begins; what was indexed is of no more use."""

    task: str


@dataclass(frozen=True, slots=True)
class EncodeTexts:
    """Encode texts; every rank gets the vectors as the model gives them."""

    texts: list[str]
    prompt: str


@dataclass(frozen=True, slots=True)
class NewIndex:
    """Documents will come: for each its place among equal scores, int64 [N]."""

    priorities: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AddDocuments:
    """Encode documents and keep them; `first` is the number of the first of them."""

    texts: list[str]
    prompt: str
    first: int


@dataclass(frozen=True, slots=True)
class SearchDocuments:
    """Find the `k` best documents of each query."""

    queries: list[str]
    prompt: str
    k: int


@dataclass(frozen=True, slots=True)
class ScoreDocuments:
    """Score given documents of each query, numbers int64 [Q, M], -1 where there is none."""

    queries: list[str]
    prompt: str
    documents: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Finish:
    """All is done, or rank 0 failed on its own; `error` says how."""

    error: str | None = None


Command = StartTask | EncodeTexts | NewIndex | AddDocuments | SearchDocuments | ScoreDocuments | Finish


class CommandChannel:
    """Work that all ranks do at rank 0's word.

    Making one is a collective. Rank 0 then calls `do`, and at last `end`; the other ranks call `serve`, which returns
    when rank 0 has ended.

    Args:
        encoder: the live model.
        world: the ranks.
        index: how documents' vectors are kept.
        unit: whether texts are compared by cosine; else by inner product.
        vector_cache: where documents' vectors are kept on disk.

    Attributes:
        in_sync: whether the others wait for an order; no longer, once one was not carried out to its end.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        world: World,
        index: IndexConfig,
        *,
        unit: bool = True,
        vector_cache: VectorCache | None = None,
    ) -> None:
        self.encoder, self.world = encoder, world
        self._config, self._unit, self._stored = index, unit, vector_cache
        self._index: ShardedIndex | None = None
        self._task = "mteb"
        self.in_sync = True
        # Orders are Python objects and lie on the CPU, whatever the ranks compute on.
        self._group = dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT)

    def do(self, command: Command) -> Any:
        """Have all ranks carry out an order; what comes out of it. On rank 0.

        Raises:
            TrainingError: on every rank, if a vector is not finite on any.
            LostContact: another rank is gone.
        """
        # Whatever interrupts this leaves the ranks at different places, and no order would reach them any more.
        self.in_sync = False
        with explain_lost_contact(f"running {self._task}"):
            result = self._execute(self._broadcast(command))
        self.in_sync = True
        return result

    def end(self, error: BaseException | None = None) -> None:
        """Let the other ranks go. On rank 0; does nothing if they were lost in the midst of an order."""
        if self.in_sync:
            self.in_sync = False
            with explain_lost_contact(f"running {self._task}"):
                self._broadcast(Finish(None if error is None else f"{type(error).__name__}: {error}"))

    def serve(self) -> None:
        """Carry out rank 0's orders until it ends. On every other rank.

        Raises:
            FailedElsewhere: rank 0 ended with an error.
            TrainingError, LostContact: as `do`.
        """
        while True:
            with explain_lost_contact(f"running {self._task}"):
                command = self._broadcast(None)
                if isinstance(command, Finish):
                    break
                self._execute(command)
        if command.error is not None:
            raise FailedElsewhere(f"rank 0 failed while running {self._task}: {command.error}")

    def _broadcast(self, command: Command | None) -> Command:
        box: list[Any] = [command]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        told: Command = box[0]
        return told

    def _execute(self, command: Command) -> Any:
        match command:
            case StartTask(task):
                self._task, self._index = task, None
            case EncodeTexts(texts, prompt):
                return self.encoder.encode_all(texts, prompt, what="texts")
            case NewIndex(priorities):
                self._index = ShardedIndex(torch.from_numpy(priorities), self.world, self._config)
            case AddDocuments(texts, prompt, first):
                self._add(texts, prompt, first)
            case SearchDocuments(queries, prompt, k):
                return self._ready.search(self._queries(queries, prompt), k)
            case ScoreDocuments(queries, prompt, documents):
                return self._ready.scores_of(self._queries(queries, prompt), torch.from_numpy(documents))
        return None

    def _add(self, texts: list[str], prompt: str, first: int) -> None:
        dtype = dtype_of(self._config)
        blocks = self.encoder.encode_blocks(
            texts, prompt, vector_cache=self._stored, finish=lambda vectors: self._comparable(vectors).to(dtype)
        )
        for block in blocks:
            self._ready.add(EncodedShard(block.vectors, block.rows + first))

    def _queries(self, texts: list[str], prompt: str) -> Tensor:
        return self._comparable(self.encoder.encode_all(texts, prompt))

    def _comparable(self, vectors: Tensor) -> Tensor:
        return unit_vectors(vectors) if self._unit else vectors

    @property
    def _ready(self) -> ShardedIndex:
        assert self._index is not None, "documents come before queries"
        return self._index
