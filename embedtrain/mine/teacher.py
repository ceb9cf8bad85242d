"""The teacher: another model, a bi-encoder or a cross-encoder, whose scores are written and used for margins.

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
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.vector_cache import VectorCache, model_identity
from embedtrain.loading.command_model import TEACHER_OPTION_NAMES, command_option_names
from embedtrain.loading.load import load_model
from embedtrain.mine.candidates import FloatArray, QueryDocumentPairs, scores_of
from embedtrain.mine.inputs import positions_within
from embedtrain.mine.options import MineOptions
from embedtrain.mine.pool import DocumentPool, IntArray
from embedtrain.models.hub import one_line
from embedtrain.models.source import ModelSource, open_model_source
from embedtrain.models.tokenizer import require_bounded_time, resolve_max_length

# sentence-transformers calls any function of torch that the config.json of a cross-encoder names.
_ACTIVATIONS = (
    "torch.nn.modules.activation.Sigmoid",
    "torch.nn.modules.activation.Tanh",
    "torch.nn.modules.linear.Identity",
)
_PAIRS_PER_PREDICT = 256  # of one query; the cross-encoder sorts them by length, and progress is reported after them


class Teacher(Protocol):
    """Scores pairs of queries and documents of the pool."""

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """Get ready to score documents of `pool`; vectors are stored in `directory`. A collective."""
        ...

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """The score of each pair, float32 [P], on every rank; `queries` are without prompts. A collective.

        Raises TrainingError on every rank if a score is not finite.
        """
        ...


@dataclass(frozen=True)
class TeacherSpec:
    """A teacher whose directory was read, but whose weights are not loaded yet."""

    source: ModelSource
    is_cross_encoder: bool  # whether it reads query and document together
    model: ModelConfig  # the options to load it with


def open_teacher(options: MineOptions) -> TeacherSpec:
    """Detect by its files whether `options.teacher` is a bi-encoder or a cross-encoder.

    Raises ConfigError if it does not exist, or is neither a bi-encoder nor a cross-encoder with a single score.
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
            except ConfigError:  # its files do not define the pooling
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
                f"teacher={path}: config.json names the activation {activation}, which sentence-transformers would "
                f"call; allowed are {', '.join(_ACTIVATIONS)}"
            )
        return TeacherSpec(source, True, model)
    classes = f" of {num_labels} classes" if is_classifier else ""
    raise ConfigError(
        f"teacher={path}: it is a {', '.join(kinds)}{classes}; a teacher is a sentence-transformers "
        "directory that defines its pooling, or a cross-encoder, which is a ...ForSequenceClassification with "
        "num_labels 1"
    )


def _activation(source: ModelSource) -> Any:
    """The name of the activation in config.json, under its current name or the one before sentence-transformers 4."""
    config = source.config.to_dict()
    settings = config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else settings
    return name if name is not None else config.get("sbert_ce_default_activation_function")


def load_teacher(
    spec: TeacherSpec, options: MineOptions, precision: Precision, world: World
) -> tuple[Teacher, tuple[str, ...]]:
    """Load the weights; also returns lines for the user. A collective."""
    if not spec.is_cross_encoder:
        model = load_model(spec.model, ParallelConfig(precision=precision), world, seed=0, work=None)
        encoder = SentenceEncoder.from_model(model, world, chunk_tokens=options.chunk_tokens, unshard=options.unshard)
        identity = model_identity(model.source, precision, world)
        return _BiEncoder(encoder, options, identity), model.notes[:1]
    with world.fail_together("loading the teacher"):
        try:
            cross_encoder = CrossEncoder(
                str(spec.source.directory),
                device=str(world.device),
                trust_remote_code=options.trust_remote_code,
                local_files_only=True,
                max_length=options.teacher_max_length,
                model_kwargs={"weights_only": True},
            )
        except Exception as error:  # for damaged files the libraries raise nearly anything
            raise ModelError(f"teacher={options.teacher} cannot be loaded: {one_line(error)}") from error
        require_bounded_time(cross_encoder.tokenizer, str(options.teacher))
        resolve_max_length(spec.source, cross_encoder.tokenizer)  # rejects a length beyond its positions
    note = f"a cross-encoder, {cross_encoder.max_seq_length} tokens"
    return _CrossEncoder(cross_encoder, options, world), (note,)


class _BiEncoder:
    """Exact cosines. Texts get the teacher's own prompts, as they do for a teacher in a loss."""

    def __init__(self, encoder: SentenceEncoder, options: MineOptions, identity: dict[str, Any]) -> None:
        self._encoder, self._options, self._identity = encoder, options, identity
        self._index: ShardedIndex | None = None

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """Encode all documents."""
        prompt = self._encoder.document_prompt
        self._index = ShardedIndex(first_added_order(len(pool)), self._encoder.world, self._options.index)
        with self._encoder.report_progress(progress):
            self._index.add_texts(
                self._encoder,
                pool.formatted(lambda text: prompt + text),
                vector_cache=VectorCache(directory, {**self._identity, "dtype": self._options.index.dtype.value}),
                label="encoding documents with the teacher",
                existing_prompt=prompt,
            )

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """Encode the queries and score the pairs."""
        assert self._index is not None
        vectors = self._encoder.encode_all(
            queries, self._encoder.query_prompt, label="encoding queries with the teacher"
        )
        return scores_of(self._index, unit_vectors(vectors), pairs)


class _CrossEncoder:
    """The scores of a cross-encoder after its activation; each rank scores a part of the pairs.

    It computes in the precision of the stored weights: bf16 is too coarse for margins.
    """

    def __init__(self, cross_encoder: CrossEncoder, options: MineOptions, world: World) -> None:
        self._cross_encoder, self._batch_size, self._world = cross_encoder, options.teacher_batch_size, world
        self._pool: DocumentPool | None = None

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """Only needs the texts."""
        self._pool = pool

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """Score the pairs in pieces of one query each."""
        assert self._pool is not None
        world, num_pairs = self._world, len(pairs.owners)
        piece_starts, piece_ends = _split_pieces(pairs.counts(len(queries)), _PAIRS_PER_PREDICT)
        # Each rank scores consecutive pieces with about the same number of pairs.
        rank_first_piece = np.searchsorted(piece_starts, num_pairs * np.arange(world.size + 1) // world.size)
        rank_first_pair = np.append(piece_starts, num_pairs)[rank_first_piece]
        num_local = rank_first_pair[world.rank + 1] - rank_first_pair[world.rank]
        scores: FloatArray = np.empty(num_local, dtype=np.float32)
        done = 0
        with world.fail_together("scoring with the teacher"):
            for piece in range(rank_first_piece[world.rank], rank_first_piece[world.rank + 1]):
                documents = pairs.documents[piece_starts[piece] : piece_ends[piece]].tolist()
                query = queries[pairs.owners[piece_starts[piece]]]
                texts = [(query, self._pool[number]) for number in documents]
                scores[done : done + len(texts)] = self._cross_encoder.predict(
                    texts, batch_size=self._batch_size, show_progress_bar=False
                )
                done += len(texts)
                progress("scoring this rank's pairs with the teacher", done, len(scores))
            if not np.isfinite(scores).all():
                raise TrainingError("the teacher's scores are not finite: its weights hold NaN or infinity")
        counts = np.diff(rank_first_pair).tolist()
        return gather_rows(torch.from_numpy(scores).to(world.device), counts).cpu().numpy()


def _split_pieces(counts: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Cut pairs, `counts` of each query in their order, into pieces of one query and at most `size` pairs.

    Returns the index of each piece's first pair, and the index after its last. The last bit of a score depends on the
    pairs that are padded together: pieces that are the same on any number of ranks make scores the same as well.
    """
    starts = np.flatnonzero(positions_within(counts) % size == 0)
    return starts, np.append(starts[1:], int(counts.sum()))
