"""What an evaluation set measures: its kind, and how many queries, documents, pairs or texts."""

from embedtrain.config.evaluation import SetKind
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    EvaluationData,
    LabelledPairs,
    LoadedSet,
    RetrievalSet,
    ScoredPairs,
)
from embedtrain.tracking.metrics import DatasetInfo


def dataset_info(loaded: LoadedSet) -> DatasetInfo:
    """Kind and size of a set. Queries are those with judgements, documents those that are searched or ranked."""
    data = loaded.data
    return DatasetInfo(kind_of(data).value, _counts(data), loaded.is_subset)


def kind_of(data: EvaluationData) -> SetKind:
    """The kind of a set, never `auto`."""
    match data:
        case RetrievalSet():
            return SetKind.retrieval if data.candidates is None else SetKind.reranking
        case ScoredPairs():
            return SetKind.sts
        case LabelledPairs():
            return SetKind.pair_classification
        case Bitext():
            return SetKind.bitext
        case ClassificationSet():
            return SetKind.classification
        case ClusteringSet():
            return SetKind.clustering


def _counts(data: EvaluationData) -> dict[str, int]:
    match data:
        case RetrievalSet():
            return {"queries": len(data.judged_queries), "documents": len(data.documents)}
        case ScoredPairs() | LabelledPairs() | Bitext():
            return {"pairs": len(data.first)}
        case ClassificationSet():
            return {"texts": len(data.texts), "train_texts": len(data.train_texts)}
        case ClusteringSet():
            return {"texts": len(data.texts)}
