"""Run directories as training writes them, with any number of steps and any names and texts."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from embedtrain.config.compose import to_plain
from embedtrain.config.recipe import Recipe
from embedtrain.report.sample import (
    AFTER,
    BEFORE,
    Pair,
    PairRelation,
    Role,
    Sample,
    SampleText,
    write_texts,
    write_vectors,
)

QUERIES = ["how to edit photos", "文本编辑器", "ضغط الملفات", "play 🎵 music 👩‍👩‍👧", "compress files"]
ANSWERS = ["an image editor", "一个小型的文本编辑器", "أداة لضغط الملفات", "🎧 a music player", "a compression tool"]


def make_run(
    folder: Path,
    *,
    name: str = "synthetic",
    steps: int = 40,
    every: int = 1,
    sets: Sequence[str] = ("dev-en", "dev-zh"),
    metrics: Sequence[str] = ("ndcg@10", "recall@10"),
    extra_metrics: Sequence[str] = (),
    sample: Sample | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A finished run; `changes` are groups of its recipe, such as `optim={"lr": 1.0}`."""
    generator = random.Random(seed)
    folder.mkdir(parents=True)
    recipe = to_plain(Recipe(name=name)) | {"versions": {"embedtrain": "0.1.0", "torch": "2.13.0", "world_size": 2}}
    for group, options in changes.items():
        recipe[group] = recipe[group] | options if isinstance(options, dict) else options
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        if step and step % every == 0:
            loss = 3 * math.exp(-step / steps * 3) + generator.random() * 0.3
            row = {
                "step": step,
                "loss": loss,
                "grad_norm": 5 + generator.random(),
                "lr": 2e-5 * (1 - step / (steps + 1)),
            }
            row |= {"accuracy": 1 - loss / 4, "samples_per_s": 900 + generator.random() * 50, "tokens_per_s": 52_000.0}
            row |= {"padding": 0.02, "data_wait": 0.001, "mfu": 0.41, "communication": 0.06, "memory_gib": 11.5}
            rows.append(row | {key: generator.random() for key in extra_metrics})
        if step % max(1, steps // 4) == 0:
            for number, set_name in enumerate(sets):
                rows.append(
                    {"step": step, "set": set_name}
                    | {m: 0.3 + 0.4 * step / max(1, steps) + number / 100 for m in metrics}
                )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if sample is not None:
        write_sample(folder, sample, steps)
    return folder


def write_sample(folder: Path, sample: Sample, step: int, dimension: int = 12) -> None:
    """Random vectors before training; after training positives are close to their queries."""
    generator = np.random.default_rng(0)
    before = generator.normal(size=(len(sample.texts), dimension)).astype(np.float32)
    after = before.copy()
    for pair in sample.pairs:
        if pair.relation is PairRelation.positive:
            after[pair.second] = after[pair.first] + 0.3 * generator.normal(size=dimension)
    write_texts(folder / "sample", sample)
    write_vectors(folder / "sample", BEFORE, before, 0)
    write_vectors(folder / "sample", AFTER, after, step)


def make_sample(queries: Sequence[str] = QUERIES, documents: Sequence[str] = ANSWERS, origin: str = "dev-en") -> Sample:
    """Query i is answered by document i; the same for training rows, with hard negatives."""
    texts: list[SampleText] = []
    pairs: list[Pair] = []
    for name, held_out in ((origin, True), ("train.jsonl", False)):
        first = len(texts)
        texts += [SampleText(text, Role.query, name, held_out) for text in queries]
        texts += [SampleText(text, Role.document, name, held_out) for text in documents]
        for number in range(len(queries)):
            pairs.append(Pair(first + number, first + len(queries) + number, PairRelation.positive))
            if not held_out:
                negative = first + len(queries) + (number + 1) % len(documents)
                pairs.append(Pair(first + number, negative, PairRelation.negative))
    return Sample(texts, pairs)
