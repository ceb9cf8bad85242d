"""What can be said of loss=sentence_transformers before sentence-transformers, or torch, is imported."""

import difflib
from collections.abc import Mapping
from typing import Any

from embedtrain.config.losses import SentenceTransformersConfig
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, UNSUPPORTED_LOSSES
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

# The functions that an argument may name. Looked up by these names, never evaluated.
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

# Arguments that nobody can set, and why.
_REFUSED = {
    "model": "the model is the recipe's; leave it out",
    "guide": "the guide is set beside class_name, not here: guide=a directory or a Hub id",
    "gather_across_devices": "the batch of all ranks is gathered in any case; leave it out",
    "loss_fct": "it is a function, and YAML names none; leave it out",
    "cos_score_transformation": "it is a function, and YAML names none; leave it out",
}


def check_sentence_transformers(config: SentenceTransformersConfig, option: str = "loss") -> None:
    """Refuse what no version of sentence-transformers could make a loss of.

    Args:
        config: the options.
        option: their name in the recipe, for the sentences.

    Raises:
        ConfigError: an unknown class, one that needs more than embeddings, an argument that cannot be set, a
            function that is not known by name, a guide that is missing or has nothing to guide, dimensions to
            shorten vectors to where the class takes whole ones.
    """
    _check_class(config.class_name, config.arguments, option)
    name = config.class_name
    if name == MATRYOSHKA:
        name = _check_matryoshka(config.arguments, option)
    if config.matryoshka_dims is not None and (
        name == "SoftmaxLoss" or SENTENCE_TRANSFORMERS_LOSSES[name].vectors or config.class_name == MATRYOSHKA
    ):
        what = "shortens vectors itself" if config.class_name == MATRYOSHKA else "takes whole vectors"
        raise ConfigError(
            f"{option}.matryoshka_dims={config.matryoshka_dims}: {config.class_name} {what}; leave it out"
        )
    if name in LOSSES_WITH_GUIDE and config.guide is None:
        raise ConfigError(f"{option}.class_name={name} needs a guide: set {option}.guide to a directory or a Hub id")
    if name not in LOSSES_WITH_GUIDE and config.guide is not None:
        raise ConfigError(
            f"{option}.guide={config.guide} is for {' and '.join(LOSSES_WITH_GUIDE)}; {name} has no guide"
        )


def _check_class(name: Any, arguments: Any, option: str) -> None:
    known = [*SENTENCE_TRANSFORMERS_LOSSES, MATRYOSHKA]
    if not name:
        raise ConfigError(f"{option}.class_name is missing: set it to one of {', '.join(known)}")
    if name in UNSUPPORTED_LOSSES:
        raise ConfigError(
            f"{option}.class_name={name} needs {UNSUPPORTED_LOSSES[name]}, and a loss here sees embeddings alone; "
            f"there are {', '.join(known)}"
        )
    if name not in known:
        lower = {one.lower(): one for one in known}
        near = difflib.get_close_matches(str(name).lower(), lower, n=1)
        hint = f", did you mean {lower[near[0]]}?" if near else "."
        raise ConfigError(
            f"{option}.class_name={name}: embedtrain knows no such class{hint} There are {', '.join(known)}"
        )
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{option}.arguments={arguments!r}: it is a mapping of {name}'s arguments")
    for argument, value in arguments.items():
        if argument in _REFUSED:
            raise ConfigError(f"{option}.arguments.{argument}={value}: {_REFUSED[argument]}")
        allowed = FUNCTION_ARGUMENTS.get(name, {}).get(argument)
        if allowed and value not in allowed:
            raise ConfigError(f"{option}.arguments.{argument}={value}: {name} takes one of {', '.join(allowed)}")


def _check_matryoshka(arguments: Mapping[str, Any], option: str) -> str:
    """The name of the class within."""
    inner, written = arguments.get("loss"), f"{option}.arguments.loss"
    if not isinstance(inner, Mapping) or "class_name" not in inner or set(inner) - {"class_name", "arguments"}:
        raise ConfigError(
            f"{written}={inner!r}: {MATRYOSHKA} takes a mapping such as "
            "{class_name: MultipleNegativesRankingLoss, arguments: {scale: 20}}"
        )
    name, inner_arguments = inner["class_name"], inner.get("arguments", {})
    if name == MATRYOSHKA:
        raise ConfigError(f"{written}.class_name={name}: a {MATRYOSHKA} holds another class, not itself")
    _check_class(name, inner_arguments, written)
    dims = arguments.get("matryoshka_dims")
    if not isinstance(dims, list | tuple) or not dims or not all(type(dim) is int and dim > 0 for dim in dims):
        raise ConfigError(f"{option}.arguments.matryoshka_dims={dims}: a list of dimensions, such as [768, 256, 64]")
    # A layer has one width, the shortened vectors another: torch would complain of a matrix product. And a loss
    # of several parts is a dictionary, which Python would not add up.
    unfit = {
        "SoftmaxLoss": f"its classifier takes whole vectors, and {MATRYOSHKA} shortens them",
        "GlobalOrthogonalRegularizationLoss": f"it has several parts, and {MATRYOSHKA} takes a loss of one",
    }
    if name in unfit:
        raise ConfigError(f"{written}.class_name={name}: {unfit[name]}")
    if inner_arguments.get("projection_dim") is not None:
        raise ConfigError(
            f"{written}.arguments.projection_dim={inner_arguments['projection_dim']}: a projection takes whole "
            f"vectors, {MATRYOSHKA} shortens them; leave it out"
        )
    return str(name)
