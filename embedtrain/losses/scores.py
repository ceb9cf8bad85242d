"""The scores of a few rows against candidates: what every way to compute InfoNCE has in common.

c, B, N: rows at hand, of this rank, of all ranks; t, K: candidates at hand, documents of all ranks; D, T:
dimensions of the vectors, of the guide's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from embedtrain.config.losses import Hardness, LossDirection, MarginKind
from embedtrain.losses.negatives import NoNegatives

QUERY_ANCHORS = (LossDirection.query_document, LossDirection.query_query)
QUERY_CANDIDATES = (LossDirection.document_query, LossDirection.query_query)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the batch: a query and its positive each.

    Attributes:
        places: int64 [c], which queries of all ranks they are.
        queries, positives: [c, D].
        beaten_from: [c], the score from which on a candidate beats the positive or equals it.
        ceilings: [c], the score above which a candidate is no negative, or None.
        guide_queries, guide_positives: [c, T], or None.
        guide_ceilings: [c], the guide's similarity above which a candidate is no negative, or None.
    """

    places: Tensor
    queries: Tensor
    positives: Tensor
    beaten_from: Tensor
    ceilings: Tensor | None = None
    guide_queries: Tensor | None = None
    guide_positives: Tensor | None = None
    guide_ceilings: Tensor | None = None

    def part(self, start: int, end: int) -> "Rows":
        """The rows from `start` to `end`."""
        cut = {name: None if value is None else value[start:end] for name, value in self.tensors().items()}
        return Rows(**cut)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor | None]:
        """All of them by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Queries and documents that rows are compared with.

    Attributes:
        first_query, first_document: where they begin among those of all ranks.
        queries, documents: [t, D]; queries are None where no side asks for them.
        guide_queries, guide_documents: [t, T], or None.
    """

    first_query: int
    first_document: int
    documents: Tensor
    queries: Tensor | None = None
    guide_queries: Tensor | None = None
    guide_documents: Tensor | None = None

    def of(self, side: LossDirection) -> Tensor:
        """The candidates of a side."""
        chosen = self.queries if side in QUERY_CANDIDATES else self.documents
        assert chosen is not None
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What happens to scores before their softmax; options of InfoNCEConfig, and the batch's duplicates."""

    no_negatives: NoNegatives
    hardness: Hardness
    hardness_strength: float

    def scores(
        self, side: LossDirection, rows: Rows, candidates: Candidates, scale: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Similarity times `scale`, [c, t], -inf where a candidate is no negative.

        Differentiable, but not with `out`: the memory that the scores are then written to.
        """
        anchors = rows.queries if side in QUERY_ANCHORS else rows.positives
        columns = candidates.of(side)
        scores = torch.mm(anchors * scale, columns.T, out=out)
        first = candidates.first_query if side in QUERY_CANDIDATES else candidates.first_document
        excluded = None
        if rows.ceilings is not None:
            excluded = scores.detach() > rows.ceilings.unsqueeze(1)
        if rows.guide_ceilings is not None:
            objected = self._guide_objects(side, rows, candidates)
            excluded = objected if excluded is None else excluded.logical_or_(objected)
        if excluded is not None:
            if side is LossDirection.document_query:  # the pair itself is not to be judged
                here = (rows.places >= first) & (rows.places < first + len(columns))
                excluded[here.nonzero().squeeze(1), rows.places[here] - first] = False
            scores = scores.masked_fill_(excluded, -torch.inf)
        if self.hardness is not Hardness.none and side is LossDirection.query_document:
            scores = self._weigh(scores, rows, candidates, float(scale.detach()))
        return self.no_negatives.strike_out(scores, side, rows.places, first)

    def _guide_objects(self, side: LossDirection, rows: Rows, candidates: Candidates) -> Tensor:
        """[c, t], true where the guide finds a candidate closer than the positive (Solatorio, 2024)."""
        queries, positives = rows.guide_queries, rows.guide_positives
        columns = candidates.guide_queries if side in QUERY_CANDIDATES else candidates.guide_documents
        anchors = queries if side in QUERY_ANCHORS else positives
        assert anchors is not None
        assert columns is not None
        assert rows.guide_ceilings is not None
        return (anchors @ columns.T) > rows.guide_ceilings.unsqueeze(1)

    def _weigh(self, scores: Tensor, rows: Rows, candidates: Candidates, scale: float) -> Tensor:
        """Scores plus strength * similarity where negatives of this kind weigh more; no gradient through that."""
        more = scores.detach() * (self.hardness_strength / scale)
        own = self.no_negatives.own_documents(rows.places, candidates.first_document, scores.shape[1])
        match self.hardness:
            case Hardness.in_batch:
                more.index_put_(own, more.new_zeros(()))
            case Hardness.hard:
                kept = more[own]
                more = torch.zeros_like(more).index_put_(own, kept)
        # -inf - (-inf) would be NaN: what is excluded stays so.
        return scores.add_(more.masked_fill_(more == -torch.inf, 0.0))


def rounding(like: Tensor) -> float:
    """How far two computations of one similarity of vectors of length 1 may be apart.

    Comparisons of scores leave so much room: a document whose vector equals the positive's must be judged alike
    in every precision, by every kernel and on every rank, and not by rounding errors.
    """
    # One of them may be of operands rounded to 10 bits, each of them off by up to 2^-10 of its size.
    tf32 = like.is_cuda and like.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return 2**-9 if tf32 else 16 * torch.finfo(like.dtype).eps


def guide_ceilings(positive: Tensor, margin: float, kind: MarginKind) -> Tensor:
    """From the guide's similarities of the positives [c]: those above which it objects to a negative."""
    return positive - margin * (positive.abs() if kind is MarginKind.relative else 1.0) + rounding(positive)


def widest(directions: Sequence[LossDirection], candidates: Candidates) -> int:
    """Scores of one row, over all directions."""
    return sum(len(candidates.of(side)) for side in directions)
