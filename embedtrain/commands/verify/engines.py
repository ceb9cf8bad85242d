"""What engines get of a model, the programs that run them, and the comparison of their output with the encoder's."""

import base64
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedtrain.config.command_options import RerankerConfig
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import Precision
from embedtrain.config.validation import model_options_named
from embedtrain.data.images.files import PICTURES
from embedtrain.data.images.item import pictures_of
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.formats.model_files import ServingOutputs
from embedtrain.formats.source import CommandModel, with_kind_of_files
from embedtrain.formats.verify import PROBES
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import (
    MODEL_OPTION_NAMES,
    load_encoder_model,
    load_reranker,
    open_reranker,
)
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.losses.encoded import Part
from embedtrain.models.types import ModelSource

_CLIENTS = Path(__file__).with_name("clients.py")
# Engines that are no Python libraries. Node reads a program from its input, because it resolves the packages of one in
# the working directory.
NODE_CLIENTS = {"transformers_js": Path(__file__).with_name("transformers_js.mjs")}
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b.*:")
_CHUNK_TOKENS = 16384
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


def run_engine(engine: str, python: str, probe: "Probe") -> Outcome:
    """Encode the texts, or score the pairs, with an engine."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps({"engine": engine, **probe.request}), encoding="utf-8")
        program = NODE_CLIENTS.get(engine)
        command = [python, "-I", str(_CLIENTS)] if program is None else ["node", "--input-type=module", "-"]
        try:
            subprocess.run(  # noqa: S603 - the user names the interpreter
                [*command, str(request), str(result)],
                cwd=None if program is None else python,
                input=None if program is None else program.read_text(encoding="utf-8"),
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
    named, expected = computed.get("similarity"), probe.source.vectors.similarity.value
    if named not in (None, expected):
        reason = f"it compares vectors by similarity_fn_name={named}, and embedtrain by {expected}"
        return Outcome(engine, computed["version"], reason=reason)
    return Outcome(engine, computed["version"], compare(computed, probe), changes=computed.get("changes", ""))


def _reason(error: subprocess.CalledProcessError) -> str:
    """The message of the exception that ended a program; node prints more after it."""
    lines: list[str] = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])


@dataclass(frozen=True, slots=True)
class Probe:
    """The request to an engine, and the encoder's answer."""

    source: ModelSource
    request: Mapping[str, Any]  # see clients.py
    expected: ServingOutputs

    @property
    def main_part(self) -> str | None:
        """The only part of the output; None if there are several."""
        return next(iter(self.expected)) if len(self.expected) == 1 else None


def probe_model(config: CommandModel, world: World) -> Probe:
    """Load the model of a directory and encode the probe texts, or score pairs of them. A collective."""
    directory = Path(str(config.path))
    with model_options_named(MODEL_OPTION_NAMES):
        scores_pairs = load_kind(with_kind_of_files(config)[0].kind).scores_pairs
    if scores_pairs:
        return _scored(directory, world)
    model = load_encoder_model(
        config, Precision.fp32, world, check=lambda source: source.require_one_model(f"model={directory}")
    )
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=_CHUNK_TOKENS)
    texts = ["", *PROBES] if model.tokenizer.tokenizer("")["input_ids"] else list(PROBES)
    prompts = {role.value: model.source.prompts.get(role.value, "") for role in TextRole}
    texts = model.source.kind.files.verified_texts(texts, model.tokenizer, prompts)
    request: dict[str, Any] = {"model": str(directory), "texts": texts, "prompts": prompts}
    expected: ServingOutputs = {}
    files = model.source.kind.files
    ways = {"text": ""} | prompts if files.encodes_plain_texts else prompts
    for way, prompt in ways.items():
        text_role = TextRole.query if way == "query" else TextRole.document
        part = encoder.encode(texts, prompt, role=text_role, label=f"encoding with the encoder ({way})")
        for name, rows in files.serving_outputs(part, model.source, way).items():
            expected.setdefault(name, {}).update(rows)
    with files.probe_documents(model.tokenizer) as pages:
        if pages:
            part = encoder.encode(pages, "", role=TextRole.document, label="encoding pages with the encoder")
            request["pages"] = [base64.b64encode(_content(page)).decode() for page in pages]
            for name, rows in files.serving_outputs(part, model.source, "page").items():
                expected.setdefault(name, {}).update(rows)
    if "vectors" in expected:
        request["dimension"] = len(expected["vectors"]["text"][0])
    request["outputs"] = list(expected)
    return Probe(model.source, request | model.tokenizer.layout.client_settings(model.tokenizer.max_length), expected)


def _content(item: str) -> bytes:
    """The file of an item that is a picture alone."""
    (picture,) = pictures_of(item)
    return Path(PICTURES.place(picture).file).read_bytes()


def _scored(directory: Path, world: World) -> Probe:
    """The pairs that are read by all libraries alike, and their scores."""
    config = RerankerConfig(path=str(directory))
    source = open_reranker(config, world, trust_remote_code=False)
    assert source is not None
    model, files = load_reranker(source, config, Precision.fp32, world), source.kind.files
    compared = files.compared(model.tokenizer, source.prompts)
    rows = range(len(PROBES)) if compared is None else compared[: len(PROBES)].nonzero().flatten().tolist()
    if not rows:
        raise ModelError(f"{directory}: no pair of the probe texts fits into the model's maximum length")
    plain, whole = list(zip(PROBES, (*PROBES[1:], PROBES[0]), strict=True)), files.probe_texts(source)
    pairs, formatted = ([list(pairs[row]) for row in rows] for pairs in (plain, whole))
    scorer = PairScorer.from_model(model, world, chunk_tokens=_CHUNK_TOKENS)
    logits = scorer.score([query for query, _ in pairs], [document for _, document in pairs])
    expected = files.serving_outputs(Part(logits[:, None]), source, "")
    request = {"model": str(directory), "pairs": pairs, "formatted_pairs": formatted, "outputs": list(expected)}
    return Probe(source, request, expected)


def compare(computed: Mapping[str, Any], probe: Probe) -> dict[str, float]:
    """The largest differences of what an engine computed, by way of encoding; of m3 by part as well.

    Texts that the engine changes are left out. A difference is that of a number, relative to it if it is above 1;
    infinite if shapes differ, or a number is not finite.
    """
    differences = {}
    for part, roles in probe.expected.items():
        for role, values in computed.get(part, {}).items():
            name = role if part == probe.main_part else f"{part} {role}"
            differences[name] = _difference(values, roles[role], computed.get("changed", {}).get(role, ()))
    return differences


def _difference(values: Sequence[Any], expected: Sequence[NDArray[np.float32]], changed: Sequence[int]) -> float:
    rows = [row for row in range(len(expected)) if row not in changed]
    if len(values) != len(expected) or not rows:
        return float("inf")
    return max(_row_difference(values[row], expected[row].astype(np.float64)) for row in rows)


def _row_difference(value: Any, expected: NDArray[np.float64]) -> float:
    if isinstance(value, dict):
        row = np.zeros_like(expected)
        if not all(0 <= index < len(row) for index in value["indices"]):
            return float("inf")
        row[value["indices"]] = value["values"]
    else:
        row = np.asarray(value, dtype=np.float64)
    if row.shape != expected.shape or not np.isfinite(row).all():
        return float("inf")
    return float((np.abs(row - expected) / np.maximum(1.0, np.abs(expected))).max(initial=0.0))
