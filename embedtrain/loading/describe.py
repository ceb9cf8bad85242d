"""The note of a loaded model about what it computes."""

from embedtrain.config.recipe import Pooling
from embedtrain.models.static_embedding import is_static
from embedtrain.models.static_queries import describe_static_queries
from embedtrain.models.types import ModelSource

_POOLED = {
    Pooling.cls: "first token",
    Pooling.mean: "mean of the tokens",
    Pooling.last: "last token",
    Pooling.max: "maximum of the tokens",
    Pooling.weighted_mean: "weighted mean of the tokens",
}


def describe_outputs(source: ModelSource) -> str:
    """The outputs of a model in a few words, such as `mean pooling, normalised`."""
    if source.words is not None:
        static = f", {describe_static_queries(source.words.queries)}" if source.words.queries is not None else ""
        return f"weights of {source.dimension:,} words, {source.words.pooling.value} over tokens{static}"
    if source.token_vectors is not None:
        new = "new " * source.token_vectors.is_new
        return f"a {new}projection of tokens to {source.dimension} dimensions, {source.token_vectors.similarity.value}"
    if source.m3 is not None:
        layers = "new layers" if source.m3.is_new else "layers"
        return (
            f"dense, lexical and multi-vector representations, {layers} of lexical weights and of token vectors of "
            f"{source.m3.token_dimension} dimensions"
        )
    if source.head is None:
        sizes = "".join(f" -> {d.num_out}" for d in source.dense)
        heads = f", {'new ' * source.has_new_head}heads {source.dense[0].num_in}{sizes}" if source.dense else ""
        pooling = "mean of the tokens' rows" if is_static(source.config) else f"{source.pooling.value} pooling"
        return f"{pooling}{heads}{', normalised' if source.normalize else ''}"
    kind = "a new score head" if source.head.is_new else "a score head"
    return f"{'the score of a token' if source.head.tokens else kind} on the {_POOLED[source.pooling]}"
