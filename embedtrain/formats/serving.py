"""What of a model a serving engine keeps: properties that engines may lose, and the verdict for one engine.

The facts about each engine are in `serving_engines`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from embedtrain.config.recipe import Pooling
from embedtrain.formats.model_files import VECTORS
from embedtrain.formats.onnx import GRAPH
from embedtrain.models.attention_direction import attends_causally, is_decoder
from embedtrain.models.file_references import read_json
from embedtrain.models.module_settings import PYLATE, SETTINGS
from embedtrain.models.static_embedding import is_static
from embedtrain.models.types import ModelSource

# What cards and messages call models.
KIND_NAMES = {
    "dense": "models of one vector per text",
    "cross_encoder": "rerankers",
    "late_interaction": "late-interaction models",
    "sparse": "sparse models",
    "m3": "models of three representations",
}


class Effect(StrEnum):
    """What a loss does to the vectors or scores that an engine returns."""

    rounded = "rounded"  # they differ by less than 1e-2 of their length
    some_texts = "some_texts"  # those that the reason describes get other tokens
    partial = "partial"  # the engine computes a part of the output
    changed = "changed"
    refused = "refused"  # the engine does not open the model


# With these, what the engine computes is compared, and used.
BEARABLE = (Effect.rounded, Effect.some_texts, Effect.partial)


@dataclass(frozen=True, slots=True)
class Loss:
    """Why an engine does not serve a model exactly."""

    effect: Effect
    reason: str  # a main clause whose subject, the engine, is `it`


class Trait(StrEnum):
    """A property of a model that some engines lose."""

    custom_code = "custom_code"
    dense = "dense"
    include_prompt = "include_prompt"
    is_causal = "is_causal"
    no_graph = "no_graph"
    no_vectors_in_graph = "no_vectors_in_graph"
    pooling = "pooling"
    scaled_positions = "scaled_positions"
    static = "static"
    logit_scores = "logit_scores"
    truncation = "truncation"
    vector_length = "vector_length"


_TRAITS = {
    Trait.custom_code: Loss(Effect.refused, "it does not run the Python code of the model's directory"),
    Trait.dense: Loss(Effect.changed, "it leaves out dense heads"),
    Trait.include_prompt: Loss(Effect.changed, "its pooling includes the tokens of the prompt (include_prompt=false)"),
    Trait.is_causal: Loss(Effect.changed, "it ignores is_causal=false of the configuration: its attention is causal"),
    Trait.no_graph: Loss(Effect.refused, f"it reads {GRAPH}, which is missing: export with formats=[onnx]"),
    Trait.no_vectors_in_graph: Loss(
        Effect.changed, "the graph cannot leave out the tokens of the prompt (include_prompt=false)"
    ),
    Trait.pooling: Loss(Effect.refused, "it has no maximum and no weighted mean of tokens"),
    Trait.scaled_positions: Loss(Effect.changed, "it ignores the scaling of rotary positions"),
    Trait.static: Loss(Effect.refused, "it does not open a static table of tokens"),
    Trait.logit_scores: Loss(Effect.refused, "it does not score pairs by the logits of tokens"),
    Trait.truncation: Loss(Effect.changed, "it returns all dimensions of a vector, not the first ones (truncate_dim)"),
    Trait.vector_length: Loss(Effect.changed, "it scales vectors to length 1, which the model does not"),
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model directory as an engine finds it."""

    source: ModelSource
    config: Mapping[str, Any]  # config.json
    has_graph: bool
    has_sentencepiece: bool = False  # tokenizer.model, which transformers 5 does not write
    is_pylate: bool = False  # whether the directory has the layout of PyLate

    @classmethod
    def open(cls, directory: Path, source: ModelSource) -> "ServedModel":
        """The facts of an exported directory, which `source` was read from."""
        path = directory / "config.json"
        config = read_json(path) if path.is_file() else {}  # a table of sentence-transformers has none
        settings = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
        return cls(
            source,
            config,
            (directory / GRAPH).is_file(),
            (directory / "tokenizer.model").is_file(),
            settings.get("model_type") == PYLATE,
        )

    @property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.source.config.model_type)

    @property
    def is_bidirectional_decoder(self) -> bool:
        """Whether a decoder attends in both directions because of `is_causal=false`."""
        is_own_option = self.model_type == "gemma3_text"
        return is_decoder(self.source.config) and not attends_causally(self.source.config) and not is_own_option

    @property
    def traits(self) -> frozenset[Trait]:
        """The properties of this model that some engines lose."""
        source, files = self.source, self.source.kind.files
        is_truncated = source.truncate_dim is not None and source.truncate_dim < source.dimension
        is_dense = source.kind.name == "dense"
        has = {
            Trait.custom_code: bool(self.config.get("auto_map")),
            Trait.dense: is_dense and bool(source.dense),
            Trait.include_prompt: is_dense and not source.include_prompt and any(source.prompts.values()),
            Trait.is_causal: self.is_bidirectional_decoder,
            Trait.no_graph: not self.has_graph,
            Trait.no_vectors_in_graph: is_dense and self.has_graph and VECTORS not in files.graph_outputs(source),
            Trait.pooling: is_dense and source.pooling in (Pooling.max, Pooling.weighted_mean),
            Trait.scaled_positions: _has_scaled_positions(source),
            Trait.static: is_static(source.config),
            Trait.logit_scores: source.kind.name == "cross_encoder" and bool(source.settings.tokens),
            Trait.truncation: is_truncated,
            Trait.vector_length: is_dense and (is_truncated or not source.normalize),
        }
        return frozenset(trait for trait, is_present in has.items() if is_present)


def _has_scaled_positions(source: ModelSource) -> bool:
    parameters = getattr(source.config, "rope_parameters", None) or {}
    layers = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return any(layer.get("rope_type", "default") != "default" for layer in layers)


Check = Callable[[ServedModel], Iterable[Loss]]


def _no_checks(_: ServedModel) -> Iterable[Loss]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What a library or server does with a model directory."""

    title: str  # as its own documentation writes it
    source: str  # the version whose source was read
    # The kinds of models that it computes, and what it leaves out of them if the text is not empty.
    kinds: Mapping[str, str]
    lost: frozenset[Trait] = frozenset()
    model_types: frozenset[str] | None = None  # None: all of transformers
    files: tuple[str, ...] = ("config.json", "model.safetensors", "tokenizer.json")  # that it reads, besides settings
    prompts: str  # who prepends the prompts of queries and documents
    precision: str = "the type of the files"  # in which it computes by default
    checks: Check = field(default=_no_checks)  # further conditions

    def losses(self, model: ServedModel) -> list[Loss]:
        """Why it would not serve the model exactly, the worst reasons first; empty if it does.

        Of a model that it does not open, only the reasons for that. What a client can do is no loss: prepend prompts,
        format pairs, and request float32 or vectors without normalisation.
        """
        kind, losses = model.source.kind.name, []
        if kind not in self.kinds:
            losses.append(Loss(Effect.refused, f"it does not serve {KIND_NAMES[kind]}"))
        elif self.kinds[kind]:
            losses.append(Loss(Effect.partial, self.kinds[kind]))
        losses += [_TRAITS[trait] for trait in sorted(model.traits & self.lost)]
        is_known = self.model_types is None or Trait.static in model.traits or model.model_type in self.model_types
        if not is_known:
            losses.append(Loss(Effect.refused, f"it has no implementation of {model.model_type}"))
        if not any(loss.effect is Effect.refused for loss in losses):
            losses += self.checks(model)
        refused = [loss for loss in losses if loss.effect is Effect.refused]
        return refused or sorted(losses, key=lambda loss: list(Effect).index(loss.effect), reverse=True)


def reasons_against(engine: Engine, model: ServedModel) -> list[str]:
    """Why what the engine computes of the model is not to be compared with the encoder; empty if it is."""
    return [loss.reason for loss in engine.losses(model) if loss.effect not in BEARABLE]


def known_differences(engine: Engine, model: ServedModel) -> list[str]:
    """Why what the engine computes of the model may differ although it is compared."""
    return [loss.reason for loss in engine.losses(model) if loss.effect in BEARABLE]
