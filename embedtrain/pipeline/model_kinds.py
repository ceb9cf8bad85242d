"""The kinds of models that stages write, and those that they take: checked before the first stage runs."""

import re
from collections.abc import Mapping
from typing import Any

from embedtrain.config.kinds import kinds
from embedtrain.errors import ConfigError
from embedtrain.pipeline.digests import LOSS_OPTIONS, leaves
from embedtrain.pipeline.registry import MODEL, STATIC, TRAIN
from embedtrain.pipeline.types import Stage

_INDEX = re.compile(r"\[\d+\]")
_DENSE = ("dense",)
_RERANKERS = ("cross_encoder", "late_interaction")
_ENCODERS = tuple(kind.name for kind in kinds() if kind.name != "cross_encoder")
# By command and option, what it takes; other options take any kind.
_TAKEN = {
    ("evaluate", MODEL): _ENCODERS,
    ("evaluate", "reranker.path"): _RERANKERS,
    ("mine", MODEL): _ENCODERS,
    ("filter", MODEL): _ENCODERS,
    ("vectors", MODEL): _DENSE,
    ("calibrate", MODEL): _DENSE,
    (STATIC, MODEL): _DENSE,
    **{(TRAIN, f"{loss}.{name}"): _DENSE for loss in LOSS_OPTIONS for name in ("guide", "teacher", "teachers")},
}
_RERANKER_ADVICE = {
    "evaluate": "; write reranker: ${{out:{producer}.model}}, which orders what BM25 or a model has found",
    "mine": "; write teacher: ${{out:{producer}.model}} beside the embedding model that finds the documents",
}


def kind_of_model(stage: Stage, stages: Mapping[str, Stage]) -> str | None:
    """The kind of the model that a stage writes; None if it writes none, or changes one from outside."""
    if MODEL not in stage.kind.outputs:
        return None
    if stage.kind.name == TRAIN:
        kind: str = stage.options.model.kind
        return kind
    if stage.kind.name == STATIC:
        return "dense"
    kinds = [kind_of_model(stages[name], stages) for name in stage.depends]
    return next((kind for kind in kinds if kind is not None), None)


def is_reranker(path: Any, stages: Mapping[str, Stage]) -> bool:
    """Whether a cross-encoder will be at a path, written by one of the stages."""
    producer = _producer(path, stages)
    return producer is not None and kind_of_model(producer, stages) == "cross_encoder"


def check_models(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """Raise ConfigError if a stage takes a model of a kind that it cannot use from one of the earlier `stages`."""
    for name, value in leaves(stage.options, ""):
        allowed = _TAKEN.get((stage.kind.name, _INDEX.sub("", name)))
        producer = _producer(value, stages)
        kind = None if producer is None else kind_of_model(producer, stages)
        if allowed is None or producer is None or kind is None or kind in allowed:
            continue
        advice = _RERANKER_ADVICE.get(stage.kind.name, "") if kind == "cross_encoder" and name == MODEL else ""
        raise ConfigError(
            f"{name}={value}: stage {producer.name} writes a model of the kind {kind}, and {stage.kind.name} "
            f"takes {' or '.join(allowed)}{advice.format(producer=producer.name)}"
        )


def _producer(path: Any, stages: Mapping[str, Stage]) -> Stage | None:
    if not isinstance(path, str):
        return None
    return next(
        (stage for stage in stages.values() if MODEL in stage.kind.outputs and stage.output(MODEL) == path), None
    )
