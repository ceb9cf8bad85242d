"""The head of a transformers class, such as that for sequence classification, and the class as a whole.

The head is the class itself, in which a stand-in returns hidden states in place of the backbone: every architecture
keeps its own pooler, activation and dropout, and packed texts need no other code. Calling the class as a whole shows
whether the head computes the same.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from embedtrain.data.types import Chunk
from embedtrain.models.attention import known_padding
from embedtrain.models.encoder import Encoder, Head, has_token_types
from embedtrain.models.stored_weights import TensorLocation

# The class is a module of the encoder with this name.
HEAD = "head."
_PROBE_LENGTHS = (5, 3)


class StandIn(nn.Module):
    """Stands for the backbone in its class: returns the hidden states that it receives, and the pooler's output.

    Args:
        pooler: the backbone's, for classes whose head receives its output; None if there is none.
        activation: of a pooler that is a linear layer only (ALBERT); other poolers take the first token themselves.
        in_float32: whether the head is computed in float32 in any precision, and receives such hidden states.
    """

    def __init__(
        self, pooler: nn.Module | None, activation: nn.Module | None = None, *, in_float32: bool = True
    ) -> None:
        super().__init__()
        self.in_float32 = in_float32
        self.pooler = pooler
        self.pooler_activation = activation
        self._backbone: list[nn.Module] = []  # a list, so that it is no submodule

    def forward(
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Hidden states [N, L, H], or the arguments of the backbone within `calling`."""
        hidden = inputs_embeds
        if self._backbone:
            hidden = self._backbone[0](*args, **kwargs).last_hidden_state
            hidden = hidden.float() if self.in_float32 else hidden
        assert hidden is not None
        pooled = None
        if self.pooler_activation is not None and self.pooler is not None:
            pooled = self.pooler_activation(self.pooler(hidden[:, 0]))
        elif self.pooler is not None:
            pooled = self.pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)

    @contextlib.contextmanager
    def calling(self, backbone: nn.Module) -> Iterator[None]:
        """Call the backbone, as in the class as it is."""
        self._backbone = [backbone]
        try:
            yield
        finally:
            self._backbone = []


class ClassHead(Head):
    """The head of a transformers class, whose backbone a stand-in has replaced.

    Args:
        model: the class.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {HEAD.rstrip("."): model}

    def stored_name(self, name: str) -> str:
        """The name of a weight or module in the class."""
        return own_name(name, self.model.base_model_prefix)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the class computes of hidden states [N, L, H]."""
        # Classes look for padding in the ids, and 0 is none.
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.model(input_ids=ids, inputs_embeds=hidden).logits
        return logits

    def whole_logits(self, chunk: Chunk, backbone: nn.Module) -> Tensor:
        """What the class computes of padded texts as a whole."""
        types = {} if chunk.types is None else {"token_type_ids": chunk.types}
        with known_padding(chunk.has_padding), stand_in_of(self.model).calling(backbone):
            logits: Tensor = self.model(input_ids=chunk.ids, attention_mask=chunk.mask, **types).logits
        return logits.float()

    @abstractmethod
    def of_whole_class(self, chunk: Chunk, backbone: nn.Module) -> Tensor:
        """The part of padded texts as the class as a whole computes it."""

    @abstractmethod
    def difference(self, actual: Tensor, expected: Tensor) -> str | None:
        """Why a part is not that of the whole class; None if it is, except for rounding."""


def own_name(name: str, prefix: str) -> str:
    """The name that a weight of an encoder has in transformers' class, whose `base_model_prefix` is `prefix`."""
    return name.removeprefix(HEAD) if name.startswith(HEAD) else f"{prefix}.{name.removeprefix('backbone.')}"


def located_in_class(
    shapes: Mapping[str, torch.Size], stored: Mapping[str, TensorLocation]
) -> dict[str, TensorLocation]:
    """Where the weights of a head are in the files of its class, by the encoder's names."""
    return {name: stored[key] for name in shapes if name.startswith(HEAD) and (key := own_name(name, "")) in stored}


def is_masked(config: PretrainedConfig) -> bool:
    """Whether the language model of the architecture is a masked one."""
    is_causal = any(name.endswith("ForCausalLM") for name in config.architectures or ())
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal


def language_model_class(config: PretrainedConfig) -> Any:
    """The class of transformers that opens a language model of the architecture."""
    return AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM


def language_model(config: PretrainedConfig) -> Any:
    """Transformers' own class for the architecture."""
    classes = MODEL_FOR_MASKED_LM_MAPPING if is_masked(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return classes[type(config)]


def stand_in_of(model: nn.Module) -> StandIn:
    """What stands for the backbone in a class."""
    return next(part for part in model.children() if isinstance(part, StandIn))


def own_class_error(encoder: Encoder, device: torch.device, what: str) -> str | None:
    """The same as a sentence about a class that is not supported as `what`."""
    reason = own_class_mismatch(encoder, device)
    head = encoder.output
    assert isinstance(head, ClassHead)
    return None if reason is None else f"{type(head.model).__name__} is not supported as {what}: {reason}"


def own_class_mismatch(encoder: Encoder, device: torch.device) -> str | None:
    """Why the head of an encoder computes something else than its whole class; None if it does not.

    Two forward passes without gradient over padded texts, which are collectives if the encoder is sharded: every rank
    must call. The encoder has weights and no dropout.
    """
    head = encoder.output
    assert isinstance(head, ClassHead)
    config = head.model.config.get_text_config()
    padding = config.pad_token_id
    tokens = [token for token in range(int(config.vocab_size)) if token != padding][:11]
    width = max(_PROBE_LENGTHS)
    ids = torch.tensor([(tokens * width)[7 * n : 7 * n + width] for n in range(len(_PROBE_LENGTHS))], device=device)
    mask = (torch.arange(width, device=device) < torch.tensor(_PROBE_LENGTHS, device=device)[:, None]).long()
    ids = torch.where(mask.bool(), ids, int(padding or 0))
    types = mask * (torch.arange(width, device=device) >= 2) if head.reads_pairs and has_token_types(encoder) else None
    chunk = Chunk(ids, mask, types=types)
    with torch.no_grad():
        (actual,) = encoder(chunk)
        with encoder.computing(lambda chunk: head.of_whole_class(chunk, encoder.backbone)):
            (expected,) = encoder(chunk)
    return head.difference(actual, expected)
