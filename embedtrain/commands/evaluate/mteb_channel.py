"""Commands of rank 0 that all ranks execute while mteb runs on rank 0: encoding, indexing, search, scores."""

import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from embedtrain.config.evaluation import IndexConfig, VectorPlacement
from embedtrain.data.images.files import PICTURES, Place, header_of
from embedtrain.data.images.item import Picture, pictures_of
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import FailedElsewhere
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.index import ShardedIndex
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.losses.encoded import Part

# How long the other ranks wait while rank 0 fits a classifier or downloads a data set. A rank that died is noticed
# immediately, so this only ends ranks that will never get another command.
_COMMAND_TIMEOUT = timedelta(days=7)
# Bytes of pictures per command, at least one picture.
_PICTURE_BYTES_PER_COMMAND = 1 << 26


@dataclass(frozen=True, slots=True)
class StartTask:
    """Start a task and drop the index."""

    task: str


@dataclass(frozen=True, slots=True)
class AddPictures:
    """Store pictures that texts of later commands refer to: `files` has the bytes of their files, one after another."""

    references: list[str]
    lengths: list[int]
    files: bytes


@dataclass(frozen=True, slots=True)
class EncodeTexts:
    """Encode texts; every rank gets the vectors, not normalized. A model that encodes all alike ignores the role."""

    texts: list[str]
    prompt: str
    role: TextRole


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


Command = StartTask | AddPictures | EncodeTexts | NewIndex | AddDocuments | SearchDocuments | ScoreDocuments | Finish


class CommandChannel:
    """Executes commands of rank 0 on all ranks.

    The constructor is a collective. Rank 0 then calls `run`, and finally `finish`; the other ranks call `serve`, which
    returns after `finish`.

    Texts may have pictures, which mteb has on rank 0 alone. `add_picture` sends their files, of which each host keeps
    one copy on its disk until the next task.
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
        self.index, self._vector_cache = index, vector_cache
        self._index: ShardedIndex | None = None
        self._task = "mteb"
        self._pending: dict[Picture, bytes] = {}  # pictures to send before the next command
        self._sent: set[int] = set()  # keys of the pictures of this task that all ranks have
        self._lent: list[Picture] = []  # those that only `_files` has
        self._files: Any = None  # a temporary file of the first rank of a host, with the pictures of this task
        self.in_sync = True  # whether the other ranks wait for a command; False after one that was not completed
        # Of gloo, on whatever device the ranks compute: commands are on the CPU.
        self._channel = replace(world, group=dist.new_group(backend="gloo", timeout=_COMMAND_TIMEOUT))

    def run(self, command: Command) -> Any:
        """Execute a command on all ranks and return its result. On rank 0."""
        self._send_pictures()
        return self._run(command)

    def _send_pictures(self) -> None:
        if self._pending:
            pictures, self._pending = self._pending, {}
            lengths = list(map(len, pictures.values()))
            self._run(AddPictures(list(map(str, pictures)), lengths, b"".join(pictures.values())))

    def _run(self, command: Command) -> Any:
        # After an interruption, the ranks are at different points and cannot receive further commands.
        self.in_sync = False
        with explain_lost_contact(f"running {self._task}"):
            result = self._execute(self._broadcast(command))
        self.in_sync = True
        return result

    def add_picture(self, data: bytes) -> Picture:
        """The picture of a file with these bytes, which texts may refer to from now on. On rank 0.

        Raises BadPicture if it cannot be used.
        """
        picture = header_of(data).picture
        if picture.key not in self._sent:
            self._sent.add(picture.key)
            self._pending[picture] = data
            if sum(map(len, self._pending.values())) >= _PICTURE_BYTES_PER_COMMAND:
                self._send_pictures()
        return picture

    def finish(self, error: BaseException | None = None) -> None:
        """Release the other ranks. On rank 0; does nothing if they were lost within a command."""
        if self.in_sync:
            self.in_sync = False
            with explain_lost_contact(f"running {self._task}"):
                self._broadcast(Finish(None if error is None else f"{type(error).__name__}: {error}"))
        self._forget_pictures()

    def serve(self) -> None:
        """Execute rank 0's commands until it finishes, or raise FailedElsewhere if it failed. On every other rank."""
        while True:
            with explain_lost_contact(f"running {self._task}"):
                command = self._broadcast(None)
                if isinstance(command, Finish):
                    break
                self._execute(command)
        self._forget_pictures()
        if command.error is not None:
            raise FailedElsewhere(f"rank 0 failed while running {self._task}: {command.error}")

    def _broadcast(self, command: Command | None) -> Command:
        received = self._channel.broadcast(command, *get_args(Command), TextRole)
        assert received is not None, "rank 0 sends a command"
        return received

    def _execute(self, command: Command) -> Any:
        match command:
            case StartTask(task):
                self._task, self._index = task, None
                self._forget_pictures()
            case AddPictures(references, lengths, files):
                self._store_pictures(references, lengths, files)
            case EncodeTexts(texts, prompt, role):
                role = TextRole.query if self.encoder.score.is_symmetric else role
                return self.encoder.encode_all(texts, prompt, role=role, label="encoding texts")
            case NewIndex(priorities):
                self._index = ShardedIndex(torch.from_numpy(priorities), self.world, self.index, self.encoder.score)
            case AddDocuments(texts, prompt, first):
                self._add_documents(texts, prompt, first)
            case SearchDocuments(queries, prompt, k):
                return self._current_index.search(self._encode_queries(queries, prompt), k)
            case ScoreDocuments(queries, prompt, documents):
                vectors = self._encode_queries(queries, prompt)
                return self._current_index.scores_of(vectors, torch.from_numpy(documents))
        return None

    def _store_pictures(self, references: list[str], lengths: list[int], files: bytes) -> None:
        world, path, start = self._channel, "", 0
        with world.fail_together("storing the pictures of a task of mteb"):
            if world.local_rank == 0:
                if self._files is None:
                    self._files = tempfile.NamedTemporaryFile(prefix="embedtrain-mteb-")  # noqa: SIM115
                path, start = self._files.name, self._files.tell()
                self._files.write(files)
                self._files.flush()
        path, start = world.gather((path, start))[world.rank - world.local_rank]
        for reference, length in zip(references, lengths, strict=True):
            (picture,) = pictures_of(reference)
            if PICTURES.lend(picture, Place(path, start, length)):
                self._lent.append(picture)
            start += length

    def _forget_pictures(self) -> None:
        """Delete those of the previous task."""
        for picture in self._lent:
            PICTURES.take_back(picture)
        self._lent.clear()
        self._sent.clear()
        self._pending.clear()
        if self._files is not None:
            self._files.close()
            self._files = None

    def _add_documents(self, texts: list[str], prompt: str, first: int) -> None:
        index, mapped = self._current_index, self.index.place is VectorPlacement.disk
        for block in self.encoder.encode_blocks(
            texts, prompt, vector_cache=self._vector_cache, mapped=mapped, transform=index.stored_part
        ):
            index.add(EncodedShard(block.part, block.rows + first))

    def _encode_queries(self, texts: list[str], prompt: str) -> Part:
        return self.encoder.score.search_part(self.encoder.encode(texts, prompt))

    @property
    def _current_index(self) -> ShardedIndex:
        assert self._index is not None, "documents are added before queries are searched"
        return self._index
