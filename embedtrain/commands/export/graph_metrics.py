"""Metrics of the graphs of an export on evaluation sets."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from embedtrain.config.evaluation import Backend
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ONNX
from embedtrain.distributed.world import World, joined_world
from embedtrain.errors import CheckpointError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.first_stage import with_bm25_candidates
from embedtrain.evaluation.sets import load_sets
from embedtrain.evaluation.types import LoadedSet, RetrievalSet, check_sets_of_kind
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.graph import load_graph
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console

if TYPE_CHECKING:
    from embedtrain.commands.export import ExportOptions

_CHUNK_TOKENS = 16384
_DEPTH = 100  # documents of BM25 that a reranker orders


@dataclass
class GraphMetrics:
    """Measures graphs by the main metric of each set, and rejects those that are much worse than the fp32 graph."""

    sets: Sequence[LoadedSet]
    world: World
    console: Console
    max_loss: float
    expected: Mapping[str, float] = field(default_factory=dict)  # of the fp32 graph, which is measured first

    def __call__(self, source: ModelSource, name: str) -> dict[str, float]:
        """The metrics of the graph of a format, by set and metric. Raises CheckpointError if one is too low."""
        model = load_graph(source, Backend(name), self.world)
        is_scorer = source.kind.scores_pairs
        encoder = (PairScorer if is_scorer else SentenceEncoder).from_model(
            model, self.world, chunk_tokens=_CHUNK_TOKENS
        )
        with self.console.progress() as progress:
            results = Evaluator(self.sets, encoder, self.world).evaluate(progress=progress)
        names = [loaded.data.name for loaded in self.sets]
        measured = {f"{name} {metric}": results[name][metric] for name in names for metric in list(results[name])[:1]}
        if name == ONNX:
            self.expected = measured
        for metric, value in measured.items():
            self.console.note(f"{name}: {metric} {value:.4f}")
            if not value >= self.expected[metric] - self.max_loss:
                raise CheckpointError(
                    f"{name}: {metric} is {value:.4f}, and that of the fp32 graph {self.expected[metric]:.4f}: more "
                    f"than max_metric_loss={self.max_loss} below; leave {name} out of formats, or raise the bound"
                )
        return measured


@contextlib.contextmanager
def graph_metrics(options: "ExportOptions", kind: str, console: Console) -> Iterator[GraphMetrics | None]:
    """The metrics on the sets that the command names; None without sets."""
    if not options.sets:
        yield None
        return
    with joined_world() as world:
        sets = load_sets(options.sets, world, subset=options.subset, option="sets")
        check_sets_of_kind(sets, load_kind(kind), "sets")
        if load_kind(kind).scores_pairs:
            sets = [_with_candidates(loaded, world) for loaded in sets]
        yield GraphMetrics(sets, world, console, options.max_metric_loss)


def _with_candidates(loaded: LoadedSet, world: World) -> LoadedSet:
    is_searched = isinstance(loaded.data, RetrievalSet) and loaded.data.candidates is None
    return with_bm25_candidates(loaded, _DEPTH, world) if is_searched else loaded
