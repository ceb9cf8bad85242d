"""Options of model.kind=cross_encoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.kind_settings import PAIR_TEMPLATES, SCORE_TOKENS, TEMPLATE_PARTS, ScoreHead, check_score_labels
from embedtrain.config.recipe import ModelConfig
from embedtrain.config.validation import OptionChecks, model_option
from embedtrain.kinds.dense.options import ImageOptions


@dataclass(kw_only=True)
class CrossEncoderOptions(ModelConfig):
    """A score per pair of query and document (a reranker)."""

    kind: str = "cross_encoder"
    # The text around a pair's query and document, for a decoder: qwen3, qwen3_vl, gemma or mxbai, as Qwen3-Reranker,
    # Qwen3-VL-Reranker, bge-reranker-v2-gemma and mxbai-rerank-v2 have it, or a mapping of prefix, query, document and
    # suffix; default: that of the directory, else the tokenizer's pairs.
    pair_template: Any = None
    score_head: ScoreHead = ScoreHead.auto
    score_tokens: list[str] | None = None  # [yes, no], or one token for its logit; default: those of the template
    # Of a classifier of several labels: [1, 0] for the logit of label 1 minus that of label 0, or one for its logit.
    score_labels: list[int] | None = None
    image: ImageOptions = field(default_factory=ImageOptions)  # of a vision-language model


def check_cross_encoder(model: CrossEncoderOptions) -> None:
    """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""
    check = OptionChecks(model, "model.")
    if model.pair_template is not None:
        _check_pair_template(model.pair_template, check)
    _check_score_tokens(model, check)
    if model.score_labels is not None:
        check_score_labels(model.score_labels, check, "score_labels")
        check.require(
            model.score_tokens is None and model.score_head is not ScoreHead.tokens and model.config is None,
            "score_labels",
            f"is for a {model_option('path')} that is a classifier, whose score is not that of tokens; leave it out",
        )


def _check_score_tokens(model: CrossEncoderOptions, check: OptionChecks) -> None:
    """Tokens are one or two different ones, and have an effect."""
    tokens = model.score_tokens
    check.require(
        model.score_head is not ScoreHead.tokens or model.config is None,
        "score_head",
        f"reads rows of the vocabulary head of a model, and model.config has no weights; set {model_option('path')}",
    )
    check.require(
        model.score_head is not ScoreHead.tokens
        or model.pair_template is None
        or isinstance(model.pair_template, str)
        or tokens is not None,
        "score_head",
        f"needs {model_option('score_tokens')}, such as [yes, no], with a pair_template of your own",
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
        "has no effect on a classification head; leave it out, or set model.score_head=tokens and "
        f"{model_option('path')}",
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
