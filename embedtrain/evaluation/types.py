"""What an evaluation set is once it is read: one dataclass for each kind, and LoadedSet around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embedtrain.config.evaluation import Classifier


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in the order of the file: `texts[i]` is that of `ids[i]`, title and text in one; ids are unique."""

    ids: Sequence[str]
    texts: Sequence[str]

    @classmethod
    def of(cls, documents: Mapping[str, str]) -> "Corpus":
        """Documents given as texts by id."""
        return cls(list(documents), list(documents.values()))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class RetrievalSet:
    """Queries, documents, and which documents answer which query.

    Attributes:
        name: what figures are reported under.
        queries: texts by query id, in the order of the file.
        documents: what is searched.
        judgements: by query id the gain of each judged document; only ids that `queries` holds. Documents
            that `documents` does not hold stay: they are relevant and can never be found, as in trec_eval.
        candidates: by query id the numbers of the documents to rank (reranking), for every judged query; None: all
            documents are searched.
        ignore_identical_ids: whether a document with the query's own id is never found.
    """

    name: str
    queries: Mapping[str, str]
    documents: Corpus
    judgements: Mapping[str, Mapping[str, int]]
    candidates: Mapping[str, Sequence[int]] | None = None
    ignore_identical_ids: bool = False

    @property
    def judged_queries(self) -> list[str]:
        """Ids of the queries that are measured, in the order of the file."""
        return [query for query in self.queries if query in self.judgements]


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Pairs of sentences with a gold similarity each (semantic textual similarity); lists of equal length."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class LabelledPairs:
    """Pairs of sentences that mean the same (1) or do not (0); lists of equal length."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    labels: Sequence[int]


@dataclass(frozen=True, slots=True)
class Bitext:
    """Sentences and their translations, row by row; lists of equal length."""

    name: str
    first: Sequence[str]
    second: Sequence[str]


@dataclass(frozen=True, slots=True)
class ClassificationSet:
    """Texts with classes, some to learn from and some to be told.

    Attributes:
        name: what figures are reported under.
        train_texts: to learn from.
        train_labels: their classes, whole numbers or texts.
        texts: to be told.
        labels: their classes.
        classifier: what is fitted to vectors.
        samples_per_label: texts of each class that an experiment learns from; None: all.
        experiments: how many draws are averaged.
    """

    name: str
    train_texts: Sequence[str]
    train_labels: Sequence[int | str]
    texts: Sequence[str]
    labels: Sequence[int | str]
    classifier: Classifier = Classifier.logistic
    samples_per_label: int | None = 8
    experiments: int = 10


@dataclass(frozen=True, slots=True)
class ClusteringSet:
    """Texts with the cluster each belongs to.

    Attributes:
        name: what figures are reported under.
        texts: all of them.
        labels: the cluster of each, whole numbers or texts; several, from the coarsest to the finest, where clusters
            are nested.
        groups: numbers of the texts that are clustered together, as older sets of MTEB have them; None: texts are
            drawn, `experiments` times.
        experiments: how many draws are averaged.
    """

    name: str
    texts: Sequence[str]
    labels: Sequence[Sequence[int | str]]
    groups: Sequence[Sequence[int]] | None = None
    experiments: int = 10


EvaluationData = RetrievalSet | ScoredPairs | LabelledPairs | Bitext | ClassificationSet | ClusteringSet


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """A set with what its recipe entry says about it.

    Attributes:
        data: the set itself.
        query_prompt: put before queries, and before all texts that are no documents; None: the model's.
        document_prompt: put before documents; None: the model's.
        query_max_length: tokens kept of what has the query's prompt; None: the model's.
        document_max_length: tokens kept of documents; None: the model's.
        metrics: which figures are wanted, the main one first; None: those of its kind.
        notes: one line each, what was found odd and what was done about it.
    """

    data: EvaluationData
    query_prompt: str | None = None
    document_prompt: str | None = None
    query_max_length: int | None = None
    document_max_length: int | None = None
    metrics: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
