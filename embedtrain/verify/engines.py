"""Runs the program of an engine on a model directory, and compares its vectors with the encoder's."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedtrain.checkpoint.export.onnx import GRAPH, output_names
from embedtrain.errors import ConfigError
from embedtrain.models.static_embedding import is_static
from embedtrain.models.types import ModelSource
from embedtrain.verify.options import ENGINES, VerifyOptions

_CLIENTS = Path(__file__).parent / "clients"
_TIMEOUT = 900.0  # seconds; a model of billions of parameters takes minutes to load


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one engine computed.

    `differences` are the largest ones of a component of a vector, by way of encoding (see clients/).
    """

    engine: str
    version: str = ""
    differences: Mapping[str, float] | None = None  # None: it did not run
    reason: str = ""  # why not

    def passes(self, tolerance: float) -> bool:
        """Whether all vectors equal the encoder's."""
        return self.differences is not None and all(value <= tolerance for value in self.differences.values())


def interpreters(options: VerifyOptions) -> dict[str, str]:
    """The Python of each engine to run; a ConfigError for one that is not installed."""
    installed = {name: sys.executable for name in ENGINES if find_spec(name) is not None} | (options.python or {})
    if options.engines is None:
        return {name: installed[name] for name in ENGINES if name in installed}
    for name in options.engines:
        if name not in installed:
            raise ConfigError(
                f"engines has {name}, which is not installed here; write python={{{name}: ENVIRONMENT/bin/python}}"
            )
    return {name: installed[name] for name in options.engines}


def unsupported(engine: str, source: ModelSource, directory: Path) -> str | None:
    """Why an engine cannot compute the vectors of this model; None if it should."""
    if is_static(source.config) and engine != "sentence_transformers":
        return "of these engines only sentence-transformers opens a static table of tokens"
    if engine == "transformers" and (source.dense or source.truncate_dim or not source.include_prompt):
        return "it leaves out dense heads, truncation and include_prompt=false: use sentence-transformers"
    if engine not in ("onnxruntime", "fastembed"):
        return None
    if not (directory / GRAPH).is_file():
        return f"{GRAPH} is missing: export with formats=[onnx]"
    if len(output_names(source)) == 1:
        return "its pooling cannot leave out the tokens of the prompt (include_prompt=false)"
    return None


def run_engine(
    engine: str, python: str, directory: Path, texts: Sequence[str], expected: Mapping[str, NDArray[np.float32]]
) -> Outcome:
    """Encode the texts with an engine; `expected` are vectors [N, D] by way of encoding."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        content = {"model": str(directory), "texts": list(texts), "dimension": expected["text"].shape[1]}
        request.write_text(json.dumps(content), encoding="utf-8")
        command = [python, "-I", str(_CLIENTS / f"{engine}.py"), str(request), str(result)]
        try:
            subprocess.run(  # noqa: S603 - the user names the interpreter
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
            return Outcome(engine, reason=lines[-1])
        except (OSError, subprocess.TimeoutExpired) as error:
            return Outcome(engine, reason=str(error))
        computed = json.loads(result.read_text(encoding="utf-8"))
    differences = {role: _difference(vectors, expected[role]) for role, vectors in computed["vectors"].items()}
    return Outcome(engine, computed["version"], differences)


def _difference(vectors: Sequence[Sequence[float]], expected: NDArray[np.float32]) -> float:
    """The largest of a component; infinite if shapes differ or a component is not finite."""
    values = np.asarray(vectors, dtype=np.float64)
    if values.shape != expected.shape or not np.isfinite(values).all():
        return float("inf")
    return float(np.abs(values - expected).max())
