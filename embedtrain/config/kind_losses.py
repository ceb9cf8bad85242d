"""The losses that train each kind of model."""

from embedtrain.config.compressed import check_kind_of_vectors
from embedtrain.config.loss_choices import LossDirection
from embedtrain.config.loss_registry import SCORE_LOSSES
from embedtrain.config.losses import (
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
from embedtrain.config.matryoshka import matryoshka_layers_of
from embedtrain.config.recipe import ModelKind
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

_M3_LOSSES = (M3LossConfig.name, *SCORE_LOSSES)
_TOKEN_LOSSES = (InfoNCEConfig.name, XTRConfig.name, *SCORE_LOSSES)


def check_kind_loss(loss: LossConfig, kind: ModelKind, option: str = "loss") -> None:
    """Raise a ConfigError for a loss, or an option of it, that this kind of model cannot be trained with.

    `loss` has passed `check_loss`; `option` is its name in the recipe.
    """
    if loss.precisions is not None:
        check_kind_of_vectors(kind, f"{option}.precisions")
    if kind is not ModelKind.dense and (layers := matryoshka_layers_of(loss)):
        raise ConfigError(
            f"{option}.matryoshka_layers={written(sorted(layers))}: is for the vectors of model.kind=dense, not "
            f"{kind.value}; leave it out"
        )
    if isinstance(loss, CombinedConfig):
        for index, part in enumerate(loss.losses):
            _check(part, kind, f"{option}={loss.name}: losses[{index}].name", f"{option}.losses[{index}].")
    else:
        _check(loss, kind, option, f"{option}.")


def _check(loss: LossConfig, kind: ModelKind, option: str, prefix: str) -> None:
    check = OptionChecks(loss, prefix)
    if kind is ModelKind.cross_encoder:
        if loss.name not in (*SCORE_LOSSES, CustomConfig.name):
            raise ConfigError(
                f"{option}={loss.name}: compares vectors, and model.kind={kind.value} scores pairs; write one of "
                f"{', '.join(SCORE_LOSSES)}, such as loss=softmax for rows with negatives"
            )
    elif kind is ModelKind.late_interaction:
        if loss.name not in (*_TOKEN_LOSSES, CustomConfig.name):
            raise ConfigError(
                f"{option}={loss.name}: compares one vector of each text, and model.kind={kind.value} has one of each "
                f"token; write one of {', '.join(_TOKEN_LOSSES)}, such as loss=infonce"
            )
        check.require(
            getattr(loss, "similarity", None) is getattr(type(loss), "similarity", None),
            "similarity",
            f"is for vectors of texts; write model.late_interaction.similarity for model.kind={kind.value}",
        )
        if isinstance(loss, InfoNCEConfig):
            check.require(
                loss.directions == [LossDirection.query_document],
                "directions",
                f"must be [query_document] for model.kind={kind.value}, whose score is not that of the texts exchanged",
            )
    elif kind is ModelKind.m3:
        if loss.name not in (*_M3_LOSSES, CustomConfig.name):
            raise ConfigError(
                f"{option}={loss.name}: is not for the three scores of model.kind={kind.value}; write one of "
                f"{', '.join(_M3_LOSSES)}, such as loss=m3"
            )
        check.require(
            loss.matryoshka_dims is None,
            "matryoshka_dims",
            f"is for vectors of one kind, and model.kind={kind.value} has two; leave it out",
        )
    elif kind is ModelKind.sparse:
        if loss.name not in (InfoNCEConfig.name, *SCORE_LOSSES):
            raise ConfigError(
                f"{option}={loss.name}: is for vectors, and model.kind={kind.value} has weights of words; write one of "
                f"{', '.join((InfoNCEConfig.name, *SCORE_LOSSES))}, such as loss=infonce"
            )
        check.require(
            getattr(loss, "similarity", None) is getattr(type(loss), "similarity", None),
            "similarity",
            f"is for vectors of texts; model.kind={kind.value} has the inner product",
        )
        check.require(
            loss.matryoshka_dims is None, "matryoshka_dims", f"is not for model.kind={kind.value}; leave it out"
        )
    elif loss.name == M3LossConfig.name:
        raise ConfigError(
            f"{option}={loss.name}: model.kind={kind.value} has one score; write loss=infonce, or model.kind=m3"
        )
    elif loss.name == XTRConfig.name:
        raise ConfigError(
            f"{option}={loss.name}: compares vectors of tokens, and model.kind={kind.value} has one of each text; "
            "write loss=infonce, or model.kind=late_interaction"
        )
    if isinstance(loss, InfoNCEConfig):
        check.require(
            not loss.mixes_negatives or kind is ModelKind.dense,
            "mixed_pairs" if loss.mixed_pairs else "mixed_list",
            f"mixes one vector of each text, which model.kind={kind.value} has not; leave it out",
        )
        of_tokens = kind in (ModelKind.late_interaction, ModelKind.sparse)
        low, high = loss.temperature_bounds or (TOKEN_TEMPERATURE_BOUNDS if of_tokens else VECTOR_TEMPERATURE_BOUNDS)
        # The default of late interaction follows from the score, which the model's directory may choose.
        default = None if of_tokens else VECTOR_TEMPERATURE
        temperature = default if loss.temperature is None else loss.temperature
        check.require(
            not loss.learn_temperature or temperature is None or low <= temperature <= high,
            "temperature",
            f"{'is the default 0.02 and ' if loss.temperature is None else ''}must be within "
            f"temperature_bounds={written([low, high])}",
        )
