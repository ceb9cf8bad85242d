"""Matryoshka options of a loss: on the first dimensions of vectors, and after the first layers of the model."""

import math

from embedtrain.config.loss_choices import LayerWeighting, MatryoshkaWeighting
from embedtrain.config.losses import CombinedConfig, LossConfig, SentenceTransformersConfig
from embedtrain.config.row_requirements import row_requirements
from embedtrain.config.validation import OptionChecks, written


def matryoshka_dims_of(loss: LossConfig) -> set[int]:
    """The dimensions on which a loss, or a part of it, also trains."""
    if isinstance(loss, CombinedConfig):
        return set(loss.matryoshka_dims or ()).union(*(matryoshka_dims_of(part) for part in loss.losses))
    of_class = loss.arguments if isinstance(loss, SentenceTransformersConfig) else None
    return set(loss.matryoshka_dims or (of_class or {}).get("matryoshka_dims") or ())


def matryoshka_layers_of(loss: LossConfig) -> set[int]:
    """The numbers of layers after which a loss, or a part of it, also trains."""
    parts = loss.losses if isinstance(loss, CombinedConfig) else []
    return set(loss.matryoshka_layers or ()).union(*(matryoshka_layers_of(part) for part in parts))


def matryoshka_weights(loss: LossConfig) -> list[float]:
    """The weight of each of `matryoshka_dims`, in the order of the option."""
    dims = loss.matryoshka_dims or []
    if loss.matryoshka_weights is not None:
        return loss.matryoshka_weights
    if loss.matryoshka_weighting is MatryoshkaWeighting.uniform:
        return [1.0] * len(dims)
    largest_first = sorted(dims, reverse=True)
    return [math.sqrt(dim / largest_first[0]) / (largest_first.index(dim) + 1) for dim in dims]


def layer_weights(loss: LossConfig) -> list[float]:
    """The weight of each of `matryoshka_layers`, in the order of the option."""
    layers = loss.matryoshka_layers or []
    if loss.layer_weights is not None:
        return loss.layer_weights
    match loss.layer_weighting:
        case LayerWeighting.uniform:
            return [1.0] * len(layers)
        case LayerWeighting.log:
            return [1 / (1 + math.log(layer)) for layer in layers]
        case LayerWeighting.linear:
            return [1 / layer for layer in layers]


def check_matryoshka(loss: LossConfig, check: OptionChecks) -> None:
    """Reject dimensions that are not different numbers, and options without them."""
    dims = loss.matryoshka_dims
    _check_numbers(loss, check, "matryoshka_dims", "matryoshka_weights", "[768,256,64]")
    check.require(
        loss.matryoshka_weighting is MatryoshkaWeighting.uniform
        or (dims is not None and loss.matryoshka_weights is None),
        "matryoshka_weighting",
        "chooses the weights of matryoshka_dims, without matryoshka_weights",
    )
    check.require(
        loss.matryoshka_per_step is None or 2 <= loss.matryoshka_per_step <= len(dims or ()),
        "matryoshka_per_step",
        f"must be from 2 to the number of matryoshka_dims={written(dims)}; null trains on all of them",
    )


def check_layers(loss: LossConfig, check: OptionChecks) -> None:
    """The same of layers."""
    layers = loss.matryoshka_layers
    _check_numbers(loss, check, "matryoshka_layers", "layer_weights", "[3,6]")
    check.require(
        loss.layer_weighting is LayerWeighting.uniform or (layers is not None and loss.layer_weights is None),
        "layer_weighting",
        "chooses the weights of matryoshka_layers, without layer_weights",
    )
    check.require(
        loss.layers_per_step is None or 1 <= loss.layers_per_step <= len(layers or ()),
        "layers_per_step",
        f"must be from 1 to the number of matryoshka_layers={written(layers)}; null trains all of them",
    )
    check.require(
        loss.precisions is None or layers is not None or not matryoshka_layers_of(loss),
        "precisions",
        "is for the whole loss, and a part has matryoshka_layers; write them for the whole loss as well",
    )
    check.at_least(0, "layer_kl")
    check.require(loss.layer_kl == 0 or layers is not None, "layer_kl", "has no effect without matryoshka_layers")


def check_layer_kl(loss: LossConfig, check: OptionChecks) -> None:
    """Reject `layer_kl` of a loss, whose other options are checked, without pairs of queries and documents."""
    check.require(
        loss.layer_kl == 0 or not row_requirements(loss).label,
        "layer_kl",
        f"compares queries with documents, and loss={loss.name} takes rows of one text; leave it out",
    )


def _check_numbers(loss: LossConfig, check: OptionChecks, option: str, weights_option: str, example: str) -> None:
    numbers, weights = getattr(loss, option), getattr(loss, weights_option)
    check.require(
        numbers is None or (bool(numbers) and min(numbers) >= 1 and len(set(numbers)) == len(numbers)),
        option,
        f"must be different numbers from 1 on, such as {example}; null switches it off",
    )
    if weights is not None:
        check.require(
            numbers is not None and len(weights) == len(numbers),
            weights_option,
            f"must have one weight for each of {option}={written(numbers)}",
        )
        check.require(all(0 < weight < math.inf for weight in weights), weights_option, "must be above 0")
