"""The comparison of each kind of model."""

from embedtrain.config.late_interaction import TokenSimilarity
from embedtrain.inference.comparison import Comparison
from embedtrain.inference.late_interaction import MaxSimComparison
from embedtrain.inference.m3 import M3Comparison
from embedtrain.inference.sparse import WordComparison
from embedtrain.inference.vector_comparison import vector_comparison
from embedtrain.models.types import ModelSource


def comparison_of(source: ModelSource) -> Comparison:
    """How texts are compared that this model has encoded."""
    if source.m3 is not None:
        return M3Comparison(source.m3)
    if source.words is not None:
        return WordComparison(is_symmetric=source.words.queries is None)
    if source.token_vectors is None:
        return vector_comparison(source.similarity)
    return MaxSimComparison(mean=source.token_vectors.similarity is TokenSimilarity.meanmaxsim)
