"""What metrics.jsonl tells of a run once it is over."""

from pathlib import Path
from typing import Any

from embedtrain.tracking.metrics import METRICS_FILE, read_metrics


def figures_at(run_dir: Path, step: int) -> dict[str, dict[str, float]]:
    """What was measured at `step`: evaluation set -> metric -> value; empty where nothing was."""
    return {
        str(row["set"]): {key: value for key, value in row.items() if key not in ("step", "set")}
        for row in _evaluations(run_dir)
        if row["step"] == step
    }


def before_and_after(run_dir: Path) -> list[str]:
    """One line per evaluation set that was measured more than once: its main figure then and now."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for row in _evaluations(run_dir):
        by_set.setdefault(row["set"], []).append(row)
    lines = []
    for name, rows in by_set.items():
        first, last = rows[0], rows[-1]
        metric = "ndcg@10" if "ndcg@10" in last else "spearman"
        if first["step"] != last["step"] and first.get(metric) is not None and last.get(metric) is not None:
            lines.append(
                f"{name}: {metric} {first[metric]:.4f} at step {first['step']}, "
                f"{last[metric]:.4f} at step {last['step']}"
            )
    return lines


def _evaluations(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / METRICS_FILE
    return [row for row in read_metrics(path) if "set" in row] if path.is_file() else []
