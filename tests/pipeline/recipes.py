"""Small pipelines for tests: train, mine, train further, export; and one with a stage of every kind."""

from pathlib import Path
from typing import Any

import yaml

from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.types import Pipeline

STEPS, EVERY = 6, 2


TRAINING = {
    "do": "train",
    "train": {"global_batch_size": 10, "chunk_tokens": 120, "log_every": 1, "steps": STEPS},
    "parallel": {"strategy": "fsdp", "precision": "fp32"},
    "optim": {"lr": 1e-3},
    "export": {"check": False},
    "tracking": {"report": False},
    "checkpoint": {"every": EVERY},
}


def small_pipeline(inputs: Path, **changes: Any) -> dict[str, Any]:
    """The content of a recipe on the files of `tests.runs.write_run_inputs`; `changes` replace its keys."""
    rows = str(inputs / "train.jsonl")
    stages = {
        "weak": TRAINING | {"model": {"path": str(inputs / "model"), "pooling": "mean"}, "data": {"train": [rows]}},
        "mined": {
            "do": "mine", "model": "${out:weak.model}", "data": [rows], "negatives": 2, "relative_margin": None,
            "query_batch_size": 8,
        },
        "tuned": TRAINING | {"init": {"from": "weak"}, "data": {"train": ["${out:mined.data}"]}},
        "final": {"do": "export", "run": "${out:tuned.run}", "check": False},
    }  # fmt: skip
    evaluation = {"after": ["weak", "tuned"], "sets": [str(inputs / "dev")]}
    return {"name": "small", "kind": "pipeline", "stages": stages, "evaluation": evaluation} | changes


def pipeline_of_all_kinds(inputs: Path) -> dict[str, Any]:
    """The content of a recipe with a stage of every kind; its final model depends on all but the evaluation."""
    mined = {"train": ["${out:mined.data}"]}
    distilled = {
        "name": "combined",
        "losses": [{"name": "infonce"}, {"name": "distill_similarities", "teacher": "${out:teacher.vectors}"}],
    }
    stages = {
        "parts": {"do": "split", "data": [str(inputs / "train.jsonl")], "dev": 4},
        "weak": TRAINING
        | {"model": {"path": str(inputs / "model"), "pooling": "mean"}, "data": {"train": ["${out:parts.data}"]}},
        "clean": {"do": "filter", "model": "${out:weak.model}", "data": ["${out:parts.data}"], "query_batch_size": 8},
        "mined": {
            "do": "mine", "model": "${out:weak.model}", "data": ["${out:clean.data}"], "negatives": 2,
            "relative_margin": None, "query_batch_size": 8,
        },
        "table": {"do": "static", "model": "${out:weak.model}", "pca_dims": 8, "check": False},
        "teacher": {"do": "vectors", "model": "${out:table.model}", "data": ["${out:mined.data}"], "rows_per_part": 16},
        "tuned": TRAINING | {"repeat": 2, "init": {"from": "weak"}, "data": mined, "loss": distilled},
        "merged": {"do": "merge", "models": "${out:tuned.each}", "check": False},
        "pruned": {"do": "prune", "model": "${out:merged.model}", "keep": 1, "check": False},
        "trimmed": {"do": "trim", "model": "${out:pruned.model}", "data": ["${out:mined.data}"], "check": False},
        "rotated": {"do": "calibrate", "model": "${out:trimmed.model}", "data": "${out:clean.data}"},
        "student": TRAINING | {"init": {"from": "rotated"}, "data": mined, "loss": distilled},
        "measured": {"do": "evaluate", "model": "${out:student.model}", "sets": ["${out:parts.dev}"]},
        "final": {"do": "export", "run": "${out:student.run}", "check": False},
    }  # fmt: skip
    return {"name": "small", "kind": "pipeline", "stages": stages}


def compose(folder: Path, content: dict[str, Any], *arguments: str) -> Pipeline:
    """The pipeline of a recipe that is written into `folder`."""
    (folder / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "recipe" / "small.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content, sort_keys=False))
    output_dir = f"output_dir={folder / 'run'}"
    pipeline = compose_pipeline(["--config-dir", str(folder), "recipe=small", output_dir, *arguments])
    assert pipeline is not None
    return pipeline
