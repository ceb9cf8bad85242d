"""Evaluation sets in memory: one dataclass for each kind, and LoadedSet with the options of a set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embedtrain.config.evaluation import Classifier

# The last column of run files that embedtrain writes: their ids are percent-encoded.
RUN_TAG = "embedtrain"


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
    """Queries, documents, and judgements of their relevance."""

    name: str
    queries: Mapping[str, str]  # texts by id, in the order of the file
    documents: Corpus
    # The gain of each judged document by query id. Documents that `documents` lacks stay: they are relevant and never
    # retrieved, as in trec_eval.
    judgements: Mapping[str, Mapping[str, int]]
    # The indices of the documents to rank (reranking), for every judged query; None: all documents are searched.
    candidates: Mapping[str, Sequence[int]] | None = None
    first_stage: str | None = None  # whose ranking the candidates are, best first (`bm25`, `run`); None: in no order
    ignore_identical_ids: bool = False  # whether a document with the query's own id is never retrieved

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
    """Texts to learn classes from, and texts to classify. Labels are whole numbers or texts."""

    name: str
    train_texts: Sequence[str]
    train_labels: Sequence[int | str]
    texts: Sequence[str]
    labels: Sequence[int | str]
    classifier: Classifier = Classifier.logistic
    samples_per_label: int | None = 8  # training texts of each class per experiment; None: all
    experiments: int = 10  # draws that are averaged


@dataclass(frozen=True, slots=True)
class ClusteringSet:
    """Texts with their clusters, of which nested ones are listed from the coarsest to the finest."""

    name: str
    texts: Sequence[str]
    labels: Sequence[Sequence[int | str]]
    # Indices of texts that are clustered together, as in older sets of MTEB; None: texts are drawn.
    groups: Sequence[Sequence[int]] | None = None
    experiments: int = 10


EvaluationData = RetrievalSet | ScoredPairs | LabelledPairs | Bitext | ClassificationSet | ClusteringSet


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """A set with its options. A prompt or length of None is the model's."""

    data: EvaluationData
    query_prompt: str | None = None  # of queries and of all texts that are not documents
    document_prompt: str | None = None
    query_max_length: int | None = None
    document_max_length: int | None = None
    metrics: tuple[str, ...] | None = None  # the main one first; None: those of its kind
    is_subset: bool = False  # whether `data` is a part of the set
    first_stage_metrics: Mapping[str, float] | None = None  # of the candidates in the order of their first stage
    notes: tuple[str, ...] = ()  # irregularities and how they are handled, one line each
