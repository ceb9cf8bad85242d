"""Evaluating on one and two ranks compared with sentence-transformers' evaluator: equal metrics, time, memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.evaluation import InformationRetrievalEvaluator

from benchmarks.inputs import MINILM, load_minilm, retrieval_set
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
# The metrics of both evaluators: our name and theirs.
COMMON_METRICS = {"ndcg@10": "cosine_ndcg@10", "mrr@10": "cosine_mrr@10", "recall@10": "cosine_recall@10"}


@dataclass(frozen=True, slots=True)
class Measured:
    """Evaluation in one process. `peak` is its peak memory in MiB, `extra` the part above that of the loaded model."""

    seconds: float
    cpu_seconds: float
    extra: float
    peak: float
    metrics: dict[str, float]


def measure() -> str:
    """Run each evaluation in new processes in every round, alternating which goes first."""
    evaluations: list[Callable[[], list[Measured]]] = [lambda: on_ranks(1, _theirs)]
    evaluations += [partial(lambda size: on_ranks(size, partial(_ours, size)), size) for size in SIZES]
    rounds: list[list[list[Measured]]] = [[] for _ in evaluations]
    for round_number in range(ROUNDS):
        for position in range(len(evaluations)):
            index = (position + round_number) % len(evaluations)
            rounds[index].append(evaluations[index]())
    theirs = rounds[0][0][0].metrics
    for name, results in zip(("theirs", *map(str, SIZES)), rounds, strict=True):
        for measured in (measured for ranks in results for measured in ranks):
            equal = all(abs(measured.metrics[metric] - theirs[metric]) < 1e-6 for metric in COMMON_METRICS)
            require(equal, f"evaluation: metrics of {name} are {measured.metrics}, theirs are {theirs}")
    names = ["InformationRetrievalEvaluator, 1 process", *(f"ours, {size} rank{'s' * (size > 1)}" for size in SIZES)]
    table = [_row(name, results, rounds) for name, results in zip(names, rounds, strict=True)]
    header = [
        "",
        "wall s",
        "times theirs",
        "times ours on 1 rank",
        "busiest rank, CPU s",
        "extra MiB per rank",
        "peak MiB per rank",
    ]
    return markdown([*header, *COMMON_METRICS], table)


def _row(name: str, results: list[list[Measured]], rounds: list[list[list[Measured]]]) -> list[object]:
    walls = [_wall(ranks) for ranks in results]
    cpu = statistics.median(max(rank.cpu_seconds for rank in ranks) for ranks in results)
    extra = max(rank.extra for ranks in results for rank in ranks)
    peak = max(rank.peak for ranks in results for rank in ranks)
    metrics = [f"{results[0][0].metrics[metric]:.6f}" for metric in COMMON_METRICS]
    times = [_times(walls, [_wall(ranks) for ranks in baseline]) for baseline in rounds[:2]]
    return [name, f"{statistics.median(walls):.2f}", *times, f"{cpu:.2f}", f"{extra:.0f}", f"{peak:.0f}", *metrics]


def _wall(ranks: list[Measured]) -> float:
    return max(rank.seconds for rank in ranks)


def _times(seconds: list[float], baseline: list[float]) -> str:
    ratios = sorted(b / a for a, b in zip(seconds, baseline, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _ours(size: int, rank: int, folder: Path) -> Measured:
    loaded = retrieval_set(QUERIES, DOCUMENTS)
    with world_of(size, rank, folder / "store", min_gpus=max(SIZES)) as world:
        model = load_minilm(world, Precision.fp32)
        encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)
        evaluator = Evaluator([loaded], encoder, world)
        encoder.encode_all(["a warm-up text"])
        world.barrier()
        return _measure(world.device, lambda: evaluator.evaluate()[loaded.data.name])


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
    model.encode(["a warm-up text"])
    measured = _measure(device, lambda: evaluator(model))
    return Measured(
        measured.seconds,
        measured.cpu_seconds,
        measured.extra,
        measured.peak,
        {our_name: measured.metrics[name] for our_name, name in COMMON_METRICS.items()},
    )


def _measure(device: torch.device, evaluate: Callable[[], dict[str, float]]) -> Measured:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) / 2**20
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    metrics = evaluate()
    if cuda:
        torch.cuda.synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if cuda else _resident("VmHWM")
    return Measured(seconds, cpu_seconds, peak - before, peak, metrics)


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
