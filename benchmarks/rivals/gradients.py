"""The gradient of a batch over several ranks, compared with that of the same batch and library in one process.

It is read from the optimizer state that each library saves after its first step: the first moment of AdamW is then a
tenth of the gradient, without clipping. Nothing of a library has to be changed to see it.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.measure import markdown
from benchmarks.rivals.launch import load_or, observe
from benchmarks.rivals.libraries import Library
from benchmarks.rivals.settings import Settings
from benchmarks.rivals.trainings import Comparison

RANKS = (1, 2, 4)
BATCH = 16
LIMIT = 75  # seconds that one step may take, from the command to the saved model


def measure(settings: Settings) -> str:
    """A row for each kind of model and library."""
    lines = []
    for kind in settings.kinds:
        comparison = Comparison(settings, kind)
        for library in comparison.installed:
            path = settings.output / "results" / f"gradients-{kind}-{library.name}.json"
            values = load_or(path, lambda c=comparison, lib=library: _compare(c, lib))
            ratios = [_cell(values, ranks, "norm", ".4f") for ranks in RANKS[1:]]
            errors = [_cell(values, ranks, "error", ".0e") for ranks in RANKS[1:]]
            lines.append([kind, library.name, *ratios, *errors])
    header = ["kind", "library", *(f"{n} ranks: norm / norm in one process" for n in RANKS[1:])]
    header += [f"{n} ranks: relative error" for n in RANKS[1:]]
    return markdown(header, lines)


def _cell(values: dict[str, Any], ranks: int, name: str, form: str) -> str:
    value = values[str(ranks)]
    return "fails" if value is None else format(value[name], form)


def _compare(comparison: Comparison, library: Library) -> dict[str, Any]:
    print(f"{comparison.kind} {library.name} gradients ...", flush=True)
    gradients: dict[int, Tensor | None] = dict.fromkeys(RANKS)
    for ranks in RANKS:
        name = f"gradients-{ranks}"
        training = comparison.training(
            library,
            name,
            seed=1,
            rows=BATCH,
            distinct=True,
            steps=1,
            global_batch=BATCH,
            ranks=ranks,
            save_every=1,
            max_grad_norm=0.0,
        )
        shutil.rmtree(comparison.folder(library, name), ignore_errors=True)  # of an interrupted measurement
        seen = observe(library, training, comparison.folder(library, name), timeout=LIMIT)
        if seen.exit_code is None:  # it would hang on more ranks as well
            break
        # Also of a process that crashes when it exits: the checkpoint was complete before.
        gradients[ranks] = read_gradient(Path(training.output))
    exact = gradients[1]
    return {
        str(ranks): None
        if exact is None or gradient is None
        else {
            "norm": float(gradient.norm() / exact.norm()),
            "error": float((gradient - exact).norm() / exact.norm()),
        }
        for ranks, gradient in gradients.items()
    }


def read_gradient(run: Path) -> Tensor | None:
    """The first moments of all parameters in the newest checkpoint of a run, in one vector [P]."""
    if files := sorted(run.rglob("optimizer*.pt")) + sorted(run.rglob("optimizer*.bin")):  # of transformers, accelerate
        # They store pickles; with weights_only, torch builds tensors and executes nothing.
        state = torch.load(files[-1], map_location="cpu", weights_only=True)["state"]
        return torch.cat([state[index]["exp_avg"].double().flatten() for index in sorted(state)])
    shards = [load_file(path) for path in sorted(run.rglob("optimizer*.safetensors"))]
    names = sorted({name for shard in shards for name in shard if "exp_avg_sq" not in name and "exp_avg" in name})
    values = [shard[name].double().flatten() for name in names for shard in shards if name in shard]
    return torch.cat(values) if values else None
