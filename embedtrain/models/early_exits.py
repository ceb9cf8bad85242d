"""Early exits: hidden states after the first layers of a model, from the forward pass that computes the last ones.

Hooks on the blocks keep the blocks' own outputs, with their graph. They run outside of the recomputation of activations
and after FSDP's hooks, whose gathering of weights they do not change.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from embedtrain.errors import ConfigError
from embedtrain.models.attention_mask import known_padding
from embedtrain.models.blocks import block_list


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
