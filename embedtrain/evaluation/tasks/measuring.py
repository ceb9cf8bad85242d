"""Measuring: what every kind of evaluation works with, and how its texts become vectors."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_limits
from torch import Tensor

from embedtrain.config.evaluation import IndexConfig
from embedtrain.distributed.world import World
from embedtrain.evaluation.types import LoadedSet
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.exact import unit_vectors
from embedtrain.inference.index import ShardedIndex, dtype_of, trec_order
from embedtrain.inference.vector_cache import VectorCache


@dataclass(frozen=True)
class EvaluationContext:
    """One set on one model.

    Attributes:
        encoder: the live model; its prompts hold where the set has none of its own.
        world: the ranks.
        loaded: the set, with its prompts and lengths.
        metrics: which figures are wanted.
        index: how documents' vectors are kept.
        vector_cache: where documents' vectors are kept on disk, if they are.
        save_runs: a folder for rankings as TREC files, or None.
        run_depth: documents of each query in a run file.
    """

    encoder: SentenceEncoder
    world: World
    loaded: LoadedSet
    metrics: tuple[str, ...]
    index: IndexConfig
    vector_cache: VectorCache | None
    save_runs: Path | None
    run_depth: int

    def queries(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors of queries: float32 [n, D], on every rank. A collective."""
        return unit_vectors(self._encoded(texts, "queries"))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Vectors of texts that are neither queries nor documents, as the model gives them, of whatever length.

        They get the prompt and the length of queries. Float32 [n, D], on every rank. A collective.
        """
        return self._encoded(texts, "texts")

    def _encoded(self, texts: Sequence[str], what: str) -> Tensor:
        prompt = self.encoder.query_prompt if self.loaded.query_prompt is None else self.loaded.query_prompt
        return self.encoder.encode_all(texts, prompt, max_length=self.loaded.query_max_length, what=what)

    def indexed(self, texts: Sequence[str], ids: Sequence[str]) -> ShardedIndex:
        """Documents, each on one rank, to be searched by cosine; ties in the order of trec_eval. A collective."""
        prompt = self.encoder.document_prompt if self.loaded.document_prompt is None else self.loaded.document_prompt
        index = ShardedIndex(trec_order(ids), self.world, self.index)
        dtype = dtype_of(self.index)
        for block in self.encoder.encode_blocks(
            texts,
            prompt,
            max_length=self.loaded.document_max_length,
            vector_cache=self.vector_cache,
            finish=lambda vectors: unit_vectors(vectors).to(dtype),
        ):
            index.add(block)
        return index


# Of whatever is drawn, in any set and experiment: MTEB's.
SEED = 42


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """Fit and measure within it.

    The last bits of a product, and with them now and then a prediction, depend on the number of threads; launchers
    give one process all cores and several processes one each. What scikit-learn warns of (no convergence after so
    many iterations, a class that was never predicted) is the figures' own matter: they are what they are.
    """
    with warnings.catch_warnings(), threadpool_limits(limits=1):
        warnings.simplefilter("ignore")
        yield
