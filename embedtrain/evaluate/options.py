"""Options of `python -m embedtrain.evaluate`."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.checks import check_sets, check_truncate_dims
from embedtrain.config.compose import compose_command
from embedtrain.config.evaluation import EvaluationSet, IndexConfig, Unshard
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.parsing import parse_items
from embedtrain.config.recipe import Pooling, Precision
from embedtrain.config.validation import OptionChecks

HELP = f"""embedtrain evaluate: measure a model on evaluation sets or on tasks of MTEB

  embedtrain evaluate model=DIR sets=[PATH,...] [option=value ...]
  embedtrain evaluate model=DIR mteb=[TASK,...]
  torchrun --nproc-per-node 8 -m embedtrain.evaluate model=DIR sets=[PATH,...]

PATH: a BEIR folder, a table (scored or labelled pairs, ...), the id of a Hub
data set, or a mapping: sets='[{{path: DIR, kind: reranking, metrics: [map]}}]'.
TASK: a task or benchmark of mteb (pip install 'embedtrain[mteb]').

{{options: model! sets mteb subset metrics truncate_dims query_prompt max_length precision
  output_dir save_runs vectors_dir}}

{LAUNCH_HELP}

Metrics are printed and added to OUTPUT_DIR/metrics.jsonl."""


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of `python -m embedtrain.evaluate`."""

    model: str = ""  # model directory or Hub id
    adapter: str | None = None  # a LoRA adapter in PEFT's format: directory or Hub id
    sets: list[Any] = field(default_factory=list)  # sets: options of EvaluationSet, or paths
    mteb: list[str] = field(default_factory=list)  # names of tasks or benchmarks of mteb
    subset: int | None = None  # maximum number of queries or rows of each set
    # Of each set those that its kind has, the main one first. Default, also of a set with none: those of its kind.
    metrics: list[str] | None = None
    truncate_dims: list[int] = field(default_factory=list)  # also measure the first so many dimensions, as SET@256
    output_dir: str = "runs/evaluate"  # for metrics.jsonl and the results of mteb
    pooling: Pooling | None = None
    normalize: bool | None = None  # L2-normalize vectors; default: the model's setting
    max_length: int | None = None  # tokens; default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    trust_remote_code: bool = False  # execute Python code of the model: only for authors you trust
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # per forward pass of a rank, including padding
    unshard: Unshard = Unshard.layer
    index: IndexConfig = field(default_factory=IndexConfig)
    vectors_dir: str | None = None  # store document vectors there, so that an interrupted evaluation resumes
    save_runs: bool = False  # write each retrieval set's ranking and judgements as TREC run and qrels files
    run_depth: int | None = None  # documents per query in a run file; default: 1000, or more if a metric needs them
    timeout: float = 1800.0  # seconds that a rank waits for the others before all fail


def check_evaluate(options: EvaluateOptions) -> EvaluateOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.require(
        bool(options.sets or options.mteb),
        "sets",
        "nothing to evaluate on; write sets=[PATH,...] (directories, tables or Hub data sets), or mteb=[TASK,...]",
    )
    check_sets(options.sets, "sets")
    check_truncate_dims(options.truncate_dims, "truncate_dims")
    check.at_least(1, "subset", "null takes all queries or rows")
    check.at_least(1, "chunk_tokens")
    check.require(options.metrics != [], "metrics", "is empty; write metrics, such as [ndcg@10], or null")
    check.at_least(1, "run_depth", "null writes all documents that the metrics need, at least 1000")
    check.length("max_length")
    check.positive("timeout")
    return options


def compose_evaluate(arguments: list[str]) -> EvaluateOptions:
    """The options, checked."""
    options = compose_command("evaluate", EvaluateOptions, arguments, HELP)
    options.sets = parse_items(options.sets, EvaluationSet, "sets")
    return check_evaluate(options)
