"""Guides and teachers of a loss: frozen models that encode the same texts, or their vectors on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embedtrain.config.kinds import kind_of_files, load_kind
from embedtrain.config.losses import CombinedConfig, LossConfig, OnMissing, Similarity, TeacherConfig, TeacherMap
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Precision
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.images.item import described
from embedtrain.data.rows import Example, TextFormat
from embedtrain.data.tokens import restore_order
from embedtrain.data.types import Chunk, TextRole
from embedtrain.distributed.collectives import max_over_ranks
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, EmbedtrainError, ModelError
from embedtrain.formats.hub import resolve_directory, split_revision
from embedtrain.formats.weights import directory_digest
from embedtrain.inference.loading.command_model import open_encoder_source
from embedtrain.inference.loading.load import load_model
from embedtrain.inference.principal_components import Moments, principal_components
from embedtrain.inference.vector_directory import (
    StoredVectors,
    VectorDirectory,
    distinct_texts,
    is_stored_vectors,
    model_of,
    teacher_identity,
)
from embedtrain.losses.distillation import DistillEmbeddings
from embedtrain.losses.types import Guide
from embedtrain.models.encoder import Encoder
from embedtrain.training.inputs import Run, RunInputs
from embedtrain.training.rank_batch import GuideTokenizer
from embedtrain.training.resume import TEACHERS
from embedtrain.utils.files import expand_user


class GuideModel:
    """A frozen model that encodes the texts of a batch."""

    def __init__(self, encoder: Encoder, texts: GuideTokenizer, similarity: Similarity, world: World) -> None:
        self.encoder = encoder.eval().requires_grad_(False)
        self.texts, self.similarity, self.world = texts, similarity, world
        self._dummy = texts.tokenizer.dummy().to(world.device)

    @property
    def dimension(self) -> int:
        """The dimension of its vectors."""
        return self.encoder.dimension

    def __call__(self, chunks: Sequence[Chunk], num_queries: int) -> Guide:
        """The vectors of this rank's chunks. A collective: every rank calls it, with or without rows."""
        # Over the host's process group: reading a tensor of the GPU would wait for all work that is queued there.
        (num_passes,) = max_over_ranks([len(chunks)], torch.device("cpu"))
        padded = [*chunks, *[self._dummy] * (max(1, num_passes) - len(chunks))]
        with torch.no_grad():
            rows = restore_order([self.encoder(chunk)[0] for chunk in padded], padded)
        reshard(self.encoder)
        return Guide(rows[:num_queries], rows[num_queries:], self.similarity)


class StoredTeacher:
    """A guide or teacher whose vectors were computed before; `more` has those of texts that its directory lacks."""

    def __init__(self, path: str, more: StoredVectors | None = None) -> None:
        self.path, self.stored, self.more = path, StoredVectors.open(path), more
        self.similarity = _guide_similarity(path, self.stored.similarity)

    @property
    def dimension(self) -> int:
        """The dimension of its vectors."""
        return self.stored.dimension

    def __call__(self, rows: Sequence[Example]) -> Guide:
        """The vectors of these rows' texts; a DataError for a text that has none."""
        queries, documents = [row.query for row in rows], [text for row in rows for text in row.documents.texts]
        vectors = self._vectors(TextRole.query, queries), self._vectors(TextRole.document, documents)
        return Guide(*vectors, self.similarity)

    def _vectors(self, role: TextRole, texts: Sequence[str]) -> torch.Tensor:
        rows = self._rows(role, texts)
        for index in np.flatnonzero(rows < 0)[:1].tolist():
            raise DataError(self._missing(role, texts[index]))
        if self.more is None:
            return self.stored.vectors(rows)
        is_stored = torch.from_numpy(rows < len(self.stored.keys))
        vectors = torch.empty(len(rows), self.dimension)
        vectors[is_stored] = self.stored.vectors(rows[is_stored.numpy()])
        vectors[~is_stored] = self.more.vectors(rows[~is_stored.numpy()] - len(self.stored.keys))
        return vectors

    def _rows(self, role: TextRole, texts: Sequence[str]) -> NDArray[np.int64]:
        """The row of each text, those of `more` after those of the directory; -1 for a text that is missing."""
        rows = self.stored.rows(role, texts)
        if self.more is None:
            return rows
        more = self.more.rows(role, texts)
        return np.where((rows < 0) & (more >= 0), more + len(self.stored.keys), rows)

    def check(self, stores: Sequence[RowStore], world: World) -> None:
        """Require a vector of every text, before the first step. A collective; the ranks share the work."""
        with world.fail_together("looking for the teacher's vectors"):
            for store in stores:
                for batch in range(world.rank, len(store.rows.batch_starts) - 1, world.size):
                    queries, *documents = (column.to_pylist() for column in store.rows.batch(batch).columns[:3])
                    of_rows = [positives + negatives for positives, negatives in zip(*documents, strict=True)]
                    owners = np.repeat(np.arange(len(queries)), [len(of_row) for of_row in of_rows])
                    for role, texts, numbers in (
                        (TextRole.query, queries, np.arange(len(queries))),
                        (TextRole.document, [text for of_row in of_rows for text in of_row], owners),
                    ):
                        for index in np.flatnonzero(self._rows(role, texts) < 0)[:1].tolist():
                            example = store[int(store.rows.batch_starts[batch] + numbers[index])]
                            raise DataError(f"{example.place}: {self._missing(role, texts[index])}")

    def _missing(self, role: TextRole, text: str) -> str:
        other = TextRole.document if role is TextRole.query else TextRole.query
        hint = "write them with embedtrain vectors, from the same training data, or set on_missing=encode in the loss"
        if self.stored.rows(other, [text])[0] >= 0:
            hint = f"it has one as a {other.value}, with the prompt {self.stored.prompt(other)!r}; {hint}"
        return (
            f"the loss's guide or teacher {self.path} has no vector of the {role.value} {described(text)[:60]!r} with "
            f"the prompt {self.stored.prompt(role)!r}: {hint}"
        )


# Rows of a directory of vectors that are read at a time.
_BLOCK = 4096


def set_teacher_maps(loss: nn.Module, guides: Mapping[str, "GuideModel | StoredTeacher"], world: World) -> None:
    """Give the parts of a loss with `teacher_map=pca` the principal components of their teacher. A collective.

    They are the eigenvectors of the second moment of all vectors, less no mean: of all maps to so many dimensions, they
    keep the inner products of the vectors best. A ConfigError for a teacher whose vectors are not on disk.
    """
    components: dict[str, Tensor] = {}
    for part in loss.modules():
        if not isinstance(part, DistillEmbeddings) or part.config.teacher_map is not TeacherMap.pca:
            continue
        path = part.config.teacher
        teacher = guides.get(path or "")
        if path is None or not isinstance(teacher, StoredTeacher):
            raise ConfigError(
                f"loss.teacher_map=pca: loss.teacher={path} is a model, whose vectors are not known at the "
                "start; write them with embedtrain vectors and set loss.teacher to the directory, or write "
                "teacher_map=orthogonal"
            )
        if path not in components:
            components[path] = _principal_components(teacher.stored, world)
        part.set_principal_components(components[path])


def _principal_components(stored: StoredVectors, world: World) -> Tensor:
    moments = Moments.of(torch.empty(0, stored.dimension))
    with world.fail_together("reading the teacher's vectors"):
        for start in range(world.rank * _BLOCK, len(stored.keys), world.size * _BLOCK):
            moments += Moments.of(stored.vectors(np.arange(start, min(start + _BLOCK, len(stored.keys)))))
    return principal_components(moments.all_reduced(world).second_moment)[0]


def teachers_identity(paths: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """The content of guides and teachers, which a resumed run must have: digests, and commits of ids of the Hub."""
    digests = dict[str, str]()
    for path in paths:
        directory = expand_user(path)
        if is_stored_vectors(path):
            digests[path] = StoredVectors.open(path).digest
        elif directory.is_dir():
            digests[path] = directory_digest(directory)
        else:
            name, revision = split_revision(path)
            commit = resolve_directory(name, revision, "the loss's guide or teacher", "its revision").name
            digests[name] = f"{digests[name]} {commit}" if name in digests else commit
    return {TEACHERS: digests} if digests else {}


def _guide_similarity(path: str, name: str) -> Similarity:
    """How a guide or teacher compares its vectors; a ConfigError for a distance, which is no inner product."""
    if name not in [similarity.value for similarity in Similarity]:
        raise ConfigError(
            f"the loss's guide or teacher {path} compares vectors by their {name} distance: a guide or teacher of a "
            f"loss compares by {' or '.join(Similarity)}; take another model"
        )
    return Similarity(name)


def load_guides(
    paths: Sequence[str],
    parallel: ParallelConfig,
    world: World,
    *,
    chunk_tokens: int,
    more: Mapping[str, StoredVectors] | None = None,
) -> tuple[dict[str, GuideModel | StoredTeacher], list[str]]:
    """Load the guides of a loss, by path or ID@REVISION, with a note about each. Every rank must call.

    `more` has vectors of texts that directories of vectors lack, by the path of the directory. Code of a guide never
    runs: `model.trust_remote_code` is for the model that is trained.
    """
    guides, notes = dict[str, GuideModel | StoredTeacher](), list[str]()
    for path in paths:
        if is_stored_vectors(path):
            with world.fail_together("opening the teacher's vectors"):
                teacher = StoredTeacher(path, (more or {}).get(path))
            guides[path] = teacher
            notes.append(f"the loss's guide or teacher {path}: {teacher.stored.describe()}")
            continue
        name, revision = split_revision(path)
        options = load_kind(ModelConfig.kind).model_options(path=name, revision=revision)
        if (expand_user(name) / "modules.json").is_file() and not kind_of_files(expand_user(name))[0].has_one_model:
            raise ConfigError(
                f"the loss's guide or teacher {path}: has a model for queries and another for documents; write its "
                f"vectors with embedtrain vectors model={path}, and name their directory instead"
            )
        try:
            loaded = load_model(options, replace(parallel, fp8=False), world, seed=0)
        except (ConfigError, ModelError) as error:
            reason = str(error).removeprefix(f"model.path={name}: ")
            reason += " (it has to be a sentence-transformers model)"
            if "auto_map" in reason:
                reason = (
                    "needs Python code of its own (auto_map), and model.trust_remote_code is for the trained model "
                    f"alone: write its vectors with embedtrain vectors model={path} trust_remote_code=true, and name "
                    "their directory instead"
                )
            raise ConfigError(f"the loss's guide or teacher {path}: {reason}") from None
        prompts = loaded.source.prompts
        text_format = TextFormat(query_prompt=prompts.get("query", ""), document_prompt=prompts.get("document", ""))
        texts = GuideTokenizer(loaded.tokenizer, text_format, chunk_tokens)
        similarity = _guide_similarity(path, loaded.source.vectors.similarity.value)
        guides[path] = GuideModel(loaded.encoder, texts, similarity, world)
        notes.append(f"the loss's guide or teacher {path}: {loaded.notes[0]}")
    return guides, notes


def encode_missing(run: Run, inputs: RunInputs) -> dict[str, StoredVectors]:
    """Vectors of texts that the directories of losses with `on_missing=encode` lack, by directory. A collective.

    They are in the run directory, where a resumed run finds them.
    """
    stores: dict[str, list[RowStore]] = {}
    for store, loss in zip(inputs.data.stores, inputs.losses, strict=True):
        for path in dict.fromkeys(_directories(loss)):
            stores.setdefault(path, []).append(store)
    missing = {path: _encode(path, of_path, run) for path, of_path in stores.items()}
    return {path: stored for path, stored in missing.items() if stored is not None}


def _directories(loss: LossConfig) -> list[str]:
    match loss:
        case CombinedConfig(losses=parts):
            return [path for part in parts for path in _directories(part)]
        case TeacherConfig(on_missing=OnMissing.encode):
            return [path for path in loss.teacher_paths if is_stored_vectors(path)]
        case _:
            return []


def _encode(path: str, stores: Sequence[RowStore], run: Run) -> StoredVectors | None:
    """The vectors of these rows' texts that the directory lacks; None if it has all."""
    recipe, world = run.recipe, run.world
    with world.fail_together("looking for the teacher's vectors"):
        stored = StoredVectors.open(path)
        index = stored.index
        texts = distinct_texts(stores, index["query_prompt"], index["document_prompt"]).without(stored.keys)
    if not len(texts):
        return None
    with world.fail_together("opening the teacher"):
        model = model_of(stored)
        try:
            source = open_encoder_source(model)[1]
        except EmbedtrainError as error:
            raise type(error)(
                f"the loss's guide or teacher {path} lacks {len(texts):,} texts of the training data, and its model "
                f"{model.path} cannot encode them: {error}; the code of a model that a file names never runs: write "
                "the vectors of all texts with embedtrain vectors"
            ) from error
        expected = dict(index["identity"])
        precision = Precision(expected["precision"])
    identity = teacher_identity(
        source,
        precision,
        world,
        max_length=model.max_length,
        dims=expected["dims"],
        dtype=expected["dtype"],
        rows_per_part=index["rows_per_part"],
    )
    if identity != expected:
        changed = next(name for name in {**expected, **identity} if identity.get(name) != expected.get(name))
        raise DataError(
            f"the loss's guide or teacher {path} lacks {len(texts):,} texts of the training data, and its model "
            f"{model.path} is no longer the one that wrote it ({changed} differs): restore the model, or write the "
            "vectors again with embedtrain vectors"
        )
    run.note([f"the loss's guide or teacher {path} lacks {len(texts):,} texts, which {model.path} encodes"])
    directory = VectorDirectory(run.run_dir.teacher_vectors / stored.digest[:16], model, identity, texts, world)
    train = recipe.train
    return directory.encode(
        chunk_tokens=train.chunk_tokens,
        unshard=recipe.evaluation.unshard,
        timeout=recipe.parallel.timeout,
        console=run.console,
    )
