"""Which candidates are no negatives of a row: itself, duplicates of its positive, answers of an equal query.

Kept as relations between small integers, never as a matrix: whoever computes scores has them struck out in the
tile at hand. Memory grows with N + K, and with the tile.

N, K: queries and documents of all ranks; M: documents of this rank; c, t: rows and candidates of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from embedtrain.config.losses import LossDirection
from embedtrain.distributed.collectives import gather_rows, row_counts
from embedtrain.losses.types import BatchInfo

# Cells are listed one by one, 50 bytes each, where they are at most this share of a tile; else there is a mask.
_LISTED = 1 / 16


class Relation:
    """Pairs (key, item): the items of a key lie together, in ascending order.

    Args:
        keys: int64 [P], from 0 to `num_keys` - 1.
        items: int64 [P], ascending among equal keys.
        num_keys: number of keys.
    """

    def __init__(self, keys: Tensor, items: Tensor, num_keys: int) -> None:
        order = torch.argsort(keys, stable=True)
        self.items = items[order]
        self._keys = keys[order]
        self._span = int(items.max()) + 1 if len(items) else 1
        self._places = self._keys * self._span + self.items  # ascending
        self.num_keys = num_keys

    def bounds(self, keys: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Where the items of each key from `first` to `first + width` begin, and how many there are."""
        low, high = min(first, self._span), min(first + width, self._span)
        starts = torch.searchsorted(self._places, keys * self._span + low)
        return starts, torch.searchsorted(self._places, keys * self._span + high) - starts

    def follow(self, places: Tensor, keys: Tensor, first: int = 0, width: int = 2**62) -> tuple[Tensor, Tensor]:
        """For each (place, key) all pairs (place, item of that key within the bounds): two int64 vectors."""
        starts, counts = self.bounds(keys, first, width)
        ends = counts.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        which = torch.repeat_interleave(torch.arange(len(keys), device=keys.device), counts, output_size=total)
        within = torch.arange(total, device=keys.device) - (ends - counts)[which]
        return places[which], self.items[starts[which] + within]


@dataclass(frozen=True, slots=True)
class _Link:
    """Row -> key -> codes -> candidates of that code: those candidates are no negatives of the row.

    Attributes:
        keys: int64 [N], of each row.
        codes_of: key -> codes.
        code: int64, of each candidate.
        candidates_of: code -> candidates.
    """

    keys: Tensor
    codes_of: Relation
    code: Tensor
    candidates_of: Relation

    def listed(self, places: Tensor, rows: Tensor, first: int, width: int) -> tuple[Tensor, Tensor] | None:
        """The cells (place, candidate) one by one; None where they are too many for that."""
        most = int(_LISTED * len(rows) * width) + len(rows)
        keys = self.keys[rows]
        if int(self.codes_of.bounds(keys, 0, 2**62)[1].sum()) > most:
            return None
        at, codes = self.codes_of.follow(places, keys)
        if int(self.candidates_of.bounds(codes, first, width)[1].sum()) > most:
            return None
        return self.candidates_of.follow(at, codes, first, width)

    def mask(self, rows: Tensor, first: int, width: int) -> Tensor:
        """The same as a bool mask [c, t]."""
        keys, row_of = self.keys[rows].unique(return_inverse=True)
        table = torch.zeros(len(keys), self.candidates_of.num_keys, dtype=torch.bool, device=rows.device)
        table[self.codes_of.follow(torch.arange(len(keys), device=rows.device), keys)] = True
        return table[:, self.code[first : first + width]][row_of]


class NoNegatives:
    """What is no negative in each side's scores, of all ranks' rows and candidates.

    Args:
        batch_info: of this rank's rows. Every rank must construct this.
        counts: queries and documents of each rank.
        duplicates: whether documents equal (by text or id) to an answer of the row's query, or of an equal
            query, count; else only the row's own positive and, for `document_document`, its own documents.
        positive_again: whether `document_query` scores a row's own pair a second time, as GTE's joint softmax
            (Li et al., 2023) and sentence-transformers' do.
    """

    def __init__(
        self, batch_info: BatchInfo, counts: tuple[list[int], list[int]], *, duplicates: bool, positive_again: bool
    ) -> None:
        self._positive_again = positive_again
        per_query, per_document = counts
        rank = dist.get_rank()
        self._first_document = sum(per_document[:rank])
        self.positives = gather_rows(batch_info.positives + self._first_document, per_query)  # [N]
        self._owners = gather_rows(batch_info.owners + sum(per_query[:rank]), per_document)  # [K]
        self._num_mine = len(batch_info.owners)
        num_queries, num_documents = len(self.positives), len(self._owners)
        self._asked = torch.arange(num_queries, device=self._owners.device)
        self._every = torch.arange(num_documents, device=self._owners.device)
        self.own = Relation(self._owners, self._every, num_queries)
        self._group, self._codes = self._asked, list[Tensor]()
        self._links: dict[LossDirection, list[_Link]] = {side: [] for side in LossDirection}
        if not duplicates:
            return
        self._group = gather_rows(batch_info.query_keys, per_query).unique(return_inverse=True)[1]
        keyings = [batch_info.document_keys]
        # Whether any rank has ids: asked of all, for a collective that only some ranks run would hang.
        if any(row_counts(0 if batch_info.document_ids is None else 1, self._owners.device)):
            keyings.append(batch_info.document_keys if batch_info.document_ids is None else batch_info.document_ids)
        for keys in keyings:
            self._link(gather_rows(keys, per_document).unique(return_inverse=True)[1])

    def _link(self, codes: Tensor) -> None:
        self._codes.append(codes)
        num_codes, num_groups = (int(of.max()) + 1 if len(of) else 0 for of in (codes, self._group))
        right = codes[self.positives]
        pairs = torch.stack([self._group, right], dim=1).unique(dim=0)
        by_code = pairs[pairs[:, 1].argsort(stable=True)]
        answers = Relation(pairs[:, 0], pairs[:, 1], num_groups)
        answered = Relation(by_code[:, 1], by_code[:, 0], num_codes)
        having = _Link(self._group, answers, codes, Relation(codes, self._every, num_codes))
        self._links[LossDirection.query_document].append(having)
        self._links[LossDirection.document_document].append(having)
        self._links[LossDirection.query_query].append(
            _Link(self._group, answers, right, Relation(right, self._asked, num_codes))
        )
        self._links[LossDirection.document_query].append(
            _Link(right, answered, self._group, Relation(self._group, self._asked, num_groups))
        )

    def strike_out(self, scores: Tensor, side: LossDirection, rows: Tensor, first: int) -> Tensor:
        """Scores [c, t], -inf where a candidate is no negative; in place, differentiable.

        Args:
            scores: of these rows against candidates from `first` on.
            side: whose scores they are.
            rows: int64 [c], queries of all ranks.
            first: where the candidates begin among those of all ranks.
        """
        width = scores.shape[1]
        places = torch.arange(len(rows), device=rows.device)
        cells = [self._own_cells(side, places, rows, first, width)]
        for link in self._links[side]:
            listed = link.listed(places, rows, first, width)
            if listed is None:
                mask = link.mask(rows, first, width)
                if side is LossDirection.document_query:
                    mask[self._within(places, rows, first, width)] = False
                scores = scores.masked_fill_(mask, -torch.inf)
                continue
            if side is LossDirection.document_query:
                other = listed[1] != rows[listed[0]]
                listed = listed[0][other], listed[1][other]
            cells.append((listed[0], listed[1] - first))
        at, column = (torch.cat([pair[i] for pair in cells]) for i in (0, 1))
        return scores.index_put_((at, column), scores.new_tensor(-torch.inf))

    def _own_cells(
        self, side: LossDirection, places: Tensor, rows: Tensor, first: int, width: int
    ) -> tuple[Tensor, Tensor]:
        match side:
            case LossDirection.query_document:
                return self._within(places, self.positives[rows], first, width)
            case LossDirection.document_query if self._positive_again:
                return places[:0], rows[:0]
            case LossDirection.document_query | LossDirection.query_query:
                return self._within(places, rows, first, width)
            case LossDirection.document_document:
                return self.own_documents(rows, first, width)

    def own_documents(self, rows: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        """The cells (place in `rows`, candidate counted from `first`) of the rows' own documents."""
        at, column = self.own.follow(torch.arange(len(rows), device=rows.device), rows, first, width)
        return at, column - first

    def answers(self) -> Iterator[Tensor]:
        """Bool [M] for each way to tell: this rank's documents that answer their own row's query, or an equal one."""
        mine = slice(self._first_document, self._first_document + self._num_mine)
        for codes in self._codes:
            span = int(codes.max()) + 1 if len(codes) else 1
            right = self._group * span + codes[self.positives]
            yield torch.isin(self._group[self._owners[mine]] * span + codes[mine], right)

    @staticmethod
    def _within(places: Tensor, columns: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        here = (columns >= first) & (columns < first + width)
        return places[here], columns[here] - first
