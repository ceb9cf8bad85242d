"""Global orthogonal regularisation: the vectors of unrelated texts spread as they would on a sphere by chance.

n: rows of a column over all ranks; B, M: queries and documents of this rank; D: dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import OrthogonalConfig, Reduction
from embedtrain.distributed.collectives import gather_rows, max_over_ranks, row_counts, sum_over_ranks
from embedtrain.losses.similarity import places_in_row, products, widened
from embedtrain.losses.types import BatchInfo, Loss, LossOutput


class Orthogonal(Loss):
    """Zhang et al., "Learning Spread-out Local Feature Descriptors" (ICCV 2017).

    Within a column, with M1 and M2 the means of the n (n - 1) cosines of different rows and of their squares,
    mean_weight M1^2 + second_moment_weight relu(M2 - 1/D): what they would be of independent points on a
    sphere. The first column is the queries, the next the rows' positives, then their first hard negatives, and
    so on; a row that lacks a document is not in that column, and a column of fewer than two rows does not
    count. The columns' mean or sum. Logs the two terms unweighted.
    """

    def __init__(self, config: OrthogonalConfig) -> None:
        super().__init__()
        self.mean_weight, self.second_moment_weight = config.mean_weight, config.second_moment_weight
        self.aggregation = config.aggregation

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] to this rank's share."""
        queries, documents = F.normalize(widened(queries), dim=1), F.normalize(widened(documents), dim=1)
        places = places_in_row(batch_info.owners)
        (num_columns,) = max_over_ranks([int(places.max()) + 1 if len(places) else 0], queries.device)

        # Zeros with a graph, for a batch in which no column counts.
        mean = second_moment = 0.0 * (queries.sum() + documents.sum())
        num_counted = 0
        for column in [queries] + [documents[places == place] for place in range(num_columns)]:
            counts = row_counts(len(column), column.device)
            if sum(counts) < 2:
                continue
            first, second = _moments(column, counts)
            mean = mean + first.square()
            second_moment = second_moment + F.relu(second - 1 / column.shape[1])
            num_counted += 1
        over = max(1, num_counted) if self.aggregation is Reduction.mean else 1
        # Every rank has computed the whole.
        mean, second_moment = (term / over / len(counts) for term in (mean, second_moment))
        return LossOutput(
            self.mean_weight * mean + self.second_moment_weight * second_moment,
            {"mean_term": mean.detach(), "second_moment_term": second_moment.detach()},
        )


def _moments(rows: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The means of all ranks' different rows' cosines and of their squares; this rank has `rows` of length 1.

    From the rows themselves where there are few. Else from their sum and from their Gram matrix [D, D], whose
    squares sum to those of all n^2 cosines, so that neither the rows travel nor are n^2 cosines computed. Few
    rows have cosines too small beside the n ones on the diagonal to be had as such a difference.
    """
    number, dimensions = sum(counts), rows.shape[1]
    num_pairs = number * (number - 1)
    if number <= dimensions:
        everything = gather_rows(rows, counts)
        cosines = products(everything, everything)
        cosines = cosines.masked_fill(torch.eye(number, dtype=torch.bool, device=rows.device), 0.0)
        return cosines.sum() / num_pairs, cosines.square().sum() / num_pairs
    lengths = rows.square().sum(dim=1)
    parts = [products(rows.T, rows.T).flatten(), rows.sum(dim=0), lengths.sum().view(1), lengths.square().sum().view(1)]
    gram, summed, diagonal, squared_diagonal = sum_over_ranks(torch.cat(parts)).split([len(part) for part in parts])
    first = (summed.square().sum() - diagonal.squeeze()) / num_pairs
    return first, (gram.square().sum() - squared_diagonal.squeeze()) / num_pairs
