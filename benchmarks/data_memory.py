"""Anonymous memory of a process that reads, tokenizes and batches data sets of increasing size."""

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.inputs import MINILM
from benchmarks.measure import markdown, peak_rss_anon, rss_anon
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import load_train_data
from embedtrain.inference.loading.load import quiet_libraries
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch

SIZES = tuple(int(size) for size in os.environ.get("ROWS", "100000,1000000,10000000").split(","))
BATCHES, BATCH = 200, 1024
TITLE = f"Anonymous memory (RssAnon) of one process, {BATCHES} batches of {BATCH:,} rows at random indices: peak MiB"
_PHASES = ("reading", "tokenizing", "batches")


@dataclass
class Measured:
    """Peak RssAnon in MiB and CPU seconds by phase; `before` is RssAnon before the first phase."""

    before: float
    peaks: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    cache_bytes: int = 0


def measure() -> str:
    rows = [_row(size) for size in SIZES]
    header = ["rows", "file, MB", "cache, MB", "before", *(f"{phase}, peak (CPU s)" for phase in _PHASES)]
    return markdown([*header, "rows read / CPU s", "tokens created / CPU s", "CPU ms per batch"], rows)


def _row(size: int) -> list[object]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, size)
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            measured = pool.submit(_run, file, Path(folder) / "cache").result()
        megabytes = file.stat().st_size / 1e6
    return [
        f"{size:,}",
        f"{megabytes:,.0f}",
        f"{measured.cache_bytes / 1e6:,.0f}",
        f"{measured.before:,.0f}",
        *(f"{measured.peaks[phase]:,.0f} ({measured.seconds[phase]:,.1f})" for phase in _PHASES),
        f"{size / measured.seconds['reading']:,.0f}",
        f"{measured.num_tokens / measured.seconds['tokenizing']:,.0f}",
        f"{1000 * measured.seconds['batches'] / BATCHES:.1f}",
    ]


def write_rows(path: Path, count: int) -> None:
    """Write rows with a query of 2 or 3 words and a positive of 3 to 6: 4 to 8 tokens per text, few duplicates."""
    vocabulary = AutoTokenizer.from_pretrained(MINILM).get_vocab()
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2)
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            query = " ".join(generator.choices(words, k=2 + number % 2))
            positive = " ".join(generator.choices(words, k=3 + number % 4))
            file.write(f'{{"query": "{query}", "pos": ["{positive}"]}}\n')


def _run(file: Path, directory: Path) -> Measured:
    quiet_libraries()
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(MINILM), 256)
    tokenizer.ids(["a text"])
    measured, cache = Measured(rss_anon()), Cache(directory=directory)
    with _measured(measured, "reading"):
        data = load_train_data([TrainSource(path=str(file))], seed=0, global_batch_size=BATCH, cache=cache)
    with _measured(measured, "tokenizing"):
        data.prepare(tokenizer, cache)
    generator = random.Random(1)
    with _measured(measured, "batches"):
        for _ in range(BATCHES):
            batch = data.batch(generator.randrange(data.plan.steps_per_epoch * 3))
            make_rank_batch(batch, 0, 1, tokenizer, ChunkOptions(16384, pass_overhead_tokens=2048))
    assert data.tokens is not None
    measured.num_tokens = sum(len(tokens.values) for tokens in data.tokens)
    measured.cache_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return measured


@contextmanager
def _measured(measured: Measured, phase: str) -> Iterator[None]:
    start = time.process_time()
    with peak_rss_anon() as peak:
        yield
    measured.seconds[phase], measured.peaks[phase] = time.process_time() - start, peak[0]
