"""What of a model serving engines keep: the verdict for each engine, and the section of the model card about them.

The facts about the engines are in `serving_engines.yaml`.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from embedtrain.formats.onnx import GRAPH
from embedtrain.formats.sentence_transformers import PYLATE, SETTINGS
from embedtrain.models.attention_direction import attends_causally, is_decoder
from embedtrain.models.file_references import read_json
from embedtrain.models.pooling import pooling_name
from embedtrain.models.types import ModelSource

_MAX_BATCH_TOKENS = 16384  # of text-embeddings-inference by default
_PLAIN_ACTIVATIONS = ("torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity")


class Severity(StrEnum):
    """What a deviation does to the vectors or scores that an engine returns, from the least."""

    rounded = "rounded"  # they differ by less than 1e-2 of their length
    some_texts = "some_texts"  # those that the reason describes get other tokens
    partial = "partial"  # the engine computes a part of the output
    changed = "changed"
    refused = "refused"  # the engine does not open the model


# With these, what the engine computes is compared, and used.
_BEARABLE = (Severity.rounded, Severity.some_texts, Severity.partial)
_VERDICTS = {
    Severity.rounded: "nearly",
    Severity.some_texts: "most texts",
    Severity.partial: "a part",
    Severity.changed: "**other numbers**",
    Severity.refused: "no",
}


@dataclass(frozen=True, slots=True)
class Deviation:
    """Why an engine does not serve a model exactly."""

    effect: Severity
    reason: str  # a main clause whose subject, the engine, is `it`


@dataclass(frozen=True)
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
    def kind(self) -> str:
        """What engines know it as."""
        return self.source.kind.served_as(self.source)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What rules about engines refer to, by name; the traits among them are true or false."""
        source, config, prompts = self.source, self.config, self.source.prompts
        kind, rope, layers = source.config.model_type, config.get("rope_scaling") or {}, config.get("layer_types") or ()
        others = [dense.activation for dense in source.vectors.dense if dense.activation not in _PLAIN_ACTIVATIONS]
        sizes = [config.get(name) or 0 for name in ("head_dim", "num_attention_heads", "hidden_size")]
        pattern, max_length = config.get("_sliding_window_pattern"), source.tokenization.max_length or 0
        has_own_option = kind == "gemma3_text"
        is_bidirectional = is_decoder(source.config) and not attends_causally(source.config) and not has_own_option
        return {
            **dict.fromkeys(_TABLE["traits"], False),
            "kind": source.kind.name,
            "model_type": str(kind),
            "pooling": pooling_name(source.vectors.pooling),
            "pooling_upper": pooling_name(source.vectors.pooling).upper(),
            "normalize": json.dumps(source.vectors.normalize),
            "max_length": max_length,
            "is_long": max_length > _MAX_BATCH_TOKENS,
            **{role: json.dumps(prompts.get(role, ""), ensure_ascii=False) for role in ("query", "document")},
            **{f"has_{role}_prompt": bool(prompts.get(role)) for role in ("query", "document")},
            "has_graph": self.has_graph,
            "has_sentencepiece": self.has_sentencepiece,
            "is_pylate": self.is_pylate,
            "is_bidirectional_decoder": is_bidirectional,
            "has_dense": bool(source.vectors.dense),
            "other_activation": others[0].rpartition(".")[2] if others else "",
            "activation": config.get("hidden_act", config.get("hidden_activation", config.get("activation"))),
            "hidden_act": config.get("hidden_act"),
            "has_other_head_dim": bool(sizes[0]) and sizes[0] * sizes[1] != sizes[2],
            "attention_bias": bool(config.get("attention_bias")),
            "norm_bias": bool(config.get("norm_bias")),
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "use_bidirectional_attention": bool(config.get("use_bidirectional_attention")),
            "has_token_types": config.get("type_vocab_size", 1) > 1,
            "rope_scaling": bool(rope),
            "rope_type": rope.get("rope_type"),
            "has_distance_of_full_layers": "global_attn_every_n_layers" in config,
            "has_irregular_layers": pattern is not None
            and any(((i + 1) % pattern > 0) != (layer == "sliding_attention") for i, layer in enumerate(layers)),
            # Traits; those of a kind of model are its own.
            "custom_code": bool(config.get("auto_map")),
            "is_causal": is_bidirectional,
            "no_graph": not self.has_graph,
            "scaled_positions": _has_scaled_positions(source),
            "static": not source.kind.files.is_transformers(source),
            "truncation": source.vectors.truncate_dim is not None and source.vectors.truncate_dim < source.dimension,
            **source.kind.files.serving_facts(source, has_graph=self.has_graph),
        }

    @property
    def traits(self) -> frozenset[str]:
        """The properties of this model that some engines lose, by their names in the table."""
        return frozenset(trait for trait in _TABLE["traits"] if self.facts[trait])


def _has_scaled_positions(source: ModelSource) -> bool:
    parameters = getattr(source.config, "rope_parameters", None) or {}
    layers = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return any(layer.get("rope_type", "default") != "default" for layer in layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What a library or server does with a model directory; the fields are explained in the table."""

    title: str
    source: str
    kinds: Mapping[str, str]
    prompts: str
    lost: frozenset[str] = frozenset()
    model_types: frozenset[str] | None = None
    rules: Sequence[Mapping[str, Any]] = ()
    start: Sequence[str | Mapping[str, Any]] = ()

    def deviations(self, model: ServedModel) -> list[Deviation]:
        """Why it would not serve the model exactly, the worst reasons first; empty if it does.

        Of a model that it does not open, only the reasons for that. What a client can do is no deviation: prepend
        prompts, format pairs, and request float32 or vectors without normalisation.
        """
        kind, facts, deviations = model.kind, model.facts, []
        if kind not in self.kinds:
            known = "whether it serves {} is not known" if self.is_unknown(model) else "it does not serve {}"
            own = model.source.kind
            plural = own.files.plural if kind == own.name else f"{kind.replace('_', '-')} models"
            deviations.append(Deviation(Severity.refused, known.format(plural)))
        elif self.kinds[kind]:
            deviations.append(Deviation(Severity.partial, self.kinds[kind]))
        # No engine has the user's class, but a graph computes it.
        lost = self.lost if "no_graph" in self.lost else self.lost | {"own_pooling"}
        deviations += [_deviation(_TABLE["traits"][trait], facts) for trait in sorted(model.traits & lost)]
        if not (self.model_types is None or facts["static"] or facts["model_type"] in self.model_types):
            deviations.append(Deviation(Severity.refused, f"it has no implementation of {facts['model_type']}"))
        if not any(deviation.effect is Severity.refused for deviation in deviations):
            deviations += _applied(self.rules, facts)
        refused = [deviation for deviation in deviations if deviation.effect is Severity.refused]
        return refused or sorted(deviations, key=lambda deviation: list(Severity).index(deviation.effect), reverse=True)

    def is_unknown(self, model: ServedModel) -> bool:
        """Whether nothing is known about what the engine does with models of this kind."""
        return model.kind in _TABLE["partly_known"] and model.kind not in self.kinds

    def reasons_against(self, model: ServedModel) -> list[str]:
        """Why what it computes of the model is not to be compared with the encoder; empty if it is."""
        return [deviation.reason for deviation in self.deviations(model) if deviation.effect not in _BEARABLE]

    def known_differences(self, model: ServedModel) -> list[str]:
        """Why what it computes of the model may differ although it is compared."""
        return [deviation.reason for deviation in self.deviations(model) if deviation.effect in _BEARABLE]

    def command(self, model: ServedModel, name: str) -> str:
        """How to start it with the model `name`, or the call that opens it; empty if the section on usage says it."""
        facts = model.facts | {"name": shlex.quote(name)}
        parts = [{"text": part} if isinstance(part, str) else part for part in self.start]
        return "".join(part["text"].format_map(facts) for part in parts if _holds(part, facts))


def _holds(rule: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether the facts are those of `when`."""
    for name, expected in rule.get("when", {}).items():
        excluded = isinstance(expected, dict)
        values = expected["not"] if excluded else expected if isinstance(expected, list) else [expected]
        if (facts[name] in values) is excluded:
            return False
    return True


def _applied(rules: Sequence[Any], facts: Mapping[str, Any]) -> Iterator[Deviation]:
    for rule in _flat(rules):
        if _holds(rule, facts):
            if "effect" in rule:
                yield _deviation(rule, facts)
            if rule.get("last"):
                return


def _flat(rules: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """A rule that is itself a list is shared by several engines."""
    for rule in rules:
        yield from _flat(rule) if isinstance(rule, list) else [rule]


def _deviation(entry: Mapping[str, str], facts: Mapping[str, Any]) -> Deviation:
    return Deviation(Severity(entry["effect"]), entry["reason"].format_map(facts))


def _engine(entry: Mapping[str, Any]) -> Engine:
    types = entry.get("model_types")
    names = None if types is None else frozenset(name for each in types for name in ([each], each)[type(each) is list])
    return Engine(**{**entry, "lost": frozenset(entry.get("lost", ())), "model_types": names})


_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("serving_engines.yaml").read_text(encoding="utf-8"))
# By the name of the package that a client imports, or of the program.
SERVING_ENGINES: Mapping[str, Engine] = {name: _engine(entry) for name, entry in _TABLE["engines"].items()}


def serving_section(model: ServedModel, name: str) -> str:
    """A section of the model card: which engines serve the model `name` exactly, why others do not, and commands."""
    rows, commands = [], []
    listed = [engine for engine in SERVING_ENGINES.values() if not engine.is_unknown(model)]
    for engine in listed:
        deviations = engine.deviations(model)
        verdict = _VERDICTS[deviations[0].effect] if deviations else "exactly"
        reasons = "; ".join(deviation.reason for deviation in deviations)
        rows.append(f"| {engine.title} ({engine.source}) | {verdict} | {reasons} |")
        if engine.start and not engine.reasons_against(model):
            commands += [f"# {engine.title}", engine.command(model, name)]
    lines = [
        "## Serving",
        "",
        "What engines compute of this model in float32, from the source code of the versions in parentheses. "
        "`embedtrain verify` compares those that are installed, except Triton and text-embeddings-inference, which it "
        "cannot run.",
        "",
        "| engine | serves it | why not exactly |",
        "| --- | --- | --- |",
        *rows,
        "",
        *(["What others do with such a model is not known.", ""] if len(listed) < len(SERVING_ENGINES) else []),
        *(["```text", *commands, "```", ""] if commands else []),
    ]
    return "\n".join(lines)


def changed_outputs(model: ServedModel) -> list[str]:
    """A line for each reason why engines that open the model return other numbers, and nothing says so."""
    engines: dict[str, list[str]] = {}
    for engine in SERVING_ENGINES.values():
        for deviation in engine.deviations(model):
            if deviation.effect is Severity.changed:
                engines.setdefault(deviation.reason, []).append(engine.title)
    return [f"other numbers with {_joined(titles)}: {reason}" for reason, titles in engines.items()]


def _joined(titles: list[str]) -> str:
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"
