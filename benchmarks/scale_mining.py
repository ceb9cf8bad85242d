"""Mining of an increasing number of documents by the command: killed twice, resumed, and repeated by another index."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from transformers import AutoTokenizer, BertConfig, BertModel

from benchmarks.inputs import MINILM
from benchmarks.measure import markdown, require, rss_anon

ROWS, QUERY_BATCH = 1024, 512  # two blocks of rows


def once(path: Path, compute: Callable[[], Any]) -> Any:
    """The result in a file, which is computed by the first call."""
    if not path.is_file():
        result = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Stage:
    """A process that mines until it is killed or ends."""

    name: str
    seconds: float  # wall
    peak: float  # anonymous memory in MiB
    files: int  # of vectors at its end
    blocks: int  # of rows


def mining_table(folder: Path, sizes: Sequence[int]) -> str:
    """Mine among each number of documents; the directory keeps what is done."""
    rows = []
    for size in sizes:
        stages = [Stage(**stage) for stage in _mine_in_stages(folder, size)]
        for stage in stages:
            found = f"{stage.files:,} / {stage.blocks}" if stage.files else "-"
            rows.append([f"{size:,}", stage.name, f"{stage.seconds:,.0f}", f"{stage.peak:,.0f}", found])
    header = ["documents", "process", "wall s, all cores", "peak, MiB", "files of vectors / blocks of rows"]
    return markdown(header, rows)


def _mine_in_stages(folder: Path, size: int) -> list[dict[str, Any]]:
    """Mine, killed while it encodes and after the first block of rows; again from the same vectors by another index."""
    output, again, state = folder / f"mined-{size}", folder / f"mined-{size}-again", folder / "results"
    corpus, model, rows = folder / f"corpus-{size}.jsonl", folder / "model", folder / "rows.jsonl"
    once(state / f"inputs-{size}.json", lambda: _write_inputs(corpus, model, rows, size))
    command = [sys.executable, "-m", "embedtrain", "mine", f"model={model}", f"data=[{rows}]", f"corpus={corpus}"]
    command += ["relative_margin=null", f"query_batch_size={QUERY_BATCH}", "index.place=disk"]
    int8 = [*command, f"output_dir={output}", "index.scan_dtype=int8"]
    half = max(3, size // 90_000)
    run = partial(_run_until, output)
    stages = [
        once(
            state / f"mine-{size}-1.json",
            lambda: run(int8, "killed while encoding", lambda: _count(output)[0] >= half),
        ),
        once(
            state / f"mine-{size}-2.json",
            lambda: run(int8, "resumed, killed after the first block", lambda: _count(output)[1] >= 1),
        ),
    ]
    if not (state / f"mine-{size}-3.json").is_file():
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(output, again, copy_function=os.link)
        for block in (again / ".mining" / "blocks").iterdir():
            shutil.rmtree(block)
    stages.append(once(state / f"mine-{size}-3.json", lambda: run(int8, "resumed, finished", lambda: False)))
    fp32 = [*command, f"output_dir={again}"]
    stages.append(
        once(
            state / f"mine-{size}-4.json",
            lambda: _run_until(again, fp32, "from the same vectors, searched in fp32", lambda: False),
        )
    )
    require((output / "rows.jsonl").read_bytes() == (again / "rows.jsonl").read_bytes(), "scale: mined rows differ")
    return stages


def _run_until(output: Path, command: list[str], name: str, condition: Callable[[], bool]) -> dict[str, Any]:
    """Run a command and kill it once the condition holds."""
    start, peak, counts = time.perf_counter(), 0.0, (0, 0)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
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
