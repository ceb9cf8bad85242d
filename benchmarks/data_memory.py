"""Anonymous memory of a process that reads, tokenises and draws batches of more and more rows."""

import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.inputs import MINILM
from benchmarks.measure import markdown
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import load_train_data
from embedtrain.loading.load import quiet_libraries
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch

SIZES = tuple(int(size) for size in os.environ.get("ROWS", "100000,1000000,10000000").split(","))
BATCHES, BATCH = 200, 1024
TITLE = f"Anonymous memory (RssAnon) of one process, {BATCHES} batches of {BATCH:,} rows at random places: peak MiB"
_PHASES = ("reading", "tokenising", "batches")


@dataclass
class Measured:
    """Peaks of RssAnon in MiB and CPU seconds by phase, beside what was resident before."""

    before: float
    peaks: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    cache_bytes: int = 0


def measure() -> str:
    rows = [_row(size) for size in SIZES]
    header = ["rows", "file, MB", "cache, MB", "before", *(f"{phase}, peak (CPU s)" for phase in _PHASES)]
    return markdown([*header, "rows read / CPU s", "tokens made / CPU s", "CPU ms a batch"], rows)


def _row(size: int) -> list[object]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, size)
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found = pool.submit(_run, file, Path(folder) / "cache").result()
        megabytes = file.stat().st_size / 1e6
    return [
        f"{size:,}",
        f"{megabytes:,.0f}",
        f"{found.cache_bytes / 1e6:,.0f}",
        f"{found.before:,.0f}",
        *(f"{found.peaks[phase]:,.0f} ({found.seconds[phase]:,.1f})" for phase in _PHASES),
        f"{size / found.seconds['reading']:,.0f}",
        f"{found.num_tokens / found.seconds['tokenising']:,.0f}",
        f"{1000 * found.seconds['batches'] / BATCHES:.1f}",
    ]


def write_rows(path: Path, count: int) -> None:
    """Rows of a query of 2 or 3 words and a positive of 3 to 6: 4 to 8 tokens a text, hardly any twice."""
    vocabulary = AutoTokenizer.from_pretrained(MINILM).get_vocab()
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2)
    chosen = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            query = " ".join(chosen.choices(words, k=2 + number % 2))
            positive = " ".join(chosen.choices(words, k=3 + number % 4))
            file.write(f'{{"query": "{query}", "pos": ["{positive}"]}}\n')


def _run(file: Path, directory: Path) -> Measured:
    quiet_libraries()
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(MINILM), 256)
    tokenizer.ids(["a text"])
    found, cache = Measured(_rss_anon()), Cache(directory=directory)
    with _watched(found, "reading"):
        data = load_train_data([TrainSource(path=str(file))], seed=0, global_batch_size=BATCH, cache=cache)
    with _watched(found, "tokenising"):
        data.prepare(tokenizer, cache)
    places = random.Random(1)
    with _watched(found, "batches"):
        for _ in range(BATCHES):
            batch = data.batch(places.randrange(data.plan.steps_per_epoch * 3))
            make_rank_batch(batch, 0, 1, tokenizer, ChunkOptions(16384, pass_overhead_tokens=2048))
    assert data.tokens is not None
    found.num_tokens = sum(len(tokens.values) for tokens in data.tokens)
    found.cache_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return found


@contextmanager
def _watched(found: Measured, phase: str) -> Iterator[None]:
    """Look at the memory a hundred times a second while the block runs."""
    peak, over = [_rss_anon()], threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            peak[0] = max(peak[0], _rss_anon())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    began = time.process_time()
    yield
    found.seconds[phase] = time.process_time() - began
    over.set()
    watcher.join()
    found.peaks[phase] = max(peak[0], _rss_anon())


def _rss_anon() -> float:
    """MiB of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise OSError("this kernel does not tell RssAnon")
