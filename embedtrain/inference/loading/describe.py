"""Notes about a loaded model: what it computes, how it is sharded, and what is trained."""

from collections.abc import Sequence

from torch import nn

from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.models.adapters import AdapterInfo, describe_adapters
from embedtrain.models.encoder import Encoder
from embedtrain.models.types import ModelSource
from embedtrain.planning.model_costs import ModelSpec


def describe_model(
    encoder: Encoder,
    source: ModelSource,
    tokenizer: TextTokenizer,
    costs: ModelSpec,
    layout: ParallelLayout,
    blocks: Sequence[nn.Module],
    adapted: AdapterInfo | None,
) -> list[str]:
    """Lines about the model, its layout on the ranks, and its adapters."""
    memory = ", activations recomputed" * layout.activation_checkpointing + ", in host memory" * layout.cpu_offload
    return [
        f"{type(encoder.backbone).__name__.removeprefix('FSDP')}, {costs.weights.parameters:,} parameters, "
        f"{source.kind.outputs(source)}, {tokenizer.longest_text} tokens",
        *tokenizer.layout.notes,
        f"{layout.strategy.value}: {layout.replicate} x {layout.shard} ranks (replicate x shard), "
        f"{len(blocks)} {type(blocks[0]).__name__ if blocks else 'block'} + root{memory}; {layout.reason}",
        *source.kind.notes(source),
        *([] if adapted is None else [describe_adapters(adapted, encoder)]),
    ]


def describe_reduction_per_chunk(costs: ModelSpec) -> str:
    """The line of a training whose ranks have no memory for full gradients."""
    size = 4 * costs.weights.trained / 2**30
    return f"gradients are reduced after every chunk: full ones would take {size:.1f} GiB on every rank"
