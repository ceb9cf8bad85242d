"""Evaluating on one and on two ranks beside sentence-transformers' evaluator: the same figures, time, memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.evaluation import InformationRetrievalEvaluator

from benchmarks.inputs import MINILM, minilm, retrieval_set
from benchmarks.measure import ROUNDS, markdown, require
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.recipe import Precision
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.types import RetrievalSet
from embedtrain.inference.encode import SentenceEncoder

QUERIES, DOCUMENTS, SIZES = 100, 800, (1, 2)
CHUNK_TOKENS = EvaluationConfig().chunk_tokens
TITLE = (
    f"Evaluating all-MiniLM-L6-v2 on {QUERIES} queries and {DOCUMENTS} documents of recipes/quickstart/dev-en, "
    f"against InformationRetrievalEvaluator"
)
# The figures that both have, by our name and by theirs.
SAME = {"ndcg@10": "cosine_ndcg@10", "mrr@10": "cosine_mrr@10", "recall@10": "cosine_recall@10"}


@dataclass(frozen=True, slots=True)
class Measured:
    """One process's evaluation. `extra` and `peak` are MiB: over what was there with the model loaded, and in all."""

    seconds: float
    cpu_seconds: float
    extra: float
    peak: float
    figures: dict[str, float]


def measure() -> str:
    """Every round each side in fresh processes, who goes first in turns; round 0 warms the disk's cache up."""
    sides: list[Callable[[], list[Measured]]] = [lambda: on_ranks(1, _theirs)]
    sides += [partial(lambda size: on_ranks(size, partial(_ours, size)), size) for size in SIZES]
    rounds: list[list[list[Measured]]] = [[] for _ in sides]
    for number in range(ROUNDS):
        for turn in range(len(sides)):
            place = (turn + number) % len(sides)
            rounds[place].append(sides[place]())
    theirs = rounds[0][0][0].figures
    for name, side in zip(("theirs", *map(str, SIZES)), rounds, strict=True):
        for one in (one for ranks in side for one in ranks):
            near = all(abs(one.figures[metric] - theirs[metric]) < 1e-6 for metric in SAME)
            require(near, f"evaluation: figures of {name} are {one.figures}, theirs are {theirs}")
    names = ["InformationRetrievalEvaluator, 1 process", *(f"ours, {size} rank{'s' * (size > 1)}" for size in SIZES)]
    table = [_row(name, side, rounds) for name, side in zip(names, rounds, strict=True)]
    header = [
        "",
        "wall s",
        "times theirs",
        "times ours on 1",
        "busiest rank, CPU s",
        "extra MiB a rank",
        "peak MiB a rank",
    ]
    return markdown([*header, *SAME], table)


def _row(name: str, side: list[list[Measured]], rounds: list[list[list[Measured]]]) -> list[object]:
    walls = [_wall(ranks) for ranks in side]
    cpu = statistics.median(max(one.cpu_seconds for one in ranks) for ranks in side)
    extra = max(one.extra for ranks in side for one in ranks)
    peak = max(one.peak for ranks in side for one in ranks)
    figures = [f"{side[0][0].figures[metric]:.6f}" for metric in SAME]
    times = [_times(walls, [_wall(ranks) for ranks in other]) for other in rounds[:2]]
    return [name, f"{statistics.median(walls):.2f}", *times, f"{cpu:.2f}", f"{extra:.0f}", f"{peak:.0f}", *figures]


def _wall(ranks: list[Measured]) -> float:
    return max(one.seconds for one in ranks)


def _times(ours: list[float], others: list[float]) -> str:
    ratios = sorted(b / a for a, b in zip(ours, others, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _ours(size: int, rank: int, folder: Path) -> Measured:
    loaded = retrieval_set(QUERIES, DOCUMENTS)
    with world_of(size, rank, folder / "store", most=max(SIZES)) as world:
        model = minilm(world, Precision.fp32)
        encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)
        evaluator = Evaluator([loaded], encoder, world)
        encoder.encode_all(["the first pass makes what later ones use"])
        world.barrier()
        return _measured(world.device, lambda: evaluator.evaluate()[loaded.data.name])


def _theirs(_rank: int, _folder: Path) -> Measured:
    data = retrieval_set(QUERIES, DOCUMENTS).data
    assert isinstance(data, RetrievalSet)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = SentenceTransformer(MINILM, device=str(device))
    evaluator = InformationRetrievalEvaluator(
        {query: data.queries[query] for query in data.judged_queries},
        dict(zip(data.documents.ids, data.documents.texts, strict=True)),
        {query: {d for d, gain in gains.items() if gain > 0} for query, gains in data.judgements.items()},
        ndcg_at_k=[10], mrr_at_k=[10], map_at_k=[100], accuracy_at_k=[10], precision_recall_at_k=[10, 100],
        main_score_function="cosine", write_csv=False,
    )  # fmt: skip
    model.encode(["the first pass makes what later ones use"])
    found = _measured(device, lambda: evaluator(model))
    return Measured(
        found.seconds,
        found.cpu_seconds,
        found.extra,
        found.peak,
        {ours: found.figures[name] for ours, name in SAME.items()},
    )


def _measured(device: torch.device, evaluate: Callable[[], dict[str, float]]) -> Measured:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) / 2**20
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    figures = evaluate()
    if cuda:
        torch.cuda.synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if cuda else _resident("VmHWM")
    return Measured(seconds, cpu_seconds, peak - before, peak, figures)


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
