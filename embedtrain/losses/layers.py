"""A loss on the vectors after several layers of the encoder."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from embedtrain.config.loss_choices import Similarity
from embedtrain.losses.combine import Drawn, add_row_losses, draw, prepare_losses
from embedtrain.losses.encoded import Encoded
from embedtrain.losses.types import BatchInfo, EncodedLoss, Guide, Loss, LossOutput, Prepared

# The key of `BatchInfo.guides` for the vectors of the last layer.
LAST_LAYER = "the last layer"


class Exit(NamedTuple):
    """The vectors after the first layers of the encoder."""

    layer: int  # the number of layers
    part: int  # of `Encoded.parts`, whose first part is of the last layer
    weight: float


class LayerLoss(EncodedLoss):
    """Li et al., "2D Matryoshka Sentence Embeddings" (2024); Zhang et al., "ML-Embed" (2025).

    The loss of the last layer, plus the mean over the exits of weight * loss. With `divergence`, each term of the mean
    has the divergence of its similarities from those of the last layer as well, times `divergence_weight`; the last
    layer gets no gradient from it. With `per_step` the mean is over so many exits, which are drawn for each batch: its
    expectation is that over all. Without exits, the loss of the last layer. Logs the metrics of the last layer, and the
    values of each.
    """

    def __init__(
        self,
        inner: Loss,
        exits: Sequence[Exit],
        *,
        per_step: int | None = None,
        divergence: Loss | None = None,
        divergence_weight: float = 0.0,
        similarity: Similarity = Similarity.cosine,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.inner, self.exits, self.divergence = inner, list(exits), divergence
        self.similarity = similarity  # by which `divergence` compares
        self.per_step, self.divergence_weight, self.seed = per_step or len(self.exits), divergence_weight, seed

    def prepare(self, batch_info: BatchInfo, dimension: int) -> dict[Hashable, Prepared]:
        """What the losses need, which is the same for every layer."""
        losses = [self.inner] if self.divergence is None else [self.inner, self.divergence]
        return prepare_losses([(loss, dimension) for loss in losses], _of_one_part(batch_info))

    def forward(self, queries: Encoded, documents: Encoded, batch_info: BatchInfo) -> LossOutput:
        """The encoded queries and documents to this rank's loss."""
        batch_info = _of_one_part(batch_info)
        output: LossOutput = self.inner(*_of_part(queries, documents, 0), batch_info)
        if not self.exits:
            return output
        local_loss, row_losses = output.local_loss, output.row_losses
        metrics = {**output.metrics, "loss@last": local_loss.detach()}
        of_queries, of_documents = (encoded.parts[0].values.detach() for encoded in (queries, documents))
        teacher = Guide(of_queries, of_documents, self.similarity)
        guided = replace(batch_info, guides={**batch_info.guides, LAST_LAYER: teacher})
        drawn = draw(len(self.exits), self.per_step, self.seed, batch_info.origin.batch, Drawn.layers)
        for layer, part, weight in (self.exits[index] for index in drawn):
            losses = [("loss", self.inner, weight)]
            if self.divergence is not None:
                losses.append(("kl", self.divergence, self.divergence_weight))
            for name, loss, factor in losses:
                of_layer = loss(
                    *_of_part(queries, documents, part), replace(guided, origin=guided.origin._replace(layer=layer))
                )
                local_loss = local_loss + factor / len(drawn) * of_layer.local_loss
                row_losses = add_row_losses(row_losses, factor / len(drawn), of_layer.row_losses)
                metrics[f"{name}@layer{layer}"] = of_layer.local_loss.detach()
        return LossOutput(local_loss, metrics, row_losses)


def _of_one_part(batch_info: BatchInfo) -> BatchInfo:
    """The same for the vectors of one layer: every part has one row per text."""
    rows = batch_info.rows
    return replace(batch_info, global_rows=replace(rows, sizes=rows.sizes[:1]))


def _of_part(queries: Encoded, documents: Encoded, part: int) -> tuple[Encoded, Encoded]:
    return Encoded((queries.parts[part],)), Encoded((documents.parts[part],))
