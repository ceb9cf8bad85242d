"""The recipe as dataclasses: every option, its type, its default, and what it means.

Hydra composes a recipe from YAML and the command line into these types; the rest of the package sees
nothing but them. A field's comment is the documentation that the reference in docs/ is made of.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from embedtrain.config.evaluation import EvaluationConfig
from embedtrain.config.losses import InfoNCEConfig, LossConfig

ALL_LINEAR = "all-linear"
ONNX, ADAPTER = "onnx", "adapter"
EXPORT_FORMATS = ("sentence_transformers", ONNX, ADAPTER)


class BaseDtype(str, Enum):
    """What frozen weights are held in.

    `auto` is bf16 where the model is computed in bf16, for then nothing is lost, or where its files hold bf16; else
    fp32.
    """

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen model, by PEFT; off unless `rank` or `path` is set."""

    rank: int | None = None  # r, of every adapter; null: all weights are trained
    alpha: float | None = None  # an adapter counts alpha / r times; default: 2 r
    targets: Any = ALL_LINEAR  # all-linear (of the blocks), or names of linear layers, such as [q_proj, v_proj]
    dropout: float = 0.0  # before an adapter
    modules_to_save: list[str] = field(
        default_factory=list
    )  # trained whole besides: embeddings, norms, or names of modules
    base_dtype: BaseDtype = BaseDtype.auto  # type of the weights that are not trained
    load_in_4bit: bool = False  # frozen linear layers in 4 bits (QLoRA): CUDA, bitsandbytes
    path: str | None = None  # go on from an adapter of PEFT's: directory or Hub id; its rank and targets are taken
    revision: str | None = None  # a commit, tag or branch of its Hub repository

    @property
    def on(self) -> bool:
        """Whether adapters are trained, and not the model itself."""
        return self.rank is not None or self.path is not None


class Pooling(str, Enum):
    """How one vector is made of a text's token vectors."""

    cls = "cls"
    mean = "mean"
    last = "last"


class Attention(str, Enum):
    """How texts of different lengths share a forward pass.

    `packed` puts one after another and computes no padding; `padded` fills all up to the longest. `auto` packs where
    the model's code allows it and gives the same vectors, and says why where it does not.
    """

    auto = "auto"
    packed = "packed"
    padded = "padded"


class Strategy(str, Enum):
    """How weights lie over the ranks: replicated, sharded, or sharded within groups that are replicated."""

    auto = "auto"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class GradientReduction(str, Enum):
    """What a rank keeps of gradients while a step has further chunks to come.

    `per_step` keeps them unreduced and reduces once a step; `per_chunk` reduces after every chunk and keeps a shard.
    `auto` reduces once a step where the unreduced gradients take little of a rank's memory.
    """

    auto = "auto"
    per_step = "per_step"
    per_chunk = "per_chunk"


class Precision(str, Enum):
    """What is computed in. Master weights, gradients' reduction and the loss are fp32 in both."""

    bf16 = "bf16"
    fp32 = "fp32"


class ExportDtype(str, Enum):
    """What exported weights are stored in; `source` is the type of the weights the run started from."""

    source = "source"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class DataFormat(str, Enum):
    """How training rows are laid out."""

    auto = "auto"
    flagembedding = "flagembedding"  # query, pos, neg; also RAG-Retrieval's, gritlm's and E5's rows
    columns = "columns"  # sentence-transformers': by their order
    tevatron = "tevatron"  # query, positive_passages, negative_passages; or ids of documents of a corpus
    messages = "messages"  # ms-swift's: messages, positive_messages, negative_messages
    beir = "beir"  # corpus, queries and qrels


class BatchMode(str, Enum):
    """What a global batch is made of.

    `mixed` draws its rows from all sources, each by its share; `by_source` draws all from one source, the same
    on every rank. `auto` is by_source where sources have losses of their own, else mixed.
    """

    auto = "auto"
    mixed = "mixed"
    by_source = "by_source"


class WeightMode(str, Enum):
    """What a source's `weight` says: how often its rows are seen in an epoch, or its share of all rows seen."""

    epochs = "epochs"
    proportions = "proportions"


class OnError(str, Enum):
    """What to do with a row that cannot be used."""

    stop = "stop"
    skip = "skip"


class ScheduleKind(str, Enum):
    """The learning rate's course after warm-up."""

    linear = "linear"
    cosine = "cosine"
    constant = "constant"


class CheckpointLayout(str, Enum):
    """`sharded`: a file a shard. `full`: one safetensors file of whole tensors, each rank writing its rows in place."""

    sharded = "sharded"
    full = "full"


class CheckpointContents(str, Enum):
    """`all`: weights and optimiser, to resume from. `model`: weights alone, to start a new run from."""

    all = "all"
    model = "model"


class WandbMode(str, Enum):
    """Where wandb's rows go: to its server as they come, or to files that `wandb sync` sends later."""

    online = "online"
    offline = "offline"


@dataclass(kw_only=True)
class ModelConfig:
    """Which model is trained, and how it turns a text into a vector."""

    path: str | None = None  # Hub id, Hugging Face directory or sentence-transformers directory
    config: Any = None  # from scratch instead: a mapping with `model_type`, or the path of a config.json
    tokenizer: str | None = None  # Hub id or directory; default: the model's own, or one trained on the data
    tokenizer_revision: str | None = None  # a commit, tag or branch of its Hub repository
    vocab_size: int = 16000  # size of a vocabulary trained on the data
    vocab_lowercase: bool = True  # whether such a vocabulary folds case: a small model need not learn it
    pooling: Pooling | None = None  # cls, mean, last; default: what a sentence-transformers directory says
    normalize: bool | None = None  # L2-normalise vectors; default: what the directory says, else true
    max_length: int | None = None  # tokens, special tokens included; default: what the directory says
    bidirectional: bool | None = None  # tokens see those behind them as well; default: as its configuration says
    append_eos: bool | None = None  # end every text with the end-of-text token; default: with pooling `last`, yes
    include_prompt: bool | None = None  # mean pooling counts the prompt's tokens; default: the directory's, else true
    attention: Attention = Attention.auto  # packed: no padding is computed; padded; auto: packed where that is right
    rope_scaling: Any = None  # a mapping such as {rope_type: yarn, factor: 4}: rotary positions beyond the model's own
    lora: LoraConfig = field(default_factory=LoraConfig)
    query_prompt: str | None = None  # put before every query; default: the directory's, else none
    document_prompt: str | None = None  # put before every document; default: the directory's, else none
    revision: str | None = None  # a commit, tag or branch of the Hub repository
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust


@dataclass(kw_only=True)
class TrainSource:
    """One source of training rows, an element of `data.train` (a bare string is its `path`)."""

    path: str  # file, folder or glob, here or under a URL (s3://, hf://, https://, ...), or Hub id
    format: DataFormat = DataFormat.auto
    name: str | None = None  # default: the end of the path
    revision: str | None = None  # of a Hub data set: a commit, tag or branch
    documents: str | None = None  # corpus that rows name documents of by id; default: what lies beside them
    documents_revision: str | None = None  # of a Hub data set with the corpus
    each_file: bool = False  # every file is a source of its own, named after it
    weight: float = 1.0  # how often its rows are seen in an epoch: 2 is twice, 0.5 a half, and the other half next
    max_rows: int | None = None  # of these at most that many rows an epoch, others in the next
    query_prompt: str | None = None  # default: model.query_prompt
    document_prompt: str | None = None  # default: model.document_prompt
    instruction_format: str | None = None  # default: data.instruction_format
    query_max_length: int | None = None  # tokens; default: the model's
    document_max_length: int | None = None  # tokens; default: the model's
    loss: Any = None  # options that differ from the recipe's loss, or another loss by `name`
    temperature: float | None = None  # default: loss.temperature
    in_batch_negatives: bool | None = (
        None  # default: loss.in_batch_negatives; false where the path says no_in_batch_neg
    )
    negatives: int | None = 7  # hard negatives used of a row at a time, drawn anew each epoch; null: all
    subset: str | None = None  # configuration of a Hub data set
    split: str = "train"  # split of a Hub data set
    columns: list[str] | None = None  # which columns: query, positive, negatives in this order, and a score column
    score_scale: float = 1.0  # scores are divided by it: 5 makes 0 to 1 of 0 to 5


@dataclass(kw_only=True)
class DataConfig:
    """What is trained on."""

    train: list[Any] = field(default_factory=list)  # of TrainSource, or of paths
    on_error: OnError = OnError.stop  # a bad row: stop with file and line, or skip and count
    batches: BatchMode = BatchMode.auto
    weight_mode: WeightMode = WeightMode.epochs
    mixing_temperature: float = 1.0  # above 1 small sources are seen more: shares are (rows x weight)^(1/temperature)
    # How an instruction that a row carries is put around its query, instead of a prompt.
    instruction_format: str = "Instruct: {instruction}\nQuery: {text}"
    cache_dir: str | None = None  # default: $EMBEDTRAIN_CACHE, else ~/.cache/embedtrain
    workers: int = 1  # threads that make batches ahead; 0: made when they are needed


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW, its schedule, and clipping."""

    lr: float = 2e-5  # the highest learning rate, where warm-up ends
    weight_decay: float = 0.01  # matrices only: biases and norms are never decayed
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # decay of AdamW's two moments
    eps: float = 1e-8  # added to the root of the second
    max_grad_norm: float | None = 1.0  # of the whole model over all ranks; null: no clipping
    schedule: ScheduleKind = ScheduleKind.linear
    warmup: float = 0.05  # below 1 a share of all steps, from 1 a number of steps
    loss_lr: float | None = None  # of parameters that the loss owns (a temperature, a classifier); default: lr


@dataclass(kw_only=True)
class TrainConfig:
    """How long and in which pieces."""

    steps: int | None = None  # steps, or
    epochs: float | None = None  # epochs
    global_batch_size: int = 256  # rows a step over all ranks: the number of ranks never changes it
    chunk_tokens: int = 16384  # tokens (padding included) one forward pass may hold on one rank
    activation_tokens: int | None = (
        None  # tokens whose graphs are kept, not encoded twice; default: what memory has room for
    )
    pass_overhead_tokens: int | None = (
        None  # what one more forward pass costs, in tokens: less is less padding in more passes
    )
    gradient_accumulation_steps: int = 1  # global batches whose gradients make one step; each has its own negatives
    log_every: int = 10  # steps between lines on the terminal and rows of metrics.jsonl


@dataclass(kw_only=True)
class ParallelConfig:
    """How the work lies over the ranks. None of it changes what is learnt."""

    strategy: Strategy = Strategy.auto
    shard_size: int | None = None  # hsdp: ranks that share one copy of the weights; default: those of one node
    block_class: str | None = None  # the layer class to shard; default: found in the model
    precision: Precision = Precision.bf16
    gradient_reduction: GradientReduction = GradientReduction.auto
    reshard_after_forward: bool | None = (
        None  # give weights back after a block's forward pass; null: where memory asks for it
    )
    activation_checkpointing: bool | None = None  # recompute a block's activations; null: where they would not fit
    cpu_offload: bool | None = None  # weights and optimiser in host memory; null: where nothing else fits
    accelerate_config: str | None = None  # a file that `accelerate config` wrote: its FSDP options become ours
    compile: bool = False  # torch.compile, block by block
    timeout: float = 1800.0  # seconds a rank waits for the others before all give up, but
    step_timeout: float = 600.0  # within a step, after the first: at most `timeout`, at least thrice what that one took


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is saved, and when."""

    every: int = 0  # steps; 0: at the end only
    keep: int = 2  # the newest that stay; the best one stays as well
    keep_every: int = 0  # steps that are multiples of it stay for good; 0: none
    asynchronous: bool = True  # write beside training, from a copy in host memory; false: training waits
    max_disk_gb: float | None = None  # all checkpoints together, in 10^9 bytes; asked before one is written
    layout: CheckpointLayout = CheckpointLayout.sharded
    contents: CheckpointContents = CheckpointContents.all
    best_metric: str | None = None  # `set/metric`: keep the checkpoint that is best by it, and export that one


@dataclass(kw_only=True)
class ExportConfig:
    """The model directory that comes out."""

    # sentence_transformers (always written; transformers opens it as well; adapters are merged), onnx: a graph beside
    # it, its weights fp32, adapter: what LoRA has learnt alone, in a folder beside it, as PEFT reads it
    formats: list[str] = field(default_factory=lambda: ["sentence_transformers"])
    dtype: ExportDtype = ExportDtype.source
    max_file_size: str = "5GB"  # larger weights are split into files of at most that size
    check: bool = True  # reopen and compare; false for models larger than one process's memory
    push_to_hub: str | None = None  # Hub id of a repository to upload it to; made if missing
    private: bool = True  # whether a repository that is made there is private


@dataclass(kw_only=True)
class TrackingConfig:
    """Where figures go besides the terminal and metrics.jsonl."""

    wandb: bool = False  # log to Weights & Biases as well
    wandb_mode: WandbMode | None = None  # online, offline; default: $WANDB_MODE, else online
    wandb_project: str = "embedtrain"  # its project
    wandb_entity: str | None = None  # user or team; default: your own
    wandb_group: str | None = None  # runs of one group are shown together
    wandb_name: str | None = None  # of the run; default: name
    wandb_tags: list[str] = field(default_factory=list)  # of the run
    wandb_notes: str | None = None  # a longer description of the run
    wandb_artifacts: bool = False  # upload the exported model as well
    tensorboard: bool = False  # event files in the run directory, in `tensorboard/`
    geometry: bool = True  # similarities of positives and hardest negatives, ..., of every logged step's batch
    profile: list[int] = field(default_factory=list)  # steps to write a trace of, such as [10,11,12]
    profile_ranks: list[int] | None = field(default_factory=lambda: [0])  # which write one; null: all
    report: bool = True  # write report.html at the end; a few texts are encoded before and after for it


@dataclass(kw_only=True)
class Recipe:
    """Everything a run is made of."""

    name: str = ""  # of the run; a recipe sets it
    seed: int = 42  # of row order, dropout and new weights
    output_dir: str = "runs/${name}"  # all that a run writes lies there; the same folder goes on
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=InfoNCEConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
