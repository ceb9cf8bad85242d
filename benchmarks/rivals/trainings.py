"""The trainings of a comparison: their settings, the order they run in, and what is stored of each."""

import dataclasses
import gzip
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rivals import docstrings
from benchmarks.rivals.launch import ENVIRONMENT, Observation, load_or, observe
from benchmarks.rivals.libraries import Library, libraries_of
from benchmarks.rivals.scripts.common import Training
from benchmarks.rivals.settings import PRECISIONS, Settings

ROOT = Path(__file__).parents[2]
PRECISION_STEPS = 6  # of the trainings that choose the precision


@dataclass(frozen=True, slots=True)
class Measured:
    """A training, what was observed of it, and nDCG@10 by evaluation set."""

    library: Library
    training: Training
    seen: Observation
    metrics: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """The trainings of one kind of model by all libraries that train it and are installed."""

    settings: Settings
    kind: str

    @property
    def installed(self) -> list[Library]:
        """Ours first."""
        chosen = [library for library in libraries_of(self.kind) if library.name in self.settings.libraries]
        return [library for library in chosen if library.installed]

    @property
    def libraries(self) -> list[Library]:
        """Those whose quality is compared, ours first."""
        return [library for library in self.installed if library.trains_alike]

    @cached_property
    def model(self) -> Path:
        """The directory that every training of this kind starts from."""
        folder = self.settings.output / "start"
        if not (folder / "done").is_file():
            arguments = [str(folder), *([self.settings.model] if self.settings.model else [])]
            run_module("benchmarks.rivals.start_models", "models", *arguments)
            (folder / "done").touch()
        return folder / self.kind

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The training rows, with mined negatives where the shape asks for them."""
        shape = self.settings.shapes[self.kind]
        if not shape.negatives:
            return read_rows(self.settings.train)
        path = self.settings.output / "mined.jsonl"
        if not path.is_file():
            run_module("benchmarks.rivals.start_models", "negatives", str(self.settings.train), str(path))
        return [row for row in read_rows(path) if len(row["neg"]) >= shape.negatives]

    @property
    def sets(self) -> dict[str, Path]:
        """The evaluation sets by name."""
        folder = self.settings.output / "library-docs"
        if not folder.is_dir():
            docstrings.write_set(folder)
        return {path.name: path for path in (*self.settings.in_domain, folder, *self.settings.out_of_domain)}

    def training(
        self,
        library: Library,
        name: str,
        *,
        seed: int,
        rows: int | None = None,
        distinct: bool = False,
        **changes: Any,
    ) -> Training:
        """The settings of a training: the shape of this kind, with changes; of so many rows, drawn by the seed.

        `distinct`: no text occurs twice, so that no library leaves a row out of a batch.
        """
        shape, folder = self.settings.shapes[self.kind], self.folder(library, name)
        suffix = "-distinct" if distinct else ""
        data = self.settings.output / "data" / f"{self.kind}-{seed}-{rows}{suffix}.jsonl"
        if not data.is_file():
            data.parent.mkdir(parents=True, exist_ok=True)
            drawn = draw(self.rows, rows or len(self.rows), seed, shape.negatives, distinct=distinct)
            data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in drawn), encoding="utf-8")
        fields = dataclasses.asdict(shape) | {
            "kind": self.kind,
            "model": str(self.model),
            "data": str(data),
            "output": str(folder / "run"),
            "events": str(folder / "events.jsonl"),
            "ranks": self.settings.ranks,
            "seed": seed,
            "precision": PRECISIONS[0],
            "max_grad_norm": 1.0,
            "save_every": 0,
            "resume": False,
        }
        return Training(**(fields | changes))

    def folder(self, library: Library, name: str) -> Path:
        """Where a training works."""
        return self.settings.output / "work" / f"{self.kind}-{library.name}-{name}"

    def measured(self, library: Library, name: str, training: Callable[[], Training], *, evaluated: bool) -> Measured:
        """A training and the metrics of its model, measured once."""

        def measure() -> dict[str, Any]:
            folder = self.folder(library, name)
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{self.kind} {library.name} {name} ...", flush=True)
            planned = training()
            seen = observe(library, planned, folder)
            metrics = self.metrics(planned.trained) if evaluated and seen.finished else {}
            shutil.rmtree(folder / "run", ignore_errors=True)
            return {"training": dataclasses.asdict(planned), "seen": dataclasses.asdict(seen), "metrics": metrics}

        stored = load_or(self.settings.output / "results" / f"{self.kind}-{library.name}-{name}.json", measure)
        return Measured(library, Training(**stored["training"]), Observation(**stored["seen"]), stored["metrics"])

    def rounds(self) -> Iterator[tuple[int, Library]]:
        """Seeds and libraries in the order of the trainings: another library goes first with every seed."""
        for round_number, seed in enumerate(self.settings.seeds):
            start = round_number % len(self.libraries)
            for library in self.libraries[start:] + self.libraries[:start]:
                yield seed, library

    def precision(self, library: Library) -> str:
        """The precision in which its steps are faster here."""
        steps = {name: self.short(library, name).seen for name in PRECISIONS}
        finished = [name for name, seen in steps.items() if seen.finished]
        return min(finished, key=lambda name: steps[name].step_seconds, default=PRECISIONS[0])

    def short(self, library: Library, precision: str) -> Measured:
        """A training of a few steps."""
        steps, seed = PRECISION_STEPS, self.settings.seeds[0]
        rows = steps * self.settings.shapes[self.kind].global_batch

        def training() -> Training:
            name = f"short-{precision}"
            return self.training(library, name, seed=seed, rows=rows, steps=steps, precision=precision)

        return self.measured(library, f"short-{precision}", training, evaluated=False)

    def equal_steps(self, library: Library, seed: int) -> Measured:
        """The steps of the shape, on exactly as many rows as they need."""
        shape, name = self.settings.shapes[self.kind], f"steps-{seed}"

        def training() -> Training:
            rows, precision = shape.steps * shape.global_batch, self.precision(library)
            return self.training(library, name, seed=seed, rows=rows, precision=precision)

        return self.measured(library, name, training, evaluated=True)

    def equal_time(self, library: Library, seed: int) -> Measured:
        """As many steps as the slowest library's wall time of the equal steps allows, from start-up to saved model."""
        usual = self._usual(library)
        more = int((self.time_limit() - usual.seconds) / usual.step_seconds)
        if not more:
            return self.equal_steps(library, seed)
        steps, name = self.settings.shapes[self.kind].steps + more, f"time-{seed}"
        return self.measured(
            library,
            name,
            lambda: self.training(library, name, seed=seed, steps=steps, precision=self.precision(library)),
            evaluated=True,
        )

    def before(self, name: str = "before", model: Path | None = None) -> dict[str, float]:
        """nDCG@10 of a model before training, the start model unless another is given."""
        path = self.settings.output / "results" / f"{self.kind}-{name}.json"
        return load_or(path, lambda: self.metrics(str(model or self.model)))

    def metrics(self, model: str) -> dict[str, float]:
        """nDCG@10 of a directory of a model on each set."""
        evaluator = self._evaluator
        assert evaluator.stdin is not None
        assert evaluator.stdout is not None
        evaluator.stdin.write(model + "\n")
        evaluator.stdin.flush()
        if not (line := evaluator.stdout.readline()):
            sys.exit(f"{model} could not be evaluated: its error is above")
        values: dict[str, float] = json.loads(line)
        return values

    @cached_property
    def _evaluator(self) -> subprocess.Popen[str]:
        """A process that evaluates all models of this kind, so that it imports its libraries and reads the sets once.

        It ends with the end of its input, which is that of this process.
        """
        shape = self.settings.shapes[self.kind]
        lengths = str(shape.query_max_length), str(shape.document_max_length)
        command = [
            sys.executable,
            "-m",
            "benchmarks.rivals.evaluate",
            self.kind,
            *lengths,
            *map(str, self.sets.values()),
        ]
        return subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time_limit(self) -> float:
        """Wall seconds of the slowest library at equal steps."""
        return max(self._usual(library).seconds for library in self.libraries)

    def _usual(self, library: Library) -> "_Usual":
        seen = [self.equal_steps(library, seed).seen for seed in self.settings.seeds]
        finished = [each for each in seen if each.finished]
        if not finished:
            return _Usual(0.0, math.inf)
        return _Usual(median(each.seconds for each in finished), median(each.step_seconds for each in finished))


@dataclass(frozen=True, slots=True)
class _Usual:
    """Medians over the seeds of a library's trainings at equal steps: of their wall time, and of the time of a step."""

    seconds: float
    step_seconds: float


def draw(
    rows: Sequence[dict[str, Any]], count: int, seed: int, negatives: int, *, distinct: bool = False
) -> list[dict[str, Any]]:
    """`count` rows with the first `negatives` negatives of each, of which a library then needs to draw none."""
    drawn: list[dict[str, Any]] = []
    seen: set[str] = set()
    for row in random.Random(seed).sample(rows, len(rows)):
        shortened = {**row, "neg": row.get("neg", [])[:negatives]}
        texts = {row["query"], *row["pos"], *shortened["neg"]}
        if len(drawn) < count and not (distinct and texts & seen):
            drawn.append(shortened)
            seen |= texts
    return drawn


def run_module(module: str, *arguments: str) -> None:
    """Run a module of the benchmarks in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, env=os.environ | ENVIRONMENT, cwd=ROOT, check=True, capture_output=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, compressed or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.split("\n") if line]
