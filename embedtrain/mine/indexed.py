"""The pool as vectors that can be searched, each on one rank."""

from collections.abc import Sequence

from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, dtype_of
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.mine.documents import ProgressCallback
from embedtrain.mine.window import pool_order


def indexed(
    encoder: SentenceEncoder,
    texts: Sequence[str],
    max_length: int | None,
    config: IndexConfig,
    vector_cache: VectorCache,
    progress: ProgressCallback,
    what: str = "documents",
    prompt: str = "",
) -> ShardedIndex:
    """Encode documents to be searched by cosine; what was stored before is not encoded again. A collective.

    Args:
        encoder: of the model.
        texts: all documents, as the model is to see them; equal scores come in their order.
        max_length: tokens kept of each; None: the model's.
        config: as what vectors are kept, and where.
        vector_cache: where they are kept on disk.
        progress: called with what is encoded, how far it has come, and of how much.
        what: they are.
        prompt: what each of them begins with that is one.

    Raises:
        TrainingError: on every rank, if a vector is not finite.
    """
    index = ShardedIndex(pool_order(len(texts)), encoder.world, config)
    dtype = dtype_of(config)

    def finish(vectors: Tensor) -> Tensor:
        return unit_vectors(vectors).to(dtype)

    before, encoder.progress = encoder.progress, progress
    for block in encoder.encode_blocks(
        texts, max_length=max_length, vector_cache=vector_cache, finish=finish, what=what, existing_prompt=prompt
    ):
        index.add(block)
    encoder.progress = before
    return index
