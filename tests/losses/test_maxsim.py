"""MaxSim equals the double loop over tokens: values, gradients, all implementations, any number of ranks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from embedtrain.config.losses import DistillScoresConfig, Implementation, InfoNCEConfig
from embedtrain.losses import maxsim, softmax
from embedtrain.losses.build import build_loss
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.maxsim import MaxSim
from embedtrain.losses.types import BatchInfo, GlobalRows, Sizes
from tests.losses.global_batch import distributions

WIDTH = 6
# Documents of each query, and the rows of each text.
DOCUMENTS = (2, 1, 3, 1, 2)
QUERY_ROWS = (3, 1, 4, 2, 4)
DOCUMENT_ROWS = (5, 2, 1, 7, 2, 5, 3, 9, 1)


def rows_of(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(sum(sizes), WIDTH, generator=generator, dtype=torch.float64), dim=1)


def texts(values, sizes):
    return list(values.split(list(sizes)))


def maxsim_of(query, document, *, mean):
    total = (query @ document.T).amax(dim=1).sum()
    return total / len(query) if mean else total


def local_part(values, sizes, selected, dtype):
    parts = texts(values, sizes)
    chosen = [parts[index] for index in selected]
    joined = torch.cat(chosen) if chosen else values[:0]
    return Part(joined.to(dtype).requires_grad_(), np.array([sizes[index] for index in selected], dtype=np.int64))


def run(world, config, rows_of_rank, dtype, mean, cells=None):
    """On one rank: the local loss, and its gradient at this rank's rows and at the parameters of the loss."""
    if cells is not None:
        maxsim.BLOCK_CELLS = softmax.TILE_CELLS = cells
        softmax.MIN_TILE_ROWS = 1
    loss = build_loss(config, dimension=WIDTH, seed=0, score=MaxSim(mean=mean)).to(dtype)
    first = np.cumsum(DOCUMENTS) - DOCUMENTS
    order = [row for rows in rows_of_rank for row in rows]
    document_order = [first[row] + n for row in order for n in range(DOCUMENTS[row])]
    rows = rows_of_rank[world.rank]
    documents = [first[row] + n for row in rows for n in range(DOCUMENTS[row])]
    info = BatchInfo(
        owners=torch.tensor([i for i, row in enumerate(rows) for _ in range(DOCUMENTS[row])], dtype=torch.int64),
        query_keys=torch.tensor(rows, dtype=torch.int64),
        document_keys=torch.tensor(documents, dtype=torch.int64),
        scores=torch.tensor([float(n % 4) for n in documents], dtype=dtype),
        global_rows=GlobalRows(
            rank=world.rank,
            num_rows=[len(rows) for rows in rows_of_rank],
            num_documents=np.array([DOCUMENTS[row] for row in order]),
            query_keys=np.array(order),
            document_keys=np.array(document_order),
            sizes=(
                Sizes(
                    np.array([QUERY_ROWS[row] for row in order]),
                    np.array([DOCUMENT_ROWS[n] for n in document_order]),
                ),
            ),
        ),
    )
    query_part = local_part(rows_of(QUERY_ROWS, 1), QUERY_ROWS, rows, dtype)
    document_part = local_part(rows_of(DOCUMENT_ROWS, 2), DOCUMENT_ROWS, documents, dtype)
    output = loss(Encoded((query_part,)), Encoded((document_part,)), info)
    output.local_loss.backward()
    grads = [
        part.values.grad if part.values.grad is not None else torch.zeros_like(part.values.detach())
        for part in (query_part, document_part)
    ]
    return output.local_loss.item(), grads, [p.grad for p in loss.parameters()], output.metrics


def expected(config, mean):
    queries, documents = rows_of(QUERY_ROWS, 1).requires_grad_(), rows_of(DOCUMENT_ROWS, 2).requires_grad_()
    scale = torch.tensor(1 / config.temperature, dtype=torch.float64)
    if getattr(config, "learn_temperature", False):  # the parameter starts in float32
        scale = scale.log().float().double().exp()
    scale.requires_grad_()
    first = np.cumsum(DOCUMENTS) - DOCUMENTS
    scores = torch.stack(
        [
            torch.stack([maxsim_of(query, document, mean=mean) for document in texts(documents, DOCUMENT_ROWS)])
            for query in texts(queries, QUERY_ROWS)
        ]
    )
    if isinstance(config, InfoNCEConfig):
        loss = F.cross_entropy(scores * scale, torch.from_numpy(first))
    else:
        lists = [scores[i, first[i] : first[i] + n] for i, n in enumerate(DOCUMENTS)]
        labels = [torch.tensor([float(d % 4) for d in range(first[i], first[i] + n)]) for i, n in enumerate(DOCUMENTS)]
        terms = [
            F.kl_div((s * scale).log_softmax(0), t.double().softmax(0), reduction="sum")
            for s, t in zip(lists, labels, strict=True)
            if len(s) > 1
        ]
        loss = torch.stack(terms).mean()
    loss.backward()
    # log_scale is trained: d scale / d log_scale = scale.
    return loss.item(), queries.grad, documents.grad, scale.grad * scale.detach()


def assert_equal_on_ranks(ranks, config, mean, rows_of_rank, cells=None, dtype=torch.float64, tolerance=1e-10):
    value, query_grads, document_grads, scale_grad = expected(config, mean)
    answers = ranks(len(rows_of_rank), run, config, rows_of_rank, dtype, mean, cells)
    assert sum(answer[0] for answer in answers) == pytest.approx(value, rel=tolerance)
    first = np.cumsum(DOCUMENTS) - DOCUMENTS
    for rows, (_, grads, _, _) in zip(rows_of_rank, answers, strict=True):
        documents = [first[row] + n for row in rows for n in range(DOCUMENTS[row])]
        for whole, sizes, selected, local in (
            (query_grads, QUERY_ROWS, rows, grads[0]),
            (document_grads, DOCUMENT_ROWS, documents, grads[1]),
        ):
            parts = texts(whole, sizes)
            wanted = torch.cat([parts[index] for index in selected]) if selected else whole[:0]
            torch.testing.assert_close(local.double(), wanted, rtol=tolerance, atol=tolerance)
    if answers[0][2]:
        total = sum(answer[2][0].item() for answer in answers if answer[2][0] is not None)
        assert total == pytest.approx(scale_grad.item(), rel=tolerance)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("implementation", [Implementation.plain, Implementation.tiled, Implementation.ring])
def test_infonce_equals_the_double_loop(ranks, implementation, mean):
    config = InfoNCEConfig(temperature=0.7, learn_temperature=True, implementation=implementation)
    for rows_of_rank in distributions(len(DOCUMENTS)):
        assert_equal_on_ranks(ranks, config, mean, rows_of_rank)


@pytest.mark.parametrize("implementation", [Implementation.tiled, Implementation.ring])
def test_tiles_of_any_size(ranks, implementation):
    config = InfoNCEConfig(temperature=0.7, learn_temperature=True, implementation=implementation)
    for cells in (1, 40):
        assert_equal_on_ranks(ranks, config, False, [[0, 1, 2, 3, 4]], cells)


def test_float32(ranks):
    for implementation in (Implementation.plain, Implementation.tiled):
        config = InfoNCEConfig(temperature=0.7, implementation=implementation)
        assert_equal_on_ranks(ranks, config, True, [[0, 1], [2, 3, 4]], dtype=torch.float32, tolerance=1e-5)


def test_distillation_equals_the_double_loop(ranks):
    config = DistillScoresConfig(temperature=0.7, teacher_temperature=1.0)
    for rows_of_rank in distributions(len(DOCUMENTS)):
        assert_equal_on_ranks(ranks, config, True, rows_of_rank)
