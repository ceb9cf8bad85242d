"""The evaluation of a live model on its sets, all ranks together."""

from collections.abc import Sequence
from pathlib import Path

from embedtrain.config.evaluation import IndexConfig
from embedtrain.distributed.world import World
from embedtrain.evaluation.encode import SentenceEncoder
from embedtrain.evaluation.metrics import DEPTH
from embedtrain.evaluation.stored_vectors import StoredVectors
from embedtrain.evaluation.tasks import retrieval, sts
from embedtrain.evaluation.tasks.measuring import Measuring
from embedtrain.evaluation.types import LoadedSet, RetrievalSet, ScoredPairs


class Evaluator:
    """Measures the model as it is now, as often as asked, on sets that were read once.

    Similarity is the cosine, as in sentence-transformers and MTEB, also where the model does not normalise.

    Args:
        sets: from `load_sets`, the same on every rank.
        encoder: the live model; its prompts hold where a set has none of its own.
        world: the ranks.
        depth: documents of each query in a run file. Figures do not depend on it.
        index: how documents' vectors are kept while they are searched.
        stored: where they are kept on disk, so that an evaluation that was stopped goes on.
    """

    def __init__(
        self,
        sets: Sequence[LoadedSet],
        encoder: SentenceEncoder,
        world: World,
        *,
        depth: int = DEPTH,
        index: IndexConfig | None = None,
        stored: StoredVectors | None = None,
    ) -> None:
        self.sets = list(sets)
        self.encoder = encoder
        self.world = world
        self.depth = depth
        self.index = index or IndexConfig()
        self.stored = stored

    def evaluate(self, *, save_runs: Path | None = None) -> dict[str, dict[str, float]]:
        """Figures by set and metric, the same floats on every rank. A collective.

        Args:
            save_runs: a folder; each retrieval set's ranking and judgements are written there by rank 0 as TREC files.

        Raises:
            TrainingError: on every rank, if the model gives vectors that are not finite.
        """
        return {loaded.data.name: self._measure(loaded, save_runs) for loaded in self.sets}

    def _measure(self, loaded: LoadedSet, save_runs: Path | None) -> dict[str, float]:
        measuring = Measuring(
            self.encoder,
            self.world,
            loaded,
            metrics_of_set(loaded),
            self.index,
            self.stored,
            save_runs,
            self.depth,
        )
        match loaded.data:
            case RetrievalSet() as data:
                figures = retrieval.measure(data, measuring)
            case ScoredPairs() as data:
                figures = sts.measure(data, measuring)
        return {metric: figures[metric] for metric in measuring.metrics}


def metrics_of_set(loaded: LoadedSet) -> tuple[str, ...]:
    """Which metrics a set is measured by, the main one first."""
    if loaded.metrics is not None:
        return loaded.metrics
    match loaded.data:
        case RetrievalSet():
            return retrieval.METRICS
        case ScoredPairs():
            return sts.METRICS
        case other:
            raise NotImplementedError(type(other).__name__)


def metrics_of(sets: Sequence[LoadedSet]) -> dict[str, tuple[str, ...]]:
    """Which metrics each set has, by the set's name."""
    return {loaded.data.name: metrics_of_set(loaded) for loaded in sets}
