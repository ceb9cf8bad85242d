"""The losses that train each kind of model."""

from dataclasses import dataclass

from embedtrain.config.compressed import check_kind_of_vectors
from embedtrain.config.loss_choices import LossDirection
from embedtrain.config.losses import (
    SCORE_LOSSES,
    TOKEN_TEMPERATURE_BOUNDS,
    VECTOR_TEMPERATURE,
    VECTOR_TEMPERATURE_BOUNDS,
    CombinedConfig,
    CustomConfig,
    InfoNCEConfig,
    LossConfig,
    M3LossConfig,
    XTRConfig,
)
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Allowed:
    losses: tuple[str, ...]
    reason: str  # why another one cannot train this kind
    example: str
    custom: bool = True  # whether a loss of the user's own may train it


# A dense model has every loss but those of other kinds.
_ALLOWED = {
    "cross_encoder": _Allowed(
        SCORE_LOSSES, "compares vectors, and model.kind={kind} scores pairs", "loss=softmax for rows with negatives"
    ),
    "late_interaction": _Allowed(
        (InfoNCEConfig.name, XTRConfig.name, *SCORE_LOSSES),
        "compares one vector of each text, and model.kind={kind} has one of each token",
        "loss=infonce",
    ),
    "m3": _Allowed((M3LossConfig.name, *SCORE_LOSSES), "is not for the three scores of model.kind={kind}", "loss=m3"),
    "sparse": _Allowed(
        (InfoNCEConfig.name, *SCORE_LOSSES),
        "is for vectors, and model.kind={kind} has weights of words",
        "loss=infonce",
        custom=False,
    ),
}


def check_kind_loss(loss: LossConfig, kind: str, option: str = "loss") -> None:
    """Raise a ConfigError for a loss, or an option of it, that this kind of model cannot be trained with.

    `loss` has passed `check_loss`; `option` is its name in the recipe.
    """
    _check_vectors(loss, kind, f"{option}.")
    if isinstance(loss, CombinedConfig):
        for index, part in enumerate(loss.losses):
            _check_vectors(part, kind, f"{option}.losses[{index}].")
            _check(part, kind, f"{option}={loss.name}: losses[{index}].name", f"{option}.losses[{index}].")
    else:
        _check(loss, kind, option, f"{option}.")


def _check_vectors(loss: LossConfig, kind: str, prefix: str) -> None:
    """Reject what is computed from the vectors of texts, in a loss or a part of one, for a kind that has none."""
    check = OptionChecks(loss, prefix)
    if loss.precisions is not None:
        check_kind_of_vectors(kind, f"{prefix}precisions")
    reasons = {
        "cross_encoder": "is for vectors, and model.kind={kind} computes a score; leave it out",
        "m3": "is for vectors of one kind, and model.kind={kind} has two; leave it out",
        "sparse": "is not for model.kind={kind}; leave it out",
    }
    if kind in reasons:
        check.require(loss.matryoshka_dims is None, "matryoshka_dims", reasons[kind].format(kind=kind))
    check.require(
        kind == "dense" or loss.matryoshka_layers is None,
        "matryoshka_layers",
        f"is for the vectors of model.kind=dense, not {kind}; leave it out",
    )


def _check(loss: LossConfig, kind: str, option: str, prefix: str) -> None:
    check = OptionChecks(loss, prefix)
    allowed = _ALLOWED.get(kind)
    is_custom = allowed is not None and allowed.custom and loss.name == CustomConfig.name
    if allowed is not None and not is_custom and loss.name not in allowed.losses:
        raise ConfigError(
            f"{option}={loss.name}: {allowed.reason.format(kind=kind)}; write one of "
            f"{', '.join(allowed.losses)}, such as {allowed.example}"
        )
    if allowed is None:
        _check_dense(loss, option)
    else:
        written_for = {
            "cross_encoder": "computes the score itself; leave it out",
            "late_interaction": "has model.similarity; write that",
            "m3": "has three scores of its own; leave it out",
            "sparse": "has the inner product; leave it out",
        }
        check.require(
            getattr(loss, "similarity", None) is getattr(type(loss), "similarity", None),
            "similarity",
            f"is for the vectors of model.kind=dense, and model.kind={kind} {written_for[kind]}",
        )
    if isinstance(loss, InfoNCEConfig):
        _check_infonce(loss, kind, check)


def _check_dense(loss: LossConfig, option: str) -> None:
    """For a model of one vector per text, which all other losses train."""
    if loss.name == M3LossConfig.name:
        raise ConfigError(f"{option}={loss.name}: model.kind=dense has one score; write loss=infonce, or model.kind=m3")
    if loss.name == XTRConfig.name:
        raise ConfigError(
            f"{option}={loss.name}: compares vectors of tokens, and model.kind=dense has one of each text; "
            "write loss=infonce, or model.kind=late_interaction"
        )


def _check_infonce(loss: InfoNCEConfig, kind: str, check: OptionChecks) -> None:
    check.require(
        kind != "late_interaction" or loss.directions == [LossDirection.query_document],
        "directions",
        f"must be [query_document] for model.kind={kind}, whose score is not that of the texts exchanged",
    )
    check.require(
        not loss.mixes_negatives or kind == "dense",
        "mixed_pairs" if loss.mixed_pairs else "mixed_list",
        f"mixes one vector of each text, which model.kind={kind} has not; leave it out",
    )
    of_tokens = kind in ("late_interaction", "sparse")
    low, high = loss.temperature_bounds or (TOKEN_TEMPERATURE_BOUNDS if of_tokens else VECTOR_TEMPERATURE_BOUNDS)
    # The default of late interaction follows from the score, which the model's directory may choose.
    default = None if of_tokens else VECTOR_TEMPERATURE
    temperature = default if loss.temperature is None else loss.temperature
    check.require(
        not loss.learn_temperature or temperature is None or low <= temperature <= high,
        "temperature",
        f"{f'is the default {VECTOR_TEMPERATURE} and ' if loss.temperature is None else ''}must be within "
        f"temperature_bounds={written([low, high])}",
    )
