"""What engines get of a model, and what the encoder computes of the same texts, for each kind of model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embedtrain.config.recipe import ModelConfig, Precision
from embedtrain.config.reranker import RerankerConfig
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.errors import ModelError
from embedtrain.formats.verify import PROBES
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.encoder_model import load_encoder_model
from embedtrain.inference.loading.reranker import load_reranker, open_reranker
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.kinds.cross_encoder.files import formatted_pairs, probe_pairs
from embedtrain.kinds.m3.score import split_rows
from embedtrain.losses.encoded import Part
from embedtrain.models.file_references import read_json
from embedtrain.models.module_settings import stored_kind
from embedtrain.models.score_head import IDENTITY, SIGMOID
from embedtrain.models.types import ModelSource

_CHUNK_TOKENS = 16384
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {SIGMOID: torch.sigmoid, IDENTITY: torch.clone}

# By part of the output (see clients/) and way of encoding, an array for each text or pair.
Outputs = dict[str, dict[str, list[NDArray[np.float32]]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """The request to an engine, and the encoder's answer."""

    source: ModelSource
    request: Mapping[str, Any]  # see clients/
    expected: Outputs

    @property
    def main_part(self) -> str | None:
        """The only part of the output; None if there are several."""
        return next(iter(self.expected)) if len(self.expected) == 1 else None


def probe_model(directory: Path, world: World) -> Probe:
    """Load the model of a directory and encode the probe texts, or score pairs of them. A collective."""
    if _is_cross_encoder(directory):
        return _scored(directory, world)
    model = load_encoder_model(ModelConfig(path=str(directory)), Precision.fp32, world)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=_CHUNK_TOKENS)
    texts = ["", *PROBES] if model.tokenizer.tokenizer("")["input_ids"] else list(PROBES)
    prompts = {role.value: model.source.prompts.get(role.value, "") for role in TextRole}
    request: dict[str, Any] = {"model": str(directory), "kind": model.source.kind.name}
    request |= {"texts": texts, "prompts": prompts}
    expected: Outputs = {}
    # A text of a late-interaction model is a query or a document.
    ways = prompts if model.source.kind.name == "late_interaction" else {"text": ""} | prompts
    for role, prompt in ways.items():
        text_role = TextRole.query if role == "query" else TextRole.document
        part = encoder.encode(texts, prompt, role=text_role, label=f"encoding with the encoder ({role})")
        for name, rows in _arrays(part, model.source):
            expected.setdefault(name, {})[role] = rows
    if "vectors" in expected:
        request["dimension"] = len(expected["vectors"]["text"][0])
    return Probe(model.source, request | model.tokenizer.layout.client_settings(model.tokenizer.max_length), expected)


def _is_cross_encoder(directory: Path) -> bool:
    config = directory / "config.json"
    names = read_json(config).get("architectures") if config.is_file() else None
    is_classifier = any(str(name).endswith("ForSequenceClassification") for name in names or ())
    return is_classifier or stored_kind(directory) == "cross_encoder"


def _scored(directory: Path, world: World) -> Probe:
    """The pairs of a cross-encoder that are read by all libraries alike, and their scores."""
    config = RerankerConfig(path=str(directory))
    source = open_reranker(config, world, trust_remote_code=False)
    assert source is not None
    assert source.kind.name == "cross_encoder"
    model = load_reranker(source, config, Precision.fp32, world)
    compared = source.kind.files.compared(model.tokenizer, source.prompts)
    rows = range(len(PROBES)) if compared is None else compared.nonzero().flatten().tolist()
    if not rows:
        raise ModelError(f"{directory}: no pair of the probe texts fits into the model's maximum length")
    plain, whole = probe_pairs(PROBES), formatted_pairs(source, PROBES)
    pairs, formatted = ([list(pairs[row][:2]) for row in rows] for pairs in (plain, whole))
    scorer = PairScorer.from_model(model, world, chunk_tokens=_CHUNK_TOKENS)
    logits = scorer.score([query for query, _ in pairs], [document for _, document in pairs])
    scores = {"logits": list(logits.numpy())}
    if (activation := _ACTIVATIONS.get(source.settings.activation)) is not None:
        scores["activated"] = list(activation(logits).numpy())
    request = {"model": str(directory), "kind": source.kind.name, "pairs": pairs, "formatted_pairs": formatted}
    return Probe(source, request, {"scores": scores})


def _arrays(part: Part, source: ModelSource) -> Iterator[tuple[str, list[NDArray[np.float32]]]]:
    """The parts of the output of encoded texts, and an array for each text."""
    if source.kind.name == "late_interaction":
        yield "token_vectors", _by_text(part)
    elif source.kind.name == "sparse":
        yield "word_weights", list(part.values.cpu().numpy())
    elif source.kind.name == "m3":
        parts = split_rows(part, source.settings)
        yield "vectors", list(parts.dense.values.cpu().numpy())
        yield "word_weights", [_lexical(rows, source) for rows in _by_text(parts.lexical)]
        yield "token_vectors", _by_text(parts.tokens)
    else:
        yield "vectors", list(part.values[:, : source.truncate_dim].cpu().numpy())


def _by_text(part: Part) -> list[NDArray[np.float32]]:
    assert part.sizes is not None
    return np.split(part.values.cpu().numpy(), np.cumsum(part.sizes)[:-1])


def _lexical(rows: NDArray[np.float32], source: ModelSource) -> NDArray[np.float32]:
    """Rows (weight, id) of tokens as the weights of all words, [V]."""
    weights = np.zeros(int(source.config.get_text_config().vocab_size), dtype=np.float32)
    np.maximum.at(weights, rows[:, 1].astype(np.int64), rows[:, 0])
    return weights


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
