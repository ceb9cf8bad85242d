"""The transformer blocks of a model, found by inspecting it, and hidden states after the first of them.

A class name in a configuration file goes stale ("BertLayer" for a model of XLMRobertaLayer), and an absent attribute
becomes the list [""]: neither may reach the sharding silently.

Early exits are computed in the forward pass that computes the last hidden states. Hooks on the blocks keep the blocks'
own outputs, with their graph. They run outside of the recomputation of activations and after FSDP's hooks, whose
gathering of weights they do not change.
"""

import difflib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from embedtrain.errors import ConfigError
from embedtrain.models.attention import known_padding

_MIN_PART_OF_WEIGHTS = 200


def find_blocks(
    model: nn.Module, block_class: str | None = None, option: str = "parallel.block_class", *, required: bool = True
) -> list[nn.Module]:
    """The repeated transformer blocks of `model`, in the order of its modules.

    By default the layers that `_no_split_modules` of the model (or of a Hugging Face model inside it) names, and those
    of other lists with a part of the weights, such as the layers of a vision tower that the class does not name; else
    those of the most frequent class in the `ModuleList` with the most weights; in each tower of an encoder. The model
    may be on the meta device.

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
    towers = list(getattr(model, "towers", {"": model}).values())
    if len(towers) > 1:
        return [block for tower in towers for block in find_blocks(tower, required=required and tower.has_layers)]
    named = _no_split_names(model)
    blocks = [layer for layer in layers if type(layer).__name__ in named]
    blocks = _with_other_lists(getattr(model, "backbone", model), blocks) if blocks else _largest_list(model)
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


def _with_other_lists(backbone: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks, and the most frequent class of every list of several layers besides them, if it is large enough.

    An FSDP group costs a collective in each pass, so that lists with a two-hundredth of the weights stay in the root.
    """
    total = sum(parameter.numel() for parameter in backbone.parameters())
    found = {id(part) for block in blocks for part in block.modules()}
    for part in backbone.modules():
        if not isinstance(part, nn.ModuleList) or len(part) < 2 or any(id(layer) in found for layer in part):
            continue
        if sum(parameter.numel() for parameter in part.parameters()) * _MIN_PART_OF_WEIGHTS < total:
            continue
        common, _ = Counter(type(layer) for layer in part).most_common(1)[0]
        blocks = [*blocks, *(layer for layer in part if type(layer) is common)]
        found |= {id(inner) for layer in part for inner in layer.modules()}
    order = {id(module): number for number, module in enumerate(backbone.modules())}
    return sorted(blocks, key=lambda block: order.get(id(block), -1))


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


class ExitPath(NamedTuple):
    """The names of what computes a model's last hidden states: blocks, one after the other, and a final norm."""

    blocks: str  # of the list
    norm: str | None  # None: the output of the last block is the last hidden state


class EarlyExits:
    """Hidden states after the first l layers and the final norm, for each l: what the model of these layers returns."""

    def __init__(self, encoder: nn.Module, path: ExitPath, layers: Sequence[int]) -> None:
        self.norm = None if path.norm is None else encoder.get_submodule(path.norm)
        self.layers, self._outputs = list(layers), dict[int, Tensor]()
        for layer in layers:
            block = encoder.get_submodule(f"{path.blocks}.{layer - 1}")
            block.register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, block: nn.Module, _inputs: Any, output: Any) -> None:
        if block.training:
            self._outputs[layer] = _first(output)

    def pop(self) -> list[Tensor]:
        """The hidden states [N, L, H] of the forward pass that has just ended, in the order of `layers`."""
        outputs, self._outputs = self._outputs, {}
        states = [outputs[layer] for layer in self.layers]
        return states if self.norm is None else [self.norm(hidden) for hidden in states]


def exit_path(encoder: nn.Module, config: PretrainedConfig, layers: Sequence[int]) -> ExitPath:
    """How `encoder`, which is on the meta device, computes its last hidden states.

    Raises ConfigError for layers that it has not, and for a model whose first layers are no model of their own: the
    input of each block has to be the output of the one before, and only a norm may follow the last.
    """
    option = f"loss.matryoshka.layers={list(layers)}"
    num_layers = int(getattr(config.get_text_config(), "num_hidden_layers", 0))
    blocks = block_list(encoder, num_layers)
    if blocks is None:
        raise ConfigError(
            f"{option}: the blocks of this {config.model_type} are not a list of {num_layers} layers; leave it out"
        )
    if layers[-1] >= num_layers:
        raise ConfigError(
            f"{option}: the model has {num_layers} layers, the last of which is always trained; write numbers from 1 "
            f"to {num_layers - 1}"
        )
    inputs, outputs, last = _calls(encoder)
    names = [f"{blocks}.{index}" for index in range(num_layers)]
    is_chain = all(
        outputs.get(before) is not None and inputs.get(after) is outputs[before]
        for before, after in itertools.pairwise(names)
    )
    of_last = outputs.get(names[-1])
    if is_chain and of_last is last:
        return ExitPath(blocks, None)
    norms = [name for name, output in outputs.items() if output is last and inputs[name] is of_last]
    if not is_chain or of_last is None or not norms:
        raise ConfigError(
            f"{option}: the layers of this {config.model_type} are not computed one after the other, with only a norm "
            "behind the last; leave it out"
        )
    return ExitPath(blocks, norms[0])


def _calls(encoder: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None], Tensor]:
    """The first input and output of each module of the backbone in a forward pass, and the last hidden states."""
    probe: Any = encoder.to("meta").eval()
    inputs, outputs = dict[str, Tensor | None](), dict[str, Tensor | None]()

    def record(name: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        inputs[name] = first if isinstance(first, Tensor) else None
        output = output[0] if isinstance(output, tuple) else output
        outputs[name] = output if isinstance(output, Tensor) else None

    for name, module in encoder.named_modules():
        module.register_forward_hook(partial(record, name), with_kwargs=True)
    ids = torch.zeros((1, 3), dtype=torch.int64, device="meta")
    with torch.no_grad(), known_padding(False):
        last: Tensor = probe.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    return inputs, outputs, last


def _first(output: Any) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden
