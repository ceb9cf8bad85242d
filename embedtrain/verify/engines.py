"""Runs the program of an engine on a model directory, and compares its output with the encoder's."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from embedtrain.checkpoint.export.onnx import GRAPH, output_names
from embedtrain.config.recipe import ModelKind
from embedtrain.errors import ConfigError
from embedtrain.models.static_embedding import is_static
from embedtrain.models.types import ModelSource
from embedtrain.verify.options import ENGINES, VerifyOptions
from embedtrain.verify.probes import Probe, compare

_CLIENTS = Path(__file__).parent / "clients"
_TIMEOUT = 900.0  # seconds; a model of billions of parameters takes minutes to load


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one engine computed: the largest differences by way of encoding, see `compare`."""

    engine: str
    version: str = ""
    differences: Mapping[str, float] | None = None  # None: it did not run
    reason: str = ""  # why not
    is_supported: bool = True  # whether it computes such models

    def passes(self, tolerance: float) -> bool:
        """Whether all that it computed equals the encoder's output."""
        return bool(self.differences) and all(value <= tolerance for value in (self.differences or {}).values())


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
    """Why an engine cannot compute the output of this model; None if it should."""
    kind = source.kind
    if is_static(source.config) and engine != "sentence_transformers":
        return "of these engines only sentence-transformers opens a static table of tokens"
    if source.head is not None and source.head.tokens and engine != "sentence_transformers":
        return "of these engines only sentence-transformers scores pairs by the logits of tokens"
    if engine == "transformers" and kind is ModelKind.late_interaction:
        return "it leaves out the projection of the vectors of tokens: use sentence-transformers"
    if engine == "transformers" and (source.dense or source.truncate_dim or not source.include_prompt):
        return "it leaves out dense heads, truncation and include_prompt=false: use sentence-transformers"
    if engine not in ("onnxruntime", "fastembed"):
        return None
    if engine == "fastembed" and kind in (ModelKind.late_interaction, ModelKind.sparse):
        return "it opens no such models but those that it lists"
    if not (directory / GRAPH).is_file():
        return f"{GRAPH} is missing: export with formats=[onnx]"
    if kind in (ModelKind.late_interaction, ModelKind.sparse):
        return "its graph has no such output"
    if kind is not ModelKind.cross_encoder and len(output_names(source)) == 1:
        return "its pooling cannot leave out the tokens of the prompt (include_prompt=false)"
    return None


def run_engine(engine: str, python: str, probe: Probe) -> Outcome:
    """Encode the texts, or score the pairs, with an engine."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps(probe.request), encoding="utf-8")
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
    if "unsupported" in computed:
        return Outcome(engine, computed["version"], reason=computed["unsupported"], is_supported=False)
    return Outcome(engine, computed["version"], compare(computed, probe))
