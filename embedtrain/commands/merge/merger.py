"""The merged rows of any weights of the models, by the method of the options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from embedtrain.commands.merge.combine import Coefficients, Measures, Progress, linear_rows
from embedtrain.commands.merge.members import Member
from embedtrain.commands.merge.options import MergeMethod, MergeOptions
from embedtrain.commands.merge.stored_weights import Piece
from embedtrain.commands.merge.ties import thresholds, ties_rows
from embedtrain.distributed.world import World

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
