"""Notes about a loaded model: what it computes, how it is sharded, and what is trained."""

from collections.abc import Sequence

from torch import nn

from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.recipe import Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.models.adapters import AdapterInfo, describe_adapters
from embedtrain.models.encoder import Encoder
from embedtrain.models.static_embedding import is_static
from embedtrain.models.static_queries import describe_static_queries
from embedtrain.models.types import ModelSource
from embedtrain.planning.model_costs import ModelSpec

_POOLED = {
    Pooling.cls: "first token",
    Pooling.mean: "mean of the tokens",
    Pooling.last: "last token",
    Pooling.max: "maximum of the tokens",
    Pooling.weighted_mean: "weighted mean of the tokens",
}


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
        f"{describe_outputs(source)}, {tokenizer.longest_text} tokens",
        *tokenizer.layout.notes,
        f"{layout.strategy.value}: {layout.replicate} x {layout.shard} ranks (replicate x shard), "
        f"{len(blocks)} {type(blocks[0]).__name__ if blocks else 'block'} + root{memory}; {layout.reason}",
        *([source.settings.note] if source.kind.name == "cross_encoder" and source.settings.note else []),
        *([] if adapted is None else [describe_adapters(adapted, encoder)]),
    ]


def describe_reduction_per_chunk(costs: ModelSpec) -> str:
    """The line of a training whose ranks have no memory for full gradients."""
    size = 4 * costs.weights.trained / 2**30
    return f"gradients are reduced after every chunk: full ones would take {size:.1f} GiB on every rank"


def describe_outputs(source: ModelSource) -> str:
    """The outputs of a model in a few words, such as `mean pooling, normalised`."""
    if source.kind.name == "sparse":
        static = f", {describe_static_queries(source.settings.queries)}" if source.settings.queries is not None else ""
        return f"weights of {source.dimension:,} words, {source.settings.pooling.value} over tokens{static}"
    if source.kind.name == "late_interaction":
        new = "new " * source.settings.is_new
        return f"a {new}projection of tokens to {source.dimension} dimensions, {source.settings.similarity.value}"
    if source.kind.name == "m3":
        layers = "new layers" if source.settings.is_new else "layers"
        return (
            f"dense, lexical and multi-vector representations, {layers} of lexical weights and of token vectors of "
            f"{source.settings.token_dimension} dimensions"
        )
    if source.kind.name != "cross_encoder":
        sizes = "".join(f" -> {d.num_out}" for d in source.dense)
        heads = f", {'new ' * source.has_new_head}heads {source.dense[0].num_in}{sizes}" if source.dense else ""
        pooling = "mean of the tokens' rows" if is_static(source.config) else f"{source.pooling.value} pooling"
        similarity = "" if source.similarity is VectorSimilarity.cosine else f", compared by {source.similarity.value}"
        return f"{pooling}{heads}{', normalised' if source.normalize else ''}{similarity}"
    kind = "a new score head" if source.settings.is_new else "a score head"
    return f"{'the score of a token' if source.settings.tokens else kind} on the {_POOLED[source.pooling]}"
