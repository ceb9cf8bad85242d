"""Search and mining of an increasing number of documents: time, memory, equal results, and resuming after SIGKILL.

With SCALE=DIR, everything is kept in a directory, and the next call continues there.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from transformers import AutoTokenizer, BertConfig, BertModel

from benchmarks.inputs import MINILM
from benchmarks.measure import markdown, peak_rss_anon, require, rss_anon
from benchmarks.ranks import on_ranks, world_of
from embedtrain.config.evaluation import IndexConfig, ScanDtype, VectorPlacement
from embedtrain.inference.encoded_shard import EncodedShard
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.inference.vector_cache import VectorCache
from embedtrain.losses.encoded import Part

SIZES = tuple(int(size) for size in os.environ.get("DOCUMENTS", "100000,1000000,10000000").split(","))
DIMENSION, QUERIES, TOP_K = 128, 512, 100
_BLOCK = 1 << 15  # vectors of a file
_CENTRES = 1000
ROWS, QUERY_BATCH = 1024, 512  # of mining: two blocks of rows
TITLE = f"Search of {QUERIES} queries (k = {TOP_K}, {DIMENSION} dimensions) and mining, by the number of documents"
_SCANS = (None, ScanDtype.bf16, ScanDtype.int8)


def measure() -> str:
    with _directory() as folder:
        return f"{_search_table(folder)}\n\n{_mining_table(folder)}"


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    if kept := os.environ.get("SCALE"):
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
        yield Path(folder)


def _once(path: Path, compute: Callable[[], Any]) -> Any:
    """The result in a file, which is computed by the first call."""
    if not path.is_file():
        result = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


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
        cases = [(scan, 1) for scan in _SCANS] + [(ScanDtype.int8, ranks) for ranks in (2, 3) if size <= 1_000_000]
        for scan, ranks in cases:
            name = "fp32" if scan is None else scan.value
            path = folder / "results" / f"search-{size}-{name}-{ranks}.json"
            results = _once(path, partial(_search_all, vectors, size, scan, ranks))
            digests |= {result["digest"] for result in results}
            busiest = max(results, key=lambda result: result["peak"])
            of_copy = {None: 0, ScanDtype.bf16: 2 * DIMENSION, ScanDtype.int8: DIMENSION}[scan] * size / ranks / 2**20
            rows.append(
                [
                    f"{size:,}",
                    name,
                    ranks,
                    f"{busiest['before']:,.0f}",
                    f"{busiest['peak']:,.0f}",
                    f"{of_copy:,.0f}",
                    f"{max(result['add'] for result in results):.1f}",
                    f"{max(result['search'] for result in results):.1f}",
                    f"{QUERIES * size / ranks / max(result['search'] for result in results) / 1e6:,.0f}",
                ]
            )
        require(len(digests) == 1, f"scale: the results for {size:,} documents differ")
    header = ["documents", "read first", "ranks", "before, MiB", "peak of a rank, MiB", "of it the copy, MiB"]
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
                index.add(EncodedShard(part.values, torch.from_numpy(numbers)))
            added = time.process_time()
            ranking = index.search(queries, TOP_K)
            searched = time.process_time()
            scores = index.scores_of(queries, ranking.documents)
        require(scores.equal(ranking.scores), "scale: scores of pairs are not those of the search")
    content = ranking.scores.numpy().tobytes() + ranking.documents.numpy().tobytes()
    return Searched(added - start, searched - added, before, peak[0], hashlib.blake2b(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Stage:
    """A process that mines until it is killed or ends."""

    name: str
    seconds: float  # wall
    peak: float  # anonymous memory in MiB
    files: int  # of vectors at its end
    blocks: int  # of rows


def _mining_table(folder: Path) -> str:
    rows = []
    for size in SIZES:
        stages = [Stage(**stage) for stage in _mine_in_stages(folder, size)]
        for stage in stages:
            found = f"{stage.files:,} / {stage.blocks}" if stage.files else "-"
            rows.append([f"{size:,}", stage.name, f"{stage.seconds:,.0f}", f"{stage.peak:,.0f}", found])
    return markdown(["documents", "process", "wall s", "peak, MiB", "files of vectors / blocks of rows"], rows)


def _mine_in_stages(folder: Path, size: int) -> list[dict[str, Any]]:
    """Mine, killed while it encodes and after the first block of rows; again from the same vectors by another index."""
    output, again, state = folder / f"mined-{size}", folder / f"mined-{size}-again", folder / "results"
    corpus, model, rows = folder / f"corpus-{size}.jsonl", folder / "model", folder / "rows.jsonl"
    _once(state / f"inputs-{size}.json", lambda: _write_inputs(corpus, model, rows, size))
    command = [sys.executable, "-m", "embedtrain.mine", f"model={model}", f"data=[{rows}]", f"corpus={corpus}"]
    command += ["relative_margin=null", f"query_batch_size={QUERY_BATCH}", "index.place=disk"]
    int8 = [*command, f"output_dir={output}", "index.scan_dtype=int8"]
    half = max(3, size // 90_000)
    run = partial(_run_until, output)
    stages = [
        _once(
            state / f"mine-{size}-1.json",
            lambda: run(int8, "killed while encoding", lambda: _count(output)[0] >= half),
        ),
        _once(
            state / f"mine-{size}-2.json",
            lambda: run(int8, "resumed, killed after the first block", lambda: _count(output)[1] >= 1),
        ),
    ]
    if not (state / f"mine-{size}-3.json").is_file():
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(output, again, copy_function=os.link)
        for block in (again / ".mining" / "blocks").iterdir():
            shutil.rmtree(block)
    stages.append(_once(state / f"mine-{size}-3.json", lambda: run(int8, "resumed, finished", lambda: False)))
    fp32 = [*command, f"output_dir={again}"]
    stages.append(
        _once(
            state / f"mine-{size}-4.json",
            lambda: _run_until(again, fp32, "from the same vectors, searched in fp32", lambda: False),
        )
    )
    require((output / "rows.jsonl").read_bytes() == (again / "rows.jsonl").read_bytes(), "scale: mined rows differ")
    return stages


def _run_until(output: Path, command: list[str], name: str, condition: Callable[[], bool]) -> dict[str, Any]:
    """Run a command and kill it once the condition holds."""
    start, peak, counts = time.perf_counter(), 0.0, (0, 0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                peak = max(peak, rss_anon(process.pid))
            counts = max(counts, _count(output))
            if condition():
                process.kill()
                break
            time.sleep(0.05)
    expected = -9 if condition() else 0
    require(process.returncode == expected, f"scale: {name}: the command ended with {process.returncode}")
    return asdict(Stage(name, time.perf_counter() - start, peak, *counts))


def _count(output: Path) -> tuple[int, int]:
    """Files of vectors, and complete blocks of rows."""
    temporary = output / ".mining"
    blocks = [path for path in temporary.glob("blocks/*") if not path.name.endswith(".part")]
    return len(list(temporary.glob("vectors/*/*.safetensors"))), len(blocks)


def _write_inputs(corpus: Path, model: Path, rows: Path, size: int) -> int:
    """A small model with random weights, rows, and documents of three to five words; returns their number."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    if not model.is_dir():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=64,
        )
        with tempfile.TemporaryDirectory() as folder:
            BertModel(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            modules = [Transformer(folder, max_seq_length=32), Pooling(64), Normalize()]
            SentenceTransformer(modules=modules).save(str(model))
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    generator = random.Random(0)

    def text(length: int) -> str:
        return " ".join(generator.choices(words, k=length))

    rows.write_text("".join(f'{{"query": "{text(3)}", "pos": ["{text(4)}"]}}\n' for _ in range(ROWS)), encoding="utf-8")
    with corpus.open("w", encoding="utf-8") as file:
        for number in range(size):
            file.write(f'{{"_id": "d{number}", "text": "{text(3 + number % 3)}"}}\n')
    return size
