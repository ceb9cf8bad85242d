"""A teacher: another model whose scores are written, and margins taken by; a bi-encoder or a cross-encoder.

Q queries, P pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from sentence_transformers import CrossEncoder

from embedtrain.config.recipe import ModelConfig, ParallelConfig, Pooling, Precision
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError, TrainingError
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex
from embedtrain.inference.vector_cache import VectorCache, model_identity
from embedtrain.loading.command_model import TEACHER_OPTION_NAMES, command_option_names
from embedtrain.loading.load import load_model
from embedtrain.mine.documents import ProgressCallback
from embedtrain.mine.indexed import indexed
from embedtrain.mine.options import MineOptions
from embedtrain.mine.pool import DocumentPool
from embedtrain.mine.relation import positions_within
from embedtrain.mine.window import FloatArray, QueryDocumentPairs, scores_of
from embedtrain.models.hub import one_line
from embedtrain.models.source import ModelSource, open_model_source
from embedtrain.models.tokenizer import resolve_max_length

# sentence-transformers calls whatever of torch has the name that a cross-encoder's config.json gives.
_ACTIVATIONS = (
    "torch.nn.modules.activation.Sigmoid",
    "torch.nn.modules.activation.Tanh",
    "torch.nn.modules.linear.Identity",
)
_PAIRS_PER_PREDICT = 256  # of one query, that a cross-encoder sorts by length; progress is told after them


class Teacher(Protocol):
    """What scores pairs of queries and documents of the pool."""

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """Do what is to be done once. A collective.

        Args:
            pool: the documents.
            directory: where vectors are kept on disk.
            progress: called with what is done, how far it has come, and of how much.
        """
        ...

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """The score of each pair, float32 [P], on every rank. A collective.

        Args:
            queries: Q texts without prompts.
            pairs: the same on every rank.
            progress: called with what is done, how far it has come, and of how much.

        Raises:
            TrainingError: on every rank, if a score is not finite.
        """
        ...


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher that was found, but not loaded yet.

    Attributes:
        source: what its directory says.
        is_cross_encoder: whether it reads query and document together.
        model: how it is loaded.
    """

    source: ModelSource
    is_cross_encoder: bool
    model: ModelConfig


def open_teacher(options: MineOptions) -> TeacherSpec:
    """Tell what `options.teacher` is by its files.

    Raises:
        ConfigError: it is not there, or is neither a bi-encoder nor a cross-encoder of one score.
    """
    model = ModelConfig(
        path=options.teacher,
        revision=options.teacher_revision,
        max_length=options.teacher_max_length,
        trust_remote_code=options.trust_remote_code,
    )
    path = str(options.teacher)
    try:
        with command_option_names(TEACHER_OPTION_NAMES):
            try:
                return TeacherSpec(open_model_source(model), False, model)
            except ConfigError:  # nothing says how it pools
                model.pooling = Pooling.mean
                source = open_model_source(model)
    except ModelError as error:
        raise ConfigError(f"teacher={path}: {str(error).removeprefix(f'teacher={path}').lstrip(': ')}") from None
    kinds = [str(kind) for kind in source.config.architectures or [source.config.model_type]]
    is_classifier = any(kind.endswith("ForSequenceClassification") for kind in kinds)
    num_labels = source.config.num_labels
    if is_classifier and num_labels == 1:
        activation = _activation(source)
        if activation not in (None, *_ACTIVATIONS) and not options.trust_remote_code:
            raise ConfigError(
                f"teacher={path}: its config.json asks for the activation {activation}, which would be called by that "
                f"name; those that are known are {', '.join(_ACTIVATIONS)}"
            )
        return TeacherSpec(source, True, model)
    classes = f" of {num_labels} classes" if is_classifier else ""
    raise ConfigError(
        f"teacher={path}: it is a {', '.join(kinds)}{classes}; a teacher is a sentence-transformers "
        "directory that says how it pools, or a cross-encoder, a "
        "...ForSequenceClassification with num_labels 1"
    )


def _activation(source: ModelSource) -> Any:
    """What sentence-transformers is told to put scores through, under its name of today or that before version 4."""
    said = source.config.to_dict()
    today = said.get("sentence_transformers")
    name = today.get("activation_fn") if isinstance(today, dict) else today
    return name if name is not None else said.get("sbert_ce_default_activation_function")


def load_teacher(
    found: TeacherSpec, options: MineOptions, precision: Precision, world: World
) -> tuple[Teacher, tuple[str, ...]]:
    """Load it; and lines for the user about it. A collective.

    Raises:
        ConfigError, ModelError: on every rank alike.
    """
    if not found.is_cross_encoder:
        loaded = load_model(found.model, ParallelConfig(precision=precision), world, seed=0, work=None)
        encoder = SentenceEncoder(
            loaded.encoder,
            loaded.tokenizer,
            world,
            chunk_tokens=options.chunk_tokens,
            query_prompt=loaded.source.prompts.get("query", ""),
            document_prompt=loaded.source.prompts.get("document", ""),
            unshard=options.unshard,
        )
        identity = model_identity(loaded.source, precision, world)
        return _BiEncoder(encoder, options, identity), loaded.notes[:1]
    with world.fail_together("loading the teacher"):
        try:
            cross = CrossEncoder(
                str(found.source.directory),
                device=str(world.device),
                trust_remote_code=options.trust_remote_code,
                local_files_only=True,
                max_length=options.teacher_max_length,
                model_kwargs={"weights_only": True},
            )
        except Exception as error:  # of files that make no sense the libraries raise nearly anything
            raise ModelError(f"teacher={options.teacher} cannot be loaded: {one_line(error)}") from error
        resolve_max_length(found.source, cross.tokenizer)  # a length beyond its positions is refused
    length = cross.max_seq_length
    return _CrossEncoder(cross, options, world), (f"a cross-encoder, {length} tokens",)


class _BiEncoder:
    """Cosines, exact. Texts have the teacher's own prompts, as those that a loss's teacher sees have."""

    def __init__(self, encoder: SentenceEncoder, options: MineOptions, identity: dict[str, Any]) -> None:
        self._encoder, self._options, self._identity = encoder, options, identity
        self._index: ShardedIndex | None = None

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """See Teacher."""
        prompt = self._encoder.document_prompt
        vector_cache = VectorCache(directory, {**self._identity, "dtype": self._options.index.dtype.value})
        texts = pool.formatted(lambda text: prompt + text)
        self._index = indexed(
            self._encoder,
            texts,
            None,
            self._options.index,
            vector_cache,
            progress,
            what="documents by the teacher",
            prompt=prompt,
        )

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """See Teacher."""
        assert self._index is not None
        vectors = self._encoder.encode_all(queries, self._encoder.query_prompt, what="queries by the teacher")
        return scores_of(self._index, unit_vectors(vectors), pairs)


class _CrossEncoder:
    """A cross-encoder's scores, through its own activation; each rank reads its share of the pairs.

    It computes in the precision that its weights are stored in: margins are finer than what bf16 can tell.
    """

    def __init__(self, cross: CrossEncoder, options: MineOptions, world: World) -> None:
        self._cross, self._batch_size, self._world = cross, options.teacher_batch_size, world
        self._pool: DocumentPool | None = None

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """See Teacher."""
        self._pool = pool

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """See Teacher."""
        assert self._pool is not None
        world, num_pairs = self._world, len(pairs.owners)
        # What is padded together, and with it a score's last bit, is the same on any number of ranks: pieces of one
        # query's pairs, dealt so that every rank has about as many pairs.
        starts = np.flatnonzero(positions_within(pairs.counts(len(queries))) % _PAIRS_PER_PREDICT == 0)
        ends = np.append(starts[1:], num_pairs)
        edges = np.searchsorted(starts, num_pairs * np.arange(world.size + 1) // world.size)
        bounds = np.append(starts, num_pairs)[edges]
        scores: FloatArray = np.empty(bounds[world.rank + 1] - bounds[world.rank], dtype=np.float32)
        done = 0
        with world.fail_together("scoring by the teacher"):
            for piece in range(edges[world.rank], edges[world.rank + 1]):
                some = slice(starts[piece], ends[piece])
                query = queries[pairs.owners[starts[piece]]]
                both = [(query, self._pool[number]) for number in pairs.documents[some].tolist()]
                scores[done : done + len(both)] = self._cross.predict(
                    both, batch_size=self._batch_size, show_progress_bar=False
                )
                done += len(both)
                progress("scoring this rank's pairs by the teacher", done, len(scores))
            if not np.isfinite(scores).all():
                raise TrainingError("the teacher's scores are not finite: its weights hold NaN or infinity")
        return gather_rows(torch.from_numpy(scores).to(world.device), np.diff(bounds).tolist()).cpu().numpy()
