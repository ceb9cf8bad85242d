"""InfoNCE whose candidates pass by, one rank's at a time: for batches whose vectors no rank could hold.

Formulas: see `softmax`. While candidates pass, each row keeps its largest score, the sum of exp(z_ij) and
sum_j exp(z_ij) c_j online, as in flash attention (Dao et al., 2022) with candidates for keys and values: that is
the rows' gradient. Then the rows pass, and every rank adds up the gradient of its own candidates. Both at once
with what is computed, and no gradient ever travels.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import LossDirection
from embedtrain.distributed.collectives import ring
from embedtrain.losses.scores import Candidates, Rows, Rules
from embedtrain.losses.softmax import (
    GradientAtOnce,
    Gradients,
    Partitions,
    RowLosses,
    Space,
    anchors_of,
    count_right,
    positive_scores,
    row_maximum,
)


def around_ring(
    rows: Rows,
    candidates: Candidates,
    rules: Rules,
    scale: Tensor,
    margin: float,
    parts: Partitions,
    counts: tuple[list[int], list[int]],
) -> RowLosses:
    """As `tiled`, with this rank's `candidates` alone; the others' come by. Every rank must call it.

    Args:
        rows: this rank's.
        candidates: this rank's own.
        rules: see Rules.
        scale: one over the temperature, [1].
        margin: subtracted from the positive's similarity.
        parts: directions that share a softmax.
        counts: queries and documents of each rank.
    """
    loss, right = _Ring.apply(  # type: ignore[no-untyped-call]
        rows.queries, rows.positives, candidates.documents, candidates.queries, scale,
        (rows, candidates, rules, margin, parts, counts),
    )  # fmt: skip
    return RowLosses(loss, right)


class _Ring(GradientAtOnce):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor,
        documents: Tensor,
        candidate_queries: Tensor | None,
        scale: Tensor,
        rest: tuple[Rows, Candidates, Rules, float, Partitions, tuple[list[int], list[int]]],
    ) -> tuple[Tensor, Tensor]:
        rows, candidates, rules, margin, parts, counts = rest
        found = Gradients.zeros(rows, candidates, scale)
        positive = positive_scores(rows, scale, margin)
        online = [_Online(rows, directions) for directions in parts]
        for others in _passing_candidates(candidates, counts):
            for state in online:
                state.add(rows, others, rules, scale)
        pull, loss = torch.zeros_like(positive), positive.new_zeros(())
        right = torch.zeros((), dtype=torch.int64, device=positive.device)
        levels = []
        for state in online:
            gap = state.logsumexp() - positive
            loss += F.softplus(gap).sum() / len(parts)
            slope = torch.sigmoid(gap) / len(parts)
            pull += slope
            each = (slope / state.mass).masked_fill_(state.mass == 0, 0.0).mul_(scale)
            for side, weighted in zip(state.directions, state.weighted, strict=True):
                found.anchors(side).addcmul_(weighted, each.unsqueeze(1))
            levels += [state.level(), each]
            right = count_right(right, state.directions, state.tops, rows)
        for these, level in _passing_rows(rows, torch.stack(levels, dim=1), counts[0]):
            _add_candidates(found, these, level, candidates, rules, scale, parts)
        ctx.ready = found.finish(rows, pull, scale, margin)
        ctx.mark_non_differentiable(right)
        return loss, right


class _Online:
    """Of each row and one partition: maximum, sum of exp(score - maximum), and that sum weighted by candidates."""

    def __init__(self, rows: Rows, directions: Sequence[LossDirection]) -> None:
        self.directions = directions
        self.top = torch.full_like(rows.beaten_from, -torch.inf)
        self.tops = [self.top.clone() for _ in directions]  # of each side alone
        self.mass = torch.zeros_like(self.top)
        self.weighted = [torch.zeros_like(rows.queries) for _ in directions]

    def add(self, rows: Rows, candidates: Candidates, rules: Rules, scale: Tensor) -> None:
        """Take in further candidates."""
        for side, weighted, side_top in zip(self.directions, self.weighted, self.tops, strict=True):
            columns = candidates.of(side)
            space = Space(rows, len(columns))
            for start, end in space.pieces:
                (tile,) = space.tiles(end - start, [len(columns)])
                scores = rules.scores(side, rows.part(start, end), candidates, scale, out=tile)
                highest = row_maximum(scores)
                side_top[start:end] = torch.maximum(side_top[start:end], highest)
                top = torch.maximum(self.top[start:end], highest)
                level = top.masked_fill(top == -torch.inf, 0.0)
                fade = (self.top[start:end] - level).exp()
                scores.sub_(level.unsqueeze(1)).exp_()
                self.top[start:end] = top
                self.mass[start:end] = self.mass[start:end] * fade + scores.sum(dim=1)
                for other in self.weighted:
                    other[start:end] *= fade.unsqueeze(1)
                weighted[start:end].addmm_(scores, columns)

    def level(self) -> Tensor:
        """What is taken off scores before their exp."""
        return self.top.masked_fill(self.top == -torch.inf, 0.0)

    def logsumexp(self) -> Tensor:
        """-inf for a row without negatives."""
        return self.level() + self.mass.log()


def _passing_candidates(own: Candidates, counts: tuple[list[int], list[int]]) -> Iterator[Candidates]:
    """Every rank's candidates, beginning with this rank's."""
    names = ["documents", "queries", "guide_documents", "guide_queries"]
    travelling = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    of = [counts[1] if name.endswith("documents") else counts[0] for name in travelling]
    for rank, tensors in ring(list(travelling.values()), of):
        yield Candidates(
            first_query=sum(counts[0][:rank]),
            first_document=sum(counts[1][:rank]),
            **dict(zip(travelling, tensors, strict=True)),
        )


def _passing_rows(own: Rows, levels: Tensor, counts: list[int]) -> Iterator[tuple[Rows, Tensor]]:
    """Every rank's rows with their levels, beginning with this rank's."""
    travelling = {name: value for name, value in own.tensors().items() if value is not None}
    for _, tensors in ring([*travelling.values(), levels], [counts] * (len(travelling) + 1)):
        yield Rows(**dict(zip(travelling, tensors[:-1], strict=True))), tensors[-1]


def _add_candidates(
    found: Gradients, rows: Rows, levels: Tensor, own: Candidates, rules: Rules, scale: Tensor, parts: Partitions
) -> None:
    """Add to the gradient of this rank's candidates what some rank's rows do to it.

    Levels [c, 2 P]: for each partition what is taken off scores before their exp, and what that is worth.
    """
    for number, directions in enumerate(parts):
        for side in directions:
            space = Space(rows, len(own.of(side)))
            for start, end in space.pieces:
                these = rows.part(start, end)
                (tile,) = space.tiles(end - start, [len(own.of(side))])
                slope = rules.scores(side, these, own, scale, out=tile)
                level, each = levels[start:end, 2 * number : 2 * number + 2].unsqueeze(1).unbind(2)
                found.of(side).addmm_(slope.sub_(level).exp_().T, anchors_of(side, these) * each)
