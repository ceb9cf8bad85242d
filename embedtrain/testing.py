"""Checks of losses that users write: on any number of ranks the same loss and gradients as in one process.

from embedtrain.losses.types import Origin
from embedtrain.testing import check_loss

check_loss("my_losses:MyLoss", {"margin": 0.1})
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from embedtrain.config.losses import CustomConfig
from embedtrain.losses.build import build_custom
from embedtrain.losses.types import BatchInfo, Loss, Origin

_SERVE = "from embedtrain import testing; testing._serve()"
_STARTED = "started"  # a file that exists once all ranks run
_START_SECONDS, _SECONDS = 600.0, 120.0  # until then, and for what the loss computes afterwards


@dataclass(frozen=True, kw_only=True)
class RandomBatch:
    """A global batch of random vectors of unit length, in float64; row i has 1 to 1 + `negatives` documents."""

    rows: int = 7
    negatives: int = 2
    dimension: int = 8
    scores: bool = False  # a score from 0 to 1 of each document
    label: bool = False  # one of three classes of each row
    same_num_documents: bool = False  # every row has all negatives

    def of_rows(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, BatchInfo, list[int]]:
        """Queries, documents and BatchInfo of these rows, and the indices of their documents among all."""
        generator = torch.Generator().manual_seed(0)
        sizes = [
            1 + (self.negatives if self.same_num_documents else i % (self.negatives + 1)) for i in range(self.rows)
        ]
        starts = [sum(sizes[:row]) for row in range(self.rows)]
        queries, documents = (
            F.normalize(torch.randn(count, self.dimension, generator=generator, dtype=torch.float64), dim=1)
            for count in (self.rows, sum(sizes))
        )
        scores = torch.rand(sum(sizes), generator=generator, dtype=torch.float64)
        indices = [starts[row] + document for row in rows for document in range(sizes[row])]
        info = BatchInfo(
            owners=torch.tensor(
                [index for index, row in enumerate(rows) for _ in range(sizes[row])], dtype=torch.int64
            ),
            query_keys=torch.tensor(rows, dtype=torch.int64) + 1000,
            document_keys=torch.tensor(indices, dtype=torch.int64) + 5000,
            scores=scores[indices] if self.scores else None,
            labels=torch.tensor(rows, dtype=torch.int64) % 3 if self.label else None,
            origin=Origin(batch=5),
        )
        return queries[list(rows)], documents[indices], info, indices


def check_loss(
    loss: str | type[Loss],
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    batch: RandomBatch | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Compare a loss on several ranks with the same batch in one process, in float64; AssertionError if they differ.

    Compared are the sum of the ranks' losses and metrics, the gradients of all embeddings, and those of the loss's
    parameters; rows are spread evenly, and with a rank without rows. Starts processes, over gloo on the CPU.

    Args:
        loss: a class that other processes can import, or its path `module:Class`.
        kwargs: arguments of its constructor, as JSON has them.
        batch: the rows that the loss needs, such as RandomBatch(scores=True).
        tolerance: relative.
    """
    path = loss if isinstance(loss, str) else f"{loss.__module__}:{loss.__qualname__}"
    if path.startswith("__main__:") or "<locals>" in path:
        raise ValueError(f"{path}: other processes cannot import it: write the class into a file, such as my_losses.py")
    batch = batch or RandomBatch()
    cases = [[list(range(batch.rows))], *(case for size in world_sizes for case in distributions(batch.rows, size))]
    with tempfile.TemporaryDirectory() as folder:
        job = {"path": path, "kwargs": dict(kwargs or {}), "batch": asdict(batch), "cases": cases, "folder": folder}
        results = _run_ranks(job, max(map(len, cases)))
    reference = results[0][0]
    for number, case in enumerate(cases):
        compare(reference, [results[rank][number] for rank in range(len(case))], case, path, tolerance)


def distributions(num_rows: int, size: int) -> list[list[list[int]]]:
    """The rows of each of `size` ranks: evenly, and with nothing for the first."""
    rows = list(range(num_rows))
    even = [rows[rank::size] for rank in range(size)]
    return [even] if size == 1 else [even, [[], *(rows[rank :: size - 1] for rank in range(size - 1))]]


def measure(path: str, kwargs: Mapping[str, Any], batch: RandomBatch, rows: Sequence[int]) -> dict[str, Any]:
    """The loss of this rank's rows in the current process group, its metrics and gradients, as JSON has them."""
    torch.manual_seed(0)
    loss = build_custom(CustomConfig(path=path, kwargs=dict(kwargs)), batch.dimension).double()
    queries, documents, info, indices = batch.of_rows(rows)
    queries.requires_grad_()
    documents.requires_grad_()
    output = loss(queries, documents, info)
    if not output.local_loss.requires_grad:
        raise AssertionError(f"{path}: local_loss has no graph on a rank with {len(rows)} rows; every rank needs one")
    output.local_loss.backward()
    gradients = {f"query {row}": grad for row, grad in zip(rows, _grad(queries), strict=True)}
    gradients |= {f"document {index}": grad for index, grad in zip(indices, _grad(documents), strict=True)}
    gradients |= {f"parameter {name}": _grad(parameter).flatten() for name, parameter in loss.named_parameters()}
    return {
        "loss": output.local_loss.item(),
        "metrics": {name: float(value) for name, value in output.metrics.items()},
        "gradients": {name: gradient.tolist() for name, gradient in gradients.items()},
    }


def compare(
    reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], case: list[list[int]], path: str, tolerance: float
) -> None:
    """Compare what `measure` returned on all ranks with the result of one process. Raises an AssertionError."""
    where = f"{path} on {len(ranks)} rank{'s' * (len(ranks) > 1)} with rows {case}"
    names = [sorted(result["metrics"]) for result in ranks]
    if any(other != names[0] for other in names):
        raise AssertionError(f"{where}: ranks return different metrics: {names}")
    pairs = {"the loss": (reference["loss"], sum(result["loss"] for result in ranks))}
    for name, value in reference["metrics"].items():
        pairs[f"metric {name}"] = value, sum(result["metrics"][name] for result in ranks)
    gradients: dict[str, Tensor] = {}
    for result in ranks:
        for name, gradient in result["gradients"].items():
            gradients[name] = gradients.get(name, 0.0) + torch.tensor(gradient, dtype=torch.float64)
    for name, gradient in reference["gradients"].items():
        pairs[f"the gradient of {name}"] = torch.tensor(gradient, dtype=torch.float64), gradients[name]
    scale = {kind: _largest(pairs, kind) for kind in ("the loss", "metric", "the gradient")}
    for name, (expected, actual) in pairs.items():
        kind = next(kind for kind in scale if name.startswith(kind))
        error = _norm(torch.as_tensor(actual) - torch.as_tensor(expected)) / scale[kind]
        if not error <= tolerance:
            raise AssertionError(
                f"{where}: the sum over the ranks of {name} differs from one process by {error:.1e} of the largest; "
                f"allowed is {tolerance:.0e}"
            )


def _largest(pairs: Mapping[str, tuple[Any, Any]], kind: str) -> float:
    norms = [_norm(torch.as_tensor(expected)) for name, (expected, _) in pairs.items() if name.startswith(kind)]
    return max([1e-12, *norms])


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _run_ranks(job: Mapping[str, Any], size: int) -> list[list[Any]]:
    """Run `_serve` in `size` processes; their results in rank order."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*filter(None, sys.path), str(Path.cwd())])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    folder = Path(job["folder"])
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            command = [sys.executable, "-P", "-c", _SERVE, json.dumps(job), str(rank)]
            with (folder / f"{rank}.txt").open("wb") as output:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603
                )
        _wait(processes, folder, job["path"])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _wait(processes: Sequence["subprocess.Popen[bytes]"], folder: Path, path: str) -> None:
    """Until all ranks have ended; an AssertionError about the first one that fails, or that does not end."""
    limit, started = time.monotonic() + _START_SECONDS, False
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:  # the others fail after it, because it is gone, or wait for it
                text = (folder / f"{rank}.txt").read_text(encoding="utf-8", errors="replace")
                raise AssertionError(f"{path} failed on rank {rank}:\n{text[-3000:]}")
        if None not in codes:
            return
        if not started and (folder / _STARTED).exists():
            limit, started = time.monotonic() + _SECONDS, True
        if time.monotonic() > limit:
            seconds = _SECONDS if started else _START_SECONDS
            raise AssertionError(
                f"{path} does not end on rank {codes.index(None)} (after {seconds:g} s): ranks that do not call the "
                "same collectives wait for each other"
            )
        time.sleep(0.02)


def _serve() -> None:
    """One rank of `check_loss`."""
    job, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    folder, size = Path(job["folder"]), max(map(len, job["cases"]))
    batch, path, kwargs = RandomBatch(**job["batch"]), job["path"], job["kwargs"]
    build_custom(CustomConfig(path=path, kwargs=kwargs), batch.dimension)  # imports: slow on a busy machine
    with _group(folder / "store", rank, size):
        pass
    if rank == 0:
        (folder / _STARTED).touch()
    results: list[Any] = []
    for number, case in enumerate(job["cases"]):
        if rank >= len(case):
            results.append(None)
            continue
        with _group(folder / f"store-{number}", rank, len(case)):
            results.append(measure(path, kwargs, batch, case[rank]))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # threads of gloo may abort the end of the interpreter


@contextlib.contextmanager
def _group(store: Path, rank: int, size: int) -> Iterator[None]:
    limit = timedelta(seconds=_START_SECONDS)  # `_wait` ends ranks that wait for each other
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    yield
    dist.barrier()  # a rank that leaves earlier ends the others, which may still connect to it
    dist.destroy_process_group()
