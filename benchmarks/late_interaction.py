"""Extra memory and time of in-batch negatives by MaxSim and by XTR, and of the losses of other libraries.

Texts have up to 128 vectors, and pages 1,030; those of pages are compared with colpali-engine if it is installed.
"""

import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.multi_vector_encoder.scoring import XTRScores
from torch import Tensor, nn

from benchmarks.measure import markdown, measure_call, require, unit
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.losses import Implementation, InfoNCEConfig, LossConfig, XTRConfig
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.losses.build import build_loss
from embedtrain.losses.encoded import Encoded, Part
from embedtrain.losses.types import BatchInfo, GlobalRows, Sizes

TITLE = f"In-batch negatives of late interaction, forward and backward: extra MiB / {unit()}"
DIMENSION, TOP_K = 128, 256
# At its peak PyLate's loss holds this many copies of the products of all tokens, as measured with 256 queries.
PADDED_COPIES = 2.1
CACHED = "CachedMultiVectorMultipleNegativesRankingLoss"
MNRL = "MultiVectorMultipleNegativesRankingLoss"
PYLATE = "PyLate Contrastive"
COLPALI, COLPALI_PAIRWISE = "ColbertLoss", "ColbertPairwiseCELoss"

Call = Callable[[Tensor, Tensor], Tensor]  # the loss of rows of queries and documents, whose gradients it sets


@dataclass(frozen=True)
class Shape:
    """Queries, each with one document; their rows, and how often they are measured."""

    texts: int
    rounds: int = 1
    query_rows: int = 32
    document_rows: int = 128

    @property
    def name(self) -> str:
        """The first cell of a row."""
        return f"{self.texts:,} x {self.texts:,}"

    @property
    def products(self) -> int:
        """Bytes of the products of all tokens."""
        return 4 * self.texts**2 * self.query_rows * self.document_rows


@dataclass(frozen=True)
class Side:
    """A column of the table."""

    name: str
    xtr: bool = False
    padded: bool = False  # holds the products of all tokens
    package: str | None = None  # which has to be installed
    same_loss: bool = True  # as the others of the table

    def call(self, shape: Shape) -> Call:
        """The loss."""
        if self.name in ("auto", "tiled", "ring"):
            return _ours(InfoNCEConfig(implementation=Implementation(self.name)), shape)
        if self.name == "xtr":
            return _ours(XTRConfig(top_k=TOP_K, temperature=1.0), shape)
        if self.package == "colpali_engine":
            return _colpali(self.name, shape)
        return _theirs(self, shape.texts)


SIDES = (Side("tiled"), Side("ring"), Side(MNRL), Side(CACHED), Side(PYLATE, padded=True, package="pylate"))
XTR_SIDES = (Side("xtr", xtr=True), Side(CACHED, xtr=True))
PAGE_SIDES = (
    Side("auto"),
    Side("ring"),
    Side(CACHED),
    Side(COLPALI, package="colpali_engine"),
    Side(COLPALI_PAIRWISE, package="colpali_engine", same_loss=False),
)
CASES = (Shape(128, rounds=3), Shape(256), Shape(512))
PAGES = (Shape(64, rounds=3, query_rows=30, document_rows=1030),)
# Sides, their shapes, and the one that is compared with the first.
TABLES = ((SIDES, CASES, CACHED), (XTR_SIDES, CASES, CACHED), (PAGE_SIDES, PAGES, COLPALI))


@dataclass(frozen=True)
class Measured:
    """One call in a new process; `norms` are the gradient norms of queries and documents."""

    extra: float
    seconds: float
    loss: float
    norms: tuple[float, float]


def measure(part: str = "", *, small: bool = False) -> str:
    """Measure all cases, or those of the tables whose numbers `part` names; `small`: one of 16 texts each."""
    tables = []
    for number, (sides, shapes, compared) in enumerate(TABLES):
        if part and str(number) not in part:
            continue
        installed = [side for side in sides if side.package is None or importlib.util.find_spec(side.package)]
        ours, names = installed[0].name, [side.name for side in installed]
        theirs = compared if compared in names else CACHED
        header = ["queries x documents", *(_title(side) for side in installed), f"{theirs} : {ours}"]
        cases = [Shape(16)] if small else shapes
        tables.append(markdown(header, [_row(installed, shape, theirs) for shape in cases]))
    return "\n\n".join(tables)


def _title(side: Side) -> str:
    return f"{side.name}, XTRScores({TOP_K})" if side.xtr and side.name != "xtr" else side.name


def _row(sides: Sequence[Side], shape: Shape, compared: str) -> list[str]:
    padded_gib = PADDED_COPIES * shape.products / 2**30
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    fitting = [side for side in sides if not side.padded or padded_gib * 2**30 < 0.8 * free]
    measured: dict[str, list[Measured]] = {side.name: [] for side in fitting}
    for number in range(shape.rounds):  # each round starts with another one
        for position in range(len(fitting)):
            side = fitting[(position + number) % len(fitting)]
            measured[side.name] += on_ranks(
                1, partial(_on_rank, side=side, shape=shape), preload="benchmarks.late_interaction"
            )
    expected = measured[sides[0].name][0]
    for name, results in measured.items():
        for result in results if all(side.same_loss for side in sides if side.name == name) else ():
            pairs = [(result.loss, expected.loss)]
            if name != PYLATE:  # normalises the vectors itself, which projects their gradients
                pairs += zip(result.norms, expected.norms, strict=True)
            require(all(abs(a / b - 1) <= 1e-4 for a, b in pairs), f"{name} differs at {shape}: {measured}")
    cells = {side.name: f"- (needs {padded_gib:,.1f} GiB)" for side in sides}
    for name, results in measured.items():
        cells[name] = f"{_median(results, 'extra'):,.0f} / {_median(results, 'seconds'):,.2f}"
    ours, theirs = measured[sides[0].name], measured[compared]
    ratios = [_median(theirs, name) / _median(ours, name) for name in ("extra", "seconds")]
    return [shape.name, *(cells[side.name] for side in sides), f"{ratios[0]:.1f} / {ratios[1]:.1f}"]


def _median(results: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(result, name) for result in results)


def _on_rank(rank: int, folder: Path, side: Side, shape: Shape) -> Measured:
    with world_of(1, rank, folder / "store", min_gpus=1) as world:
        return measure_here(side, shape, world.device)


def measure_here(side: Side, shape: Shape, device: torch.device) -> Measured:
    """Measure one call in this process, after a warm-up."""
    for size in (4, shape.texts):
        generator = torch.Generator().manual_seed(0)
        rows = [
            torch.randn(size * count, DIMENSION, generator=generator)
            for count in (shape.query_rows, shape.document_rows)
        ]
        leaves = [F.normalize(part, dim=1).to(device).requires_grad_() for part in rows]
        call = side.call(replace(shape, texts=size))
        loss, extra, seconds = measure_call(lambda: call(*leaves), device)  # noqa: B023
    norms = [leaf.grad.double().norm().item() for leaf in leaves if leaf.grad is not None]
    return Measured(extra, seconds, loss.item(), (norms[0], norms[1]))


def _ours(config: LossConfig, shape: Shape) -> Call:
    texts = shape.texts
    loss = build_loss(config, dimension=DIMENSION, seed=0, score=MaxSim(mean=False))
    keys, sizes = torch.arange(texts), [np.full(texts, rows) for rows in (shape.query_rows, shape.document_rows)]
    batch_info = BatchInfo(
        owners=keys,
        query_keys=keys,
        document_keys=keys,
        global_rows=GlobalRows(
            rank=0,
            num_rows=[texts],
            num_documents=np.ones(texts, dtype=np.int64),
            query_keys=keys.numpy(),
            document_keys=keys.numpy(),
            sizes=(Sizes(sizes[0], sizes[1]),),
        ),
    )

    def call(queries: Tensor, documents: Tensor) -> Tensor:
        encoded = [Encoded((Part(rows, size),)) for rows, size in zip((queries, documents), sizes, strict=True)]
        local_loss = loss(*encoded, batch_info.to(queries.device)).local_loss
        local_loss.backward()
        return local_loss.detach()

    return call


def _colpali(name: str, shape: Shape) -> Call:
    # The package imports all of its models, which need torchvision; the losses are modules of their own.
    if "colpali_engine" not in sys.modules:
        spec = importlib.util.find_spec("colpali_engine")
        assert spec is not None
        sys.modules["colpali_engine"] = importlib.util.module_from_spec(spec)
    os.environ["COLPALI_SCORES_BACKEND"] = "torch"
    losses = importlib.import_module("colpali_engine.loss.late_interaction_losses")
    loss = getattr(losses, name)(temperature=1.0, normalize_scores=False)

    def call(queries: Tensor, documents: Tensor) -> Tensor:
        value: Tensor = loss(*(rows.view(shape.texts, -1, DIMENSION) for rows in (queries, documents)))
        value.backward()
        return value.detach()

    return call


class Vectors(nn.Module):
    """A model whose features are vectors already; the attributes are PyLate's."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        """Return the vectors."""
        return {"token_embeddings": features["vectors"], "attention_mask": features["attention_mask"]}


def _theirs(side: Side, texts: int) -> Call:
    similarity = XTRScores(TOP_K) if side.xtr else None

    def call(queries: Tensor, documents: Tensor) -> Tensor:
        vectors = [rows.view(texts, -1, DIMENSION) for rows in (queries, documents)]
        masks = [torch.ones(rows.shape[:2], dtype=torch.int64, device=rows.device) for rows in vectors]
        if side.name == CACHED:
            cached = CachedMultiVectorMultipleNegativesRankingLoss(Vectors(), similarity_fct=similarity)
            for rows in vectors:
                rows.retain_grad()
            loss: Tensor = cached.calculate_loss(
                [[rows] for rows in vectors], [[mask.bool()] for mask in masks], with_backward=True
            )
            return loss
        features = [
            {"vectors": rows, "attention_mask": mask, "input_ids": mask}
            for rows, mask in zip(vectors, masks, strict=True)
        ]
        if side.name == PYLATE:
            from pylate.losses import Contrastive

            loss = Contrastive(Vectors())(features)
        else:
            loss = MultiVectorMultipleNegativesRankingLoss(Vectors(), similarity_fct=similarity)(features)
        loss.backward()
        return loss.detach()

    return call
