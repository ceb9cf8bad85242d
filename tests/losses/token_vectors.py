"""Compares losses of late interaction on any number of ranks with their formulas in one process, in float64.

Every query and document has several rows; scores are the double loop over the rows of both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.losses import (
    CombinedConfig,
    DistillScoresConfig,
    Hardness,
    InfoNCEConfig,
    LossConfig,
    MarginMSEConfig,
    MatryoshkaConfig,
    XTRConfig,
)
from embedtrain.distributed.world import World
from embedtrain.kinds.late_interaction import score as maxsim
from embedtrain.kinds.late_interaction import xtr
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses import softmax
from embedtrain.losses.build import build_loss
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.types import BatchInfo, GlobalRows, Guide, Sizes
from tests.losses.global_batch import distributions

WIDTH = 6
GUIDE = "big"


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """N queries with `documents[i]` documents each, K in total; float64."""

    documents: tuple[int, ...]
    queries: Tensor  # [rows of all queries, WIDTH]
    query_rows: tuple[int, ...]  # of each query
    candidates: Tensor  # [rows of all documents, WIDTH]
    candidate_rows: tuple[int, ...]  # of each document
    query_keys: tuple[int, ...]
    document_keys: tuple[int, ...]
    labels: tuple[float, ...]
    guide: Guide

    @property
    def first(self) -> NDArray[np.int64]:
        """The positive of each query."""
        return np.cumsum(self.documents) - self.documents

    def documents_of(self, rows: Sequence[int]) -> list[int]:
        """Those of some queries."""
        return [self.first[row] + n for row in rows for n in range(self.documents[row])]

    def of_rank(self, rank: int, rows_of_rank: list[list[int]], dtype: torch.dtype) -> tuple[Part, Part, BatchInfo]:
        """The queries and documents of a rank, with gradients, and their BatchInfo."""
        rows, order = rows_of_rank[rank], [row for rows in rows_of_rank for row in rows]
        documents, all_documents = self.documents_of(rows), self.documents_of(order)
        info = BatchInfo(
            owners=torch.tensor([i for i, row in enumerate(rows) for _ in range(self.documents[row])]).long(),
            query_keys=torch.tensor([self.query_keys[row] for row in rows]).long(),
            document_keys=torch.tensor([self.document_keys[n] for n in documents]).long(),
            scores=torch.tensor([self.labels[n] for n in documents], dtype=dtype),
            guides={GUIDE: Guide(self.guide.queries[rows].to(dtype), self.guide.documents[documents].to(dtype))},
            global_rows=GlobalRows(
                rank=rank,
                num_rows=[len(rows) for rows in rows_of_rank],
                num_documents=np.array([self.documents[row] for row in order]),
                query_keys=np.array([self.query_keys[row] for row in order]),
                document_keys=np.array([self.document_keys[n] for n in all_documents]),
                sizes=(
                    Sizes(
                        np.array([self.query_rows[row] for row in order]),
                        np.array([self.candidate_rows[n] for n in all_documents]),
                    ),
                ),
            ),
        )
        return (
            _local_part(self.queries, self.query_rows, rows, dtype),
            _local_part(self.candidates, self.candidate_rows, documents, dtype),
            info,
        )


def token_batch(
    documents: tuple[int, ...] = (2, 1, 3, 1, 2),
    query_rows: tuple[int, ...] = (3, 1, 4, 2, 4),
    candidate_rows: tuple[int, ...] = (5, 2, 1, 7, 2, 5, 3, 9, 1),
    *,
    width: int = WIDTH,
) -> TokenBatch:
    """Random texts: the queries 1 and 3 are equal, a negative of 2 equals the positive of 0, and another that of 3."""
    generator = torch.Generator().manual_seed(1)
    document_keys = list(range(100, 100 + len(candidate_rows)))
    if len(documents) == 5:
        document_keys[4], document_keys[8] = document_keys[0], document_keys[6]

    def unit_rows(count: int) -> Tensor:
        return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=1)

    return TokenBatch(
        documents=documents,
        queries=unit_rows(sum(query_rows)),
        query_rows=query_rows,
        candidates=unit_rows(sum(candidate_rows)),
        candidate_rows=candidate_rows,
        query_keys=tuple(range(len(documents))) if len(documents) != 5 else (0, 1, 2, 1, 4),
        document_keys=tuple(document_keys),
        labels=tuple(3 * torch.rand(len(candidate_rows), generator=generator).double()),
        guide=Guide(unit_rows(len(documents)), unit_rows(len(candidate_rows))),
    )


def maxsim_scores(batch: TokenBatch, *, mean: bool) -> Tensor:
    """[N, K]."""
    rows = []
    for query in batch.queries.split(batch.query_rows):
        sums = [(query @ document.T).amax(dim=1).sum() for document in batch.candidates.split(batch.candidate_rows)]
        rows.append(torch.stack(sums) / (len(query) if mean else 1))
    return torch.stack(rows)


def xtr_scores(batch: TokenBatch, top_k: int) -> Tensor:
    """[N, K]: the mean over the query's rows that retrieve a row of the document, of their largest product with it."""
    rows = []
    for query in batch.queries.split(batch.query_rows):
        products = query @ batch.candidates.T
        retrieved = torch.zeros_like(products, dtype=torch.bool)
        retrieved.scatter_(1, products.topk(min(top_k, products.shape[1]), dim=1).indices, True)
        scores = []
        for product, actual in zip(
            products.split(batch.candidate_rows, 1), retrieved.split(batch.candidate_rows, 1), strict=True
        ):
            best = product.masked_fill(~actual, -torch.inf).amax(dim=1)[actual.any(dim=1)]
            scores.append(best.sum() / max(1, len(best)))
        rows.append(torch.stack(scores))
    return torch.stack(rows)


def formula(config: LossConfig, batch: TokenBatch, scale: Tensor, *, mean: bool) -> Tensor:
    """The loss of the global batch; `scale` is one over the temperature."""
    if config.matryoshka.dims is not None:
        inner = replace(config, matryoshka=MatryoshkaConfig())
        terms = [formula(inner, _truncated(batch, dim), scale, mean=mean) for dim in config.matryoshka.dims]
        weights = config.matryoshka.dim_weights or [1.0] * len(terms)
        return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()
    match config:
        case CombinedConfig(losses=losses):
            return sum(part.weight * formula(part, batch, 1 / part.temperature, mean=mean) for part in losses)
        case InfoNCEConfig():
            return _infonce(config, batch, maxsim_scores(batch, mean=mean), scale)
        case XTRConfig():
            options = InfoNCEConfig(mask_duplicates=config.mask_duplicates)
            return _infonce(options, batch, xtr_scores(batch, config.top_k), scale)
        case DistillScoresConfig():
            terms = []
            for own, labels in _lists(batch, mean=mean):
                student = (
                    (own - own.min()) / (own.max() - own.min()) if config.normalize_scores and len(own) > 1 else own
                )
                target = (labels / config.teacher_temperature).softmax(0)
                terms.append(F.kl_div((student * scale).log_softmax(0), target, reduction="sum"))
            return torch.stack(terms).sum() / sum(n > 1 for n in batch.documents)
        case MarginMSEConfig():
            terms = [((own[0] - own[1:]) - (labels[0] - labels[1:])) ** 2 for own, labels in _lists(batch, mean=mean)]
            return torch.cat(terms).mean()
        case _:
            raise AssertionError(config)


def _lists(batch: TokenBatch, *, mean: bool) -> list[tuple[Tensor, Tensor]]:
    scores, labels = maxsim_scores(batch, mean=mean), torch.tensor(batch.labels, dtype=torch.float64)
    return [(scores[i, own], labels[own]) for i in range(len(batch.documents)) if (own := batch.documents_of([i]))]


def _infonce(config: InfoNCEConfig, batch: TokenBatch, scores: Tensor, scale: Tensor) -> Tensor:
    terms = []
    for row, first in enumerate(batch.first):
        positive, own = scores[row, first], batch.documents_of([row])
        answers = {
            batch.document_keys[batch.first[r]]
            for r, key in enumerate(batch.query_keys)
            if key == batch.query_keys[row]
        }
        logits = []
        for column in range(len(batch.document_keys)):
            score = scores[row, column]
            if column == first or (config.mask_duplicates and batch.document_keys[column] in answers):
                continue
            if not config.in_batch_negatives and column not in own:
                continue
            if config.false_negative_margin is not None and score > positive + config.false_negative_margin:
                continue
            if config.guide is not None:
                similarities = batch.guide.documents[[column, first]] @ batch.guide.queries[row]
                if similarities[0] > similarities[1]:
                    continue
            weighted = {Hardness.none: False, Hardness.all: True, Hardness.hard: column in own}[config.hardness]
            logits.append(score * scale + (config.hardness_strength * score.detach() if weighted else 0))
        if logits:
            terms.append(F.softplus(torch.stack(logits).logsumexp(0) - (positive - config.margin) * scale).squeeze())
    return torch.stack([*terms, batch.queries.sum() * 0]).sum() / len(batch.documents)


def _truncated(batch: TokenBatch, dim: int) -> TokenBatch:
    queries, candidates = (F.normalize(rows[:, :dim], dim=1) for rows in (batch.queries, batch.candidates))
    return replace(batch, queries=queries, candidates=candidates)


@dataclass(frozen=True)
class TokenCase:
    """A loss of MaxSim or MeanMaxSim."""

    config: LossConfig
    mean: bool = False

    def expected(self, batch: TokenBatch) -> tuple[float, Tensor, Tensor, float]:
        """The loss, its gradients at the rows of queries and documents, and at the logarithm of 1 / temperature."""
        leaves = [rows.clone().requires_grad_() for rows in (batch.queries, batch.candidates)]
        temperature = getattr(self.config, "temperature", None)
        scale = torch.tensor([1 / (temperature or MaxSim(mean=self.mean).default_temperature)], dtype=torch.float64)
        if getattr(self.config, "learn_temperature", False):  # the parameter starts in float32
            scale = scale.log().float().double().exp()
        scale.requires_grad_()
        loss = formula(self.config, replace(batch, queries=leaves[0], candidates=leaves[1]), scale, mean=self.mean)
        loss.backward()
        of_scale = 0.0 if scale.grad is None else (scale.grad * scale.detach()).item()
        return loss.item(), *map(_grad, leaves), of_scale


def run(
    world: World,
    cases: Sequence[TokenCase],
    batch: TokenBatch,
    rows_of_rank: list[list[int]],
    dtype: torch.dtype,
    cells: int,
) -> list[tuple[float, list[Tensor], list[Tensor]]]:
    """On one rank, of each case: the local loss, and its gradient at this rank's rows and at the loss's parameters.

    Tiles have `cells` scores or products, if not 0.
    """
    modules = [(maxsim, "BLOCK_CELLS_CPU"), (softmax, "TILE_CELLS"), (softmax, "MIN_TILE_ROWS"), (xtr, "TILE_ROWS")]
    defaults = [getattr(module, name) for module, name in modules]
    try:
        for (module, name), value in zip(modules, (cells, cells, 1, cells), strict=True):
            if cells:
                setattr(module, name, value)
        return [_run(world, case, batch, rows_of_rank, dtype) for case in cases]
    finally:
        for (module, name), value in zip(modules, defaults, strict=True):
            setattr(module, name, value)


def _run(
    world: World, case: TokenCase, batch: TokenBatch, rows_of_rank: list[list[int]], dtype: torch.dtype
) -> tuple[float, list[Tensor], list[Tensor]]:
    loss = build_loss(case.config, dimension=batch.queries.shape[1], seed=0, score=MaxSim(mean=case.mean)).to(dtype)
    queries, documents, info = batch.of_rank(world.rank, rows_of_rank, dtype)
    output = loss(Encoded((queries,)), Encoded((documents,)), info)
    output.local_loss.backward()
    assert output.row_losses is not None
    torch.testing.assert_close(output.row_losses.sum(), output.local_loss.detach())
    grads = [_grad(part.values) for part in (queries, documents)]
    return output.local_loss.item(), grads, [_grad(parameter) for parameter in loss.parameters()]


def check_tokens(
    ranks: Callable[..., list[Any]],
    cases: Sequence[TokenCase],
    batch: TokenBatch,
    *,
    only: Sequence[int] = (0, 1, 2, 6),
    cells: int = 0,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
) -> None:
    """The losses, their gradients and those of the temperature equal the formulas: on `only` these `distributions`."""
    expected = [case.expected(batch) for case in cases]
    for number in only:
        rows_of_rank = distributions(len(batch.documents))[number]
        answers = ranks(len(rows_of_rank), run, cases, batch, rows_of_rank, dtype, cells)
        for case, (value, query_grads, document_grads, scale_grad), *of_ranks in zip(
            cases, expected, *answers, strict=True
        ):
            text = f"{case}, rows {rows_of_rank}"
            assert sum(answer[0] for answer in of_ranks) == pytest.approx(value, rel=tolerance), text
            for rows, (_, grads, _) in zip(rows_of_rank, of_ranks, strict=True):
                for whole, sizes, selected, local in (
                    (query_grads, batch.query_rows, rows, grads[0]),
                    (document_grads, batch.candidate_rows, batch.documents_of(rows), grads[1]),
                ):
                    right = _local_part(whole, sizes, selected, torch.float64).values.detach()
                    torch.testing.assert_close(local.double(), right, rtol=tolerance, atol=tolerance, msg=text)
            if of_ranks[0][2]:
                total = sum(answer[2][0].item() for answer in of_ranks)
                assert total == pytest.approx(scale_grad, rel=tolerance, abs=tolerance), text


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor).detach() if tensor.grad is None else tensor.grad


def _local_part(values: Tensor, sizes: Sequence[int], selected: Sequence[int], dtype: torch.dtype) -> Part:
    parts = values.detach().split(list(sizes))
    rows = torch.cat([values.detach()[:0], *(parts[index] for index in selected)])
    return Part(rows.to(dtype).requires_grad_(), np.array([sizes[index] for index in selected], dtype=np.int64))
