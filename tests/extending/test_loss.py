"""A loss of the user's own, with options: docs/extending.md explains this file."""

import pytest
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.compose import compose_recipes
from embedtrain.config.losses import CustomConfig
from embedtrain.distributed.collectives import gather_rows
from embedtrain.errors import ConfigError
from embedtrain.losses.build import build_loss
from embedtrain.losses.types import BatchInfo, Loss, LossOutput
from tests.losses.global_batch import GlobalVectors, check, vectors

PATH = "tests.extending.test_loss:HardestNegative"


class HardestNegative(Loss):
    """The most similar other document of the global batch has to be less similar than the positive, by a margin."""

    def __init__(self, margin: float = 0.2) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, queries: Tensor, documents: Tensor, batch_info: BatchInfo) -> LossOutput:
        """The sum over this rank's rows, divided by the rows of all ranks."""
        rows = batch_info.rows
        candidates = F.normalize(gather_rows(documents, rows.counts.documents), dim=1)
        scores = F.normalize(queries, dim=1) @ candidates.T
        positives = (batch_info.positives + rows.local_documents.start).unsqueeze(1)
        hardest = scores.scatter(1, positives, -1.0).amax(dim=1, keepdim=True)
        losses = (self.margin + hardest - scores.gather(1, positives)).relu()
        return LossOutput(losses.sum() / sum(rows.num_rows))


def textbook(batch: GlobalVectors, _: dict[str, Tensor]) -> Tensor:
    """The same, row by row in one process."""
    total = batch.queries.new_zeros(())
    for row, query in enumerate(batch.queries):
        scores = F.cosine_similarity(query.unsqueeze(0), batch.documents)
        positive = batch.documents_of(row)[0]
        others = [score for index, score in enumerate(scores) if index != positive]
        total = total + (0.3 + max(others) - scores[positive]).relu()
    return total / len(batch.queries)


def test_its_gradient_is_that_of_one_process_on_any_number_of_ranks(ranks):
    check(ranks, CustomConfig(path=PATH, kwargs={"margin": 0.3}), vectors([2, 1, 3, 1, 2], seed=3), textbook)


def test_its_options_are_those_of_its_constructor():
    options = ["recipe=quickstart", "loss=custom", f"loss.path={PATH}", "loss.matryoshka.dims=[8,4]"]
    (recipe,) = compose_recipes([*options, "loss.kwargs={margin: 0.3}"])
    assert recipe.loss.kwargs == {"margin": 0.3}
    with pytest.raises(ConfigError, match=r"loss\.kwargs=.*'margn': 1.*HardestNegative"):
        build_loss(CustomConfig(path=PATH, kwargs={"margn": 1}), dimension=8, seed=0)
