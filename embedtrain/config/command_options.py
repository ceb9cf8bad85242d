"""Options that several commands have, each written once: a command's dataclass inherits those that it needs.

A command lists its bases from the least important to the most important one, because a dataclass has the fields of its
last base first, and help and errors name options in the order of the fields.
"""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.checks import check_model
from embedtrain.config.code import code_option
from embedtrain.config.columns import DataPath
from embedtrain.config.evaluation import Backend, EvaluationSet, IndexConfig, Unshard
from embedtrain.config.kinds import KINDS, kind_of_pairs
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.options import LENGTH, SEED, check_values, declare, option
from embedtrain.config.parsing import parse_items
from embedtrain.config.recipe import (
    POOLINGS,
    DataConfig,
    ExportDtype,
    LoraConfig,
    ModelConfig,
    OnError,
    Precision,
    TrainSource,
)
from embedtrain.config.validation import OptionChecks, model_options_named
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class TrustOptions:
    """Whether the code of models is trusted."""

    # Execute Python code of the models that are named beside it: only for authors you trust
    trust_remote_code: bool = declare(
        code_option(
            False,
            *("model", "revision", "reranker", "teacher", "teacher_revision", "models", "run", "adapters", "base"),
        ),
        in_result=False,
    )


@dataclass(kw_only=True)
class ModelPathOptions:
    """A model."""

    model: str = option("", is_input=True)  # model directory or Hub id; of verify a directory


@dataclass(kw_only=True)
class ModelOptions(TrustOptions, ModelPathOptions):
    """A model, and whether its code is trusted."""

    revision: str | None = option(None, is_revision=True)  # a commit, tag or branch of the model's Hub repository


@dataclass(kw_only=True)
class BaseOptions(TrustOptions):
    """A model that others were trained from."""

    # The model that the adapters, or the models of task_arithmetic and ties, were trained from, as ID@REVISION; default
    # of adapters: the model that they name.
    base: str | None = option(None, is_input=True)


@dataclass(kw_only=True)
class KindOptions:
    """What a directory is read as."""

    # of the model, also `module:Class` of a module of your own; default: what its files say
    kind: str | None = code_option(None, names=KINDS)


@dataclass(kw_only=True)
class PoolingOptions:
    """How the vectors of tokens become one."""

    # cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's.
    pooling: str | None = code_option(None, names=POOLINGS)


@dataclass(kw_only=True)
class LengthOptions:
    """How long texts are."""

    max_length: int | None = option(None, **LENGTH)  # tokens; default: the model's


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
class EncodeOptions(TextOptions, SimilarityOptions, PoolingOptions, KindOptions, ModelOptions):
    """A model that encodes texts, and everything that changes its vectors."""

    adapter: str | None = option(None, is_input=True)  # an adapter in PEFT's format: directory or Hub id
    normalize: bool | None = None  # L2-normalize vectors; default: the model's setting


@dataclass(kw_only=True)
class ChunkOptions:
    """How much is computed at a time."""

    chunk_tokens: int = option(16384, at_least=1, in_result=False)  # per forward pass of a rank, including padding


@dataclass(kw_only=True)
class ShardOptions(ChunkOptions):
    """How a sharded model computes."""

    unshard: Unshard = option(Unshard.layer, in_result=False)


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

    # seconds that a rank waits for the others before all fail
    timeout: float = option(1800.0, above=0, in_result=False)


@dataclass(kw_only=True)
class CacheOptions:
    """Prepared data."""

    cache_dir: str | None = option(None, in_result=False)  # as data.cache_dir


@dataclass(kw_only=True)
class DataOptions:
    """Training rows, or their texts."""

    # Training rows: list of TrainSource, or of paths; or one path. Of calibrate also paths of documents.
    data: Any = option(None, is_input=True, items=TrainSource)


@dataclass(kw_only=True)
class RowsOptions(CacheOptions, DataOptions):
    """Training rows that are prepared once."""


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
    """Documents, besides those of rows if there are any."""

    # Further documents: list of DataPath, or of paths; or one path. BEIR directories, corpus files, tables, Hub ids
    # (ID@REVISION). Of search one: a BEIR folder, documents, training rows or a folder of pictures.
    corpus: Any = option(None, is_input=True, items=DataPath)


@dataclass(kw_only=True)
class IndexOptions:
    """Where documents are searched."""

    index: IndexConfig = field(default_factory=IndexConfig)


@dataclass(kw_only=True)
class RerankerConfig:
    """The option `reranker` of `evaluate` and `search`: a finished cross-encoder or late-interaction model.

    A string is its `path`.
    """

    path: str = option(is_input=True)  # model directory or Hub id
    adapter: str | None = option(None, is_input=True)  # an adapter in PEFT's format: directory or Hub id
    revision: str | None = None  # a commit, tag or branch of its Hub repository
    max_length: int | None = option(None, **LENGTH)  # tokens of a pair; default: the reranker's
    query_prompt: str | None = None  # default: the reranker's
    document_prompt: str | None = None  # default: the reranker's
    pair_template: Any = None  # as model.pair_template
    score_tokens: list[str] | None = None  # as model.score_tokens
    score_labels: list[int] | None = None  # as model.score_labels
    # Of a cross-encoder: read a document that is too long in overlapping windows, of which the best counts.
    document_windows: bool = False
    backend: Backend = Backend.torch  # as the option of this name of evaluate

    def model_config(self, *, trust_remote_code: bool) -> ModelConfig:
        """The options of the model, as a recipe has them."""
        options: ModelConfig = kind_of_pairs().model_options(
            path=self.path,
            lora=LoraConfig(path=self.adapter),
            revision=self.revision,
            max_length=self.max_length,
            query_prompt=self.query_prompt,
            document_prompt=self.document_prompt,
            pair_template=self.pair_template,
            score_tokens=self.score_tokens,
            score_labels=self.score_labels,
            trust_remote_code=trust_remote_code,
        )
        return options


@dataclass(kw_only=True)
class RerankOptions:
    """A search by a model, whose first documents a second one orders."""

    # A cross-encoder or late-interaction model that orders the first documents of each query again: options of
    # RerankerConfig, or its path. Scores are its own.
    reranker: Any = option(None, is_input=True, items=RerankerConfig)
    rerank_depth: int = option(100, at_least=1)  # documents per query for the reranker
    # Weights of the dense, lexical and multi-vector scores of a model of three representations (BGE-M3) in their sum;
    # default: the model's.
    hybrid_weights: list[float] | None = None
    # store document vectors there; the next run does not encode them again
    vectors_dir: str | None = option(None, in_result=False)


@dataclass(kw_only=True)
class SetOptions:
    """Evaluation sets."""

    # evaluation sets: options of EvaluationSet, or paths
    sets: list[Any] = option(factory=list, is_input=True, items=EvaluationSet)
    # maximum number of queries or rows of each set
    subset: int | None = option(None, at_least=1, hint="null takes all queries or rows")


@dataclass(kw_only=True)
class OutputOptions:
    """Where a command writes."""

    output_dir: str = option("", in_result=False)  # directory for the results


@dataclass(kw_only=True)
class CheckOptions:
    """Verification of a model directory that is written."""

    # reopen the directory and compare its outputs with those that it should have
    check: bool = option(True, in_result=False)


@dataclass(kw_only=True)
class WrittenModelOptions(CheckOptions, OutputOptions):
    """A model directory that is written like those it is made from."""

    # in which the weights are written; source: the widest type of the models, fp32 of a static one
    dtype: ExportDtype = ExportDtype.source


@dataclass(kw_only=True)
class UploadOptions:
    """An upload to the Hub."""

    push_to_hub: str | None = option(None, in_result=False)  # Hub id to upload to
    private: bool = option(True, in_result=False)  # whether a repository that is created is private


@dataclass(kw_only=True)
class DimsOptions:
    """Fewer dimensions of vectors."""

    dims: int | None = option(None, at_least=1)  # dimensions of vectors that are kept, the first ones; default: all


@dataclass(kw_only=True)
class SeedOptions:
    """Random choices."""

    seed: int = option(42, **SEED)  # of random choices


@dataclass(kw_only=True)
class JsonOptions:
    """Output for programs."""

    json: bool = False  # one JSON object instead of tables; `--json` is the same


@dataclass(kw_only=True)
class NodeOptions:
    """The nodes of a job on a cluster."""

    # number of nodes; of Kubernetes, pods, each on a node of its own if they need all its GPUs
    nodes: int = option(1, at_least=1)
    gpus_per_node: int = option(8, at_least=0)  # 0: compute on the CPU
    ranks_per_node: int | None = option(None, at_least=1)  # default: one per GPU; 1 without GPUs
    # Default: of SLURM the share of the GPUs, if sinfo reports it, else the cluster's; of Kubernetes the namespace's.
    cpus_per_node: int | None = option(None, at_least=1)
    mem: str | None = None  # of each node, such as 500G, on Kubernetes 500Gi; 0 on SLURM: all; default: the cluster's


def check_no_reranker(options: RerankOptions, *names: str) -> None:
    """Raise a ConfigError for the first of these options that is set, without a reranker."""
    for name in names:
        OptionChecks(options).require(
            getattr(options, name) == getattr(type(options), name),
            name,
            "has no effect without a reranker; write reranker=DIR",
        )


def parse_reranker(value: Any, option: str) -> RerankerConfig | None:
    """The value of an option, a path or a mapping, with its values checked; None stays.

    Raises ConfigError, with the name of the option, for a value that cannot work.
    """
    if value is None:
        return None
    if isinstance(value, list):
        raise ConfigError(f"{option}={value!r} is neither a path nor a mapping with `path`")
    (reranker,) = parse_items(value, RerankerConfig, option)
    check_values(reranker, f"{option}.")
    check = OptionChecks(reranker, f"{option}.")
    check.require(bool(reranker.path), "path", "is empty; write a directory or a Hub id")
    check.require(
        reranker.backend is Backend.torch or reranker.adapter is None, "adapter", "is not part of a graph; leave it out"
    )
    with model_options_named({}, f"{option}."):
        check_model(reranker.model_config(trust_remote_code=False))
    return reranker
