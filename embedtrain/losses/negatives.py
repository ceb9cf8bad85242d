"""Which candidates are no negatives of a row: itself, duplicates of its positive, answers of an equal query.

Kept as relations between small integers, never as a matrix: whoever computes scores asks for the cells of
the rows at hand. Memory grows with N + K, and with the number of cells asked for.

N, K: queries and documents of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from embedtrain.config.losses import Side
from embedtrain.distributed.collectives import gather_rows, row_counts
from embedtrain.losses.types import LossInput


class Relation:
    """Pairs (key, item): the items of a key lie together.

    Args:
        keys: int64 [P], from 0 to `num_keys` - 1.
        items: int64 [P].
        num_keys: number of keys.
    """

    def __init__(self, keys: Tensor, items: Tensor, num_keys: int) -> None:
        order = torch.argsort(keys, stable=True)
        self.items = items[order]
        self.counts = torch.bincount(keys, minlength=num_keys)
        self.starts = self.counts.cumsum(0) - self.counts

    def follow(self, places: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """For each (place, key) all pairs (place, item of that key): two int64 vectors of one length."""
        counts = self.counts[keys]
        ends = counts.cumsum(0)
        total = int(ends[-1]) if len(ends) else 0
        which = torch.repeat_interleave(torch.arange(len(keys), device=keys.device), counts, output_size=total)
        within = torch.arange(total, device=keys.device) - (ends - counts)[which]
        return places[which], self.items[self.starts[keys[which]] + within]


@dataclass(frozen=True, slots=True)
class _Sameness:
    """What follows from one way to tell that two documents are the same.

    Attributes:
        answers: group of equal queries -> codes of their positives.
        documents: code -> documents.
        groups: code -> groups that have it for an answer.
        answered: code -> queries whose positive it is.
    """

    answers: Relation
    documents: Relation
    groups: Relation
    answered: Relation


class NoNegatives:
    """The cells of each side's scores that are no negatives, of all ranks' rows and candidates.

    Args:
        known: of this rank's rows. Every rank must construct this.
        counts: queries and documents of each rank.
        duplicates: whether documents equal (by text or id) to an answer of the row's query, or of an equal
            query, count; else only the row's own positive and, for `document_document`, its own documents.
        positive_again: whether `document_query` scores a row's own pair a second time, as GTE's joint softmax
            (Li et al., 2023) and sentence-transformers' do.
    """

    def __init__(
        self, known: LossInput, counts: tuple[list[int], list[int]], *, duplicates: bool, positive_again: bool
    ) -> None:
        self._positive_again = positive_again
        per_query, per_document = counts
        rank = dist.get_rank()
        first_query, first_document = sum(per_query[:rank]), sum(per_document[:rank])
        self.positives = gather_rows(known.positives + first_document, per_query)  # [N]
        owners = gather_rows(known.owners + first_query, per_document)  # [K]
        self.num_queries, self.num_documents = len(self.positives), len(owners)
        self.own = Relation(owners, torch.arange(self.num_documents, device=owners.device), self.num_queries)
        self._samenesses: list[_Sameness] = []
        if not duplicates:
            return
        _, self._group = gather_rows(known.query_keys, per_query).unique(return_inverse=True)
        self._queries = Relation(self._group, torch.arange(self.num_queries, device=owners.device), self._num_groups)
        keyings = [known.document_keys]
        # Whether any rank has ids: asked of all, for a collective that only some ranks run would hang.
        if any(row_counts(0 if known.document_ids is None else 1, owners.device)):
            keyings.append(known.document_keys if known.document_ids is None else known.document_ids)
        self._codes: list[Tensor] = []
        for keys in keyings:
            _, codes = gather_rows(keys, per_document).unique(return_inverse=True)
            self._codes.append(codes)
            self._samenesses.append(self._sameness(codes))

    @property
    def _num_groups(self) -> int:
        return int(self._group.max()) + 1 if len(self._group) else 0

    def _sameness(self, codes: Tensor) -> _Sameness:
        num_codes = int(codes.max()) + 1 if len(codes) else 0
        right = codes[self.positives]
        pairs = torch.stack([self._group, right], dim=1).unique(dim=0)
        every = torch.arange(self.num_documents, device=codes.device)
        asked = torch.arange(self.num_queries, device=codes.device)
        return _Sameness(
            answers=Relation(pairs[:, 0], pairs[:, 1], self._num_groups),
            documents=Relation(codes, every, num_codes),
            groups=Relation(pairs[:, 1], pairs[:, 0], num_codes),
            answered=Relation(right, asked, num_codes),
        )

    def cells(self, side: Side, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The cells of these rows: (place in `rows`, candidate), int64 both; a cell may come twice.

        Args:
            side: whose candidates are meant.
            rows: int64 [c], queries of all ranks.
        """
        places = torch.arange(len(rows), device=rows.device)
        found = [self._own_cells(side, places, rows)]
        for codes, same in zip(self._codes, self._samenesses, strict=True) if self._samenesses else ():
            if side is Side.document_query:
                at, groups = same.groups.follow(places, codes[self.positives[rows]])
                at, column = self._queries.follow(at, groups)
                other = column != rows[at]
                found.append((at[other], column[other]))
                continue
            at, answers = same.answers.follow(places, self._group[rows])
            having = same.answered if side is Side.query_query else same.documents
            found.append(having.follow(at, answers))
        return _joined(found)

    def _own_cells(self, side: Side, places: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        match side:
            case Side.query_document:
                return places, self.positives[rows]
            case Side.document_query if self._positive_again:
                return places[:0], rows[:0]
            case Side.document_query | Side.query_query:
                return places, rows
            case Side.document_document:
                return self.own.follow(places, rows)


def _joined(cells: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([at for at, _ in cells]), torch.cat([column for _, column in cells])
