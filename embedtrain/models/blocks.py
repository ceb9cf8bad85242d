"""Finds the transformer blocks of a model by inspecting the model.

A class name in a configuration file goes stale ("BertLayer" for a model of XLMRobertaLayer), and an absent attribute
becomes the list [""]: neither may reach the sharding silently.
"""

import difflib
from collections import Counter
from collections.abc import Iterable

from torch import nn

from embedtrain.errors import ConfigError


def find_blocks(
    model: nn.Module, block_class: str | None = None, option: str = "parallel.block_class", *, required: bool = True
) -> list[nn.Module]:
    """The repeated transformer blocks of `model`, in the order of its modules.

    By default the layers that `_no_split_modules` of the model (or of a Hugging Face model inside it) names, else those
    of the most frequent class in the `ModuleList` with the most weights. The model may be on the meta device.

    Args:
        block_class: a class name, or several separated by commas. Blank names are ignored.
        option: where `block_class` was set, for messages.
        required: whether a model without repeated blocks is a ConfigError, as an unknown `block_class` always is.
    """
    classes = [name.strip() for name in (block_class or "").split(",") if name.strip()]
    layers = _layers(model)
    if classes:
        blocks = [layer for layer in layers if type(layer).__name__ in classes]
        missing = [name for name in classes if name not in {type(block).__name__ for block in blocks}]
        if missing:
            raise ConfigError(_no_such_class(model, missing, layers, option))
        return _outermost(blocks)
    named = _no_split_names(model)
    blocks = [layer for layer in layers if type(layer).__name__ in named]
    if not blocks:
        blocks = _largest_list(model)
    if not blocks and required:
        raise ConfigError(
            f"{type(model).__name__} has no list of repeated layers to shard: write parallel.strategy=ddp, or set "
            f"parallel.block_class to the class of its layers"
        )
    return _outermost(blocks)


def block_list(model: nn.Module, num_layers: int) -> str | None:
    """The name of the list of all blocks of `model`; None unless they are one list of `num_layers` blocks."""
    of_block = {id(block) for block in find_blocks(model, required=False)}
    names = [name for name, module in model.named_modules() if id(module) in of_block]
    prefix = names[0].rpartition(".")[0] if names else ""
    return prefix if names and names == [f"{prefix}.{index}" for index in range(num_layers)] else None


def _layers(model: nn.Module) -> list[nn.Module]:
    """Every element of every ModuleList, without duplicates: blocks are repeated, unlike embeddings."""
    layers = (layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part)
    return list(dict.fromkeys(layers))


def _no_split_names(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for part in model.modules():
        declared = getattr(part, "_no_split_modules", None)
        if isinstance(declared, Iterable) and not isinstance(declared, str):
            names.update(str(name) for name in declared)
    return names - {""}


def _largest_list(model: nn.Module) -> list[nn.Module]:
    def weight(part: nn.ModuleList) -> int:
        return sum(p.numel() for p in part.parameters())

    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and weight(part) > 0]
    if not lists:
        return []
    largest = max(lists, key=weight)
    common, _ = Counter(type(layer) for layer in largest).most_common(1)[0]
    return [layer for layer in largest if type(layer) is common]


def _outermost(blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks that are not inside another block."""
    inner = {id(part) for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if id(block) not in inner]


def _no_such_class(model: nn.Module, missing: list[str], layers: list[nn.Module], option: str) -> str:
    counts = Counter(type(layer).__name__ for layer in layers if any(True for _ in layer.parameters()))
    named = _no_split_names(model)
    blocks = [name for name in counts if name in named] or [name for name, _ in counts.most_common(1)]
    close = difflib.get_close_matches(missing[0], list(counts), n=1, cutoff=0.3)
    suggestion = (blocks or close or ["null"])[0]
    listed = ", ".join(f"{name} x{count}" for name, count in counts.most_common(8)) or "no repeated layer"
    return (
        f"{option}={','.join(missing)}: {type(model).__name__} has no such layer. It has {listed}. "
        f"Write parallel.block_class={suggestion}, or leave it out to detect the layers"
    )
