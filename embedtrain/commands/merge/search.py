"""Weights that are chosen on evaluation sets: one model is in memory, and each candidate is written into it.

Each rank computes its own rows of a candidate from the files of all members.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from embedtrain.commands.merge.combine import (
    Coefficients,
    Measures,
    Progress,
    combined_tensors,
    linear_rows,
    merged_rows,
    thresholds,
    ties_rows,
)
from embedtrain.commands.merge.members import Member, Piece, split_pieces
from embedtrain.commands.merge.options import FindOptions, MergeMethod, MergeOptions, SearchMethod
from embedtrain.config.recipe import ParallelConfig
from embedtrain.distributed.sharding import reshard, row_range
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.sets import load_sets
from embedtrain.evaluation.types import check_sets_of_kind, metric_names_of_set
from embedtrain.formats.weights import WeightRows
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.load import LoadedModel, load_model, verify_packing
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.tracking.console import Console

Combine = Callable[[Piece], Tensor]  # rows in float64


@dataclass(frozen=True, slots=True)
class Merger:
    """Models whose weights were measured; of methods with a base, the last member is the base."""

    options: MergeOptions
    members: Sequence[Member]
    measures: Measures
    kept: Mapping[str, Sequence[float]] = field(default_factory=dict)  # thresholds of TIES

    @classmethod
    def prepare(
        cls, options: MergeOptions, members: Sequence[Member], measures: Measures, world: World, progress: Progress
    ) -> "Merger":
        """Measure what the method needs besides inner products. A collective."""
        if options.method is not MergeMethod.ties:
            return cls(options, members, measures)
        kept = thresholds(members[:-1], members[-1], options.density, world, progress)
        return cls(options, members, measures, kept)

    def merged(self, weights: Sequence[float]) -> Combine:
        """The merged model. Raises ConfigError for `parts` that do not fit the models."""
        coefficients = Coefficients(self.options, self.measures, weights)
        if self.options.method is MergeMethod.ties:
            *members, base = self.members
            return lambda piece: ties_rows(
                members, base, piece, coefficients.weights_of(piece.name), self.kept, self.options.scale
            )
        by_name = {name: coefficients.of(name) for name in self.measures.grams}
        return lambda piece: linear_rows(self.members, piece, by_name[piece.name])

    def member(self, index: int) -> Combine:
        """One of the models as it is."""
        return lambda piece: linear_rows([self.members[index]], piece, [1.0])


# The value of weights on the sets that choose them, measured once for each.
Score = Callable[[list[float]], float]


@dataclass(frozen=True, slots=True)
class Search:
    """Weights, and how they were found, for merge.json."""

    weights: list[float]
    record: dict[str, Any]


def find_weights(
    find: FindOptions, merger: Merger, num_models: int, settings: int, world: World, console: Console
) -> Search:
    """Choose weights on `find.sets`, with the settings of the member `settings`. A collective.

    Raises ConfigError for a method that does not fit the number of models, or sets that do not fit their kind.
    """
    if find.method is SearchMethod.grid and num_models != 2:
        raise ConfigError(f"find.method=grid: is for two models, not {num_models}; write coordinate or greedy")
    names = [member.name for member in merger.members[:num_models]]
    candidate = _Candidate(find, merger, settings, world, console)
    of_members = [candidate.measure(merger.member(index), names[index]) for index in range(num_models)]
    values = [candidate.value(metrics) for metrics in of_members]
    tried: dict[tuple[float, ...], float] = {}

    def score(weights: list[float]) -> float:
        key = tuple(weights)
        if key not in tried:
            tried[key] = candidate.value(candidate.measure(merger.merged(weights), _written(weights)))
        return tried[key]

    weights = _METHODS[_require(find.method)](find, values, score)
    merged = candidate.measure(merger.merged(weights), f"merged, {_written(weights)}")
    record = {
        "method": _require(find.method).value,
        "chosen_on": candidate.chosen_on,
        "members": dict(zip(names, of_members, strict=True)),
        "candidates": [{"weights": list(key), "value": value} for key, value in tried.items()],
        "merged": merged,
    }
    console.warn(
        f"{', '.join(candidate.chosen_on)}: the weights were chosen there, so these are no test sets of the merged "
        "model; measure it on others (find.held_out)"
    )
    best = max(values)
    if candidate.value(merged) < best:
        console.warn(
            f"the merged model has {candidate.value(merged):.4f} where the best model, {names[values.index(best)]}, "
            f"has {best:.4f}"
        )
    return Search(weights, record)


class _Candidate:
    """A model in memory whose weights are replaced."""

    def __init__(self, find: FindOptions, merger: Merger, settings: int, world: World, console: Console) -> None:
        self._merger, self._world, self._console = merger, world, console
        source = merger.members[settings].source
        metrics = None if find.metric is None else [find.metric]
        sets = load_sets([*find.sets, *find.held_out], world, subset=find.subset, metrics=metrics, option="find.sets")
        check_sets_of_kind(sets, source.kind, "find.sets")
        self._main_metrics = {loaded.data.name: metric_names_of_set(loaded)[0] for loaded in sets}
        self.chosen_on = [loaded.data.name for loaded in sets[: len(find.sets)]]
        # The weights of heads are not read from the files of this member either.
        heads = tuple(replace(dense, directory=None) for dense in source.vectors.dense)
        source = replace(source, vectors=replace(source.vectors, dense=heads))
        self._config = source.kind.model_options(path=str(source.directory))
        self._parallel = ParallelConfig(precision=find.precision)
        self._loaded: LoadedModel = load_model(
            self._config, self._parallel, world, seed=0, source=source, read_weights=False, work=None
        )
        self._sets, self._chunk_tokens = sets, find.chunk_tokens
        self._evaluator: Evaluator | None = None

    def measure(self, combine: Combine, name: str) -> dict[str, float]:
        """The main metric of each set, of a model with these weights. A collective."""
        self._fill(combine)
        if self._evaluator is None:
            # Packing is verified with weights that are not random.
            self._loaded = verify_packing(self._loaded, self._config, self._parallel, self._world)
            kind = PairScorer if self._loaded.source.kind.scores_pairs else SentenceEncoder
            encoder = kind.from_model(self._loaded, self._world, chunk_tokens=self._chunk_tokens)
            self._evaluator = Evaluator(self._sets, encoder, self._world)
        with self._console.progress() as progress:
            results = self._evaluator.evaluate(progress=progress)
        values = {name: results[name][metric] for name, metric in self._main_metrics.items()}
        shown = ", ".join(f"{key} {value:.4f}" for key, value in values.items())
        self._console.note(f"{name}: {shown}")
        return values

    def value(self, metrics: dict[str, float]) -> float:
        """The mean over the sets that choose the weights."""
        return math.fsum(metrics[name] for name in self.chosen_on) / len(self.chosen_on)

    def _fill(self, combine: Combine) -> None:
        """Write this rank's rows into the encoder."""
        encoder = self._loaded.encoder
        reshard(encoder)
        state = encoder.state_dict()
        with self._world.fail_together("reading the members' weights"), torch.no_grad():
            for name, first, rows in self._rows(combine, state):
                if name not in state:  # of an adapter, whose product is among the others
                    continue
                tensor = state[name]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                start, end = row_range(tensor)
                low, high = max(first, start), min(first + len(rows), end) if rows.dim() else end
                if not local.dim():
                    local.copy_(rows)
                elif low < high:
                    local[low - start : high - start].copy_(rows[low - first : high - first])

    def _rows(self, combine: Combine, state: Mapping[str, Tensor]) -> Iterator[WeightRows]:
        """This rank's rows of the candidate's weights, or all of a model whose adapters are combined as factors."""
        members = self._merger.members
        adapters = members[0].adapters
        if adapters is not None:
            yield from adapters.merged(combined_tensors(members, combine)).rows
            return
        for name, tensor in state.items():
            start, end = row_range(tensor)
            pieces = [
                Piece(name, start + piece.start, start + piece.end)
                for piece in split_pieces({name: members[0].specs[name].rows(end - start)}, 1 << 20)
            ]
            yield from merged_rows(members, pieces, combine, torch.float32)


def _greedy(find: FindOptions, values: Sequence[float], score: Score) -> list[float]:
    """Model soups (Wortsman et al., 2022, https://arxiv.org/abs/2203.05482), best model first."""
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    chosen, best = order[:1], values[order[0]]
    for index in order[1:]:
        value = score(_uniform([*chosen, index], len(values)))
        if value >= best:
            chosen, best = [*chosen, index], value
    return _uniform(chosen, len(values))


def _uniform(chosen: Sequence[int], size: int) -> list[float]:
    return [1 / len(chosen) if index in chosen else 0.0 for index in range(size)]


def _grid(find: FindOptions, values: Sequence[float], score: Score) -> list[float]:
    """The best of evenly spaced weights; of equal ones the nearest to the middle."""
    candidates = [([1.0, 0.0], values[0]), ([0.0, 1.0], values[1])]
    for step in range(1, find.steps):
        weights = [1 - step / find.steps, step / find.steps]
        candidates.append((weights, score(weights)))
    return max(candidates, key=lambda candidate: (candidate[1], -abs(candidate[0][0] - 0.5)))[0]


def _coordinate(find: FindOptions, values: Sequence[float], score: Score) -> list[float]:
    """From equal weights on, the best value of each weight in turn; the others keep their proportions."""
    weights = _uniform(range(len(values)), len(values))
    best = score(weights)
    for _ in range(find.rounds):
        before = best
        for index in range(len(values)):
            for step in range(find.steps + 1):
                changed = _with_weight(weights, index, step / find.steps)
                if changed is not None and (value := score(changed)) > best:
                    weights, best = changed, value
        if best == before:
            break
    return weights


def _with_weight(weights: Sequence[float], index: int, value: float) -> list[float] | None:
    """The weights with another one at `index` and the sum 1; None if the others are 0 and cannot be scaled."""
    others = math.fsum(weights) - weights[index]
    if others <= 0:
        return None
    return [value if i == index else weight / others * (1 - value) for i, weight in enumerate(weights)]


def _cocktail(find: FindOptions, values: Sequence[float], score: Score) -> list[float]:
    """A softmax of the metrics, as LM-Cocktail's (Xiao et al., 2023, https://arxiv.org/abs/2311.13534) of losses."""
    temperature = statistics.pstdev(values) if find.temperature is None else find.temperature
    if not temperature:
        return _uniform(range(len(values)), len(values))
    highest = max(values)
    powers = [math.exp((value - highest) / temperature) for value in values]
    return [power / math.fsum(powers) for power in powers]


_METHODS = {
    SearchMethod.greedy: _greedy,
    SearchMethod.grid: _grid,
    SearchMethod.coordinate: _coordinate,
    SearchMethod.cocktail: _cocktail,
}


def _require(method: SearchMethod | None) -> SearchMethod:
    assert method is not None
    return method


def _written(weights: Sequence[float]) -> str:
    return f"weights {', '.join(f'{weight:.3g}' for weight in weights)}"
