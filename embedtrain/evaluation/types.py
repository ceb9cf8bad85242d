"""Evaluation sets in memory: a dataclass for each kind, their names, sizes and metrics, and what is measured."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from embedtrain.config.evaluation import Classifier, SetKind, VectorFormat, VectorPrecision, stored_bytes
from embedtrain.config.kinds import Kind
from embedtrain.data.images.item import chunks_of
from embedtrain.errors import ConfigError
from embedtrain.evaluation.metrics import (
    BINARY_CLASSIFICATION_METRICS,
    BITEXT_METRICS,
    CENTROID_METRICS,
    CLASSIFICATION_METRICS,
    CLUSTERING_METRICS,
    MEAN,
    PAIR_CLASSIFICATION_METRICS,
    RERANKING_METRICS,
    RETRIEVAL_METRICS,
    STS_METRICS,
    check_retrieval_metrics,
)
from embedtrain.inference.index import ShardedIndex
from embedtrain.inference.quantised import CompressedIndex, sample_ranges
from embedtrain.losses.quantisation import Ranges
from embedtrain.tracking.metrics import DatasetInfo, FirstStage, VectorSize

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
    # The gains of chunks of documents, by the ids of `of_chunks`; the gain of a document is then that of its best one.
    chunk_judgements: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def judged_queries(self) -> list[str]:
        """Ids of the queries with judgements, in the order of the file."""
        return [query for query in self.queries if query in self.judgements]

    @property
    def of_chunks(self) -> "RetrievalSet":
        """The set whose documents are the chunks, with their `chunk_id`; texts are those of whole documents."""
        ids = [
            chunk_id(name, number)
            for name, text in zip(self.documents.ids, self.documents.texts, strict=True)
            for number in range(len(chunks_of(text)[0]))
        ]
        return replace(self, documents=Corpus(ids, self.documents.texts), judgements=self.chunk_judgements)


def chunk_id(document: str, number: int) -> str:
    """The id of a chunk, by its number from 0."""
    return f"{document}#{number}"


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


# What is measured of a set: the first dimensions of its vectors, a view of their score, or a form of the vectors; None:
# the vectors as they are.
Variant = int | str | VectorFormat | None
# The view of a score that compares queries with chunks of documents, of sets that judge these.
CHUNKS = "chunks"


@dataclass(frozen=True, slots=True)
class CompressedVectors:
    """Forms to measure, and where the ranges of int8 and uint8 are from."""

    formats: Sequence[VectorFormat] = ()
    calibration: int = 10000  # documents of a set whose vectors give the ranges
    ranges: Mapping[int, Ranges] = field(default_factory=dict)  # of the model's files instead, by dimension

    def besides(self, truncate_dims: Sequence[int]) -> list[VectorFormat]:
        """The forms that are not just vectors of these dimensions."""
        return [form for form in self.formats if form.label not in map(str, truncate_dims)]

    def index(
        self, whole: ShardedIndex, form: VectorFormat, dimension: int, sampled: dict[int, Ranges]
    ) -> CompressedIndex:
        """The documents of an index in one form; `dimension` is that of their vectors. A collective.

        Ranges are the model's, else those of a sample of the documents, which `sampled` keeps for further forms.
        """

        def ranges_of(dimension: int) -> Ranges:
            if dimension not in self.ranges and dimension not in sampled:
                sampled[dimension] = sample_ranges(whole, dimension, self.calibration)
            return self.ranges.get(dimension) or sampled[dimension]

        return CompressedIndex(whole, form, dimension, ranges_of)


def has_variant(loaded: LoadedSet, variant: Variant) -> bool:
    """Whether a set is measured in this form; compressed vectors and chunks are for searches of all documents."""
    is_search = isinstance(loaded.data, RetrievalSet) and loaded.data.candidates is None
    if variant == CHUNKS:
        return is_search and isinstance(loaded.data, RetrievalSet) and bool(loaded.data.chunk_judgements)
    return is_search or not isinstance(variant, VectorFormat)


def vector_size(variant: Variant, dimension: int) -> VectorSize:
    """Bytes of a document of vectors that have so many dimensions."""
    if isinstance(variant, VectorFormat):
        return VectorSize(variant.label, variant.bytes_per_document(dimension), variant.rescore_bytes(dimension))
    dims = variant if isinstance(variant, int) else dimension
    return VectorSize(str(dims), stored_bytes(dims, VectorPrecision.float), 0)


def dataset_info(loaded: LoadedSet) -> DatasetInfo:
    """Kind and size of a set. Queries are those with judgements, documents those that are searched or ranked."""
    data, first_stage = loaded.data, None
    if isinstance(data, RetrievalSet) and data.first_stage is not None and loaded.first_stage_metrics is not None:
        main = metric_names_of_set(loaded)[0]
        first_stage = FirstStage(data.first_stage, main, loaded.first_stage_metrics[main])
    return DatasetInfo(kind_of(data).value, _counts(data), loaded.is_subset, first_stage=first_stage)


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


def check_sets_of_kind(sets: Sequence[LoadedSet], kind: Kind, option: str) -> None:
    """Raise ConfigError for a set that models of this kind cannot measure, if they encode texts."""
    for loaded in () if kind.measures_classes or kind.scores_pairs else sets:
        if isinstance(loaded.data, ClassificationSet | ClusteringSet):
            raise ConfigError(
                f"{option}: {loaded.data.name} is a set of the kind {kind_of(loaded.data).value}, which needs one "
                f"vector per text, and model.kind={kind.name} computes {kind.summary}: leave it out (allowed are "
                "retrieval, reranking, sts, pair_classification and bitext)"
            )


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


def metric_names_of_set(loaded: LoadedSet) -> tuple[str, ...]:
    """The metrics of a set, the main one first."""
    return _kind_and_metrics(loaded.data)[1] if loaded.metrics is None else loaded.metrics


def metric_names(sets: Sequence[LoadedSet], variants: Sequence[Variant] = ()) -> dict[str, tuple[str, ...]]:
    """The metrics of an evaluation by the name of the set; `mean` has those that several sets have.

    `variants` are also measured, such as `SET@256` with truncated vectors.
    """
    names: dict[str, tuple[str, ...]] = {}
    for variant in (None, *variants):
        measured = [loaded for loaded in sets if has_variant(loaded, variant)]
        by_set = {loaded.data.name: metric_names_of_set(loaded) for loaded in measured}
        shared = shared_metrics(by_set, MEAN)
        by_set |= {MEAN: shared} if shared else {}
        names |= {name_at(name, variant): of_set for name, of_set in by_set.items()}
    return names


def name_at(name: str, variant: Variant) -> str:
    """The name of a set under which a variant is reported."""
    return name if variant is None else f"{name}@{variant.label if isinstance(variant, VectorFormat) else variant}"


def check_metrics(data: EvaluationData, metrics: Sequence[str], option: str) -> None:
    """Raise ConfigError for metrics that a set does not have; `option` is the name of the option for the message."""
    kind, allowed = _kind_and_metrics(data)
    if not metrics:
        raise ConfigError(f"{option}=[] is empty: name metrics, or write null for those of {kind}")
    if isinstance(data, RetrievalSet):
        check_retrieval_metrics(metrics, option)
        return
    for metric in metrics:
        if metric not in allowed:
            raise ConfigError(f"{option}: {metric!r} is not a metric of {kind}: allowed are {', '.join(allowed)}")


def has_metric(data: EvaluationData, metric: str) -> bool:
    """Whether a set has a metric."""
    try:
        check_metrics(data, [metric], "")
    except ConfigError:
        return False
    return True


def explain_no_metric(sets: Sequence[EvaluationData], metric: str, option: str) -> str:
    """The message for a metric that none of the sets has: those of each kind of set."""
    messages = dict[str, None]()
    for data in sets:
        try:
            check_metrics(data, [metric], option)
        except ConfigError as error:
            messages[str(error)] = None
    first, *others = messages
    return "; ".join([first, *(message.partition(": ")[2] for message in others)])


def _kind_and_metrics(data: EvaluationData) -> tuple[str, tuple[str, ...]]:
    """The name of a kind of set, and its metrics, the main one first."""
    match data:
        case RetrievalSet(candidates=None):
            return "retrieval", RETRIEVAL_METRICS
        case RetrievalSet():
            return "reranking", RERANKING_METRICS
        case ScoredPairs():
            return "semantic textual similarity", STS_METRICS
        case LabelledPairs():
            return "pair classification", PAIR_CLASSIFICATION_METRICS
        case Bitext():
            return "bitext mining", BITEXT_METRICS
        case ClassificationSet(classifier=Classifier.centroid):
            return "classification by centroids", CENTROID_METRICS
        case ClassificationSet():
            # Average precision is defined for two classes only.
            is_binary = len(set(data.labels)) == 2
            return "classification", BINARY_CLASSIFICATION_METRICS if is_binary else CLASSIFICATION_METRICS
        case ClusteringSet():
            return "clustering", CLUSTERING_METRICS


def shared_metrics(metrics_by_set: Mapping[str, Sequence[str]], mean: str) -> tuple[str, ...]:
    """The metrics that several sets have; none if a set has the name `mean` itself."""
    if mean in metrics_by_set:
        return ()
    counts = Counter(metric for metrics in metrics_by_set.values() for metric in metrics)
    return tuple(metric for metric, count in counts.items() if count > 1)
