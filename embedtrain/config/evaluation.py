"""Options of evaluation: the sets, their metrics, and how texts are encoded and searched."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from embedtrain.config.code import code_option
from embedtrain.config.columns import DataPath
from embedtrain.config.options import LENGTH, Effect, check_values, declare, option
from embedtrain.config.validation import OptionChecks, written
from embedtrain.errors import ConfigError

if TYPE_CHECKING:
    from embedtrain.config.kinds import Kind


BM25, MODEL = "bm25", "model"  # what finds the documents for a reranker: `first_stage` of evaluate


class SetKind(str, Enum):
    """The kind of an evaluation set. `auto` detects it from the directory or the columns."""

    auto = "auto"
    retrieval = "retrieval"
    reranking = "reranking"
    sts = "sts"
    pair_classification = "pair_classification"
    bitext = "bitext"
    classification = "classification"
    clustering = "clustering"


class Unshard(str, Enum):
    """How much of sharded weights a rank gathers at a time to encode texts.

    `layer`: one layer, in every forward pass. `model`: all layers, once for each set of texts.
    """

    layer = "layer"
    model = "model"


class Backend(str, Enum):
    """What computes the outputs of a model: torch, or a graph of its directory on the CPU, see `export.formats`."""

    torch = "torch"
    onnx = "onnx"
    onnx_fp16 = "onnx_fp16"
    onnx_int8 = "onnx_int8"
    openvino = "openvino"


class VectorPlacement(str, Enum):
    """Where a rank keeps the embeddings of documents.

    `auto`: on the GPU if they fit into half its free memory, else on the host. `disk`: in the files of stored vectors,
    which are memory-mapped.
    """

    auto = "auto"
    device = "device"
    host = "host"
    disk = "disk"


class VectorDtype(str, Enum):
    """The type of the stored embeddings of documents. Scores are always fp32.

    `fp16` has three more bits than `bf16` for numbers up to 1, and is for unit vectors.
    """

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ScanDtype(str, Enum):
    """The type of the copy of the embeddings that a search reads first."""

    bf16 = "bf16"
    fp16 = "fp16"
    int8 = "int8"


class VectorPrecision(str, Enum):
    """How a number of a vector is stored.

    `float`: as it is, in 4 bytes. `int8`, `uint8`: in one byte, as one of 256 steps between the smallest and the
    largest value of its dimension. `binary`: in one bit, whether it is above 0.
    """

    float = "float"
    int8 = "int8"
    uint8 = "uint8"
    binary = "binary"


class Classifier(str, Enum):
    """How classes are learnt from training texts.

    `logistic`, `knn`: logistic regression and k-nearest neighbors of scikit-learn. `centroid`: the nearest class by the
    cosine to the mean of its normalised vectors. With descriptions of the classes to learn from, it is zero-shot
    classification.
    """

    logistic = "logistic"
    knn = "knn"
    centroid = "centroid"


@dataclass(kw_only=True)
class IndexConfig:
    """How the embeddings of documents are stored for search."""

    dtype: VectorDtype = VectorDtype.fp32
    # A search reads a smaller copy of this type, and scores by the embeddings themselves all documents that the error
    # of the copy leaves possible. The results are the same. With place=auto, the copy is on the GPU if it fits into
    # half its free memory, and the embeddings are on the host.
    scan_dtype: ScanDtype | None = option(None, in_result=False)
    place: VectorPlacement = option(VectorPlacement.auto, in_result=False)
    # Of a late-interaction model: a document keeps one in so many of its vectors, means of those that are alike
    # (HierarchicalTokenPooling of sentence-transformers); its first vector stays as it is.
    token_pooling: float = option(1.0, at_least=1, finite=True)
    # Of a late-interaction model: only so many documents of each query are scored by all of their vectors, those that
    # score best by vectors pooled as with token_pooling. Others are not found: first_stage_recall@k of evaluate is the
    # fraction of the best k documents that are. With place=auto, only the pooled vectors may be on the GPU.
    first_stage: int | None = option(None, at_least=1, hint="null scores all documents by all of their vectors")
    first_stage_pooling: float = option(4.0, above=1, finite=True)  # the first stage has one in so many of the vectors

    @property
    def identity(self) -> str:
        """What the stored vectors depend on."""
        pooled = "" if self.token_pooling == 1 else f", token_pooling={self.token_pooling:g}"
        return f"{self.dtype.value}{pooled}"

    @property
    def search_identity(self) -> str:
        """What the results of a search depend on."""
        if self.first_stage is None:
            return self.identity
        return f"{self.identity}, first_stage={self.first_stage}, first_stage_pooling={self.first_stage_pooling:g}"


def check_index(index: IndexConfig, prefix: str, *, stores_vectors: bool) -> None:
    """Check how an index stores vectors; `stores_vectors`: whether the command stores them in files."""
    check = OptionChecks(index, prefix)
    check.require(
        index.scan_dtype in (None, ScanDtype.int8) or index.dtype is VectorDtype.fp32,
        "scan_dtype",
        f"is not smaller than {prefix}dtype={index.dtype.value}; write int8, or leave it out",
    )
    check.require(
        index.scan_dtype is None or index.first_stage is None,
        "scan_dtype",
        f"is a copy of all vectors that a search reads, and {prefix}first_stage={index.first_stage} has pooled ones; "
        "keep one of the two",
    )
    check.require(
        index.first_stage is not None or index.first_stage_pooling == IndexConfig.first_stage_pooling,
        "first_stage_pooling",
        f"has no effect without {prefix}first_stage; write {prefix}first_stage=N, or leave it out",
    )
    check.require(
        stores_vectors or index.place is not VectorPlacement.disk,
        "place",
        "needs a directory of stored vectors: write vectors_dir=DIR in evaluate or search; training stores none",
    )


def check_index_of_kind(index: IndexConfig, prefix: str, kind: "Kind") -> None:
    """Check an index against the vectors that a kind of model computes of a document."""
    check = OptionChecks(index, prefix)
    check.require(
        index.scan_dtype is None or kind.has_one_vector or kind.has_token_vectors,
        "scan_dtype",
        f"is for models with one dense vector per text or per token, not for model.kind={kind.name}; leave it out",
    )
    for name in ("token_pooling", "first_stage"):
        check.require(
            kind.has_token_vectors or getattr(index, name) == getattr(IndexConfig, name),
            name,
            f"is for late-interaction models, whose documents have several vectors, not for model.kind={kind.name}; "
            "leave it out",
        )


@dataclass(kw_only=True)
class EvaluationSet(DataPath):
    """One evaluation set, an element of `evaluation.sets` (a string is its `path`)."""

    path: str = option(is_input=True)  # BEIR directory, table, directory of tables, or Hub id
    kind: SetKind = SetKind.auto
    # Of a table: those of the query and its documents, or of the two languages, in this order; or by role, as
    # {query: q, positive: passage, label: gold}, with text, sentence1, sentence2, negative and score. Default: by name.
    columns: Any = None
    backslash_escapes: bool = False  # CSV, TSV: a backslash escapes quotation marks, as Spark and MySQL write them
    name: str | None = None  # default: the end of the path
    config: str | None = None  # configuration of a Hub data set, such as a language
    split: str | None = None  # qrels/<split>.tsv, or split of a Hub data set; default: test, then dev, ...
    revision: str | None = None  # a commit, tag or branch of a Hub data set
    qrels_revision: str | None = None  # the same of the Hub data set with its judgements, <path>-qrels
    query_prompt: str | None = None  # for queries and all texts other than documents; default: model.query_prompt
    document_prompt: str | None = None  # default: model.document_prompt
    query_max_length: int | None = option(None, **LENGTH)  # tokens; default: the model's
    document_max_length: int | None = option(None, **LENGTH)  # tokens; default: the model's
    metrics: list[str] | None = None  # as [ndcg@10, recall@1000], the main one first; default: evaluation.metrics
    # at most so many queries or rows, the same in every run; default: evaluation.subset
    subset: int | None = option(None, at_least=1, hint="null takes all queries or rows")
    # at most so many documents besides the judged ones
    subset_documents: int | None = option(None, at_least=1, hint="null takes all documents")
    ignore_identical_ids: bool = False  # leave out the document with the query's id, as in ArguAna and Quora
    # retrieval: the documents are the queries, and the queries the documents, as of captions to find for a picture
    exchange_sides: bool = False
    # reranking: a TREC run file with the documents to rank for each query
    candidates: str | None = option(None, is_input=True)
    train: str | None = option(None, is_input=True)  # classification: training table; default: train beside the path
    classifier: Classifier = Classifier.logistic
    # classification: training texts per class; null, and always with classifier=centroid: all
    samples_per_label: int | None = option(8, at_least=1, hint="null takes all texts of each class")
    experiments: int = option(10, at_least=1)  # classification and clustering: number of random draws to average


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark of mteb under a short name, of which the tasks with public data are run."""

    benchmark: str  # its name in mteb
    quoted: str  # what people quote of it, in words


NANOBEIR = "nanobeir"
SUITES = {
    NANOBEIR: Suite("NanoBEIR", "mean nDCG@10 of 13 tasks"),
    "rteb": Suite("RTEB(beta)", "mean nDCG@10 of the public tasks"),
    "bright": Suite("BRIGHT", "mean nDCG@10 of 12 subsets"),
    "mteb_en": Suite("MTEB(eng, v2)", "mean of 41 tasks, and mean of the means of 7 types of tasks"),
    "mmteb_multi": Suite("MTEB(Multilingual, v2)", "mean of 131 tasks, and mean of the means of 9 types of tasks"),
    "vidore": Suite("ViDoRe(v3)", "mean nDCG@10 of the public tasks"),
}
# Those of NanoBEIR, as `sets: [nanobeir]` names them; mteb's copies on the Hub are mteb/NanoNAMERetrieval.
_NANOBEIR_SETS = (
    "ArguAna", "ClimateFever", "DBPedia", "FEVER", "FiQA2018", "HotpotQA", "MSMARCO", "NFCorpus", "NQ", "Quora",
    "SCIDOCS", "SciFact", "Touche2020",
)  # fmt: skip


def with_suites(sets: Sequence[EvaluationSet]) -> list[EvaluationSet]:
    """The sets, with each one whose path is `nanobeir` replaced by those of NanoBEIR, which get its options.

    A file or folder of this name is itself.
    """
    expanded: list[EvaluationSet] = []
    for each in sets:
        if each.path != NANOBEIR or os.path.lexists(NANOBEIR):
            expanded.append(each)
            continue
        for name in ("name", "config", "split", "revision", "qrels_revision", "candidates", "train"):
            if getattr(each, name) is not None:
                raise ConfigError(
                    f"sets, {NANOBEIR}: {name}={getattr(each, name)}: is of one set, and these are "
                    f"{len(_NANOBEIR_SETS)}; write the path of one, such as mteb/NanoSciFactRetrieval"
                )
        paths = (f"mteb/Nano{name}Retrieval" for name in _NANOBEIR_SETS)
        expanded += [replace(each, path=path, split="train", kind=SetKind.retrieval) for path in paths]
    return expanded


def parse_suites(value: Any, option: str = "suite") -> list[str]:
    """Names of suites, one or a list. Raises a ConfigError for other names."""
    names = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{option}={value!r}: must be names of suites: {', '.join(SUITES)}")
    for name in names:
        if name not in SUITES:
            raise ConfigError(
                f"{option}={name}: is no suite; write one of {', '.join(SUITES)}, or mteb=[{name}] for a task or "
                "benchmark of mteb"
            )
    return list(dict.fromkeys(names))


_PRECISION = "(?:float|int8|uint8|binary)"


# What `VectorFormat.label` returns.
_LABEL = re.compile(rf"(\d+|(\d+-)?{_PRECISION}(-float-query)?(-x\d+(-{_PRECISION})?(-\d+)?(-top\d+)?)?)")


@dataclass(kw_only=True)
class RescoreConfig:
    """A second, more precise copy of the vectors that orders the best documents of a search again.

    The query is a float vector. Documents beyond those that are scored again follow in the order of the search.
    """

    times: int = option(4, at_least=1)  # so many times `top_k` documents are scored again
    top_k: int = option(10, at_least=1)  # results that a search serves
    documents: VectorPrecision = VectorPrecision.int8  # of the copy
    dims: int | None = option(None, at_least=1)  # of the copy; default: all


@dataclass(kw_only=True)
class VectorFormat:
    """A form of the vectors to measure, an element of `evaluation.vectors` (a string is its `documents`)."""

    dims: int | None = option(None, at_least=1)  # the first so many dimensions, normalised again; default: all
    documents: VectorPrecision = VectorPrecision.float
    queries: VectorPrecision | None = None  # float, or the precision of the documents, which is the default
    rescore: RescoreConfig | None = None  # options of RescoreConfig; default: documents are scored once

    @property
    def has_float_queries(self) -> bool:
        """Whether float vectors of queries are compared with compressed documents."""
        return self.documents is not VectorPrecision.float and self.queries is VectorPrecision.float

    @property
    def label(self) -> str:
        """The name that follows that of the set, such as `256-binary-x4`: defaults are left out."""
        parts = [] if self.dims is None else [str(self.dims)]
        if self.documents is not VectorPrecision.float or self.rescore is not None or self.dims is None:
            parts.append(self.documents.value)
        parts += ["float-query"] * self.has_float_queries
        if self.rescore is not None:
            parts.append(f"x{self.rescore.times}")
            is_default = self.rescore.documents is RescoreConfig.documents and self.rescore.dims is None
            parts += [self.rescore.documents.value] * (not is_default)
            parts += [] if self.rescore.dims is None else [str(self.rescore.dims)]
            parts += [f"top{self.rescore.top_k}"] * (self.rescore.top_k != RescoreConfig.top_k)
        return "-".join(parts)

    def bytes_per_document(self, dimension: int) -> int:
        """Bytes of a document that every search reads; `dimension` is that of the whole vectors."""
        return stored_bytes(self.dims or dimension, self.documents)

    def rescore_bytes(self, dimension: int) -> int:
        """Bytes of a document's copy for rescoring; 0 without."""
        return 0 if self.rescore is None else stored_bytes(self.rescore.dims or dimension, self.rescore.documents)


def stored_bytes(dims: int, precision: VectorPrecision) -> int:
    """Bytes of a vector."""
    match precision:
        case VectorPrecision.float:
            return 4 * dims
        case VectorPrecision.int8 | VectorPrecision.uint8:
            return dims
        case VectorPrecision.binary:
            return -(-dims // 8)


def is_label(text: str) -> bool:
    """Whether the name of a set may end with `@` and this text because its vectors are truncated or compressed."""
    return _LABEL.fullmatch(text) is not None


def dims_of(formats: Sequence[VectorFormat]) -> list[int]:
    """All dimensions that are named."""
    rescored = [form.rescore.dims for form in formats if form.rescore is not None]
    return [dims for dims in (*(form.dims for form in formats), *rescored) if dims is not None]


def check_kind_of_vectors(kind: "Kind", option: str) -> None:
    """Raise a ConfigError for a model that does not compute one vector per text."""
    if not kind.has_one_vector:
        raise ConfigError(f"{option}: is for one vector of each text (model.kind=dense), not {kind.name}; leave it out")


def check_truncate_dims(dims: Sequence[int] | None, option: str) -> None:
    """Raise a ConfigError for dimensions that no vector can be truncated to."""
    if dims is not None and (min(dims, default=1) < 1 or len(set(dims)) < len(dims)):
        raise ConfigError(
            f"{option}={written(dims)}: must be different numbers of dimensions above 0, such as [256,64], or [] for "
            "none"
        )


def check_vector_format(vectors: VectorFormat, prefix: str) -> VectorFormat:
    """The form itself; a ConfigError if it cannot be."""
    check = OptionChecks(vectors, prefix)
    check_values(vectors, prefix)
    check.require(
        vectors.queries in (None, VectorPrecision.float, vectors.documents),
        "queries",
        f"must be float or that of the documents, {vectors.documents.value}",
    )
    is_float = vectors.documents is VectorPrecision.float
    check.require(
        not is_float or vectors.dims is not None or vectors.rescore is not None,
        "documents",
        "is the form that vectors have without this option; write int8, uint8 or binary, or dims",
    )
    if vectors.rescore is not None:
        rescoring = OptionChecks(vectors.rescore, f"{prefix}rescore.")
        rescoring.require(
            vectors.rescore.documents in (VectorPrecision.float, VectorPrecision.int8, VectorPrecision.uint8),
            "documents",
            "must be float, int8 or uint8, which are more precise than binary",
        )
    return vectors


TRAINED = "@trained"  # follows the names of sets that are measured with the trained weights


@dataclass(kw_only=True)
class EvaluationConfig:
    """What is evaluated and when."""

    # steps; 0: only at the end
    every: int = option(0, at_least=0, hint="0 evaluates at the end only", chooses_best=True)
    at_start: bool = True  # evaluate before the first step as well, for comparison
    # sets: options of EvaluationSet, or paths
    sets: list[Any] = option(factory=list, is_measured=True, is_input=True, items=EvaluationSet)
    # at most so many queries or rows of each set
    subset: int | None = option(None, at_least=1, hint="null takes all queries or rows", is_measured=True)
    # Of each set those that its kind has, the main one first. Default, also of a set with none: those of its kind.
    metrics: list[str] | None = option(None, is_measured=True)
    # Also measure the first so many dimensions of the vectors, as SET@256. Default: those of loss.matryoshka.dims.
    truncate_dims: list[int] | None = None
    # Also measure retrieval sets with compressed vectors: options of VectorFormat, or precisions, as [int8,binary].
    vectors: list[Any] = option(factory=list, is_measured=True, items=VectorFormat)
    # documents of a set whose vectors give the ranges of int8 and uint8
    calibration: int = option(10000, at_least=1, is_measured=True)
    # With optim.ema, whose average is what is evaluated, also measure the trained weights, as SET@trained.
    trained_weights: bool = False
    # stop after so many evaluations without a better checkpoint.best_metric
    patience: int | None = option(None, at_least=1, hint="null never stops early", resume=Effect.changes_training)
    chunk_tokens: int = option(16384, at_least=1)  # tokens, including padding, of one forward pass on one rank
    unshard: Unshard = Unshard.layer
    index: IndexConfig = option(factory=IndexConfig, is_measured=True)
    # With model.kind=cross_encoder: documents to rank for each query of a retrieval set, the best of its `candidates`,
    # or of BM25 without.
    rerank_depth: int = option(100, at_least=1, is_measured=True)
    # A cross-encoder reads a document that is too long in overlapping windows, of which the best counts.
    document_windows: bool = option(False, is_measured=True)
    # module:function, called with the encoder after every evaluation; its metrics are a set of the function's name.
    function: str | None = declare(code_option(None), is_measured=True)
