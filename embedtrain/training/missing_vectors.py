"""Vectors of the texts that a teacher's directory lacks: its model encodes them before the first step."""

from collections.abc import Sequence

from embedtrain.config.losses import CombinedConfig, LossConfig
from embedtrain.config.recipe import Precision
from embedtrain.config.similarity_losses import OnMissing, TeacherConfig
from embedtrain.data.cache.row_store import RowStore
from embedtrain.errors import DataError, EmbedtrainError
from embedtrain.inference.loading.encoder_model import open_encoder_source
from embedtrain.inference.stored_vectors import StoredVectors, is_stored_vectors
from embedtrain.inference.vector_directory import VectorDirectory, distinct_texts, model_of, teacher_identity
from embedtrain.training.inputs import Run, RunInputs


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
