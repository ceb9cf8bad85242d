"""Search and mining of an increasing number of documents: time, memory, equal results, and resuming after SIGKILL.

With SCALE=DIR, everything is kept in a directory, and the next call continues there.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.inputs import MINILM, load_minilm
from benchmarks.measure import markdown, peak_rss_anon, require, rss_anon
from benchmarks.ranks import on_ranks, world_of
from benchmarks.scale_mining import mining_table, once
from benchmarks.workloads import descriptions
from embedtrain.config.evaluation import IndexConfig, ScanDtype, Unshard, VectorPlacement
from embedtrain.config.recipe import Precision, Strategy
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.formats.source import open_model_source
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.encoding_plan import PromptedTexts, plan_encoding
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.search_costs import LOCAL_BYTES, SearchWorkload, search_costs
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.losses.encoded import Part
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import build_encoder
from embedtrain.planning.memory import ClusterSpec
from embedtrain.planning.model_costs import model_spec

SIZES = tuple(int(size) for size in os.environ.get("DOCUMENTS", "100000,1000000,10000000").split(","))
DIMENSION, QUERIES, TOP_K = 128, 512, 100
_BLOCK = 1 << 15  # vectors of a file
_CENTRES = 1000
TITLE = f"Search of {QUERIES} queries (k = {TOP_K}, {DIMENSION} dimensions) and mining, by the number of documents"
_SCANS = (None, ScanDtype.bf16, ScanDtype.int8)


def measure() -> str:
    with _directory() as folder:
        return "\n\n".join([_search_table(folder), _planned_table(folder), mining_table(folder, SIZES)])


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    if kept := os.environ.get("SCALE"):
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class Searched:
    """A search on one rank: seconds of CPU, anonymous memory in MiB, and a digest of all scores and documents."""

    add: float
    search: float
    before: float
    peak: float
    digest: str


def _search_table(folder: Path) -> str:
    rows = []
    for size in SIZES:
        vectors = folder / f"vectors-{size}"
        digests = set()
        for scan, ranks in _cases(size):
            results = once(_result_of(folder, size, scan, ranks), partial(_search_all, vectors, size, scan, ranks))
            digests |= {result["digest"] for result in results}
            busiest = max(results, key=lambda result: result["peak"] - result["before"])
            rows.append(
                [
                    f"{size:,}",
                    _name(scan),
                    ranks,
                    f"{busiest['before']:,.0f}",
                    f"{busiest['peak']:,.0f}",
                    f"{_planned(size, scan, ranks, 1.0).memory_mib:,.0f}",
                    f"{max(result['add'] for result in results):.1f}",
                    f"{max(result['search'] for result in results):.1f}",
                    f"{QUERIES * size / ranks / max(result['search'] for result in results) / 1e6:,.0f}",
                ]
            )
        require(len(digests) == 1, f"scale: the results for {size:,} documents differ")
    header = ["documents", "read first", "ranks", "before, MiB", "peak of a rank, MiB", "planned growth, MiB"]
    return markdown([*header, "adding, CPU s", "searching, CPU s", "million scores / CPU s of a rank"], rows)


def _search_all(vectors: Path, size: int, scan: ScanDtype | None, ranks: int) -> list[dict[str, Any]]:
    on_ranks(1, partial(_write_vectors, vectors, size))
    return [asdict(result) for result in on_ranks(ranks, partial(_search, vectors, size, scan, ranks))]


def _random_vectors(count: int, seed: int) -> torch.Tensor:
    """Unit vectors around a thousand centres."""
    centres = torch.randn(_CENTRES, DIMENSION, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(_CENTRES, (count,), generator=generator)
    return F.normalize(centres[chosen] + torch.randn(count, DIMENSION, generator=generator), dim=1)


def _write_vectors(directory: Path, size: int, rank: int, folder: Path) -> None:
    """Write the files that an interrupted call has not written."""
    cache = VectorCache(directory, {})
    with world_of(1, rank, folder / "store", min_gpus=1_000) as world:
        written = {chunk for _, chunks in cache.list_files(world) for chunk in chunks}
        for number, start in enumerate(range(0, size, _BLOCK)):
            if number not in written:
                rows = np.arange(start, min(start + _BLOCK, size))
                cache.write(Part(_random_vectors(len(rows), 1 + number)), rows, [number], world)


def _search(directory: Path, size: int, scan: ScanDtype | None, ranks: int, rank: int, folder: Path) -> Searched:
    cache = VectorCache(directory, {})
    with world_of(ranks, rank, folder / "store", min_gpus=1_000) as world:
        files = cache.list_files(world)
        queries, before, start = _random_vectors(QUERIES, 0), rss_anon(), time.process_time()
        with peak_rss_anon() as peak:
            index = ShardedIndex(
                first_added_order(size), world, IndexConfig(scan_dtype=scan, place=VectorPlacement.disk)
            )
            for part, numbers in cache.read_local(files, world, mapped=True):
                index.add(EncodedShard(part, torch.from_numpy(numbers)))
            added = time.process_time()
            ranking = index.search(queries, TOP_K)
            searched = time.process_time()
            scores = index.scores_of(queries, ranking.documents)
        require(scores.equal(ranking.scores), "scale: scores of pairs are not those of the search")
    content = ranking.scores.numpy().tobytes() + ranking.documents.numpy().tobytes()
    return Searched(added - start, searched - added, before, peak[0], hashlib.blake2b(content).hexdigest())


def _cases(size: int) -> list[tuple[ScanDtype | None, int]]:
    return [(scan, 1) for scan in _SCANS] + [(ScanDtype.int8, ranks) for ranks in (2, 3) if size <= 1_000_000]


def _name(scan: ScanDtype | None) -> str:
    return "fp32" if scan is None else scan.value


def _result_of(folder: Path, size: int, scan: ScanDtype | None, ranks: int) -> Path:
    return folder / "results" / f"search-{size}-{_name(scan)}-{ranks}.json"


@dataclass(frozen=True, slots=True)
class _Planned:
    memory_mib: float  # by which a process grows
    seconds: float  # of a search


def _planned(size: int, scan: ScanDtype | None, ranks: int, flops: float) -> _Planned:
    """The plan of a search on CPU ranks that reach so many operations per second."""
    encoder = build_encoder(open_model_source(DenseOptions(path=MINILM)))
    model = model_spec(encoder, find_blocks(encoder), precision=Precision.fp32, tokens_per_text=8, gpu=False)
    work = SearchWorkload(
        documents=size,
        queries=QUERIES,
        top_k=TOP_K,
        tokens_per_text=8,
        tokens_per_query=8,
        chunk_tokens=16384,
        unshard=Unshard.layer,
        index=IndexConfig(scan_dtype=scan, place=VectorPlacement.disk),
        search_flops=flops,
        tokens_per_second=1e6,
    )
    cluster = ClusterSpec(ranks=ranks, per_node=ranks, memory=2**34, gpu=False)
    layout = ParallelLayout(Strategy.ddp, ranks, 1, "")
    costs = search_costs(replace(model, dimension=DIMENSION), layout, cluster, work)
    # Nothing is encoded here, so there is no plan of it.
    memory = costs.memory.host_index + costs.memory.buffers + LOCAL_BYTES * size / ranks
    return _Planned(memory / 2**20, costs.traffic.search_seconds)


def _planned_table(folder: Path) -> str:
    """The search by the rate of the smallest number of documents, and encoding by the rates of few texts."""
    rows: list[list[object]] = []
    for size in SIZES[1:]:
        for scan, ranks in _cases(size):
            first = json.loads(_result_of(folder, SIZES[0], scan, 1).read_text())[0]["search"]
            planned = _planned(size, scan, ranks, 2.0 * QUERIES * SIZES[0] * DIMENSION / first)
            measured = json.loads(_result_of(folder, size, scan, ranks).read_text())
            growth = max(result["peak"] - result["before"] for result in measured)
            seconds = max(result["search"] for result in measured)
            memory = f"{planned.memory_mib:,.0f} / {growth:,.0f}"
            title = f"searching {size:,} documents, {_name(scan)} read first"
            rows.append([title, ranks, memory, f"{planned.seconds:.1f} / {seconds:.1f}"])
    cases = ((100, 1), (400, 1), (400, 2))
    rates, *runs = once(folder / "results" / "encoding.json", lambda: [_encode(texts, ranks) for texts, ranks in cases])
    for run in runs:
        for name in ("tokenizing", "encoding"):
            seconds = run["tokens"] * rates[name] / rates["tokens"]
            title = f"{name} {run['texts']:,} texts, {run['tokens']:,} tokens of a rank"
            rows.append([title, run["ranks"], "-", f"{seconds:.2f} / {run[name]:.2f}"])
    return markdown(["", "ranks", "growth of a rank, MiB: planned / measured", "CPU s: planned / measured"], rows)


def _encode(num_texts: int, ranks: int) -> dict[str, Any]:
    results = on_ranks(ranks, partial(_encode_on_rank, num_texts, ranks))
    return {"texts": num_texts, "ranks": ranks, **max(results, key=lambda result: result["encoding"])}


def _encode_on_rank(num_texts: int, ranks: int, rank: int, folder: Path) -> dict[str, float]:
    texts = [description for _, description in descriptions()[: num_texts + 1]]
    with world_of(ranks, rank, folder / "store", min_gpus=1_000) as world:
        encoder = SentenceEncoder.from_model(load_minilm(world, Precision.fp32), world, chunk_tokens=4096)
        encoder.encode_all(texts[-1:])  # warms up
        start = time.process_time()
        plan = plan_encoding(PromptedTexts(texts[:-1]), encoder.tokenizer, None, 4096, world)
        tokenizing = time.process_time() - start
        shards = list(encoder.encode_blocks(texts[:-1]))  # plans a second time
        encoding = time.process_time() - start - 2 * tokenizing
    assert plan.tokenized is not None
    require(sum(len(shard.rows) for shard in shards) > 0, "scale: a rank encoded nothing")
    tokens = sum(int(plan.tokenized.lengths[plan.chunk(chunk)].sum()) for chunk in range(rank, len(plan), ranks))
    return {"tokens": tokens, "tokenizing": tokenizing, "encoding": encoding}
