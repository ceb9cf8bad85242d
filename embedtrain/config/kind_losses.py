"""Whether a loss trains a kind of model: the kind says which losses do, and what the options of these would compare."""

from embedtrain.config.compressed import check_kind_of_vectors
from embedtrain.config.kinds import Kind, kinds
from embedtrain.config.loss_choices import LossDirection
from embedtrain.config.losses import VECTOR_TEMPERATURE, CombinedConfig, InfoNCEConfig, LossConfig
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError


def check_kind_loss(loss: LossConfig, kind: Kind, option: str = "loss") -> None:
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


def _check_vectors(loss: LossConfig, kind: Kind, prefix: str) -> None:
    """Reject what is computed from the vectors of texts, in a loss or a part of one, for a kind that has none."""
    check = OptionChecks(loss.matryoshka, f"{prefix}matryoshka.")
    if loss.matryoshka.precisions is not None:
        check_kind_of_vectors(kind, f"{prefix}matryoshka.precisions")
    check.require(
        loss.matryoshka.dims is None or not kind.why_no_dimensions,
        "dims",
        f"{kind.why_no_dimensions}; leave it out",
    )
    check.require(
        kind.has_one_vector or loss.matryoshka.layers is None,
        "layers",
        f"is for the vectors of model.kind=dense, not {kind.name}; leave it out",
    )


def _check(loss: LossConfig, kind: Kind, option: str, prefix: str) -> None:
    check = OptionChecks(loss, prefix)
    owner = next((other for other in kinds() if loss.name in other.own_losses), kind)
    if kind.losses is not None and loss.name not in kind.losses:
        allowed = ", ".join(dict.fromkeys(kind.losses))
        raise ConfigError(
            f"{option}={loss.name}: {kind.why_no_other_loss}; write one of {allowed}, such as loss={kind.losses[0]}"
        )
    if owner is not kind and kind.losses is None:
        raise ConfigError(
            f"{option}={loss.name}: is for {owner.summary}, and model.kind={kind.name} computes {kind.summary}; write "
            f"loss=infonce, or model.kind={owner.name}"
        )
    check.require(
        not kind.why_no_similarity or getattr(loss, "similarity", None) is getattr(type(loss), "similarity", None),
        "similarity",
        f"is for the vectors of model.kind=dense, and model.kind={kind.name} {kind.why_no_similarity}",
    )
    if isinstance(loss, InfoNCEConfig):
        _check_infonce(loss, kind, check)


def _check_infonce(loss: InfoNCEConfig, kind: Kind, check: OptionChecks) -> None:
    check.require(
        kind.is_symmetric or loss.directions == [LossDirection.query_document],
        "directions",
        f"must be [query_document] for model.kind={kind.name}, whose score is not that of the texts exchanged",
    )
    check.require(
        not loss.mixes_negatives or kind.has_one_vector,
        "mixed_pairs" if loss.mixed_pairs else "mixed_list",
        f"mixes one vector of each text, which model.kind={kind.name} has not; leave it out",
    )
    low, high = loss.temperature_bounds or kind.temperature_bounds
    temperature = kind.temperature if loss.temperature is None else loss.temperature
    check.require(
        not loss.learn_temperature or temperature is None or low <= temperature <= high,
        "temperature",
        f"{f'is the default {VECTOR_TEMPERATURE} and ' if loss.temperature is None else ''}must be within "
        f"temperature_bounds={written([low, high])}",
    )
