"""Checks of loss=sentence_transformers, without importing sentence-transformers or torch."""

from collections.abc import Mapping
from typing import Any

from embedtrain.config.losses import SentenceTransformersConfig
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, UNSUPPORTED_LOSSES
from embedtrain.config.validation import OptionChecks, did_you_mean, written
from embedtrain.errors import ConfigError

MATRYOSHKA = "MatryoshkaLoss"
LOSSES_WITH_GUIDE = ("GISTEmbedLoss", "CachedGISTEmbedLoss")

_MATRIX = ("cos_sim", "dot_score", "euclidean_sim", "manhattan_sim")
_PAIRWISE = (
    "pairwise_cos_sim",
    "pairwise_dot_score",
    "pairwise_euclidean_sim",
    "pairwise_manhattan_sim",
    "pairwise_angle_sim",
)
_SIAMESE = ("EUCLIDEAN", "MANHATTAN", "COSINE_DISTANCE")
_BATCH = ("cosine_distance", "euclidean_distance")

# The functions that an argument may name. They are looked up by these names, never evaluated.
FUNCTION_ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "MultipleNegativesRankingLoss": {"similarity_fct": _MATRIX},
    "MultipleNegativesSymmetricRankingLoss": {"similarity_fct": _MATRIX},
    "CachedMultipleNegativesRankingLoss": {"similarity_fct": _MATRIX},
    "CachedMultipleNegativesSymmetricRankingLoss": {"similarity_fct": _MATRIX},
    "GlobalOrthogonalRegularizationLoss": {"similarity_fct": _MATRIX},
    "CoSENTLoss": {"similarity_fct": _PAIRWISE},
    "DistillKLDivLoss": {"similarity_fct": _PAIRWISE},
    "MarginMSELoss": {"similarity_fct": _PAIRWISE},
    "TripletLoss": {"distance_metric": ("COSINE", "EUCLIDEAN", "MANHATTAN")},
    "ContrastiveLoss": {"distance_metric": _SIAMESE},
    "OnlineContrastiveLoss": {"distance_metric": _SIAMESE},
    "BatchAllTripletLoss": {"distance_metric": _BATCH},
    "BatchHardTripletLoss": {"distance_metric": _BATCH},
    "BatchHardSoftMarginTripletLoss": {"distance_metric": _BATCH},
    "BatchSemiHardTripletLoss": {"distance_metric": _BATCH},
}

# Arguments that cannot be set, and why.
_REJECTED = {
    "model": "the model is that of the recipe; leave it out",
    "guide": "set the guide beside class_name instead: guide=a directory or a Hub id",
    "gather_across_devices": "the batch of all ranks is always gathered; leave it out",
    "loss_fct": "is a function, which YAML cannot name; leave it out",
    "cos_score_transformation": "is a function, which YAML cannot name; leave it out",
}


def check_sentence_transformers(loss: SentenceTransformersConfig, option: str = "loss") -> None:
    """Reject options, named `option` in the recipe, that no supported version of sentence-transformers accepts.

    A ConfigError for an unknown class, one that needs more than embeddings, an argument that cannot be set, a function
    that is not known by name, a missing or superfluous guide, and `matryoshka.dims` for a class that takes whole
    embeddings.
    """
    _check_class(loss.class_name, loss.arguments, option)
    name = loss.class_name
    if name == MATRYOSHKA:
        name = _check_matryoshka_arguments(loss.arguments, option)
    check = OptionChecks(loss.matryoshka, f"{option}.matryoshka.")
    check.require(
        loss.matryoshka.dims is None or loss.class_name != MATRYOSHKA,
        "dims",
        f"{MATRYOSHKA} shortens embeddings itself; leave it out",
    )
    check.require(
        loss.matryoshka.precisions is None or loss.class_name != MATRYOSHKA,
        "precisions",
        f"{MATRYOSHKA} would truncate vectors after they are quantised; write loss.matryoshka.dims instead of it",
    )
    check.require(
        loss.matryoshka.dims is None or (name != "SoftmaxLoss" and not SENTENCE_TRANSFORMERS_LOSSES[name].vectors),
        "dims",
        f"{name} takes whole embeddings; leave it out",
    )
    check = OptionChecks(loss, f"{option}.")
    if name in LOSSES_WITH_GUIDE:
        check.require(loss.guide is not None, "guide", f"{name} needs a guide; write a directory or a Hub id")
    check.require(
        loss.guide is None or name in LOSSES_WITH_GUIDE,
        "guide",
        f"is for {' and '.join(LOSSES_WITH_GUIDE)}; {name} has no guide",
    )


def _check_class(name: Any, arguments: Any, option: str) -> None:
    """Check a class's name and arguments; `option` is that of the mapping that holds both."""
    supported = [*SENTENCE_TRANSFORMERS_LOSSES, MATRYOSHKA]
    if not name:
        raise ConfigError(f"{option}.class_name is missing: set it to one of {', '.join(supported)}")
    if name in UNSUPPORTED_LOSSES:
        raise ConfigError(
            f"{option}.class_name={name}: needs {UNSUPPORTED_LOSSES[name]}, but losses see embeddings only. "
            f"Available are {', '.join(supported)}"
        )
    if name not in supported:
        hint = did_you_mean(str(name), supported)
        raise ConfigError(
            f"{option}.class_name={name}: there is no such class{hint} Available are {', '.join(supported)}"
        )
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{option}.arguments={arguments!r}: must be a mapping of the arguments of {name}")
    for argument, value in arguments.items():
        if argument in _REJECTED:
            raise ConfigError(f"{option}.arguments.{argument}={written(value)}: {_REJECTED[argument]}")
        allowed = FUNCTION_ARGUMENTS.get(name, {}).get(argument)
        if allowed and value not in allowed:
            raise ConfigError(
                f"{option}.arguments.{argument}={written(value)}: {name} takes one of {', '.join(allowed)}"
            )


def _check_matryoshka_arguments(arguments: Mapping[str, Any], option: str) -> str:
    """Check the arguments of MatryoshkaLoss, and return the name of the class that it wraps."""
    inner, inner_option = arguments.get("loss"), f"{option}.arguments.loss"
    if not isinstance(inner, Mapping) or "class_name" not in inner or set(inner) - {"class_name", "arguments"}:
        raise ConfigError(
            f"{inner_option}={inner!r}: {MATRYOSHKA} takes a mapping such as "
            "{class_name: MultipleNegativesRankingLoss, arguments: {scale: 20}}"
        )
    name, inner_arguments = inner["class_name"], inner.get("arguments", {})
    if name == MATRYOSHKA:
        raise ConfigError(f"{inner_option}.class_name={name}: {MATRYOSHKA} cannot wrap itself")
    _check_class(name, inner_arguments, inner_option)
    dims = arguments.get("matryoshka_dims")
    if not isinstance(dims, list | tuple) or not dims or not all(type(dim) is int and dim > 0 for dim in dims):
        raise ConfigError(
            f"{option}.arguments.matryoshka_dims={dims}: must be a list of dimensions, such as [768,256,64]"
        )
    # A linear layer has one input width, so torch would raise about a matrix product; and a loss of several parts is
    # a dictionary, which MatryoshkaLoss could not add up.
    unsupported = {
        "SoftmaxLoss": f"its classifier takes whole embeddings, and {MATRYOSHKA} shortens them",
        "GlobalOrthogonalRegularizationLoss": f"it has several parts, and {MATRYOSHKA} takes a loss of one",
    }
    if name in unsupported:
        raise ConfigError(f"{inner_option}.class_name={name}: {unsupported[name]}")
    if inner_arguments.get("projection_dim") is not None:
        raise ConfigError(
            f"{inner_option}.arguments.projection_dim={inner_arguments['projection_dim']}: a projection takes whole "
            f"embeddings, and {MATRYOSHKA} shortens them; leave it out"
        )
    return str(name)
