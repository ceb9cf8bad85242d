"""Global orthogonal regularisation: vectors of unrelated texts spread like random points on a sphere.

n: rows of a column over all ranks; B, M: queries and documents of this rank; D: dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import OrthogonalConfig, Reduction
from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.similarity import at_least_float32, inner_products, positions_in_row
from embedtrain.losses.types import BatchInfo, Loss, LossOutput


class Orthogonal(Loss):
    """Zhang et al., "Learning Spread-out Local Feature Descriptors" (ICCV 2017).

    For each column, with M1 and M2 the means of the n (n - 1) cosines of different rows and of their squares:
    mean_weight M1^2 + second_moment_weight relu(M2 - 1/D), which compares them with independent points on a sphere. The
    first column is the queries, the next the rows' positives, then their first hard negatives, and so on; a row without
    that document is not in the column, and a column of fewer than two rows does not count. The mean or the sum over
    columns. Logs the two terms without their weights.
    """

    def __init__(self, config: OrthogonalConfig) -> None:
        super().__init__()
        self.mean_weight, self.second_moment_weight = config.mean_weight, config.second_moment_weight
        self.aggregation = config.aggregation

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """Queries [B, D] and documents [M, D] to this rank's loss."""
        queries = F.normalize(at_least_float32(queries), dim=1)
        documents = F.normalize(at_least_float32(documents), dim=1)
        rows, positions = batch_info.rows, positions_in_row(batch_info.owners)
        by_position = documents[positions.argsort(stable=True)]

        # Zeros with a graph, for a batch in which no column counts.
        mean = second_moment = 0.0 * (queries.sum() + documents.sum())
        num_counted, start = 0, 0
        for position in range(-1, int(rows.num_documents.max(initial=0))):  # from the queries on
            counts = rows.counts_with(position + 1)
            column = queries if position < 0 else by_position[start : start + counts[rows.rank]]
            start += 0 if position < 0 else len(column)
            if sum(counts) < 2:
                continue
            column_mean, column_second_moment = _moments(column, counts)
            mean = mean + column_mean.square()
            second_moment = second_moment + F.relu(column_second_moment - 1 / column.shape[1])
            num_counted += 1
        divisor = max(1, num_counted) if self.aggregation is Reduction.mean else 1
        # Every rank has computed the whole.
        mean, second_moment = (term / divisor / len(rows.num_rows) for term in (mean, second_moment))
        return LossOutput(
            self.mean_weight * mean + self.second_moment_weight * second_moment,
            {"mean_term": mean.detach(), "second_moment_term": second_moment.detach()},
        )


def _moments(rows: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The means of the cosines of different rows of all ranks and of their squares; `rows` of this rank, of length 1.

    Few rows are gathered. Many are summarised by their sum and by their Gram matrix [D, D], whose squares sum to those
    of all n^2 cosines, so that neither the rows travel nor n^2 cosines are computed. The cosines of few rows are too
    small beside the n ones on the diagonal for such a difference.
    """
    number, dimensions = sum(counts), rows.shape[1]
    num_pairs = number * (number - 1)
    if number <= dimensions:
        all_rows = gather_rows(rows, counts)
        cosines = inner_products(all_rows, all_rows)
        cosines = cosines.masked_fill(torch.eye(number, dtype=torch.bool, device=rows.device), 0.0)
        return cosines.sum() / num_pairs, cosines.square().sum() / num_pairs
    lengths = rows.square().sum(dim=1)
    parts = [
        inner_products(rows.T, rows.T).flatten(),
        rows.sum(dim=0),
        lengths.sum().view(1),
        lengths.square().sum().view(1),
    ]
    gram, row_sum, diagonal, squared_diagonal = sum_over_ranks(torch.cat(parts)).split([len(part) for part in parts])
    mean = (row_sum.square().sum() - diagonal.squeeze()) / num_pairs
    return mean, (gram.square().sum() - squared_diagonal.squeeze()) / num_pairs
