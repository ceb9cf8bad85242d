"""Whether a model's texts can be packed, looked at twice: its code on the meta device, and what its weights make of it.

A model that lets a text see its neighbours, or counts positions another way, would be wrong without a sign of it. So
no list of architectures is trusted.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from embedtrain.config.recipe import Precision
from embedtrain.data.types import Packing
from embedtrain.models import packed_attention
from embedtrain.models.encoder import Encoder
from embedtrain.models.hub import one_line
from embedtrain.models.packed_attention import KERNEL_HEAD_SIZE, NAME, PackingError

# Of a vector's length: how far packed vectors may be from those of the texts alone.
_TOLERANCE = {Precision.fp32: 1e-3, Precision.bf16: 5e-2}
_LENGTHS = (5, 3)
_OWN = "it computes attention by itself, not through transformers' interface"

Forward = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class PackingCheck:
    """What was seen of a model's code.

    Attributes:
        padding_reason: why it cannot take packed texts; None where it can.
        dropout: the largest that its attention asks for in training.
    """

    padding_reason: str | None
    dropout: float = 0.0


def enable_packing(encoder: Encoder) -> None:
    """Let the encoder's backbone take packed texts, and padded ones as before."""
    for config in _configs(encoder):
        config._attn_implementation = NAME


def disable_packing(encoder: Encoder) -> None:
    """Undo `enable_packing`."""
    for config in _configs(encoder):
        config._attn_implementation = "sdpa"


def check_packing(encoder: Encoder, *, precision: Precision, gpu: bool) -> PackingCheck:
    """Run the model's code with packed texts, on the meta device.

    Args:
        encoder: parameters may be on the meta device; left as it is.
        precision: what is computed in.
        gpu: whether on one.
    """
    if gpu and precision is Precision.fp32:
        return PackingCheck("a GPU's kernel for packed texts computes in bf16 alone, and parallel.precision=fp32")
    if {config._attn_implementation for config in _configs(encoder)} - {"sdpa", NAME}:
        return PackingCheck(_OWN)
    sizes, dropouts = list[int](), list[float]()

    def watched(module: nn.Module, query: Tensor, *args: Any, packing: Packing | None = None, **others: Any) -> Any:
        if packing is None:
            raise PackingError("its layers do not hand on what they are called with")
        sizes.append(query.shape[-1])
        dropouts.append(others.get("dropout", 0.0))
        return packed_attention.attention(module, query, *args, packing=packing, **others)

    try:
        part = copy.deepcopy(encoder).to("meta").train()
        enable_packing(part)
        with torch.no_grad(), _attention_is(watched):
            part(*_chunk(torch.device("meta"), [list(range(length)) for length in _LENGTHS]))
    except PackingError as error:
        return PackingCheck(str(error))
    except Exception as error:  # a model's own code may raise anything
        return PackingCheck(f"its code does not take packed texts ({type(error).__name__}: {one_line(error)})")
    if not sizes:
        return PackingCheck(_OWN)
    wrong = [size for size in sizes if size > KERNEL_HEAD_SIZE or size % 8]
    if gpu and wrong:
        taken = f"multiples of 8 up to {KERNEL_HEAD_SIZE}"
        return PackingCheck(f"its heads have size {wrong[0]}, and a GPU's kernel for packed texts takes {taken}")
    return PackingCheck(None, max(dropouts))


def packing_mismatch(
    encoder: Forward, config: PretrainedConfig, precision: Precision, device: torch.device
) -> str | None:
    """Why the vectors of packed texts are not those of each alone; None where they are.

    Two texts are packed with one another, and each with another in the other's place, which must not change a bit of
    it. Four forward passes without gradient, collectives if the encoder is sharded: every rank must call.

    Args:
        encoder: with weights, after `enable_packing`, without dropout.
        config: of its backbone.
        precision: what is computed in.
        device: where.
    """
    special = {config.get_text_config().pad_token_id}
    ids = [token for token in range(int(config.get_text_config().vocab_size)) if token not in special][:11]
    first, second = ids[:5], (ids * 3)[5:8]
    changed_first, changed_second = first[1:] + first[:1], (ids * 3)[8:11]
    with torch.no_grad():
        texts = [(first, second), (changed_first, second), (first, changed_second)]
        both, other_first, other_second = (encoder(*_chunk(device, list(pair))).float() for pair in texts)
        width = len(first)
        padded = torch.tensor([first, second + [ids[0]] * (width - len(second))], device=device)
        mask = torch.arange(width, device=device) < torch.tensor([[width], [len(second)]], device=device)
        alone = encoder(padded, mask.long()).float()
    if not (torch.equal(both[0], other_second[0]) and torch.equal(both[1], other_first[1])):
        return "its texts see one another when they are packed"
    apart = float(((both - alone).norm(dim=1) / alone.norm(dim=1)).max())
    if not apart <= _TOLERANCE[precision]:
        return f"its packed vectors are {apart:.1%} from those of the same texts padded"
    return None


def _chunk(device: torch.device, texts: list[list[int]]) -> tuple[Tensor, Tensor, None, Packing]:
    lengths = [len(text) for text in texts]
    ids = torch.tensor([[token for text in texts for token in text]], device=device)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    positions = torch.tensor([[place for length in lengths for place in range(length)]], device=device)
    return ids, torch.ones_like(ids), None, Packing(tuple(lengths), starts, positions)


@contextlib.contextmanager
def _attention_is(function: Callable[..., Any]) -> Iterator[None]:
    AttentionInterface.register(NAME, function)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, packed_attention.attention)


def _configs(encoder: nn.Module) -> list[PretrainedConfig]:
    found = [getattr(part, "config", None) for part in encoder.modules()]
    return list({id(config): config for config in found if isinstance(config, PretrainedConfig)}.values())
