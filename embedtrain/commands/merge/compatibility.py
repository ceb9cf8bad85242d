"""Whether models can be merged: the same tensors, the same tokens, and the same computation around them."""

from collections.abc import Sequence

from embedtrain.commands.merge.members import Member
from embedtrain.errors import ModelError
from embedtrain.models.compatibility import different_setting, different_tokens
from embedtrain.models.tokenizer import load_tokenizer


def require_compatible(members: Sequence[Member]) -> list[str]:
    """Warnings about differences that do not matter for the weights.

    Raises ModelError for models that differ in tensors, in what surrounds them, or in their tokenizers, with both
    values and the names of the models.
    """
    first, *others = members
    warnings = []
    for other in others:
        _compare_tensors(first, other)
        _compare_settings(first, other)
        warnings += _differences_of_prompts(first, other)
    tokenizer = load_tokenizer(first.source)
    compared = {first.source.directory}
    for other in others:
        if other.source.directory not in compared:
            compared.add(other.source.directory)
            difference = different_tokens(tokenizer, load_tokenizer(other.source))
            if difference is not None:
                raise ModelError(f"{other.name} cannot be merged with {first.name}: {difference}")
    return warnings


def shown_name(name: str) -> str:
    """The name of a weight without the encoder's own prefix."""
    return name.removeprefix("backbone.")


def _compare_tensors(first: Member, other: Member) -> None:
    missing = [name for name in first.specs if name not in other.specs]
    extra = [name for name in other.specs if name not in first.specs]
    for names, owner, lacking in ((missing, first, other), (extra, other, first)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {owner.name} has the tensor {shown_name(names[0])}"
                f"{more}, which {lacking.name} lacks"
            )
    for name, spec in first.specs.items():
        if other.specs[name].shape != spec.shape:
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {shown_name(name)} has the shape "
                f"{list(other.specs[name].shape)}, not {list(spec.shape)}"
            )
        if other.specs[name].dtype.is_floating_point is not spec.dtype.is_floating_point:
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {shown_name(name)} has the type "
                f"{other.specs[name].dtype}, not {spec.dtype}"
            )


def _compare_settings(first: Member, other: Member) -> None:
    difference = different_setting(first.source, other.source)
    if difference is not None:
        raise ModelError(f"{other.name} cannot be merged with {first.name}: {difference}")


def _differences_of_prompts(first: Member, other: Member) -> list[str]:
    warnings = []
    for role in sorted(first.source.prompts.keys() | other.source.prompts.keys()):
        prompts = [member.source.prompts.get(role, "") for member in (first, other)]
        if prompts[0] != prompts[1]:
            warnings.append(
                f"the prompt {role} of {other.name} is {prompts[1]!r}, that of {first.name} {prompts[0]!r}: "
                "settings_from chooses the model whose prompts are written"
            )
    return warnings
