"""The recipe as dataclasses: every option with its type, its default and its meaning.

Hydra composes recipes from YAML and the command line into these types; the rest of the package sees nothing else.
The reference in docs/ is generated from the comments.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from embedtrain.config.code import code_option
from embedtrain.config.columns import DataPath
from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.kind_settings import SparsityConfig
from embedtrain.config.kinds import load_kind
from embedtrain.config.losses import InfoNCEConfig, LossConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.options import LENGTH, SEED, Effect, option
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class TrackingConfig:
    """What the terminal shows, and where metrics are logged besides the terminal and metrics.jsonl."""

    wandb: bool = False  # log to Weights & Biases
    # A mapping of arguments of wandb.init: project (default: embedtrain), entity, group, job_type, name (default: that
    # of the run), tags, notes, and mode, online or offline.
    wandb_init: Any = None
    wandb_artifacts: bool = False  # upload the exported model
    tensorboard: bool = False  # write event files to `tensorboard/` in the run directory
    mlflow: bool = False  # log to MLflow: the server of MLFLOW_TRACKING_URI
    mlflow_init: Any = None  # a mapping: experiment (default: embedtrain), run_name (default: that of the run), tags
    trackio: bool = False  # log to trackio
    # A mapping of arguments of trackio.init: project (default: embedtrain), name, group, space_id, dataset_id.
    trackio_init: Any = None
    # Print diagnostics of every logged step as well: padding, waiting, communication, similarities, all metrics of the
    # loss.
    verbose: bool = False
    geometry: bool = True  # similarities of positives, of the hardest negatives, ... of every logged batch
    # Measure the fraction of the step that ranks spend in exposed collectives, in the 3rd step and every 100th logged
    # one; null: on CPUs. On a GPU torch's profiler measures it, which starts for seconds and excludes other profilers.
    communication: bool | None = None
    profile: list[int] = field(default_factory=list)  # steps to trace, such as [10,11,12]
    profile_ranks: list[int] | None = field(default_factory=lambda: [0])  # ranks that write traces; null: all
    report: bool = True  # write report.html at the end, for which a few texts are encoded before and after


class CheckpointLayout(str, Enum):
    """`sharded`: one file per shard. `full`: one safetensors file of whole tensors; each rank writes its rows to it."""

    sharded = "sharded"
    full = "full"


class CheckpointContents(str, Enum):
    """`all`: weights and optimizer state, to resume from. `model`: only weights, to start a new run from."""

    all = "all"
    model = "model"


class WeightsOf(str, Enum):
    """Which weights of a checkpoint are read: those that were trained, or their moving average (`optim.ema`)."""

    trained = "trained"
    ema = "ema"


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is saved and when."""

    # steps between checkpoints; 0: by time, see `every_minutes`
    every: int = option(0, at_least=0, hint="0 saves by time (checkpoint.every_minutes)")
    # minutes between checkpoints if `every=0` and `contents=all`; 0: only at the end
    every_minutes: float = option(30.0, at_least=0, hint="0 saves at the end only")
    # the newest checkpoints to keep, besides the best one
    keep: int = option(2, at_least=1, hint="training resumes from a checkpoint")
    # checkpoints at multiples of so many steps are never deleted; 0: none
    keep_every: int = option(0, at_least=0, hint="0 keeps none for good")
    asynchronous: bool = True  # write while training continues, from a copy in host memory; false: training waits
    # limit for all checkpoints together, in 10^9 bytes; checked before each
    max_disk_gb: float | None = option(None, above=0, hint="null sets no limit")
    layout: CheckpointLayout = CheckpointLayout.sharded
    contents: CheckpointContents = CheckpointContents.all
    # set/metric, such as dev/ndcg@10: keep and export the checkpoint that is best by it
    best_metric: str | None = option(None, resume=Effect.changes_training)

    @property
    def minutes(self) -> float:
        """Minutes between checkpoints that are saved by time; 0: none are.

        Those without optimizer state are not: a run that is started again would begin anew from the weights of one.
        """
        by_time = self.every == 0 and self.contents is CheckpointContents.all
        return self.every_minutes if by_time else 0.0

    @property
    def saves_while_training(self) -> bool:
        """Whether training goes on after a save, other than that at the end."""
        return self.every > 0 or self.minutes > 0 or self.best_metric is not None

    @property
    def stages(self) -> bool:
        """Whether saves are written from a copy in host memory: there is nothing to delay at the end."""
        return self.asynchronous and self.saves_while_training

    @property
    def moments(self) -> str:
        """When checkpoints are saved, for the user."""
        moments = ["at the end"]
        if self.best_metric is not None:
            moments.insert(0, "after a better evaluation")
        if self.every or self.minutes:
            moments.insert(0, f"every {self.every:,} steps" if self.every else f"every {self.minutes:g} minutes")
        return ", ".join(moments)


ALL_LINEAR = "all-linear"
# Keys of `model.adapter` that mean the same for every type of adapter.
_OF_EVERY_ADAPTER = ("type", "target_modules", "modules_to_save")
ONNX, ONNX_FP16, ONNX_INT8, OPENVINO = "onnx", "onnx_fp16", "onnx_int8", "openvino"
ADAPTER, LOGIT_SCORE = "adapter", "logit_score"
EXPORT_FORMATS = ("sentence_transformers", ONNX, ONNX_FP16, ONNX_INT8, OPENVINO, ADAPTER, LOGIT_SCORE)


class BaseDtype(str, Enum):
    """The type that frozen weights are stored in.

    `auto` is bf16 if the model is computed in bf16, which loses nothing, or if its files hold bf16; otherwise fp32.
    """

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen model, by PEFT; off unless `rank` or `path` is set."""

    rank: int | None = None  # r of every adapter; null trains all weights
    alpha: float | None = None  # adapters are scaled by alpha / r; default: 2 r
    # all-linear (of the blocks), or names of linear layers, such as [q_proj, v_proj]; of a model with several towers
    # they may begin with that of a tower: text.all-linear, image.q_proj
    targets: Any = ALL_LINEAR
    dropout: float = 0.0  # applied to the input of an adapter
    modules_to_save: list[str] = field(default_factory=list)  # trained in full: embeddings, norms, or names of modules
    base_dtype: BaseDtype = BaseDtype.auto  # type of the frozen weights
    load_in_4bit: bool = False  # frozen linear layers in 4 bits (QLoRA): CUDA, bitsandbytes
    # start from an adapter of PEFT: directory or Hub id; its rank and targets are used
    path: str | None = option(None, is_input=True)
    revision: str | None = None  # a commit, tag or branch of its Hub repository

    @property
    def on(self) -> bool:
        """Whether adapters are trained instead of the whole model."""
        return self.rank is not None or self.path is not None

    @property
    def section(self) -> str:
        """The section of the recipe that asks for these adapters."""
        return "model.lora"

    @property
    def targets_option(self) -> str:
        """The option with the names of layers."""
        return "model.lora.targets"

    def peft_settings(self) -> tuple[str, dict[str, Any]]:
        """PEFT's type of new adapters, and the settings of its configuration besides names of layers."""
        alpha = None if self.rank is None else 2 * self.rank if self.alpha is None else self.alpha
        return "lora", {"r": self.rank, "lora_alpha": alpha, "lora_dropout": self.dropout}


@dataclass
class PeftAdapters(LoraConfig):
    """What `model.adapter` asks for: `settings` of PEFT's configuration of a type, without names of layers."""

    type: str
    settings: dict[str, Any]

    @property
    def on(self) -> bool:
        """Always."""
        return True

    @property
    def section(self) -> str:
        """The section of the recipe that asks for these adapters."""
        return "model.adapter"

    @property
    def targets_option(self) -> str:
        """The option with the names of layers."""
        return "model.adapter.target_modules"

    def peft_settings(self) -> tuple[str, dict[str, Any]]:
        """The type, as the recipe names it, and the settings."""
        return self.type, self.settings


class Pooling(str, Enum):
    """How token embeddings become one embedding of the text.

    `cls`: that of the first token, `last`: of the last one. `mean`: their mean, `weighted_mean`: with weights 1, 2, 3,
    ... in the order of the tokens (Muennighoff, 2022, "SGPT"). `max`: the maximum of each dimension.
    """

    cls = "cls"
    mean = "mean"
    last = "last"
    max = "max"
    weighted_mean = "weighted_mean"


# Values of `pooling` options that name a mode instead of a class of the user.
POOLINGS = tuple(mode.value for mode in Pooling)


class Attention(str, Enum):
    """How texts of different lengths share a forward pass.

    `packed` concatenates them and computes no padding; `padded` pads all to the longest. `auto` packs if the model's
    code allows it and the embeddings are the same, and reports why not otherwise.
    """

    auto = "auto"
    packed = "packed"
    padded = "padded"


class Strategy(str, Enum):
    """How weights are distributed: replicated, sharded, or sharded within groups of ranks that are replicas."""

    auto = "auto"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class GradientReduction(str, Enum):
    """When gradients are reduced over the ranks.

    `per_step` keeps them unreduced and reduces once per step; `per_chunk` reduces after every chunk and keeps a shard.
    `auto` reduces once per step if the unreduced gradients take little of a rank's memory.
    """

    auto = "auto"
    per_step = "per_step"
    per_chunk = "per_chunk"


class Precision(str, Enum):
    """The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32."""

    auto = "auto"  # bf16 where all GPUs or CPUs have instructions for it, otherwise fp32
    bf16 = "bf16"
    fp32 = "fp32"


class ExportDtype(str, Enum):
    """The type of exported weights; `source` is the type of the weights that the run started from."""

    source = "source"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class DataFormat(str, Enum):
    """The format of training rows; `auto` detects it."""

    auto = "auto"
    flagembedding = "flagembedding"  # query, pos, neg; also the rows of RAG-Retrieval, gritlm and E5
    columns = "columns"  # that of sentence-transformers: columns in order
    tevatron = "tevatron"  # query, positive_passages, negative_passages; or document ids of a corpus
    messages = "messages"  # that of ms-swift: messages, positive_messages, negative_messages
    beir = "beir"  # corpus, queries and qrels


class BatchMode(str, Enum):
    """Which sources a global batch holds.

    `mixed` draws rows from all sources in proportion to their sizes and weights; `by_source` draws all rows of a batch
    from one source, the same on every rank. `auto` is by_source if sources differ in their loss, otherwise mixed.
    """

    auto = "auto"
    mixed = "mixed"
    by_source = "by_source"


class WeightMode(str, Enum):
    """The meaning of a source's `weight`: passes over its rows per epoch, or its proportion of all rows."""

    epochs = "epochs"
    proportions = "proportions"


class Resume(str, Enum):
    """What happens if `output_dir` holds a run.

    `auto` continues it; if it has finished, it only makes the evaluation and the export that are asked for, and ends
    with an error if an option that changes training is another one. `never` ends with an error. `require` ends with an
    error if there is no checkpoint to continue.
    """

    auto = "auto"
    never = "never"
    require = "require"


class OnError(str, Enum):
    """How rows that cannot be used are handled."""

    stop = "stop"
    skip = "skip"


@dataclass(kw_only=True)
class ModelConfig:
    """The model to train: options that every kind of model has."""

    # What the model computes: dense (a vector per text), dual_encoder (the same, by one model for queries and another
    # for documents), image_text (a vector per text and per picture, CLIP), cross_encoder (a score per pair of query and
    # document, a reranker), late_interaction (a vector per token of a text, ColBERT), m3 (a vector, lexical weights and
    # a vector per token, BGE-M3) or sparse (a weight per word of the vocabulary, SPLADE). Each has further options.
    kind: str = "dense"
    path: str | None = option(None, is_input=True)  # Hub id, Hugging Face directory or sentence-transformers directory
    # instead, for random weights: a mapping with `model_type`, or the path of a config.json
    config: Any = option(None, is_input=True)
    # Hub id or directory; default: the model's, or one trained on the data
    tokenizer: str | None = option(None, is_input=True)
    tokenizer_revision: str | None = None  # a commit, tag or branch of its Hub repository
    vocab_size: int = 16000  # size of a vocabulary trained on the data
    vocab_lowercase: bool = True  # lowercase texts for such a vocabulary
    max_length: int | None = None  # tokens, including special tokens; default: that of the directory
    bidirectional: bool | None = None  # tokens attend to later tokens as well; default: the configuration's
    attention: Attention = option(Attention.auto, resume=Effect.changes_rounding)
    rope_theta: float | None = None  # base of the rotary positions in training; default: the configuration's
    rope_scaling: Any = None  # extends rotary positions: a mapping such as {rope_type: yarn, factor: 4}
    # Probability of every dropout that the configuration names (hidden states, attention, classifier, ...), in training
    # alone: the exported configuration is the original one. Default: those of the configuration.
    dropout: float | None = option(None, within=(0, 0.9), resume=Effect.changes_training)
    lora: LoraConfig = field(default_factory=LoraConfig)
    # Another adapter of PEFT instead of LoRA: a mapping of its type, such as dora, ia3 or vera, and settings of PEFT's
    # configuration of this type, such as {type: dora, r: 16, target_modules: all-linear}.
    adapter: Any = None
    query_prompt: str | None = None  # precedes every query; default: that of the directory, else none
    document_prompt: str | None = None  # precedes every document; default: that of the directory, else none
    revision: str | None = None  # a commit, tag or branch of the Hub repository
    # Run Python code of the model: only for authors that you trust. It is set, and the model named, on the command line
    # or in Python, never in a file.
    trust_remote_code: bool = code_option(False, "path", "revision", "config", "tokenizer", "tokenizer_revision")

    @property
    def adapters(self) -> LoraConfig:
        """The adapters that are trained: those of `adapter`, or of `lora`, which may be off.

        A ConfigError if `adapter` is no mapping with a type, or both are set.
        """
        if self.adapter is None:
            return self.lora
        _check_adapter(self.adapter, self.lora)
        settings = {name: value for name, value in self.adapter.items() if name not in _OF_EVERY_ADAPTER}
        return PeftAdapters(
            type=self.adapter["type"],
            settings=settings,
            targets=self.adapter.get("target_modules") or ALL_LINEAR,
            modules_to_save=self.adapter.get("modules_to_save") or [],
            base_dtype=self.lora.base_dtype,
            load_in_4bit=self.lora.load_in_4bit,
        )


def _check_adapter(adapter: Any, lora: LoraConfig) -> None:
    example = "such as {type: dora, r: 16}"
    if not isinstance(adapter, dict) or not isinstance(adapter.get("type"), str):
        raise ConfigError(f"model.adapter={adapter}: must be a mapping with the type of the adapter, {example}")
    default = LoraConfig()
    for name in ("rank", "path", "alpha", "targets", "dropout", "modules_to_save"):
        if getattr(lora, name) != getattr(default, name):
            raise ConfigError(
                f"model.lora.{name} and model.adapter are both set; keep model.adapter, whose settings are those of "
                f"PEFT, {example}, or leave it out"
            )
    targets, modules = adapter.get("target_modules"), adapter.get("modules_to_save")
    names = [targets] if isinstance(targets, str) else [] if targets is None else targets
    for name, value in (("target_modules", names), ("modules_to_save", [] if modules is None else modules)):
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise ConfigError(f"model.adapter.{name}={value}: must be names of modules, such as [q_proj,v_proj]")
    if ALL_LINEAR in names and len(names) > 1:
        raise ConfigError(f"model.adapter.target_modules: {ALL_LINEAR} includes the others; leave them out")


@dataclass(kw_only=True)
class TrainSource(DataPath):
    """One source of training rows, an element of `data.train` (a string is its `path`)."""

    # file, directory or glob, local or a URL (s3://, hf://, https://, ...), or Hub id
    path: str = option(is_input=True)
    format: DataFormat = DataFormat.auto
    # Default: the end of the path; if several sources end alike, with the folders that distinguish them (`web/train`).
    name: str | None = None
    revision: str | None = None  # a commit, tag or branch of a Hub data set
    # corpus of the document ids in rows; default: the corpus beside them
    documents: str | None = option(None, is_input=True)
    documents_revision: str | None = None  # a commit, tag or branch of the Hub data set with the corpus
    each_file: bool = False  # every file is a source
    # passes over its rows per epoch: 2 is two, 0.5 is half of the rows, the other half in the next
    weight: float = option(1.0, above=0, hint="leave the source out instead")
    # at most so many rows per epoch, other rows in the next
    max_rows: int | None = option(None, at_least=1, hint="null for all rows")
    query_prompt: str | None = None  # default: model.query_prompt
    document_prompt: str | None = None  # default: model.document_prompt
    instruction_format: str | None = None  # default: data.instruction_format
    query_max_length: int | None = option(None, **LENGTH)  # tokens; default: the model's
    document_max_length: int | None = option(None, **LENGTH)  # tokens; default: the model's
    loss: Any = None  # options that differ from the recipe's loss, or another loss by `name`
    in_batch_negatives: bool | None = None  # default: loss.in_batch_negatives; false for a path with no_in_batch_neg
    # hard negatives per row, drawn from all of its negatives in each epoch; null: all
    negatives: int | None = option(7, at_least=0, hint="null for all of a row")
    subset: str | None = None  # configuration of a Hub data set
    split: str = "train"  # of a Hub data set, or of a folder by the names of its files
    # In the order query, positive, negatives, and a score; or by role, as {query: q1, positive: q2, label: same}, with
    # text, negative, score and prompt (a column of instructions). Default: by name.
    columns: Any = None
    # Rows are single texts, each of which is the query and its own positive: dropout (SimCSE) or `delete_words` makes
    # them differ. `columns={text: COLUMN}` names their column where there are several.
    text_as_positive: bool = False
    # Share of the words that are deleted from every query, drawn anew in each epoch; at least one is left.
    delete_words: float = option(0.0, at_least=0, below=1, hint="0 deletes none")
    # scores are divided by it: 5 maps 0 to 5 onto 0 to 1
    score_scale: float = option(1.0, above=0, hint="scores are divided by it")
    # Reads only rows for which it holds: comparisons of columns with numbers, such as "rank <= 2 and score > 0.3". A
    # column with a number for each positive selects among a row's positives; a row with none selected is skipped.
    where: str | None = None
    backslash_escapes: bool = False  # CSV, TSV: a backslash escapes quotation marks, as Spark and MySQL write them


@dataclass(kw_only=True)
class DataConfig:
    """The training data."""

    # sources: options of TrainSource, or paths
    train: list[Any] = option(factory=list, resume=Effect.must_match, is_input=True, items=TrainSource)
    # for a row that cannot be used: stop with file and line, or skip and count it
    on_error: OnError = option(OnError.stop, resume=Effect.no_effect, in_result=True)
    batches: BatchMode = option(BatchMode.auto, resume=Effect.must_match)
    # part of each batch by source that is drawn from all sources (KaLM-Embedding-V2)
    mixed_share: float = option(0.0, resume=Effect.must_match)
    # Documents of other rows of the global batch that each row gets as further negatives, for model.kind=cross_encoder.
    batch_negatives: int = option(0, at_least=0, hint="0 draws none", resume=Effect.must_match)
    weight_mode: WeightMode = option(WeightMode.epochs, resume=Effect.no_effect, in_result=True)
    # Sources are drawn in proportion to (rows x weight)^(1/temperature): above 1, small sources more often.
    mixing_temperature: float = option(
        1.0, above=0, hint="1 draws by size and weight", resume=Effect.no_effect, in_result=True
    )
    # Combines the instruction of a row with its query, instead of a prompt; "{text}" leaves instructions of rows out.
    instruction_format: str = option("Instruct: {instruction}\nQuery: {text}", resume=Effect.no_effect, in_result=True)
    # default: $EMBEDTRAIN_CACHE, else ~/.cache/embedtrain
    cache_dir: str | None = option(None, resume=Effect.no_effect)
    # threads that prepare batches ahead; 0 prepares each batch when it is needed
    workers: int = option(1, at_least=0, hint="0 prepares each batch when it is needed", resume=Effect.no_effect)


@dataclass(kw_only=True)
class TrainConfig:
    """The length of training, and the sizes of batches and chunks."""

    steps: int | None = option(None, above=0, resume=Effect.changes_training)  # optimizer steps; instead of epochs
    # passes over the data; default: 1, if steps is not set
    epochs: float | None = option(None, above=0, resume=Effect.changes_training)
    # An earlier run of the same model, or one of its checkpoints: a new run starts with its weights, loss and optimizer
    # state, at step 0 of its own data and schedule. Of a run, the step that it exported.
    init_from: str | None = option(None, resume=Effect.changes_training, is_input=True)
    # rows per batch over all ranks, whatever their number
    global_batch_size: int = option(256, at_least=2, hint="a contrastive loss compares rows", resume=Effect.must_match)
    # tokens, including padding, of one forward pass on one rank
    chunk_tokens: int = option(16384, at_least=1, resume=Effect.changes_rounding)
    # Tokens whose activations are kept, so that they are not encoded twice; default: what fits into memory.
    activation_tokens: int | None = option(
        None, at_least=0, hint="0 encodes every chunk twice", resume=Effect.changes_rounding
    )
    # cost of a forward pass, in tokens: smaller is less padding in more passes
    pass_overhead_tokens: int | None = option(
        None, at_least=0, hint="null chooses by device and sharding", resume=Effect.changes_rounding
    )
    # global batches per step; each has its own negatives
    gradient_accumulation_steps: int = option(1, at_least=1, resume=Effect.must_match)
    # Steps between log lines and rows of metrics.jsonl; default: 10, and less in a run that would have fewer than ten.
    log_every: int | None = option(None, at_least=1, resume=Effect.no_effect)


SELECTIVE = "selective"  # `parallel.activation_checkpointing` besides true and false


@dataclass(kw_only=True)
class ParallelConfig:
    """How the work is distributed over the ranks. They change the result by rounding and dropout masks at most."""

    strategy: Strategy = Strategy.auto
    # hsdp: ranks per replica of the weights; default: those of one node
    shard_size: int | None = option(None, at_least=1, hint="null takes the ranks of one node")
    block_class: str | None = None  # the layer class to shard; default: detected
    precision: Precision = option(Precision.auto, resume=Effect.changes_training)  # a resumed run keeps its own
    gradient_reduction: GradientReduction = GradientReduction.auto
    # Free a block's unsharded weights after its forward pass; null: if memory requires it.
    reshard_after_forward: bool | None = None
    # Recompute activations of blocks in the backward pass: true all, selective those between matrix products and
    # attention, whose results are kept, false none; null: as far as memory requires it.
    activation_checkpointing: bool | str | None = None
    cpu_offload: bool | None = None  # weights and optimizer in host memory; null: if nothing else fits
    # a file that `accelerate config` wrote, for its FSDP options
    accelerate_config: str | None = option(None, is_input=True)
    # torch.compile for each block, in the first steps; auto: on GPUs, except with `deterministic`
    compile: bool | str = "auto"
    # Products of the linear layers of blocks in fp8 instead of bf16, in training: for models of a billion weights or
    # more, on GPUs of compute capability 8.9 or above, with torchao.
    fp8: bool = option(False, resume=Effect.changes_training)
    # RMSNorm, rotary positions and SwiGLU of layers that are not compiled by liger-kernel; auto: on GPUs where it is
    # installed
    fused_kernels: bool | str = "auto"
    # Only kernels that repeat bit for bit on GPUs, at a cost that has not been measured yet; no effect on CPUs.
    deterministic: bool = False
    # seconds that a rank waits for the others before all end with an error
    timeout: float = option(1800.0, above=0, resume=Effect.no_effect)
    # The same within a step, after the first one that compiles nothing: at most `timeout`, at least three times the
    # longest step so far.
    step_timeout: float = option(600.0, above=0, resume=Effect.no_effect)


@dataclass(kw_only=True)
class ExportConfig:
    """The exported model directory."""

    # sentence_transformers: always written, transformers opens it too, adapters are merged. onnx: an fp32 graph in the
    # same directory; onnx_fp16, onnx_int8: smaller files of it, and openvino: OpenVINO's, each besides onnx. adapter:
    # the adapter alone, in a directory inside it, for PEFT. logit_score: a reranker that started from the score of
    # tokens as a causal language model again, in a directory inside it.
    formats: list[str] = option(factory=lambda: ["sentence_transformers"], in_result=True)
    dtype: ExportDtype = option(ExportDtype.source, in_result=True)
    # vectors have only the first so many dimensions; needs loss.matryoshka.dims
    truncate_dim: int | None = option(None, at_least=1, hint="null keeps all dimensions", in_result=True)
    # Smallest cosine of a vector of onnx_fp16, onnx_int8 or openvino to that of onnx, on probe texts; of vectors of
    # tokens, the mean of a text; of a cross-encoder, 1 minus the largest difference of a probability. An export below
    # it fails.
    onnx_min_agreement: float = option(0.97, within=(0, 1))
    # Base of the rotary positions of the exported model, which its evaluations measure; default: that of training.
    rope_theta: float | None = option(
        None, above=0, hint="null keeps that of training", is_measured=True, in_result=True
    )
    max_file_size: str = option("5GB", in_result=False)  # larger weights are split into files of at most this size
    check: bool = True  # reopen and compare; false for models that do not fit into one process
    push_to_hub: str | None = None  # Hub id of a repository to upload to; created if missing
    private: bool = True  # whether a repository that is created is private
    license: str | None = None  # for the model card: an identifier of the Hub, such as apache-2.0
    language: list[str] = field(default_factory=list)  # for the model card: ISO 639-1 codes, such as [en, zh]


@dataclass(kw_only=True)
class Recipe:
    """All options of a run."""

    # name of the run; default: that of the recipe, else the last part of model.path
    name: str = option("", resume=Effect.no_effect)
    seed: int = option(42, **SEED, resume=Effect.must_match)  # seed of the data order, dropout and new weights
    output_dir: str = option("runs/${name}", resume=Effect.no_effect, in_result=False)  # directory of the run
    resume: Resume = option(Resume.auto, resume=Effect.no_effect)
    model: ModelConfig = option(factory=lambda: load_kind("dense").options(), resume=Effect.must_match)
    data: DataConfig = option(factory=DataConfig, resume=Effect.must_match)
    loss: LossConfig = option(factory=InfoNCEConfig, resume=Effect.must_match)
    sparsity: SparsityConfig = option(factory=SparsityConfig, resume=Effect.changes_training)
    optim: OptimConfig = option(factory=OptimConfig, resume=Effect.changes_training)
    train: TrainConfig = option(factory=TrainConfig, resume=Effect.must_match)
    parallel: ParallelConfig = option(factory=ParallelConfig, resume=Effect.changes_rounding)
    evaluation: EvaluationConfig = option(factory=EvaluationConfig, resume=Effect.no_effect)
    checkpoint: CheckpointConfig = option(factory=CheckpointConfig, resume=Effect.no_effect)
    export: ExportConfig = option(factory=ExportConfig, resume=Effect.no_effect)
    tracking: TrackingConfig = option(factory=TrackingConfig, resume=Effect.no_effect)
