"""The kinds of models that stages write, and those that they take: checked before the first stage runs."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from embedtrain.config.commands import MODEL
from embedtrain.config.kinds import Kind, kinds, load_kind
from embedtrain.errors import ConfigError
from embedtrain.pipeline.state import LOSS_OPTIONS, leaves
from embedtrain.pipeline.types import Stage

_INDEX = re.compile(r"\[\d+\]")
_GUIDES = tuple(f"{loss}.{name}" for loss in LOSS_OPTIONS for name in ("guide", "teacher", "teachers"))
_RERANKER_ADVICE = {
    "evaluate": "; write reranker: ${{out:{producer}.model}}, which orders what BM25 or a model has found",
    "mine": "; write teacher: ${{out:{producer}.model}} beside the embedding model that finds the documents",
}


def kind_of_model(stage: Stage, stages: Mapping[str, Stage]) -> Kind | None:
    """The kind of the model that a stage writes; None if it writes none, or changes one from outside."""
    if MODEL not in stage.command.outputs:
        return None
    if stage.is_training:
        return load_kind(stage.options.model.kind)
    if stage.command.kind is not None:
        return load_kind(stage.command.kind)
    found = [kind_of_model(stages[name], stages) for name in stage.depends]
    return next((kind for kind in found if kind is not None), None)


def is_reranker(path: Any, stages: Mapping[str, Stage]) -> bool:
    """Whether a cross-encoder will be at a path, written by one of the stages."""
    producer = _producer(path, stages)
    kind = None if producer is None else kind_of_model(producer, stages)
    return kind is not None and kind.scores_pairs


def check_models(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """Raise ConfigError if a stage takes a model of a kind that it cannot use from one of the earlier `stages`."""
    for name, value in leaves(stage.options, ""):
        takes = _taken(stage, _INDEX.sub("", name))
        producer = _producer(value, stages)
        kind = None if producer is None else kind_of_model(producer, stages)
        if takes is None or producer is None or kind is None or takes(kind):
            continue
        advice = _RERANKER_ADVICE.get(stage.command.name, "") if kind.scores_pairs and name == MODEL else ""
        raise ConfigError(
            f"{name}={value}: stage {producer.name} writes a model of the kind {kind.name}, and {stage.command.name} "
            f"takes {' or '.join(one.name for one in kinds() if takes(one))}{advice.format(producer=producer.name)}"
        )


def _taken(stage: Stage, option: str) -> Callable[[Kind], bool] | None:
    """Which kinds of models an option takes; None: any, or the option names no model."""
    if stage.is_training and option in _GUIDES:
        return lambda kind: kind.has_one_vector
    return stage.command.takes.get(option)


def _producer(path: Any, stages: Mapping[str, Stage]) -> Stage | None:
    if not isinstance(path, str):
        return None
    return next(
        (stage for stage in stages.values() if MODEL in stage.command.outputs and stage.output(MODEL) == path), None
    )
