"""Evaluating on one and on two ranks: the same figures, in less time."""

import statistics
import time
from pathlib import Path

import torch

from benchmarks.inputs import minilm, retrieval_set
from benchmarks.measure import ROUNDS, markdown, require
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.schema import Precision
from embedtrain.evaluation.encode import SentenceEncoder
from embedtrain.evaluation.evaluator import Evaluator

QUERIES, DOCUMENTS, SIZES = 50, 150, (1, 2)
CHUNK_TOKENS = EvaluationConfig().chunk_tokens
TITLE = f"Evaluating all-MiniLM-L6-v2 on {QUERIES} queries and {DOCUMENTS} documents of recipes/quickstart/dev-en"


def measure() -> str:
    ranks = on_ranks(max(SIZES), _evaluate)
    rows = []
    for size in SIZES:
        wall = statistics.median(seconds for seconds, _, _ in ranks[0][size])
        cpu = statistics.median(max(ranks[r][size][i][1] for r in range(size)) for i in range(ROUNDS))
        figures = [measured for r in range(size) for _, _, measured in ranks[r][size]]
        reference = ranks[0][SIZES[0]][0][2]
        require(all(measured == reference for measured in figures), f"evaluation: figures differ on {size} ranks")
        rows.append([size, f"{wall:.2f}", f"{cpu:.2f}", f"{figures[0]['ndcg@10']:.6f}", f"{figures[0]['mrr@10']:.6f}"])
    return markdown(["ranks", "wall s", "CPU s of the busiest rank", "nDCG@10", "MRR@10"], rows)


def _evaluate(rank: int, folder: Path) -> dict[int, list[tuple[float, float, dict[str, float]]]]:
    """By number of ranks and round: wall seconds, this rank's CPU seconds, figures."""
    loaded = retrieval_set(QUERIES, DOCUMENTS)
    results: dict[int, list[tuple[float, float, dict[str, float]]]] = {size: [] for size in SIZES}
    for number in range(ROUNDS):
        for size in SIZES:
            if rank >= size:
                continue  # and wait for the others where the next, larger group is made
            with world_of(size, rank, folder / f"{number}-{size}", most=max(SIZES)) as world:
                model = minilm(world, Precision.fp32)
                encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=CHUNK_TOKENS)
                evaluator = Evaluator([loaded], encoder, world)
                world.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                figures = evaluator.evaluate()[loaded.data.name]
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                results[size].append((time.perf_counter() - wall, time.process_time() - cpu, figures))
    return results
