"""Exact top-k search over documents that are sharded over the ranks.

Shapes: Q queries, T of them at a time, N documents, n on this rank, D dimensions, K results kept.

Scores are found in two stages. Matrix products in fp32 pick candidates; their rounding depends on the
shape of the tile and thus on the number of ranks. Each candidate's score is then computed anew on its own,
in float64 and in a fixed order of additions, and rounded to float32: a function of the two vectors alone.
The first stage's error is bounded, so where a document beyond the candidates could still belong to the
top K, all that could are looked at.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.world import World
from embedtrain.evaluation.encode import EncodedShard

_QUERIES_AT_A_TIME = 512
_DOCUMENTS_AT_A_TIME = 16384
# Numbers of float64 in one block of pair scores: 128 MiB.
_PAIR_NUMBERS = 1 << 24
# Candidates kept beyond K, so that rounding hardly ever asks for the second look.
_SLACK = 32
_NOTHING = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best documents of each query, best first; K' = min(K, N).

    Attributes:
        scores: float32 [Q, K'], on the CPU.
        documents: int64 [Q, K'], places in the list of document ids, on the CPU.
    """

    scores: Tensor
    documents: Tensor


class ShardedIndex:
    """Documents that lie on the ranks where they were encoded, ready to be searched by inner product.

    Equal scores are ordered as trec_eval does, by document id downwards, so that a ranking is one thing,
    whatever the number of ranks.

    Args:
        shard: this rank's vectors and their places in `ids`; any number, none included.
        ids: the ids of all N documents, the same on every rank.
        world: the ranks.
    """

    def __init__(self, shard: EncodedShard, ids: Sequence[str], world: World) -> None:
        device = shard.vectors.device
        # Places in the list of ids sorted upwards. trec_eval compares bytes; Python's order of code points
        # is that of their UTF-8 bytes.
        self._by_id = sorted(range(len(ids)), key=ids.__getitem__)
        place = torch.empty(len(ids), dtype=torch.int64)
        place[self._by_id] = torch.arange(len(ids))
        self.world = world
        self.vectors = shard.vectors.float()
        self.places = place[shard.rows].to(device)
        self.num_documents = len(ids)
        self._longest = _norms(self.vectors).max().item() if len(shard.rows) else 0.0

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Ranking:
        """The K documents with the largest inner product. A collective: the same queries on every rank.

        Args:
            queries: float32 [Q, D].
            k: how many documents to keep, at least 1; all, where there are fewer.
        """
        assert k > 0, "a ranking holds at least one document"
        k = min(k, self.num_documents)
        found = [torch.empty((0, k), dtype=torch.int64)]
        for tile in torch.split(queries.to(self.vectors.device, torch.float32), _QUERIES_AT_A_TIME):
            if not tile.shape[0]:
                continue
            with _full_precision(tile.device):
                mine = self._search_shard(tile, min(k, self.vectors.shape[0]))
            # [T, k_r] travels as [k_r, T]: rows may differ in number between the ranks, columns may not.
            found.append(_best(gather_rows(mine.T.contiguous()).T, k).cpu())
        scores, places = _unpack(torch.cat(found))
        return Ranking(scores, torch.tensor(self._by_id, dtype=torch.int64)[places])

    def _search_shard(self, queries: Tensor, k: int) -> Tensor:
        """Keys of the best `k` documents of this rank, int64 [T, k], best first."""
        rough, candidates = self._candidates(queries, min(k + _SLACK, self.vectors.shape[0]))
        rows = torch.arange(queries.shape[0], device=queries.device).repeat_interleave(candidates.shape[1])
        best = _best(self._keys(queries, rows, candidates.flatten()).view(candidates.shape), k)
        if candidates.shape[1] == self.vectors.shape[0]:
            return best
        # What was not kept scores at most the last one kept, give or take the error of both roundings.
        last = _unpack(best[:, -1])[0].double()
        error = self._rounding(queries)
        unsure = (last <= rough.min(dim=1).values.double() + error).nonzero().flatten()
        if unsure.numel():
            best[unsure] = self._second_look(queries[unsure], k, (last - error)[unsure])
        return best

    def _candidates(self, queries: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """The `keep` documents with the largest fp32 scores: scores and rows of the shard, [T, keep]."""
        scores = queries.new_empty((queries.shape[0], 0))
        rows = torch.empty((queries.shape[0], 0), dtype=torch.int64, device=queries.device)
        for start, tile in self._tiles():
            places = torch.arange(start, start + tile.shape[0], device=queries.device)
            scores = torch.cat([scores, queries @ tile.T], dim=1)
            rows = torch.cat([rows, places.expand(queries.shape[0], -1)], dim=1)
            scores, kept = scores.topk(min(keep, scores.shape[1]), dim=1, sorted=False)
            rows = rows.gather(1, kept)
        return scores, rows

    def _second_look(self, queries: Tensor, k: int, least: Tensor) -> Tensor:
        """Keys of the best `k` among all documents whose fp32 score is `least` [T] or more, [T, k].

        Many documents with the same vector, or a model that gives every text nearly the same one, lead here.
        """
        best = torch.empty((queries.shape[0], 0), dtype=torch.int64, device=queries.device)
        for start, tile in self._tiles():
            rough = (queries @ tile.T).double()
            rows, columns = (rough >= least.unsqueeze(1)).nonzero(as_tuple=True)
            keys = torch.full_like(rough, _NOTHING, dtype=torch.int64)
            keys[rows, columns] = self._keys(queries, rows, columns + start)
            best = _best(torch.cat([best, keys], dim=1), k)
        return best

    def _tiles(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.vectors.shape[0], _DOCUMENTS_AT_A_TIME):
            yield start, self.vectors[start : start + _DOCUMENTS_AT_A_TIME]

    def _keys(self, queries: Tensor, rows: Tensor, documents: Tensor) -> Tensor:
        """Keys of pairs (row of `queries`, row of this shard), [P]."""
        block = max(1, _PAIR_NUMBERS // max(1, self.vectors.shape[1]))
        scores = [
            _sum_of_products(queries[r], self.vectors[d])
            for r, d in zip(torch.split(rows, block), torch.split(documents, block), strict=True)
        ]
        return _pack(torch.cat(scores).float(), self.places[documents])

    def _rounding(self, queries: Tensor) -> Tensor:
        """Bound, [T], on how far an fp32 score and a score rounded to float32 can lie apart.

        Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 3.1: D u |q| |d| for the sum
        in any order, and a little for the rounding of the exact score.
        """
        unit = torch.finfo(torch.float32).eps / 2
        return (self.vectors.shape[1] + 8) * unit * self._longest * _norms(queries)


def unit_vectors(vectors: Tensor) -> Tensor:
    """Vectors [n, D] scaled to length 1, float32; a zero vector stays. The same bits however they are batched."""
    parts = torch.split(vectors, _DOCUMENTS_AT_A_TIME)
    return torch.cat([(part / _norms(part).clamp(min=1e-12).unsqueeze(1)).float() for part in parts])


def cosines(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of each row of two [P, D], float64 [P]; 0 where a vector is zero."""
    return _sum_of_products(first, second) / (_norms(first) * _norms(second)).clamp(min=1e-24)


def _norms(vectors: Tensor) -> Tensor:
    """Length of each vector, float64 [n]."""
    block = max(1, _PAIR_NUMBERS // max(1, vectors.shape[1]))
    return torch.cat([_sum_of_products(part, part).sqrt() for part in torch.split(vectors, block)])


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of each row of two [P, D], float64 [P].

    The products of float32 are exact in float64, and halves are added to halves: a library's sum may add in
    another order for another P, on another device or with another number of threads.
    """
    terms = left.double() * right.double()
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        odd = terms[:, 2 * half :]
        terms = torch.cat([terms[:, :half] + terms[:, half : 2 * half], odd], dim=1)
    return terms[:, 0]


def _pack(scores: Tensor, places: Tensor) -> Tensor:
    """A float32 score and a document's place among the sorted ids as one integer of the same order.

    The largest keys are then the best documents, ties and all, and one topk finds them.
    """
    # Adding 0 turns -0.0 into 0.0. The bits of a negative float count the wrong way round.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + places


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered = (keys >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), keys & 0xFFFFFFFF


def _best(keys: Tensor, k: int) -> Tensor:
    return keys.topk(min(k, keys.shape[1]), dim=1).values


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Products in true fp32: neither TF32 nor a caller's autocast, which the bound on the error knows nothing of."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
