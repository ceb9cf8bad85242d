"""A reranker compared with sentence-transformers' CrossEncoder: steps of its losses, and the scores of candidates.

Their losses tokenize pairs within the step; ours joins cached tokens within the step.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss, ListNetLoss
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.comparison import (
    OPTIM,
    TOLERANCE,
    Batches,
    StepResults,
    StepRunner,
    comparison_cells,
    make_step_context,
    padding_factor,
)
from benchmarks.inputs import MINILM, disable_dropout, precisions
from benchmarks.measure import ROUNDS, markdown, ratio, require, speed, unit
from benchmarks.products import LIMIT_HEADER, Measured, limit_cells, measure_shares
from benchmarks.workloads import Workload, load_rows, question_passage, web
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.losses import BCEConfig, ListNetConfig
from embedtrain.config.recipe import ParallelConfig, Precision, TrainConfig
from embedtrain.data.rows import Example
from embedtrain.data.types import GlobalBatch, Pair
from embedtrain.distributed.world import World, joined_world
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.kinds.cross_encoder.options import CrossEncoderOptions
from embedtrain.losses.listwise import BCE, ListNet
from embedtrain.losses.score import PairScore
from embedtrain.losses.types import Loss
from embedtrain.training.optimizer import build_optimizer
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from embedtrain.training.step import train_step

DOCUMENTS = 4  # of a query: a positive and negatives
QUERIES, CANDIDATES, POOL = 3, 100, 150
TITLE = "A reranker from all-MiniLM-L6-v2: training steps and scores, against CrossEncoder"
WORKLOADS = (question_passage(num_pairs=32, steps=1), web(num_pairs=32, steps=1))
CHUNK_OPTIONS = ChunkOptions(TrainConfig().chunk_tokens)
DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}
# Maximal difference of scores, whose head is new: they are between -1 and 1.
SCORE_TOLERANCE = {Precision.fp32: 1e-4, Precision.bf16: 3e-2}
# Our precision, and theirs.
COMPARED = ((Precision.bf16, Precision.fp32), (Precision.bf16, Precision.bf16), (Precision.fp32, Precision.fp32))


@dataclass(frozen=True)
class Compared:
    """A loss of both sides."""

    name: str
    ours: type[BCE] | type[ListNet]
    config: BCEConfig | ListNetConfig
    theirs: type[nn.Module]

    def build(self) -> Loss:
        """Our loss."""
        return self.ours(self.config, PairScore())  # type: ignore[arg-type]


LOSSES = (
    Compared("BCE", BCE, BCEConfig(), BinaryCrossEntropyLoss),
    Compared("ListNet", ListNet, ListNetConfig(), ListNetLoss),
)


class OurSteps:
    """`train_step` on the batches of a round, with the chunks of their pairs built from the cached tokens."""

    def __init__(self, model: LoadedModel, world: World, batches: Batches, loss: Loss) -> None:
        self.run, self.batches, self.tokenizer = make_step_context(model, world, loss=loss), batches, model.tokenizer

    def __call__(self, round_number: int) -> StepResults:
        """Run the steps of a round."""
        batches = (make_rank_batch(batch, 0, 1, self.tokenizer, CHUNK_OPTIONS) for batch in self.batches(round_number))
        reports = [train_step(self.run, batch) for batch in batches]
        real, computed = (sum(getattr(report, f"{kind}_tokens") for report in reports) for kind in ("real", "computed"))
        return StepResults(tuple(report.loss for report in reports), real, computed)


class TheirSteps:
    """A step of CrossEncoderTrainer without the trainer.

    Args:
        precision: bf16 runs the forward pass and the loss under autocast, as the trainer does with `bf16=True`.
    """

    def __init__(self, model: CrossEncoder, loss: nn.Module, precision: Precision, batches: Batches) -> None:
        self.model, self.loss, self.batches = model, loss, batches
        disable_dropout(model)
        model.train()
        self.optimizer = build_optimizer(model, OPTIM)
        self.autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=precision is Precision.bf16)
        self.real = self.computed = 0
        model.register_forward_pre_hook(self._count)

    def __call__(self, round_number: int) -> StepResults:
        """Run the steps of a round."""
        self.real = self.computed = 0
        losses = tuple(self._step(batch) for batch in self.batches(round_number))
        return StepResults(losses, self.real, self.computed)

    def _count(self, _model: nn.Module, inputs: tuple[Any, ...]) -> None:
        mask = inputs[0]["attention_mask"]
        self.real, self.computed = self.real + int(mask.sum()), self.computed + mask.numel()

    def _step(self, batch: GlobalBatch) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.loss(*_columns(batch.rows, lists=isinstance(self.loss, ListNetLoss)))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.max_grad_norm or 0.0)
        self.optimizer.step()
        return float(loss)


def _columns(rows: Sequence[Example], *, lists: bool) -> tuple[list[Any], Any]:
    """The columns of their trainer: queries and lists of documents, or pairs; a positive has the label 1."""
    labels = [torch.tensor([1.0, *[0.0] * (len(row.documents.texts) - 1)]) for row in rows]
    if lists:
        return [[row.query for row in rows], [list(row.documents.texts) for row in rows]], labels
    queries = [row.query for row in rows for _ in row.documents.texts]
    return [queries, [text for row in rows for text in row.documents.texts]], torch.cat(labels)


class OurScores:
    """Scores of all pairs."""

    def __init__(self, model: LoadedModel, world: World, pairs: Sequence[Pair]) -> None:
        self.scorer = PairScorer.from_model(model, world, chunk_tokens=EvaluationConfig().chunk_tokens)
        self.pairs, self.tokens = pairs, sum(map(len, model.tokenizer.ids(pairs)))

    def __call__(self, _round_number: int) -> Tensor:
        """Float32 [n]."""
        return self.scorer.score([pair.query for pair in self.pairs], [pair.document for pair in self.pairs])


class TheirScores:
    """The same with `CrossEncoder.predict`, with weights in `precision`."""

    def __init__(self, folder: str, max_length: int, world: World, precision: Precision, pairs: Sequence[Pair]) -> None:
        dtype = {"dtype": DTYPES[precision]}
        self.model = CrossEncoder(folder, device=str(world.device), max_length=max_length, model_kwargs=dtype)
        self.pairs = [(pair.query, pair.document) for pair in pairs]

    def __call__(self, _round_number: int) -> Tensor:
        """Float32 [n], before the sigmoid."""
        options: dict[str, Any] = {"activation_fn": nn.Identity(), "convert_to_tensor": True}
        scores: Tensor = self.model.predict(self.pairs, show_progress_bar=False, **options)
        return scores.float()


def measure(workloads: Sequence[Workload] = WORKLOADS, num_queries: int = QUERIES) -> str:
    with joined_world() as world, saved_reranker() as folder:
        cases = [(workload, LOSSES[0]) for workload in workloads] + [(workloads[-1], loss) for loss in LOSSES[1:]]
        rows = [row for workload, compared in cases for row in _steps(world, folder, workload, compared)]
        scored = [row for workload in workloads for row in _scores(world, folder, workload, num_queries)]
    per_s = f"real tokens / {unit()}"
    header = ["texts", "ours", "theirs", f"ours, {per_s}", f"theirs, {per_s}", "ratio"]
    padding = ["computed / real tokens, ours", "computed / real tokens, theirs"]
    training = markdown([*header, "loss difference", *padding, *LIMIT_HEADER], rows)
    return f"{training}\n\n{markdown([*header, 'score difference', *LIMIT_HEADER], scored)}"


@contextmanager
def saved_reranker() -> Iterator[str]:
    """A directory of all-MiniLM-L6-v2 with a new head."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_pretrained(MINILM, num_labels=1).save_pretrained(folder)
        AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
        yield folder


def load_reranker(folder: str, precision: Precision, world: World, max_length: int) -> LoadedModel:
    config = CrossEncoderOptions(path=folder, max_length=max_length)
    return load_model(config, ParallelConfig(precision=precision), world, seed=0)


def _steps(world: World, folder: str, workload: Workload, compared: Compared) -> list[list[str]]:
    available = precisions()
    models = {name: load_reranker(folder, name, world, workload.max_length) for name in available}
    num_rows, steps = workload.num_pairs // DOCUMENTS, ROUNDS * workload.steps
    pairs = workload.pairs(steps * workload.num_pairs)
    rows = [
        {"query": group[0][0], "pos": [group[0][1]], "neg": [text for _, text in group[1:]]}
        for group in (pairs[start : start + DOCUMENTS] for start in range(0, len(pairs), DOCUMENTS))
    ]
    data = load_rows(rows, workload.max_length, num_rows, models[Precision.fp32].tokenizer)
    batches = Batches(data, workload.steps)
    runners: list[StepRunner] = [OurSteps(model, world, batches, compared.build()) for model in models.values()]
    for precision in available:
        model = CrossEncoder(folder, device=str(world.device), max_length=workload.max_length)
        runners.append(TheirSteps(model, compared.theirs(model), precision, batches))
    ours, theirs = _by_precision(measure_shares(*runners, size=lambda results: results.computed))
    rows_of_table = []
    for our, their in _available():
        label = f"reranking, {workload.name}, {compared.name}"
        sides = ours[our], theirs[their]
        cells = comparison_cells(label, *(side.rounds for side in sides), max(TOLERANCE[our], TOLERANCE[their]))
        names = [f"{workload.num_pairs} pairs, {workload.name}, {compared.name}", our.value, their.value]
        factors = [padding_factor(side.rounds) for side in sides]
        rows_of_table.append([*names, *cells, *factors, *limit_cells(*sides)])
    return rows_of_table


def _scores(world: World, folder: str, workload: Workload, num_queries: int) -> list[list[str]]:
    pairs = _candidates(workload, num_queries)
    models = {name: load_reranker(folder, name, world, workload.max_length) for name in precisions()}
    our_scores = [OurScores(model, world, pairs) for model in models.values()]
    their_scores = [TheirScores(folder, workload.max_length, world, precision, pairs) for precision in models]
    ours, theirs = _by_precision(measure_shares(*our_scores, *their_scores))
    rows, tokens = [], [our_scores[0].tokens] * ROUNDS
    for our, their in _available():
        both = zip(ours[our].rounds, theirs[their].rounds, strict=True)
        difference = max(float((a.value - b.value).abs().max()) for a, b in both)
        tolerance = max(SCORE_TOLERANCE[our], SCORE_TOLERANCE[their])
        require(difference <= tolerance, f"scores, {workload.name}: they differ by {difference}")
        sides = ours[our], theirs[their]
        speeds = [f"{speed(side.rounds, tokens):,.0f}" for side in sides]
        texts = f"{CANDIDATES} candidates of {num_queries} queries, {workload.name}"
        cells = [our.value, their.value, *speeds, ratio(*(side.rounds for side in sides)), f"{difference:.0e}"]
        rows.append([texts, *cells, *limit_cells(*sides)])
    return rows


def _candidates(workload: Workload, num_queries: int) -> list[Pair]:
    """Queries with the same number of candidates each, drawn from one corpus."""
    generator, corpus = np.random.default_rng(2), workload.pairs(POOL)
    chosen = [generator.choice(POOL, CANDIDATES, replace=False) for _ in range(num_queries)]
    return [Pair(corpus[number][0], corpus[index][1]) for number, of_query in enumerate(chosen) for index in of_query]


def _available() -> list[tuple[Precision, Precision]]:
    return [pair for pair in COMPARED if set(pair) <= set(precisions())]


def _by_precision(measured: list[Measured[Any]]) -> tuple[dict[Precision, Any], dict[Precision, Any]]:
    available = precisions()
    ours, theirs = measured[: len(available)], measured[len(available) :]
    return dict(zip(available, ours, strict=True)), dict(zip(available, theirs, strict=True))
