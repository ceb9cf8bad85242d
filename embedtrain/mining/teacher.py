"""The teacher: another model of any kind, whose scores are written and used for margins.

Q queries, P pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from embedtrain.config.kinds import kinds
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Precision
from embedtrain.config.validation import model_options_named
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.loading.command_model import TEACHER_OPTION_NAMES, open_encoder_source
from embedtrain.inference.loading.load import load_model
from embedtrain.inference.pair_scorer import PairScorer, Selected
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.mining.inputs import FloatArray, QueryDocumentPairs, scores_of
from embedtrain.mining.options import RowSearchOptions
from embedtrain.mining.pool import DocumentPool
from embedtrain.models.types import ModelSource


class Teacher(Protocol):
    """Scores pairs of queries and documents of the pool."""

    scores_are_logits: bool  # of a probability, instead of similarities

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
    model: ModelConfig  # the options to load it with


def open_teacher(options: RowSearchOptions) -> TeacherSpec:
    """Detect by its files whether `options.teacher` is a bi-encoder or a cross-encoder.

    Raises ConfigError if it does not exist, or is neither a bi-encoder nor a finished cross-encoder.
    """
    common: dict[str, Any] = {
        "path": options.teacher,
        "revision": options.teacher_revision,
        "max_length": options.teacher_max_length,
        "trust_remote_code": options.trust_remote_code,
    }
    path = str(options.teacher)
    template, labels = options.teacher_pair_template, options.teacher_score_labels
    (of_pairs,) = (kind for kind in kinds() if kind.scores_pairs)
    reranker = of_pairs.model_options(**common, pair_template=template, score_labels=labels)
    try:
        with model_options_named(TEACHER_OPTION_NAMES):
            if template is None and labels is None:
                try:
                    encoder, source = open_encoder_source(ModelConfig(**common))
                    return TeacherSpec(source, encoder)
                except ConfigError:  # its files do not define the pooling
                    pass
            source = open_model_source(reranker)
    except ModelError as error:
        raise ConfigError(f"teacher={path}: {str(error).removeprefix(f'teacher={path}').lstrip(': ')}") from None
    if source.has_new_head:
        architectures = ", ".join(source.config.architectures or [source.config.model_type])
        raise ConfigError(
            f"teacher={path}: it is a {architectures}; a teacher is a sentence-transformers directory that defines its "
            "pooling, or a finished cross-encoder, such as a ...ForSequenceClassification with num_labels 1"
        )
    return TeacherSpec(source, reranker)


def load_teacher(
    spec: TeacherSpec, options: RowSearchOptions, precision: Precision, identity: dict[str, Any], world: World
) -> tuple[Teacher, tuple[str, ...]]:
    """Load the weights; also returns lines for the user. A collective; `identity` is that of `model_identity`."""
    model = load_model(spec.model, ParallelConfig(precision=precision), world, seed=0, source=spec.source, work=None)
    settings: dict[str, Any] = {"chunk_tokens": options.chunk_tokens, "unshard": options.unshard}
    if spec.source.kind.scores_pairs:
        scorer = PairScorer.from_model(model, world, windows=options.teacher_document_windows, **settings)
        return _CrossEncoder(scorer), model.notes[:1]
    encoder = SentenceEncoder.from_model(model, world, **settings)
    return _BiEncoder(encoder, options, identity), model.notes[:1]


class _BiEncoder:
    """Exact similarities. Texts get the teacher's own prompts, as they do for a teacher in a loss."""

    scores_are_logits = False

    def __init__(self, encoder: SentenceEncoder, options: RowSearchOptions, identity: dict[str, Any]) -> None:
        self._encoder, self._options, self._identity = encoder, options, identity
        self._index: ShardedIndex | None = None

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """Encode all documents."""
        prompt = self._encoder.document_prompt
        config = replace(self._options.index, token_pooling=1.0, first_stage=None)  # of the model that searches
        self._index = ShardedIndex(first_added_order(len(pool)), self._encoder.world, config, self._encoder.score)
        with self._encoder.report_progress(progress):
            self._index.add_texts(
                self._encoder,
                pool.formatted(lambda text: prompt + text),
                vector_cache=VectorCache(directory, {**self._identity, "dtype": config.identity}),
                label="encoding documents with the teacher",
                existing_prompt=prompt,
            )

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """Encode the queries and score the pairs."""
        assert self._index is not None
        encoded = self._encoder.encode(queries, self._encoder.query_prompt, label="encoding queries with the teacher")
        return scores_of(self._index, self._encoder.score.search_part(encoded), pairs)


class _CrossEncoder:
    """Raw scores, without a sigmoid, in which the best of them would tie. All ranks score together."""

    scores_are_logits = True

    def __init__(self, scorer: PairScorer) -> None:
        self._scorer = scorer
        self._pool: DocumentPool | None = None

    def prepare(self, pool: DocumentPool, directory: Path, progress: ProgressCallback) -> None:
        """Only needs the texts."""
        self._pool = pool

    def scores(self, queries: Sequence[str], pairs: QueryDocumentPairs, progress: ProgressCallback) -> FloatArray:
        """Score all pairs."""
        assert self._pool is not None
        with self._scorer.report_progress(progress):
            scores = self._scorer.score(
                Selected(queries, pairs.owners),
                Selected(self._pool, pairs.documents),
                label="scoring pairs with the teacher",
            )
        return scores.numpy()
