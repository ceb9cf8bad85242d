"""Checks of a set: whether its options fit its kind, and whether it can distinguish models."""

from dataclasses import fields

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    EvaluationData,
    LabelledPairs,
    RetrievalSet,
    ScoredPairs,
)

_KINDS: dict[type[EvaluationData], str] = {
    RetrievalSet: "a retrieval set",
    ScoredPairs: "an STS set",
    LabelledPairs: "a set of labelled pairs",
    Bitext: "a bitext set",
    ClassificationSet: "a classification set",
    ClusteringSet: "a clustering set",
}
# Options of some kinds of sets.
_KINDS_OF_OPTION: dict[str, tuple[type[EvaluationData], ...]] = {
    "candidates": (RetrievalSet,),
    "subset_documents": (RetrievalSet,),
    "ignore_identical_ids": (RetrievalSet,),
    "train": (ClassificationSet,),
    "classifier": (ClassificationSet,),
    "samples_per_label": (ClassificationSet,),
    "experiments": (ClassificationSet, ClusteringSet),
}
_DOCUMENT_OPTIONS = ("document_prompt", "document_max_length")


def check_options(config: EvaluationSet, data: EvaluationData) -> list[str]:
    """Reject options that would have no effect; document prompts and lengths only cause a note.

    Raises:
        ConfigError: an option does not apply to this kind of set.
    """
    default = {field.name: field.default for field in fields(EvaluationSet)}
    for option, kinds in _KINDS_OF_OPTION.items():
        value = getattr(config, option)
        if value != default[option] and not isinstance(data, kinds):
            raise ConfigError(
                f"{option}={value} has no use with {config.path}, which is {_KINDS[type(data)]}: leave it out"
            )
    if isinstance(data, RetrievalSet):
        if data.candidates is not None and config.subset_documents is not None:
            raise ConfigError(
                f"subset_documents={config.subset_documents} has no use with {config.path}, "
                f"of which only candidates are ranked: leave it out"
            )
        return []
    unused = [option for option in _DOCUMENT_OPTIONS if getattr(config, option) is not None]
    return [f"{data.name}: {unused[0]} has no use, since {_KINDS[type(data)]} has no documents"] if unused else []


def require_usable(data: EvaluationData, source: str) -> None:
    """Reject a set on which the metric is undefined or the same for every model.

    Args:
        data: the set, as it is measured.
        source: its name in the message.

    Raises:
        DataError: with what it lacks.
    """
    match data:
        case RetrievalSet() if not any(
            gain > 0 and (data.candidates is None or data.candidates.get(query))
            for query, gains in data.judgements.items()
            for gain in gains.values()
        ):
            lacking = "a relevant document" if data.candidates is None else "a relevant document and candidates"
            raise DataError(f"{source}: no query has {lacking}, so every model would score 0")
        case ScoredPairs() if len(set(data.scores)) < 2:
            count = len(data.scores)
            raise DataError(f"{source}: {count} pairs with {len(set(data.scores))} different scores, so no correlation")
        case LabelledPairs() if len(set(data.labels)) < 2:
            same = f" and all have the label {data.labels[0]}" if data.labels else ""
            raise DataError(f"{source}: {len(data.labels)} pairs{same}, so there is nothing to distinguish")
        case Bitext() if not data.first:
            raise DataError(f"{source} is empty")
        case ClassificationSet() if len(set(data.train_labels)) < 2:
            raise DataError(
                f"{source}: all {len(data.train_labels)} texts to learn from have the label {data.train_labels[0]}, "
                f"so there is nothing to distinguish"
            )
        case ClusteringSet() if not any(len(set(clusters)) > 1 for clusters in _clusters(data)):
            raise DataError(
                f"{source}: {len(data.texts)} texts without two clusters, so there is nothing to distinguish"
            )
        case _:
            return


def _clusters(data: ClusteringSet) -> list[list[int | str]]:
    """The clusters of each group of texts that are clustered together, on the finest level."""
    groups = [range(len(data.texts))] if data.groups is None else data.groups
    return [[data.labels[row][-1] for row in group] for group in groups]
