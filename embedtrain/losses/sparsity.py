"""Learned sparse models: the regularization that keeps most weights of words at zero.

B, M: queries and documents of this rank; N: texts of all ranks; V: words.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from embedtrain.config.kind_settings import SparseQueries, SparseRegularizer, SparsityConfig
from embedtrain.distributed.collectives import gather_rows, sum_over_ranks
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.similarity import at_least_float32
from embedtrain.losses.types import BatchInfo, EncodedLoss, Loss, LossOutput, Prepared

ACTIVE_WORDS, DENSITY, EMPTY_TEXTS = "active_words", "density", "empty_texts"
_GROWTH = "sparsity_ramp"
_MAX_DENSITY = 0.5


class SparsityRegularized(EncodedLoss):
    """A loss and the regularizers of queries and documents.

    FLOPS (Paria et al., 2020) is the sum over words of the squared mean weight of the word over the N texts of all
    ranks. A mean over the texts of one rank would be another loss: a word in one text of a batch would have a
    gradient that grows with the number of ranks. L1 is the mean over the N texts of the sum of weights. With a
    threshold, texts with at most so many active words are left out of the sums of FLOPS, and still counted in N (Shen
    et al., 2025).

    Logs, for queries and documents, the value of the regularizer before its weight, the mean and the 99th percentile
    of active words, their fraction of the vocabulary, and the fraction of texts without any. `row_losses` are those of
    the loss alone.

    Args:
        ramp: global batches over which the weights of the regularizers grow quadratically from 0.
    """

    def __init__(self, inner: Loss, config: SparsityConfig, ramp: float) -> None:
        super().__init__()
        self.inner, self.config, self.ramp = inner, config.resolved(SparseQueries.encoded), ramp

    def for_source(self, source: int) -> Loss:
        """The loss of this training source's rows."""
        return self.inner.for_source(source)

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the loss needs."""
        return self.inner.prepare(batch_info, dimension)

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """Weights of words [B, V] and [M, V] to this rank's loss."""
        output = self.inner(queries, documents, batch_info)
        config, counts = self.config, batch_info.rows.counts
        texts = [at_least_float32(encoded.vectors) for encoded in (queries, documents)]
        kinds = config.query_regularizer, config.document_regularizer
        thresholds = config.query_threshold, config.document_threshold
        numbers = counts.queries, counts.documents
        active = [(weights.detach() > 0).sum(dim=1) for weights in texts]
        sums = [
            _sum_of_texts(weights, words, threshold)
            for weights, words, threshold in zip(texts, active, thresholds, strict=True)
        ]
        # One collective for both, which is why it is not skipped where only one of them needs it.
        means = sum_over_ranks(torch.stack(sums))
        growth = min(1.0, (batch_info.origin.batch + 1) / self.ramp) ** 2 if self.ramp > 0 else 1.0
        local_loss, metrics = output.local_loss, dict(output.metrics)
        for index, (name, factor) in enumerate(
            (("queries", config.query_weight), ("documents", config.document_weight))
        ):
            number = max(1, sum(numbers[index]))
            flops = (means[index] / number).square().sum() / len(numbers[index])
            value = flops if kinds[index] is SparseRegularizer.flops else texts[index].sum() / number
            if factor:
                local_loss = local_loss + growth * factor * value
            metrics[f"{name}/flops"] = flops.detach()
            metrics |= _word_metrics(name, active[index], numbers[index], texts[index].shape[1])
        metrics[_GROWTH] = local_loss.new_full((), growth / len(counts.queries))
        return LossOutput(local_loss, metrics, output.row_losses)


def _sum_of_texts(weights: Tensor, active: Tensor, threshold: int | None) -> Tensor:
    """[V], of the texts with more active words than `threshold`."""
    if threshold is None:
        return weights.sum(dim=0)
    return (weights * (active > threshold).unsqueeze(1)).sum(dim=0)


def sparsity_warning(measures: Mapping[str, float]) -> str | None:
    """Advice if the texts of a batch have no active words, or still most of them; None otherwise."""
    for name, option in (("queries", "query"), ("documents", "document")):
        if measures.get(f"{name}/{EMPTY_TEXTS}", 0.0) >= 1.0 - 1e-6:
            return (
                f"the {name} have no active words left, and such weights have no gradient: start again with a smaller "
                f"sparsity.{option}_weight, a longer sparsity.ramp or a smaller optim.lr"
            )
        if measures.get(_GROWTH, 0.0) >= 1.0 - 1e-6 and measures.get(f"{name}/{DENSITY}", 0.0) > _MAX_DENSITY:
            return (
                f"the {name} have weights for {measures[f'{name}/{DENSITY}']:.0%} of all words, with the full "
                f"sparsity.{option}_weight: increase it, or start from a masked language model whose head is trained"
            )
    return None


def _word_metrics(name: str, active: Tensor, counts: Sequence[int], num_words: int) -> dict[str, Tensor]:
    """This rank's parts of the metrics of all texts, from the active words of its own [B]."""
    number, ranks = max(1, sum(counts)), len(counts)
    gathered = gather_rows(active.float(), list(counts))
    largest = gathered.sort().values[int(0.99 * (number - 1))] if sum(counts) else active.new_zeros(()).float()
    return {
        f"{name}/{ACTIVE_WORDS}": active.sum() / number,
        f"{name}/{ACTIVE_WORDS}_p99": largest.double() / ranks,
        f"{name}/{DENSITY}": active.sum() / (number * num_words),
        f"{name}/{EMPTY_TEXTS}": (active == 0).sum() / number,
    }
