"""Checks of model options that cannot work, without opening the model."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

from embedtrain.config.kinds import load_kind
from embedtrain.config.late_interaction import LateInteractionConfig, QueryExpansion
from embedtrain.config.m3 import M3Config, check_hybrid_weights
from embedtrain.config.pair_template import PAIR_TEMPLATES, SCORE_TOKENS, TEMPLATE_PARTS
from embedtrain.config.recipe import (
    ADAPTER,
    ALL_LINEAR,
    LoraConfig,
    ModelConfig,
    Pooling,
    ScoreHead,
)
from embedtrain.config.sparse import SparseConfig
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import install_command

# The types of rotary scaling, and whether transformers keeps the number of positions of the original model for each.
ROPE_TYPES = {"yarn": True, "linear": False, "llama3": True}
ROPE_TYPES_BY_BATCH = ("dynamic", "longrope")  # their frequencies follow the longest text of a forward pass
_ROPE_EXAMPLE = "such as model.rope_scaling={rope_type: yarn, factor: 4}"


def check_model(model: ModelConfig) -> None:
    """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""
    check = OptionChecks(model, "model.")
    load_kind(model.kind)
    if model.path is None and model.config is None:
        raise ConfigError("no model: set model.path to a Hub id or a directory, or model.config for random weights")
    if model.path is not None and model.config is not None:
        raise ConfigError("model.path and model.config are both set: the second has no weights; keep one")
    check.require(
        model.revision is None or model.path is not None,
        "revision",
        "chooses a version of a Hub repository; set model.path to its id",
    )
    check.require(
        model.tokenizer_revision is None or model.tokenizer is not None,
        "tokenizer_revision",
        "has no effect without model.tokenizer: the model's own tokenizer has the model's revision",
    )
    _check_kind(model, check)
    if model.kind == "dense" and model.config is not None and model.pooling is None:
        raise ConfigError("model.config does not define pooling: set model.pooling to cls, mean or last")
    check.length("max_length")
    if model.include_prompt is False and model.pooling not in (None, Pooling.mean):
        raise ConfigError(include_prompt_error(model.pooling))
    check.positive("rope_theta", "null keeps that of the configuration")
    if model.rope_scaling is not None:
        check_rope_scaling(model.rope_scaling)


# The options that only models of one kind have.
_OPTIONS_OF_KIND = {
    "dense": ("pooling", "normalize", "similarity", "include_prompt", "append_eos"),
    "cross_encoder": ("pair_template", "score_head", "score_tokens", "score_labels"),
}


def _check_kind(model: ModelConfig, check: OptionChecks) -> None:
    defaults = ModelConfig()
    for kind, names in _OPTIONS_OF_KIND.items():
        foreign = [name for name in names if getattr(model, name) != getattr(defaults, name)]
        if foreign and model.kind != kind:
            unset = " ".join(f"model.{name}={written(getattr(defaults, name))}" for name in foreign)
            check.require(
                False,
                foreign[0],
                f"is for model.kind={kind}, not {model.kind}; leave it out, or write {unset} where a recipe sets it",
            )
    _check_late_interaction(model)
    _check_m3(model)
    for name, default in vars(SparseConfig()).items():
        OptionChecks(model.sparse, "model.sparse.").require(
            model.kind == "sparse" or getattr(model.sparse, name) == default,
            name,
            f"is for model.kind=sparse, not {model.kind}; leave it out",
        )
    if model.pair_template is not None:
        _check_pair_template(model.pair_template, check)
    _check_score_tokens(model, check)
    if model.score_labels is not None:
        check_score_labels(model.score_labels, check, "score_labels")
        check.require(
            model.score_tokens is None and model.score_head is not ScoreHead.tokens and model.config is None,
            "score_labels",
            "is for a model.path that is a classifier, whose score is not that of tokens; leave it out",
        )


def _check_late_interaction(model: ModelConfig) -> None:
    """Options of vectors of tokens have an effect, and their lengths fit each other."""
    options, defaults = model.late_interaction, LateInteractionConfig()
    check = OptionChecks(options, "model.late_interaction.")
    for name, default in vars(defaults).items():
        check.require(
            model.kind == "late_interaction" or getattr(options, name) == default,
            name,
            f"is for model.kind=late_interaction, not {model.kind}; leave it out",
        )
    check.at_least(1, "dim")
    for name in ("query_length", "document_length", "expansion_length"):
        check.length(name)
    not_expanded = options.query_expansion is QueryExpansion.none or (
        options.query_expansion is None and model.path is None
    )
    for name in ("expansion_length", "expansion_token", "attend_to_expansion_tokens"):
        check.require(
            getattr(options, name) is None or not not_expanded,
            name,
            "has no effect without expansion; set model.late_interaction.query_expansion to min or fixed",
        )
    if options.query_length is not None and options.expansion_length is not None:
        check.require(
            options.query_length >= options.expansion_length,
            "query_length",
            f"is below expansion_length={options.expansion_length}, the tokens of an expanded query; lower that as "
            "well, or leave query_length out",
        )


def _check_m3(model: ModelConfig) -> None:
    """Options of BGE-M3 have an effect."""
    options, check = model.m3, OptionChecks(model.m3, "model.m3.")
    for name, default in vars(M3Config()).items():
        check.require(
            model.kind == "m3" or getattr(options, name) == default,
            name,
            f"is for model.kind=m3, not {model.kind}; leave it out",
        )
    check.at_least(1, "dim")
    check_hybrid_weights(options.hybrid_weights, check)


def _check_score_tokens(model: ModelConfig, check: OptionChecks) -> None:
    """Tokens are one or two different ones, and have an effect."""
    tokens = model.score_tokens
    check.require(
        model.score_head is not ScoreHead.tokens or model.config is None,
        "score_head",
        "reads rows of the vocabulary head of a model, and model.config has no weights; set model.path",
    )
    check.require(
        model.score_head is not ScoreHead.tokens
        or model.pair_template is None
        or isinstance(model.pair_template, str)
        or tokens is not None,
        "score_head",
        "needs model.score_tokens, such as [yes, no], with a pair_template of your own",
    )
    if tokens is None:
        return
    check.require(
        len(tokens) in (1, 2) and len(set(tokens)) == len(tokens) and all(tokens),
        "score_tokens",
        "must be two different tokens, such as [yes, no], or one for its logit alone",
    )
    check.require(
        not {"True", "False"} & set(tokens),
        "score_tokens",
        'are what YAML makes of yes and no without quotes; write ["yes", "no"]',
    )
    check.require(
        model.score_head is not ScoreHead.classification and model.config is None,
        "score_tokens",
        "has no effect on a classification head; leave it out, or set model.score_head=tokens and model.path",
    )


def check_score_labels(labels: Sequence[int], check: OptionChecks, name: str) -> None:
    """Labels are one or two different ones."""
    check.require(
        len(labels) in (1, 2) and len(set(labels)) == len(labels) and min(labels) >= 0,
        name,
        "must be two different labels, such as [1,0] for the logit of label 1 minus that of label 0, or one for its "
        "logit alone",
    )


def _check_pair_template(template: Any, check: OptionChecks) -> None:
    """A name, or a mapping whose query and document contain their texts as `{query}` and `{document}`."""
    if isinstance(template, str) and template in PAIR_TEMPLATES:
        return
    example = 'such as {query: "Query: {query}\\n", document: "Document: {document}", suffix: "\\nRelevant:"}'
    is_mapping = isinstance(template, Mapping)
    check.require(
        is_mapping,
        "pair_template",
        f"must be {', '.join(SCORE_TOKENS)}, or a mapping of {', '.join(TEMPLATE_PARTS)}, {example}",
    )
    for name, text in template.items():
        known = name in TEMPLATE_PARTS and isinstance(text, str)
        check.require(
            known, "pair_template", f"{name} must be one of {', '.join(TEMPLATE_PARTS)} and a text, {example}"
        )
    for name in ("query", "document"):
        check.require(
            str(template.get(name, "")).count(f"{{{name}}}") == 1,
            "pair_template",
            f"its {name} must contain {{{name}}} once, {example}",
        )


def include_prompt_error(pooling: Pooling) -> str:
    """The message for `model.include_prompt=false` with a pooling other than mean."""
    return (
        f"model.include_prompt=false is for model.pooling=mean: with {pooling.value} the embedding is that of one "
        "token; leave include_prompt out"
    )


def check_rope_scaling(scaling: Any) -> None:
    """Raise a ConfigError for a `model.rope_scaling` that no model can have."""
    if not isinstance(scaling, Mapping):
        raise ConfigError(
            f"model.rope_scaling={scaling!r}: must be a mapping with rope_type and factor, {_ROPE_EXAMPLE}"
        )
    rope_type = scaling.get("rope_type")
    if rope_type in ROPE_TYPES_BY_BATCH:
        raise ConfigError(
            f"model.rope_scaling.rope_type={rope_type}: scales positions by the longest text of a batch, so the "
            f"embedding of a text would depend on the other texts; write one of {', '.join(ROPE_TYPES)}"
        )
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"model.rope_scaling.rope_type={rope_type}: must be one of {', '.join(ROPE_TYPES)}, {_ROPE_EXAMPLE}"
        )
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (math.isfinite(factor) and factor > 1):
        raise ConfigError(f"model.rope_scaling.factor={factor}: must be above 1, the factor of the context length")
    original = scaling.get("original_max_position_embeddings")
    if original is not None and (isinstance(original, bool) or not isinstance(original, int) or original < 1):
        raise ConfigError(
            f"model.rope_scaling.original_max_position_embeddings={original}: must be a number; default: the model's"
        )


def check_lora(lora: LoraConfig, export_formats: Sequence[str]) -> None:
    """Raise a ConfigError for options of adapters that cannot work, also together with `export.formats`."""
    defaults = LoraConfig()
    check = OptionChecks(lora, "model.lora.")
    if not lora.on:
        for name in ("alpha", "targets", "dropout", "modules_to_save", "base_dtype", "load_in_4bit", "revision"):
            check.require(
                getattr(lora, name) == getattr(defaults, name),
                name,
                "has no effect without adapters; set model.lora.rank, or model.lora.path to start from an adapter",
            )
        if ADAPTER in export_formats:
            raise ConfigError(
                f"export.formats={written(list(export_formats))}: there is no adapter to export; set model.lora.rank, "
                "or leave adapter out"
            )
        return
    check.at_least(1, "rank", "null trains the whole model")
    check.positive("alpha", "null is twice the rank")
    check.require(0 <= lora.dropout < 1, "dropout", "must be from 0 to below 1")
    targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
    check.require(
        isinstance(targets, list) and bool(targets) and all(isinstance(name, str) and name for name in targets),
        "targets",
        f"must be {ALL_LINEAR}, or names of layers such as [q_proj,v_proj]",
    )
    check.require(
        ALL_LINEAR not in targets or len(targets) == 1, "targets", f"{ALL_LINEAR} includes the others; leave them out"
    )
    if lora.path is not None:
        for name in ("rank", "alpha", "targets", "dropout"):
            check.require(
                getattr(lora, name) == getattr(defaults, name),
                name,
                f"the adapter of model.lora.path={lora.path} has its own; leave one out",
            )
    check.require(
        lora.revision is None or lora.path is not None,
        "revision",
        "chooses a version of a Hub adapter; set model.lora.path to its id",
    )
    if ADAPTER in export_formats and "dense" in lora.modules_to_save:
        raise ConfigError(
            "export.formats has adapter and model.lora.modules_to_save has dense: PEFT's adapter format cannot "
            "hold the heads behind the pooling; leave one of them out (the merged model has them)"
        )
    check.require(
        not lora.load_in_4bit or importlib.util.find_spec("bitsandbytes") is not None,
        "load_in_4bit",
        f"needs the package bitsandbytes, which is not installed: {install_command('qlora')}, or leave it out",
    )
