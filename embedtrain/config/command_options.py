"""Options that several commands have, each written once: a command's dataclass inherits those that it needs."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.code import code_option
from embedtrain.config.evaluation import IndexConfig, Unshard
from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.recipe import POOLINGS, DataConfig, ExportDtype, OnError, Precision


@dataclass(kw_only=True)
class ModelOptions:
    """A model, and whether its code is trusted."""

    model: str = ""  # model directory or Hub id
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    # Execute Python code of the model: only for authors you trust
    trust_remote_code: bool = code_option(False, "model", "revision", "reranker", "teacher", "teacher_revision")


@dataclass(kw_only=True)
class KindOptions:
    """What a directory is read as."""

    kind: str | None = None  # of the model, also `module:Class` of a module of your own; default: what its files say


@dataclass(kw_only=True)
class PoolingOptions:
    """How the vectors of tokens become one."""

    # cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's.
    pooling: str | None = code_option(None, names=POOLINGS)


@dataclass(kw_only=True)
class LengthOptions:
    """How long texts are."""

    max_length: int | None = None  # tokens; default: the model's


@dataclass(kw_only=True)
class DocumentOptions(LengthOptions):
    """How documents are read."""

    document_prompt: str | None = None  # default: the model's


@dataclass(kw_only=True)
class TextOptions(DocumentOptions):
    """How queries and documents are read."""

    query_prompt: str | None = None  # default: the model's


@dataclass(kw_only=True)
class SimilarityOptions:
    """How vectors are compared."""

    # How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting.
    similarity: VectorSimilarity | None = None


@dataclass(kw_only=True)
class EncodeOptions(ModelOptions, KindOptions, PoolingOptions, SimilarityOptions, TextOptions):
    """A model that encodes texts, and everything that changes its vectors."""

    adapter: str | None = None  # a LoRA adapter in PEFT's format: directory or Hub id
    normalize: bool | None = None  # L2-normalize vectors; default: the model's setting


@dataclass(kw_only=True)
class ChunkOptions:
    """How much is computed at a time."""

    chunk_tokens: int = 16384  # per forward pass of a rank, including padding


@dataclass(kw_only=True)
class ShardOptions(ChunkOptions):
    """How a sharded model computes."""

    unshard: Unshard = Unshard.layer


@dataclass(kw_only=True)
class PrecisionOptions:
    """The numbers of weights and activations, where exact ones matter more than speed."""

    precision: Precision = Precision.fp32


@dataclass(kw_only=True)
class FastPrecisionOptions:
    """The numbers of weights and activations, where speed matters."""

    precision: Precision | None = None  # default: bf16 on GPUs, fp32 on CPUs


@dataclass(kw_only=True)
class RankOptions:
    """Several ranks."""

    timeout: float = 1800.0  # seconds that a rank waits for the others before all fail


@dataclass(kw_only=True)
class CacheOptions:
    """Prepared data."""

    cache_dir: str | None = None  # as data.cache_dir


@dataclass(kw_only=True)
class RowsOptions(CacheOptions):
    """Training rows."""

    data: Any = None  # training rows: list of TrainSource, or of paths; or one path


@dataclass(kw_only=True)
class ErrorOptions:
    """Rows that cannot be used."""

    on_error: OnError = OnError.stop  # for a row that cannot be used: stop with file and line, or skip and count it


@dataclass(kw_only=True)
class InstructionOptions:
    """Instructions of queries."""

    instruction_format: str = DataConfig.instruction_format  # as data.instruction_format


@dataclass(kw_only=True)
class CorpusOptions:
    """Documents besides those of rows."""

    # Further documents, one path or a list: BEIR directories, corpus files, tables, Hub ids (ID@REVISION).
    corpus: Any = None


@dataclass(kw_only=True)
class IndexOptions:
    """Where documents are searched."""

    index: IndexConfig = field(default_factory=IndexConfig)


@dataclass(kw_only=True)
class RerankOptions:
    """A search by a model, whose first documents a second one orders."""

    # A cross-encoder or late-interaction model that orders the first documents of each query again: options of
    # RerankerConfig, or its path. Scores are its own.
    reranker: Any = None
    rerank_depth: int = 100  # documents per query for the reranker
    # Weights of the dense, lexical and multi-vector scores of a model of three representations (BGE-M3) in their sum;
    # default: the model's.
    hybrid_weights: list[float] | None = None
    vectors_dir: str | None = None  # store document vectors there; the next run does not encode them again


@dataclass(kw_only=True)
class SetOptions:
    """Evaluation sets."""

    sets: list[Any] = field(default_factory=list)  # evaluation sets: options of EvaluationSet, or paths
    subset: int | None = None  # maximum number of queries or rows of each set


@dataclass(kw_only=True)
class OutputOptions:
    """Where a command writes."""

    output_dir: str = ""  # directory for the results


@dataclass(kw_only=True)
class CheckOptions:
    """Verification of a model directory that is written."""

    check: bool = True  # reopen the directory and compare its outputs with those that it should have


@dataclass(kw_only=True)
class WrittenModelOptions(OutputOptions, CheckOptions):
    """A model directory that is written like those it is made from."""

    dtype: ExportDtype = ExportDtype.source  # in which the weights are written; source: the widest type of the models


@dataclass(kw_only=True)
class UploadOptions:
    """An upload to the Hub."""

    push_to_hub: str | None = None  # Hub id to upload to
    private: bool = True  # whether a repository that is created is private


@dataclass(kw_only=True)
class SeedOptions:
    """Random choices."""

    seed: int = 42  # of random choices


@dataclass(kw_only=True)
class JsonOptions:
    """Output for programs."""

    json: bool = False  # one JSON object instead of tables; `--json` is the same


@dataclass(kw_only=True)
class NodeOptions:
    """The nodes of a job on a cluster."""

    nodes: int = 1  # number of nodes; of Kubernetes, pods, each on a node of its own if they need all its GPUs
    gpus_per_node: int = 8  # 0: compute on the CPU
    ranks_per_node: int | None = None  # default: one per GPU; 1 without GPUs
    # Default: of SLURM the share of the GPUs, if sinfo reports it, else the cluster's; of Kubernetes the namespace's.
    cpus_per_node: int | None = None
    mem: str | None = None  # of each node, such as 500G, on Kubernetes 500Gi; 0 on SLURM: all; default: the cluster's
