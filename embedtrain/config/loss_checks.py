"""Options of a loss that cannot work, found when the recipe is composed."""

import difflib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from embedtrain.config.losses import (
    LOSSES,
    BatchTripletConfig,
    CombinedConfig,
    ContrastiveConfig,
    DistillEmbeddingsConfig,
    Hardness,
    InfoNCEConfig,
    LossConfig,
    LossDirection,
    OnlineContrastiveConfig,
    OrthogonalConfig,
    PartitionMode,
    SentenceTransformersConfig,
    SigLIPConfig,
    TripletConfig,
)
from embedtrain.config.row_requirements import ScoreRequirement, row_requirements
from embedtrain.config.sentence_transformers import check_sentence_transformers
from embedtrain.errors import ConfigError


def check_loss(loss: LossConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """
    if loss.weight != 1.0:
        raise ConfigError(f"loss.weight={loss.weight} is for the parts of loss=combined: a loss alone needs no weight")
    _check(loss, "loss")


def check_loss_name(name: Any, option: str) -> str:
    """The name itself, if a loss has it.

    Raises:
        ConfigError: none has; the nearest is named.
    """
    if str(name) not in LOSSES:
        near = difflib.get_close_matches(str(name), LOSSES, n=1)
        hint = f", did you mean {near[0]}?" if near else "."
        raise ConfigError(f"{option}={name}: there is no such loss{hint} There are {', '.join(LOSSES)}")
    return str(name)


def guide_paths(loss: LossConfig) -> list[str]:
    """The models whose vectors a loss asks for, each once."""
    match loss:
        case CombinedConfig(losses=parts):
            return list(dict.fromkeys(path for part in parts for path in guide_paths(part)))
        case InfoNCEConfig(guide=path) | SentenceTransformersConfig(guide=path) | DistillEmbeddingsConfig(teacher=path):
            return [] if path is None else [path]
        case _:
            return []


def _check(loss: LossConfig, option: str) -> None:
    if type(loss) is not LOSSES[check_loss_name(loss.name, f"{option}.name")]:
        raise ConfigError(f"{option}.name={loss.name} does not choose a loss: write loss={loss.name}")
    for problem in _problems(loss):
        raise ConfigError(f"{option}.{problem}")
    if isinstance(loss, SentenceTransformersConfig):
        check_sentence_transformers(loss, option)
    if isinstance(loss, CombinedConfig):
        for index, part in enumerate(loss.losses):
            if isinstance(part, CombinedConfig):
                raise ConfigError(f"{option}.losses[{index}]: a combination within a combination; list its parts here")
            where = f"{option}.losses[{index}]"
            if None not in (loss.matryoshka_dims, part.matryoshka_dims):
                raise ConfigError(f"{where}.matryoshka_dims: {option}.matryoshka_dims is around this one already")
            # What a part does not go with, it does not go with around it either.
            around = loss.matryoshka_dims or part.matryoshka_dims
            _check(replace(part, matryoshka_dims=around), where)
        _check_rows_fit(loss, option)


def _problems(loss: LossConfig) -> Iterator[str]:
    """What is wrong with the options of one loss, without the loss's own place in the recipe."""
    if not _positive(loss.weight):
        yield f"weight={loss.weight}: must be above 0; leave the loss out instead"
    yield from _matryoshka(loss)
    for name in ("temperature", "teacher_temperature"):
        value = getattr(loss, name, None)
        if value is not None and not _positive(value):
            yield f"{name}={value}: must be above 0; {'0.01 to 0.1' if name == 'temperature' else '1'} is usual"
    match loss:
        case InfoNCEConfig():
            yield from _bounds(loss, trained=loss.learn_temperature)
            yield from _infonce(loss)
        case SigLIPConfig():
            yield from _bounds(loss, trained=loss.learn_temperature)
            if not math.isfinite(loss.bias):
                yield f"bias={loss.bias}: must be a number; -10 is usual"
        case ContrastiveConfig() | OnlineContrastiveConfig() | TripletConfig() | BatchTripletConfig():
            if not _positive(loss.margin):
                yield f"margin={loss.margin}: must be above 0"
        case OrthogonalConfig():
            weights = (loss.mean_weight, loss.second_moment_weight)
            if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
                yield "mean_weight and second_moment_weight must not be negative, and one of them above 0"
        case DistillEmbeddingsConfig() if loss.project and loss.matryoshka_dims is not None:
            yield "project=true: a projection takes all dimensions, so it does not go with matryoshka_dims"
        case CombinedConfig() if not loss.losses:
            yield "losses is empty: name some, such as losses=[{name: infonce}, {name: distill_scores, weight: 0.5}]"


def _matryoshka(loss: LossConfig) -> Iterator[str]:
    dims, weights = loss.matryoshka_dims, loss.matryoshka_weights
    if dims is not None and (not dims or min(dims) < 1 or len(set(dims)) < len(dims)):
        yield f"matryoshka_dims={dims}: different numbers from 1 on, such as [768,256,64]; null switches it off"
    if weights is None:
        return
    if dims is None or len(weights) != len(dims):
        yield f"matryoshka_weights={weights}: one weight for each of matryoshka_dims={dims}"
    if not all(map(_positive, weights)):
        yield f"matryoshka_weights={weights}: must be above 0"


def _bounds(loss: InfoNCEConfig | SigLIPConfig, *, trained: bool) -> Iterator[str]:
    bounds = loss.temperature_bounds
    if len(bounds) != 2 or not all(map(_positive, bounds)) or bounds[0] >= bounds[1]:
        yield f"temperature_bounds={bounds}: two numbers above 0, the smaller first, such as [0.01, 1.0]"
    elif trained and not bounds[0] <= loss.temperature <= bounds[1]:
        yield f"temperature={loss.temperature} is not within temperature_bounds={bounds}"


def _infonce(loss: InfoNCEConfig) -> Iterator[str]:
    directions = [side.value for side in loss.directions]
    told = f"directions=[{','.join(directions)}]"
    if LossDirection.query_document not in loss.directions or len(set(directions)) < len(directions):
        yield f"{told}: query_document (it has the positive) and any of {', '.join(list(LossDirection)[1:])}, each once"
    without = [
        side.value for side in loss.directions if side in (LossDirection.query_query, LossDirection.document_document)
    ]
    if loss.partition_mode is PartitionMode.separate and without:
        yield f"partition_mode=separate: a softmax over {without[0]} alone has no positive; write partition_mode=joint"
    if not loss.in_batch_negatives and loss.directions != [LossDirection.query_document]:
        yield f"in_batch_negatives=false leaves only query_document, not {told}"
    if not loss.in_batch_negatives and loss.hardness is Hardness.in_batch:
        yield "hardness=in_batch: there are none with in_batch_negatives=false"
    for name in ("margin", "false_negative_margin", "guide_margin", "hardness_strength"):
        value = getattr(loss, name)
        if value is not None and not math.isfinite(value):
            yield f"{name}={value}: must be a number"
    if loss.margin < 0 or loss.hardness_strength < 0:
        yield f"margin={loss.margin}, hardness_strength={loss.hardness_strength}: must not be negative"
    if (loss.hardness is Hardness.none) != (loss.hardness_strength == 0):
        yield (
            f"hardness={loss.hardness.value}, hardness_strength={loss.hardness_strength}: "
            f"one has no effect without the other"
        )
    if loss.guide is None and loss.guide_margin != 0:
        yield f"guide_margin={loss.guide_margin} has no effect without loss.guide"


def _check_rows_fit(loss: CombinedConfig, option: str) -> None:
    """Refuse losses that ask for different rows."""
    needs = [row_requirements(part) for part in loss.losses]
    classes = [need.loss for need in needs if need.label]
    pairs = [need.loss for need in needs if need.documents]
    if classes and pairs:
        raise ConfigError(
            f"{option}.losses: {classes[0]} takes rows of one text and its class, {pairs[0]} rows of a query and "
            f"documents: they cannot be trained on the same rows"
        )
    scored = [need.loss for need in needs if need.scores is not ScoreRequirement.none]
    vectors = [need.loss for need in needs if need.vectors]
    if vectors and (scored or classes):
        raise ConfigError(
            f"{option}.losses: rows have one column of values, which is vectors for {vectors[0]} and scores or "
            f"classes for {(scored or classes)[0]}: give {vectors[0]} a `teacher` instead"
        )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
