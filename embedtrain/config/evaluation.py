"""Options of evaluation: the sets, how each is measured, and how their texts are encoded and searched."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class SetKind(str, Enum):
    """What an evaluation set is. `auto` tells by its folder or its columns."""

    auto = "auto"
    retrieval = "retrieval"
    reranking = "reranking"
    sts = "sts"
    pair_classification = "pair_classification"
    bitext = "bitext"
    classification = "classification"
    clustering = "clustering"


class Unshard(str, Enum):
    """How much of sharded weights a rank holds while it encodes.

    `layer`: one layer at a time, gathered anew for every pass. `model`: all of them, gathered before
    a set of texts is encoded.
    """

    layer = "layer"
    model = "model"


class VectorPlacement(str, Enum):
    """Where a rank keeps its documents' vectors. `auto`: on its GPU where they take less than half of what is free."""

    auto = "auto"
    device = "device"
    host = "host"


class VectorDtype(str, Enum):
    """What documents' vectors are kept as; scores of them are fp32 either way."""

    fp32 = "fp32"
    bf16 = "bf16"


class Classifier(str, Enum):
    """What tells classes apart by vectors: scikit-learn's logistic regression, or its nearest neighbours."""

    logistic = "logistic"
    knn = "knn"


@dataclass(kw_only=True)
class IndexConfig:
    """How documents' vectors are kept for search."""

    dtype: VectorDtype = VectorDtype.fp32
    place: VectorPlacement = VectorPlacement.auto


@dataclass(kw_only=True)
class EvaluationSet:
    """One evaluation set, an element of `evaluation.sets` (a bare string is its `path`)."""

    path: str  # BEIR folder, table, folder of tables, or Hub id
    kind: SetKind = SetKind.auto
    name: str | None = None  # default: the end of the path
    config: str | None = None  # configuration of a Hub data set, such as a language
    split: str | None = None  # qrels/<split>.tsv, or split of a Hub data set; default: test, then dev, ...
    revision: str | None = None  # of a Hub data set: a commit, tag or branch
    qrels_revision: str | None = None  # of a second Hub data set that holds its judgements, <path>-qrels
    query_prompt: str | None = None  # of queries, and of all texts that are no documents; default: model.query_prompt
    document_prompt: str | None = None  # default: model.document_prompt
    query_max_length: int | None = None  # tokens; default: the model's
    document_max_length: int | None = None  # tokens; default: the model's
    metrics: list[str] | None = None  # such as [ndcg@10, recall@1000]; the first is the main one; default: the kind's
    subset: int | None = None  # at most so many queries, or rows, the same in every run; default: evaluation.subset
    subset_documents: int | None = None  # at most so many documents beside the judged ones
    ignore_identical_ids: bool = False  # a document with the query's id is not found, as in ArguAna and Quora
    candidates: str | None = None  # reranking: a TREC run file with the documents to rank for each query
    train: str | None = None  # classification: the table to learn classes from; default: train beside the path
    classifier: Classifier = Classifier.logistic
    samples_per_label: int | None = 8  # classification: texts of each class to learn from; null: all
    experiments: int = 10  # classification and clustering: draws whose figures are averaged


@dataclass(kw_only=True)
class EvaluationConfig:
    """What is measured, and when."""

    every: int = 0  # steps; 0: at the end only
    at_start: bool = False  # also before the first step
    sets: list[Any] = field(default_factory=list)  # of EvaluationSet, or of paths
    subset: int | None = None  # at most so many queries or rows of each set, for speed
    patience: int | None = None  # stop after so many evaluations without a better checkpoint.best_metric
    chunk_tokens: int = 16384  # tokens one forward pass may hold on one rank
    unshard: Unshard = Unshard.layer
    index: IndexConfig = field(default_factory=IndexConfig)
