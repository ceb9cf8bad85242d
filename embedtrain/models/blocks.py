"""Which modules of a model are its transformer blocks: asked of the model, never of the user.

A class name in a configuration file goes stale ("BertLayer" for a model made of XLMRobertaLayer) and an
absent attribute turns into the list [""]. Both have cost people days; neither can reach the sharding here.
"""

import difflib
from collections import Counter
from collections.abc import Iterable

from torch import nn

from embedtrain.errors import ConfigError


def find_blocks(
    model: nn.Module,
    block_class: str | None = None,
    asked_by: str = "parallel.block_class",
    *,
    required: bool = True,
) -> list[nn.Module]:
    """The repeated transformer blocks of `model`, in order of execution as far as its modules tell.

    Without `block_class` they are the layers that `_no_split_modules` of the model (or of any Hugging Face
    model inside it) names, else the most frequent class of the `ModuleList` that holds the most weights.

    Args:
        model: the model, which may be on the meta device.
        block_class: a class name, or several separated by commas. Blank names are ignored.
        asked_by: what the message calls the place `block_class` came from.
        required: whether a model without any repeated block is refused, or has the empty list.

    Raises:
        ConfigError: no block is of the class asked for, or the model has no repeated block but must.
    """
    wanted = [name.strip() for name in (block_class or "").split(",") if name.strip()]
    layers = _layers(model)
    if wanted:
        blocks = [layer for layer in layers if type(layer).__name__ in wanted]
        missing = [name for name in wanted if name not in {type(block).__name__ for block in blocks}]
        if missing:
            raise ConfigError(_no_such_class(model, missing, layers, asked_by))
        return _outermost(blocks)
    named = _no_split_names(model)
    blocks = [layer for layer in layers if type(layer).__name__ in named]
    if not blocks:
        blocks = _largest_list(model)
    if not blocks and required:
        raise ConfigError(
            f"{type(model).__name__} has no list of repeated layers to shard, so parallel.strategy=fsdp has "
            f"nothing to work on: use parallel.strategy=ddp, or name the layer class in parallel.block_class"
        )
    return _outermost(blocks)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Every element of every ModuleList: only what is repeated can be a block; embeddings are not."""
    found = (layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part)
    return list(dict.fromkeys(found))  # one that stands in two lists once


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
    """Without blocks that lie inside another block."""
    inner = {id(part) for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if id(block) not in inner]


def _no_such_class(model: nn.Module, missing: list[str], layers: list[nn.Module], asked_by: str) -> str:
    there = Counter(type(layer).__name__ for layer in layers if any(True for _ in layer.parameters()))
    named = _no_split_names(model)
    blocks = [name for name in there if name in named] or [name for name, _ in there.most_common(1)]
    close = difflib.get_close_matches(missing[0], list(there), n=1, cutoff=0.3)
    write = (blocks or close or ["null"])[0]
    listed = ", ".join(f"{name} x{count}" for name, count in there.most_common(8)) or "no repeated layer"
    return (
        f"{asked_by}={','.join(missing)}: {type(model).__name__} has no such layer. It has {listed}. "
        f"Write parallel.block_class={write}, or leave it out and the layers are found"
    )
