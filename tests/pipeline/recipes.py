"""A small pipeline for tests: train, mine, train further, export."""

from pathlib import Path
from typing import Any

import yaml

from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline

STEPS, EVERY = 6, 2


def small_pipeline(inputs: Path, **changes: Any) -> dict[str, Any]:
    """The content of a recipe on the files of `tests.runs.write_run_inputs`; `changes` replace its keys."""
    rows = str(inputs / "train.jsonl")
    training = {
        "train": {"global_batch_size": 10, "chunk_tokens": 120, "log_every": 1, "steps": STEPS},
        "parallel": {"strategy": "fsdp", "precision": "fp32"},
        "optim": {"lr": 1e-3},
        "export": {"check": False},
        "tracking": {"report": False},
        "checkpoint": {"every": EVERY},
    }
    stages = {
        "weak": {"do": "train", "model": {"path": str(inputs / "model"), "pooling": "mean"}, "data": {"train": [rows]}}
        | training,
        "mined": {
            "do": "mine", "model": "${out:weak.model}", "data": [rows], "negatives": 2, "relative_margin": None,
            "query_batch_size": 8,
        },
        "tuned": {"do": "train", "init": {"from": "weak"}, "data": {"train": ["${out:mined.data}"]}} | training,
        "final": {"do": "export", "run": "${out:tuned.run}", "check": False},
    }  # fmt: skip
    evaluation = {"after": ["weak", "tuned"], "sets": [str(inputs / "dev")]}
    return {"name": "small", "kind": "pipeline", "stages": stages, "evaluation": evaluation} | changes


def compose(folder: Path, content: dict[str, Any], *arguments: str) -> Pipeline:
    """The pipeline of a recipe that is written into `folder`."""
    (folder / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "recipe" / "small.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content, sort_keys=False))
    output_dir = f"output_dir={folder / 'run'}"
    pipeline = compose_pipeline(["--config-dir", str(folder), "recipe=small", output_dir, *arguments])
    assert pipeline is not None
    return pipeline
