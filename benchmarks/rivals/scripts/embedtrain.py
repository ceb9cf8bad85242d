"""`embedtrain train` for every kind; options that a training leaves open keep their defaults."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import Training, read_training

KIND = {
    "dense": [],
    "reranker": ["model.kind=cross_encoder", "loss=softmax"],
    "late_interaction": ["model.kind=late_interaction"],
    "sparse": ["model.kind=sparse"],
}
POLL = 0.01  # seconds


def command(training: Training) -> list[str]:
    """The command line; a run that resumes has the same one."""
    source = {"path": training.data, "negatives": training.negatives}
    lengths = {"query_max_length": training.query_max_length, "document_max_length": training.document_max_length}
    chosen = {
        "optim.lr": training.lr,
        "optim.warmup": training.warmup,
        "optim.weight_decay": training.weight_decay,
        "loss.temperature": None if training.kind == "reranker" else training.temperature,
    }
    if training.kind == "reranker":  # a limit of the pair
        lengths, chosen["model.max_length"] = {}, training.query_max_length + training.document_max_length
    options = {
        "name": "rival",
        "output_dir": training.output,
        "data.cache_dir": str(Path(training.output).parent / "cache"),  # of this training alone, as that of the others
        "model.path": training.model,
        "data.train": json.dumps([source | lengths]).replace('"', ""),
        "train.steps": training.steps,
        "train.global_batch_size": training.global_batch,
        "train.log_every": 1,
        "seed": training.seed,
        "parallel.precision": training.precision,
        "checkpoint.every": training.save_every,
        "checkpoint.every_minutes": 0,  # the other libraries save by steps only
        "optim.max_grad_norm": training.max_grad_norm or "null",
        **{name: value for name, value in chosen.items() if value is not None},
    }
    launcher = [str(Path(sys.executable).parent / "embedtrain"), "train", "--nproc-per-node", str(training.ranks)]
    return [*launcher, *KIND[training.kind], *(f"{name}={value}" for name, value in options.items())]


def _lines(metrics: Path) -> list[bytes]:
    """Complete lines."""
    content = metrics.read_bytes() if metrics.is_file() else b""
    return content.split(b"\n")[:-1]


def main(training: Training) -> int:
    """Run the command, and report the steps that appear in its metrics."""
    metrics = Path(training.output) / "metrics.jsonl"
    # A run that resumes takes back the rows after its checkpoint, so that the file becomes shorter.
    seen = set(_lines(metrics))
    process = subprocess.Popen(command(training))
    running = True
    while running:
        running = process.poll() is None
        for line in _lines(metrics):
            if line not in seen:
                seen.add(line)
                row = json.loads(line)
                if "loss" in row:
                    training.report("step", row["step"])
        time.sleep(POLL)
    if process.returncode == 0:
        training.report("end", training.steps)
    return process.returncode


if __name__ == "__main__":
    os.environ.pop("RANK", None)
    sys.exit(main(read_training()))
