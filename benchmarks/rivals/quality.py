"""nDCG@10 of the trained models at equal steps and at equal wall time, and the speed and memory of these trainings."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from tokenizers import Tokenizer

from benchmarks.measure import machine, markdown
from benchmarks.rivals.libraries import ACTIVE_WORDS, OURS, RERANKER, Library
from benchmarks.rivals.scripts.common import Training
from benchmarks.rivals.settings import PRECISIONS, Settings
from benchmarks.rivals.trainings import Comparison, Measured


def measure(settings: Settings) -> str:
    """The tables of all kinds."""
    return "\n\n".join(_of_kind(Comparison(settings, kind)) for kind in settings.kinds)


def _of_kind(comparison: Comparison) -> str:
    for seed, library in comparison.rounds():  # alternating, before anything is computed from them
        comparison.equal_steps(library, seed)
    for seed, library in comparison.rounds():
        comparison.equal_time(library, seed)
    shape, title = comparison.settings.shapes[comparison.kind], comparison.kind.replace("_", " ")
    seeds = comparison.settings.seeds
    of_library = {
        library: [comparison.equal_steps(library, seed) for seed in seeds] for library in comparison.libraries
    }
    in_time = {library: [comparison.equal_time(library, seed) for seed in seeds] for library in comparison.libraries}
    return f"""### {title}: nDCG@10 after {shape.steps} steps of {shape.global_batch} rows

{quality_table(comparison.before(), of_library)}

### {title}: nDCG@10 after {comparison.time_limit():.0f} s of wall time, from the command to the saved model

{quality_table(comparison.before(), in_time)}

### {title}: speed and memory of these trainings

{_speed(comparison, of_library)}"""


def quality_table(before: dict[str, float], trainings: dict[Library, list[Measured]]) -> str:
    """The metrics of each set `before` training and after it; trainings that failed are left out and counted."""
    sets = {name: "{:.0f}" if name == ACTIVE_WORDS else "{:.4f}" for name in before}
    lines: list[list[str]] = [["before training", "", "", *(sets[name].format(before[name]) for name in sets)]]
    for library, measured in trainings.items():
        finished = [each for each in measured if each.seen.finished]
        if not finished:
            lines.append([library.name, "-", "-", *["-"] * len(sets)])
            continue
        values = [_spread([each.metrics[name] for each in finished], form) for name, form in sets.items()]
        steps, seconds = finished[0].training.steps, mean(each.seen.seconds for each in finished)
        part = "" if len(finished) == len(measured) else f", {len(finished)} of {len(measured)} runs"
        lines.append([library.name + part, f"{steps}", f"{seconds:.0f} s", *values])
    return markdown(["library", "steps", "wall time", *sets], lines)


def _spread(values: Sequence[float], form: str) -> str:
    deviation = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + deviation


def _speed(comparison: Comparison, trainings: dict[Library, list[Measured]]) -> str:
    """Real tokens per wall second, in the precision that is faster for each library; ratios are seed by seed."""
    ours = {m.training.seed: m for library, of in trainings.items() for m in of if library.name == OURS}
    lines = []
    for library, measured in trainings.items():
        finished = [each for each in measured if each.seen.finished]
        if not finished:
            lines.append([library.name, *["-"] * 7])
            continue
        speeds = [tokens_per_step(each) / each.seen.step_seconds for each in finished]
        ratios = [
            each.seen.step_seconds / ours[each.training.seed].seen.step_seconds
            for each in finished
            if each.training.seed in ours
        ]
        lines.append(
            [
                library.name,
                finished[0].training.precision,
                f"{median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-",
                *(_short(comparison, library, name) for name in PRECISIONS),
                f"{max(each.seen.peak_mib for each in finished):,.0f}",
                f"{median(each.seen.steps[0] for each in finished):.0f} s",
            ]
        )
    header = ["library", "precision", "real tokens / s", "time of a step, times ours", "step in fp32", "step in bf16",
              "peak MiB per rank", "from the command to the first step"]  # fmt: skip
    return markdown(header, lines)


def _short(comparison: Comparison, library: Library, precision: str) -> str:
    seen = comparison.short(library, precision).seen
    return f"{seen.step_seconds:.2f} s" if seen.finished else "fails"


def summary(settings: Settings) -> dict[str, Any]:
    """What figures are drawn from: each training, the start models and the gradients, as they are stored."""
    runs, before, gradients = [], {}, []
    for kind in settings.kinds:
        comparison = Comparison(settings, kind)
        before[kind] = comparison.before()
        for mode, train in (("steps", comparison.equal_steps), ("time", comparison.equal_time)):
            for library in comparison.libraries:
                trained = [train(library, seed) for seed in settings.seeds]
                runs += [_as_json(kind, mode, measured) for measured in trained if measured.seen.finished]
        for library in comparison.installed:
            path = settings.output / "results" / f"gradients-{kind}-{library.name}.json"
            if path.is_file():
                value = list(json.loads(path.read_text()).values())[-1]
                gradients.append({"kind": kind, "library": library.name, "error": value and value["error"]})
    return {"machine": machine(), "before": before, "runs": runs, "gradients": gradients}


def _as_json(kind: str, mode: str, measured: Measured) -> dict[str, Any]:
    seen, training = measured.seen, measured.training
    return {
        "kind": kind,
        "library": measured.library.name,
        "mode": mode,
        "seed": training.seed,
        "precision": training.precision,
        "steps": training.steps,
        "seconds": round(seen.seconds, 1),
        "step_seconds": round(seen.step_seconds, 3),
        "first_step_seconds": round(seen.steps[0], 1),
        "tokens_per_step": round(tokens_per_step(measured)),
        "peak_mib": round(seen.peak_mib),
        "metrics": {name: round(value, 6) for name, value in measured.metrics.items()},
    }


def tokens_per_step(measured: Measured) -> float:
    """Mean number of real tokens of a step: of the texts of its rows, or of its pairs."""
    return measured.training.global_batch * _tokens_per_row(measured.training.data, measured.training)


@cache
def _tokens_per_row(data: str, training: Training) -> float:
    tokenizer = Tokenizer.from_file(str(Path(training.model) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    total = 0
    for row in rows:
        documents = [row["pos"][0], *row["neg"][: training.negatives]]
        query, *lengths = (len(each.ids) for each in tokenizer.encode_batch([row["query"], *documents]))
        if training.kind == RERANKER:
            limit = training.query_max_length + training.document_max_length
            total += sum(min(query + length - 1, limit) for length in lengths)
        else:
            total += min(query, training.query_max_length)
            total += sum(min(length, training.document_max_length) for length in lengths)
    return total / len(rows)
