"""Which linear layers adapters are put on, and which parts of an encoder are trained whole besides."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from embedtrain.config.lora import ALL_LINEAR
from embedtrain.errors import ConfigError
from embedtrain.models.encoder import Encoder

EMBEDDINGS, NORMS, DENSE = "embeddings", "norms", "dense"


def chosen_layers(backbone: nn.Module, asked: str | list[str]) -> list[str]:
    """Names of layers as PEFT takes them, where each stands for at least one linear layer.

    Args:
        backbone: without adapters.
        asked: `model.lora.targets`.

    Raises:
        ConfigError: one of them matches nothing, or something else than a linear layer.
    """
    targets = [asked] if isinstance(asked, str) else list(asked)
    linear = Counter(name.rsplit(".", 1)[-1] for name, part in backbone.named_modules() if isinstance(part, nn.Linear))
    if targets == [ALL_LINEAR]:
        return sorted(linear)
    names = [name for name, _ in backbone.named_modules()]
    for target in targets:
        found = [name for name in names if name == target or name.endswith(f".{target}")]
        if not found:
            raise ConfigError(
                f"model.lora.targets: {type(backbone).__name__} has no layer {target}; its linear layers are "
                f"{', '.join(f'{name} x{count}' for name, count in linear.items())}: name some of them, or write "
                f"model.lora.targets={ALL_LINEAR}"
            )
        for name in found:
            _require_linear(backbone.get_submodule(name), target)
    return targets


def chosen_parts(encoder: Encoder, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules to be trained whole, by the encoder's names.

    Args:
        encoder: with all its layers, adapted or not.
        names: `model.lora.train`.

    Raises:
        ConfigError: one of them matches nothing.
    """
    found: dict[str, nn.Module] = {}
    for asked in names:
        chosen = dict(_part(encoder, asked))
        if not chosen:
            kinds = sorted({name.rsplit(".", 1)[-1] for name, part in encoder.backbone.named_modules() if _owns(part)})
            raise ConfigError(
                f"model.lora.train: {type(encoder.backbone).__name__} has no {asked}; allowed are {EMBEDDINGS}, "
                f"{NORMS}, {DENSE} (heads behind the pooling), or its modules: "
                f"{', '.join(kind for kind in kinds if not kind.isdigit())}"
            )
        found |= chosen
    return found


def _require_linear(layer: nn.Module, target: str) -> None:
    if isinstance(layer, nn.Linear):
        return
    if isinstance(layer, nn.Embedding):
        raise ConfigError(
            f"model.lora.targets: {target} is an embedding, which has no adapter here: train it whole with "
            f"model.lora.train=[{EMBEDDINGS}]"
        )
    inside = sorted({name.rsplit(".", 1)[-1] for name, part in layer.named_modules() if isinstance(part, nn.Linear)})
    raise ConfigError(
        f"model.lora.targets: {target} is a {type(layer).__name__}, and adapters are put on linear layers"
        + (f": it holds {', '.join(inside)}" if inside else "")
    )


def _part(encoder: Encoder, asked: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in encoder.named_modules():
        inside = name.removeprefix("backbone.")
        match asked:
            case "embeddings":
                chosen = isinstance(module, nn.Embedding)
            case "norms":
                chosen = "norm" in type(module).__name__.lower() and _owns(module)
            case "dense":
                chosen = name.startswith("dense.") and _owns(module)
            case _:
                chosen = inside == asked or inside.endswith(f".{asked}")
        if chosen:
            yield name, module


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
