"""Runs the program of an engine on a model directory, and compares its output with the encoder's."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from embedtrain.commands.verify.options import ENGINES, VerifyOptions
from embedtrain.commands.verify.probes import Probe, compare
from embedtrain.errors import ConfigError

_CLIENTS = Path(__file__).parent / "clients"
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b.*:")
_TIMEOUT = 900.0  # seconds; a model of billions of parameters takes minutes to load


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one engine computed: the largest differences by way of encoding, see `compare`."""

    engine: str
    version: str = ""
    differences: Mapping[str, float] | None = None  # None: it did not run
    reason: str = ""  # why not
    changes: str = ""  # what it does to texts, which are not compared
    is_supported: bool = True  # whether it computes such models

    def passes(self, tolerance: float) -> bool:
        """Whether all that it computed equals the encoder's output."""
        return bool(self.differences) and all(value <= tolerance for value in (self.differences or {}).values())


def interpreters(options: VerifyOptions) -> dict[str, str]:
    """The Python, or folder, of each engine to run; a ConfigError for one that is not installed."""
    installed = {name: sys.executable for name in ENGINES if find_spec(name) is not None} | (options.python or {})
    if options.engines is None:
        return {name: installed[name] for name in ENGINES if name in installed}
    for name in options.engines:
        if name not in installed:
            value = "FOLDER" if _program(name).suffix == ".mjs" else "ENVIRONMENT/bin/python"
            raise ConfigError(f"engines has {name}, which is not installed here; write python={{{name}: {value}}}")
    return {name: installed[name] for name in options.engines}


def _program(engine: str) -> Path:
    own = [path for path in (_CLIENTS / f"{engine}.mjs", _CLIENTS / f"{engine}.py") if path.is_file()]
    return own[0] if own else _CLIENTS / "libraries.py"


def run_engine(engine: str, python: str, probe: Probe) -> Outcome:
    """Encode the texts, or score the pairs, with an engine."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps({**probe.request, "engine": engine}), encoding="utf-8")
        # node resolves the packages of a program that it reads from its input in the working directory.
        program = _program(engine)
        by_node = program.suffix == ".mjs"
        command = ["node", "--input-type=module", "-"] if by_node else [python, "-I", str(program)]
        try:
            subprocess.run(  # noqa: S603 - the user names the interpreter
                [*command, str(request), str(result)],
                cwd=python if by_node else None,
                input=program.read_text(encoding="utf-8") if by_node else None,
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except subprocess.CalledProcessError as error:
            return Outcome(engine, reason=_reason(error))
        except (OSError, subprocess.TimeoutExpired) as error:
            return Outcome(engine, reason=str(error))
        computed = json.loads(result.read_text(encoding="utf-8"))
    if "unsupported" in computed:
        return Outcome(engine, computed["version"], reason=computed["unsupported"], is_supported=False)
    named, expected = computed.get("similarity"), probe.source.similarity.value
    if named not in (None, expected):
        reason = f"it compares vectors by similarity_fn_name={named}, and embedtrain by {expected}"
        return Outcome(engine, computed["version"], reason=reason)
    return Outcome(engine, computed["version"], compare(computed, probe), changes=computed.get("changes", ""))


def _reason(error: subprocess.CalledProcessError) -> str:
    """The message of the exception that ended a program; node prints more after it."""
    lines: list[str] = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])
