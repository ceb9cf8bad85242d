"""The evaluation of a live model on its sets, all ranks together."""

from collections.abc import Sequence
from pathlib import Path

from embedtrain.distributed.world import World
from embedtrain.evaluation.encode import EncodedShard, SentenceEncoder
from embedtrain.evaluation.metrics import DEPTH, RETRIEVAL_METRICS, STS_METRICS, retrieval_metrics, sts_metrics
from embedtrain.evaluation.runfile import run_path, write_run
from embedtrain.evaluation.search import ShardedIndex, cosines, unit_vectors
from embedtrain.evaluation.types import LoadedSet, RetrievalSet, ScoredPairs


class Evaluator:
    """Measures the model as it is now, as often as asked, on sets that were read once.

    Similarity is the cosine, as in sentence-transformers and MTEB, also where the model does not normalise.

    Args:
        sets: from `load_sets`, the same on every rank.
        encoder: the live model; its prompts hold where a set has none of its own.
        world: the ranks.
        depth: documents of each query in a run file. Figures are always those of the first 100.
    """

    def __init__(
        self, sets: Sequence[LoadedSet], encoder: SentenceEncoder, world: World, *, depth: int = DEPTH
    ) -> None:
        self.sets = list(sets)
        self.encoder = encoder
        self.world = world
        self.depth = depth

    def evaluate(self, *, save_runs: Path | None = None) -> dict[str, dict[str, float]]:
        """Figures by set and metric, the same floats on every rank. A collective.

        Args:
            save_runs: a folder; each retrieval set's ranking is written there by rank 0 as a TREC run file.

        Raises:
            TrainingError: on every rank, if the model gives vectors that are not finite.
        """
        return {loaded.data.name: self._evaluate_set(loaded, save_runs) for loaded in self.sets}

    def _evaluate_set(self, loaded: LoadedSet, save_runs: Path | None) -> dict[str, float]:
        query_prompt = self.encoder.query_prompt if loaded.query_prompt is None else loaded.query_prompt
        document_prompt = self.encoder.document_prompt if loaded.document_prompt is None else loaded.document_prompt
        if isinstance(loaded.data, ScoredPairs):
            return self._correlate(loaded.data, query_prompt)
        return self._retrieve(loaded.data, query_prompt, document_prompt, save_runs)

    def _retrieve(
        self, data: RetrievalSet, query_prompt: str, document_prompt: str, save_runs: Path | None
    ) -> dict[str, float]:
        judged, ids = data.judged_queries, list(data.documents)
        queries = self.encoder.encode_all([data.queries[query] for query in judged], query_prompt)
        shard = self.encoder.encode_sharded(list(data.documents.values()), document_prompt)
        index = ShardedIndex(EncodedShard(unit_vectors(shard.vectors), shard.rows), ids, self.world)
        ranking = index.search(unit_vectors(queries), max(self.depth, DEPTH))
        figures: dict[str, float] = {}
        with self.world.together(f"computing the metrics of {data.name}"):
            if self.world.is_main:
                run = {
                    query: dict(zip((ids[place] for place in places), scores, strict=True))
                    for query, places, scores in zip(
                        judged, ranking.documents.tolist(), ranking.scores.tolist(), strict=True
                    )
                }
                figures = retrieval_metrics(data.judgements, run)
                if save_runs is not None:
                    write_run(run_path(save_runs, data.name), run, self.depth)
        return self.world.broadcast(figures)

    def _correlate(self, data: ScoredPairs, prompt: str) -> dict[str, float]:
        vectors = self.encoder.encode_all([*data.first, *data.second], prompt)
        first, second = vectors[: len(data.first)], vectors[len(data.first) :]
        figures: dict[str, float] = {}
        with self.world.together(f"computing the metrics of {data.name}"):
            if self.world.is_main:
                figures = sts_metrics(cosines(first, second).tolist(), data.scores)
        return self.world.broadcast(figures)


def metrics_of(sets: Sequence[LoadedSet]) -> dict[str, tuple[str, ...]]:
    """Which metrics each set has, by the set's name."""
    return {
        loaded.data.name: RETRIEVAL_METRICS if isinstance(loaded.data, RetrievalSet) else STS_METRICS for loaded in sets
    }
