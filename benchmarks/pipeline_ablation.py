"""What each stage of recipe=pipelines/quickstart contributes: nDCG@10 with and without it, over several seeds."""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import markdown
from embedtrain.config.hydra_files import folder

SEEDS = 3
RANKS = 2
# Nothing was chosen on the held-out sets: recipes/pipelines/quickstart.yaml measures them only.
SELECTION, HELD_OUT = ("dev-en", "dev-zh2en"), ("dev-en2zh", "dev-zh2zh")
TITLE = f"Stages of recipe=pipelines/quickstart: nDCG@10, mean and standard deviation of {SEEDS} seeds"
METRIC = "ndcg@10"
COMPRESSED = "128-binary-float-query-x4"


def _weighted(path: str) -> list[dict[str, Any]]:
    """The four training files with the weights that the recipe gives them."""
    return [{"path": path % index, "weight": 3 if index else 1} for index in range(4)]


# Further stages beside those of the recipe, by name: the stage that they copy, and what differs.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "unfiltered": ("strong", {"data": {"train": _weighted("${shared.rows[%d]}")}}),
    "without-mining": ("tuned", {"data": {"train": "${shared.clean}"}}),
    "without-teacher": ("tuned", {"loss": {"name": "infonce", "temperature": 0.07}}),
}
# Rows of the table: a label, the stage that is measured and the one that it is compared with.
ROWS = (
    ("after weak training", "weak", None),
    ("further training on filtered rows", "strong", "weak"),
    ("the same without filtering", "unfiltered", "strong"),
    ("one member: mined negatives and two teachers", "tuned-1", "strong"),
    ("the same without mined negatives", "without-mining", "tuned-1"),
    ("the same without teachers", "without-teacher", "tuned-1"),
    ("the best of three members on these sets", "best", None),
    ("merged: the mean of three members", "merged", "best"),
    ("128 bits, rescored from int8", "bytes", "merged"),
    ("a student with half of the layers", "student", "merged"),
)


def measure() -> str:
    """Run the pipeline with each seed; an interrupted measurement resumes if PIPELINE_ABLATION names its directory."""
    with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as temporary:
        root = Path(os.environ.get("PIPELINE_ABLATION", temporary))
        results = [_run(root / f"seed-{number}", number) for number in range(SEEDS)]
    return table(results)


def recipe_with_variants(number: int) -> dict[str, Any]:
    """The content of the recipe with the variants and the seeds of a repetition."""
    content = yaml.safe_load((folder("recipes") / "pipelines" / "quickstart.yaml").read_text(encoding="utf-8"))
    stages = content["stages"]
    for name, (original, changes) in VARIANTS.items():
        stages[name] = _without_members(stages[original]) | changes
    for stage in stages.values():
        if stage["do"] == "train":
            stage["seed"] = stage.get("seed", 42) + 1000 * number
    content["evaluation"]["after"] += VARIANTS
    if number:  # the second teacher is the same in all repetitions: it takes as long as weak training
        del stages["other"], stages["teacher"]["each"]["other"]
    return dict(content)


def _without_members(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stage.items() if key != "repeat"}


def _run(directory: Path, number: int) -> dict[str, dict[str, float]]:
    """nDCG@10 by stage and set."""
    (directory / "recipe").mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(recipe_with_variants(number), sort_keys=False)
    if number:
        shared = directory.with_name("seed-0") / "run" / "stages" / "teacher-other" / "vectors"
        content = content.replace("${out:teacher-other.vectors}", str(shared))
    (directory / "recipe" / "ablation.yaml").write_text(f"# @package _global_\n{content}", encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = ["-m", "embedtrain", "--config-dir", str(directory), "recipe=ablation", f"output_dir={directory / 'run'}"]
    with (directory / "log.txt").open("a", encoding="utf-8") as log:
        subprocess.run([*launcher, *command], check=True, stdout=log, stderr=subprocess.STDOUT)
    return metrics_of(json.loads((directory / "run" / "lineage.json").read_text(encoding="utf-8")))


def metrics_of(lineage: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """nDCG@10 by stage and set, with the best member, of each kind of sets, and the compressed vectors as stages."""
    measured = {
        stage["stage"].removesuffix("-evaluation"): {name: values[METRIC] for name, values in stage["metrics"].items()}
        for stage in lineage["stages"]
        if stage["do"] == "evaluate"
    }
    members = [values for name, values in measured.items() if name.startswith("tuned-")]
    measured["best"] = {}
    for sets in (SELECTION, HELD_OUT):
        best = max(members, key=functools.partial(_mean, sets=sets))
        measured["best"] |= {name: best[name] for name in sets}
    measured["bytes"] = {name: measured["bytes"][f"{name}@{COMPRESSED}"] for name in (*SELECTION, *HELD_OUT)}
    return measured


def _mean(values: Mapping[str, float], sets: Sequence[str]) -> float:
    return statistics.fmean(values[name] for name in sets)


def table(results: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """The table of all repetitions."""
    rows = []
    for label, stage, other in ROWS:
        cells = [_cell([_mean(result[stage], sets) for result in results]) for sets in (SELECTION, HELD_OUT)]
        differences = [
            "" if other is None else _cell([_mean(r[stage], sets) - _mean(r[other], sets) for r in results], "+")
            for sets in (SELECTION, HELD_OUT)
        ]
        ratios = [] if other is None else [_mean(r[stage], HELD_OUT) / _mean(r[other], HELD_OUT) for r in results]
        compared = next((label for label, name, _ in ROWS if name == other), "")
        rows.append([label, *cells, compared, *differences, f"{statistics.fmean(ratios):.1%}" if ratios else ""])
    names = [f"{kind}: {' and '.join(sets)}" for kind, sets in (("selection", SELECTION), ("held out", HELD_OUT))]
    return markdown(
        ["stage", *names, "compared with", "difference, selection", "difference, held out", "ratio, held out"], rows
    )


def _cell(values: Sequence[float], sign: str = "") -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.4f}{deviation}"
