"""Options of the doors other than training, as dataclasses: type, default, and what each means."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.evaluation import Gather, IndexConfig
from embedtrain.config.schema import DataConfig, ExportDtype, Pooling, Precision


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of `python -m embedtrain.evaluate`."""

    model: str = ""  # model directory or Hub id
    adapter: str | None = None  # a LoRA adapter on it, as PEFT writes them: directory or Hub id
    sets: list[Any] = field(default_factory=list)  # of EvaluationSet, or of paths
    mteb: list[str] = field(default_factory=list)  # names of mteb's tasks
    subset: int | None = None  # at most so many queries or rows of each set
    output_dir: str = "runs/evaluate"  # metrics.jsonl is written there, and mteb's results
    pooling: Pooling | None = None
    normalize: bool | None = None  # L2-normalise vectors; default: as the model says
    max_length: int | None = None  # tokens; default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # tokens (padding included) one forward pass may hold on one rank
    gather: Gather = Gather.block
    index: IndexConfig = field(default_factory=IndexConfig)
    vectors_dir: str | None = None  # keep documents' vectors there: an evaluation that was stopped goes on
    save_runs: bool = False  # write each retrieval set's ranking and judgements as TREC run and qrels files
    depth: int = 100  # documents of each query in a run file; figures go as deep as their metrics
    timeout: float = 1800.0  # seconds a rank waits for the others before all give up


@dataclass(kw_only=True)
class ExportOptions:
    """Options of `python -m embedtrain.export`."""

    run: str = ""  # output_dir of a run
    step: str = "latest"  # latest, best, or a step's number
    to: str | None = None  # default: model/ in the run's directory
    formats: list[str] | None = None  # default: the recipe's export.formats
    dtype: ExportDtype | None = None  # default: the recipe's export.dtype
    max_file_size: str | None = None  # default: the recipe's export.max_file_size
    check: bool | None = None  # reopen and compare; default: the recipe's export.check
    push_to_hub: str | None = None  # Hub id to upload it to; the recipe's is for the run's own export
    private: bool = True  # whether a repository that is made there is private
    trust_remote_code: bool = False  # run Python that lies in the run's directory; its recipe cannot allow that


@dataclass(kw_only=True)
class SearchOptions:
    """Options of `python -m embedtrain.search`."""

    model: str = ""  # model directory or Hub id
    corpus: str = ""  # BEIR folder, or a corpus.jsonl
    query: str | None = None  # without it queries are read from the keyboard, or line by line from a pipe
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    top: int = 5  # documents shown of each query
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # tokens (padding included) one forward pass may hold
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust


@dataclass(kw_only=True)
class InspectOptions:
    """Options of `python -m embedtrain.inspect`."""

    data: Any = field(default_factory=list)  # of TrainSource, or of paths; or one path
    model: str | None = None  # model directory or Hub id: lengths in its tokens, examples as it sees them
    revision: str | None = None  # a commit, tag or branch of its Hub repository
    max_length: int | None = None  # default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    instruction_format: str = DataConfig.instruction_format  # as data.instruction_format
    for_loss: str = "infonce"  # what the rows are to be trained with: some losses need scores, classes or vectors
    examples: int = 2  # rows shown of each source
    problems: int = 10  # rows that cannot be used, named of each source
    cache_dir: str | None = None  # as data.cache_dir
    trust_remote_code: bool = False  # run Python that comes with the model: only for authors you trust


@dataclass(kw_only=True)
class PlanOptions:
    """Options of `python -m embedtrain.plan`; all others on its command line are the recipe's."""

    gpus: int = 8  # in all
    gpus_per_node: int = 8  # GPUs that share a machine
    gpu_memory: float = 80.0  # GiB of each; a tenth of it is left to the driver and to what the plan does not know
    bandwidth_node: float = 300.0  # GB/s that a GPU sends within its node (H100: NVLink)
    bandwidth_network: float = 50.0  # GB/s that a GPU sends to other nodes (an adapter of 400 Gb/s each)
    tflops: float = 400.0  # that a GPU reaches in training; 400 is what good trainers publish of an H100 in bf16
    tokens_per_text: int | None = None  # in the mean, padding included; default: the model's length, all of it
    texts_per_row: int = 2  # a query and its positive; one more for each hard negative that is used
    json: bool = False  # one JSON object instead of tables; `--json` is the same


@dataclass(kw_only=True)
class ReportOptions:
    """Options of `python -m embedtrain.report`."""

    runs: list[str] = field(default_factory=list)  # output_dirs of runs; written without a name as well
    to: str | None = None  # the file; default: in the first run's directory


@dataclass(kw_only=True)
class DoctorOptions:
    """Options of `python -m embedtrain.doctor`."""

    output_dir: str = "runs"  # where runs are to be written
    cache_dir: str | None = None  # as data.cache_dir
    quick: bool = False  # no bandwidth, no speed of disks, no question to the Hub
    hub: bool = True  # ask the Hugging Face Hub, for some seconds at most
    json: bool = False  # one JSON object instead of a list; `--json` is the same
    timeout: float = 120.0  # seconds that ranks wait for each other
