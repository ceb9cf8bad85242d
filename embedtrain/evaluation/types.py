"""Evaluation sets in memory: one dataclass for each kind, and LoadedSet with the options of a set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embedtrain.config.evaluation import Classifier


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in the order of the file: `texts[i]` is title and text of `ids[i]`; ids are unique."""

    ids: Sequence[str]
    texts: Sequence[str]

    @classmethod
    def from_dict(cls, documents: Mapping[str, str]) -> "Corpus":
        """A corpus of texts by id."""
        return cls(list(documents), list(documents.values()))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class RetrievalSet:
    """Queries, documents, and judgements of their relevance.

    Attributes:
        name: in reports.
        queries: texts by query id, in the order of the file.
        documents: the corpus.
        judgements: the gain of each judged document by query id; only ids of `queries`. Documents that `documents`
            lacks stay: they are relevant and can never be found, as in trec_eval.
        candidates: the numbers of the documents to rank (reranking), for every judged query; None: all documents are
            searched.
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
        """Ids of the queries with judgements, in the order of the file."""
        return [query for query in self.queries if query in self.judgements]


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Pairs of sentences with gold similarities (semantic textual similarity); lists of equal length."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class LabelledPairs:
    """Pairs of sentences with the same meaning (1) or not (0); lists of equal length."""

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
    """Texts to learn classes from, and texts to classify.

    Attributes:
        name: in reports.
        train_texts: to learn from.
        train_labels: classes of `train_texts`, whole numbers or texts.
        texts: to classify.
        labels: classes of `texts`.
        classifier: fitted to the vectors.
        samples_per_label: training texts of each class per experiment; None: all.
        experiments: number of draws that are averaged.
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
    """Texts with their clusters.

    Attributes:
        name: in reports.
        texts: of all clusters.
        labels: the cluster of each text, a whole number or a text; nested clusters from the coarsest to the finest.
        groups: numbers of the texts that are clustered together, as in older sets of MTEB; None: texts are drawn,
            `experiments` times.
        experiments: number of draws that are averaged.
    """

    name: str
    texts: Sequence[str]
    labels: Sequence[Sequence[int | str]]
    groups: Sequence[Sequence[int]] | None = None
    experiments: int = 10


EvaluationData = RetrievalSet | ScoredPairs | LabelledPairs | Bitext | ClassificationSet | ClusteringSet


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """A set with its options.

    Attributes:
        data: the set itself.
        query_prompt: of queries and of all texts that are not documents; None: the model's.
        document_prompt: None: the model's.
        query_max_length: tokens; None: the model's.
        document_max_length: tokens; None: the model's.
        metrics: the metrics to report, the main one first; None: those of its kind.
        notes: irregularities and how they are handled, one line each.
    """

    data: EvaluationData
    query_prompt: str | None = None
    document_prompt: str | None = None
    query_max_length: int | None = None
    document_max_length: int | None = None
    metrics: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
