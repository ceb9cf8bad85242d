"""Commands with which rank 0, on which mteb runs, makes all ranks encode, index and search.

Texts are sent in batches, so that no rank holds a corpus; document vectors stay on the rank that encoded them.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import FailedElsewhere
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.index import ShardedIndex
from embedtrain.inference.store import dtype_of
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.losses.encoded import Part

# How long the other ranks wait while rank 0 fits a classifier or downloads a data set. A rank that died is noticed
# immediately, so this only ends ranks that will never get another command.
_COMMAND_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class StartTask:
    """Start a task and drop the index."""

    task: str


@dataclass(frozen=True, slots=True)
class EncodeTexts:
    """Encode texts; every rank gets the vectors, not normalized."""

    texts: list[str]
    prompt: str


@dataclass(frozen=True, slots=True)
class NewIndex:
    """Create an index for documents with these tie priorities, int64 [N]."""

    priorities: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AddDocuments:
    """Encode documents and add them to the index; `first` is the number of the first."""

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
    """Score documents of each query, given as numbers int64 [Q, M] padded with -1."""

    queries: list[str]
    prompt: str
    documents: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Finish:
    """No more commands; `error` describes why rank 0 failed, if it did."""

    error: str | None = None


Command = StartTask | EncodeTexts | NewIndex | AddDocuments | SearchDocuments | ScoreDocuments | Finish


class CommandChannel:
    """Executes commands of rank 0 on all ranks.

    The constructor is a collective. Rank 0 then calls `run`, and finally `finish`; the other ranks call `serve`, which
    returns after `finish`.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        world: World,
        index: IndexConfig,
        *,
        vector_cache: VectorCache | None = None,
    ) -> None:
        self.encoder, self.world = encoder, world
        self._config, self._vector_cache = index, vector_cache
        self._index: ShardedIndex | None = None
        self._task = "mteb"
        self.in_sync = True  # whether the other ranks wait for a command; False after one that was not completed
        # Of gloo, on whatever device the ranks compute: commands are on the CPU.
        self._channel = replace(world, group=dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT))

    def run(self, command: Command) -> Any:
        """Execute a command on all ranks and return its result. On rank 0."""
        # After an interruption, the ranks are at different points and cannot receive further commands.
        self.in_sync = False
        with explain_lost_contact(f"running {self._task}"):
            result = self._execute(self._broadcast(command))
        self.in_sync = True
        return result

    def finish(self, error: BaseException | None = None) -> None:
        """Release the other ranks. On rank 0; does nothing if they were lost within a command."""
        if self.in_sync:
            self.in_sync = False
            with explain_lost_contact(f"running {self._task}"):
                self._broadcast(Finish(None if error is None else f"{type(error).__name__}: {error}"))

    def serve(self) -> None:
        """Execute rank 0's commands until it finishes, or raise FailedElsewhere if it failed. On every other rank."""
        while True:
            with explain_lost_contact(f"running {self._task}"):
                command = self._broadcast(None)
                if isinstance(command, Finish):
                    break
                self._execute(command)
        if command.error is not None:
            raise FailedElsewhere(f"rank 0 failed while running {self._task}: {command.error}")

    def _broadcast(self, command: Command | None) -> Command:
        received = self._channel.broadcast(command, *get_args(Command))
        assert received is not None, "rank 0 sends a command"
        return received

    def _execute(self, command: Command) -> Any:
        match command:
            case StartTask(task):
                self._task, self._index = task, None
            case EncodeTexts(texts, prompt):
                role = TextRole.query if self.encoder.score.is_symmetric else TextRole.document
                return self.encoder.encode_all(texts, prompt, role=role, label="encoding texts")
            case NewIndex(priorities):
                self._index = ShardedIndex(torch.from_numpy(priorities), self.world, self._config, self.encoder.score)
            case AddDocuments(texts, prompt, first):
                self._add_documents(texts, prompt, first)
            case SearchDocuments(queries, prompt, k):
                return self._current_index.search(self._encode_queries(queries, prompt), k)
            case ScoreDocuments(queries, prompt, documents):
                vectors = self._encode_queries(queries, prompt)
                return self._current_index.scores_of(vectors, torch.from_numpy(documents))
        return None

    def _add_documents(self, texts: list[str], prompt: str, first: int) -> None:
        def transform(vectors: Tensor) -> Tensor:
            return self.encoder.score.search_rows(vectors).to(dtype_of(self._config))

        mapped = self._config.place is VectorPlacement.disk
        for block in self.encoder.encode_blocks(
            texts, prompt, vector_cache=self._vector_cache, mapped=mapped, transform=transform
        ):
            self._current_index.add(EncodedShard(block.vectors, block.rows + first, block.sizes))

    def _encode_queries(self, texts: list[str], prompt: str) -> Part:
        return self.encoder.score.search_part(self.encoder.encode(texts, prompt))

    @property
    def _current_index(self) -> ShardedIndex:
        assert self._index is not None, "documents are added before queries are searched"
        return self._index
