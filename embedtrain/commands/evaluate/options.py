"""Options of `python -m embedtrain evaluate`."""

from dataclasses import dataclass, field
from typing import Any

from embedtrain.config.checks import check_sets
from embedtrain.config.code import code_option, is_code_path
from embedtrain.config.command_options import (
    EncodeOptions,
    IndexOptions,
    PrecisionOptions,
    RankOptions,
    RerankOptions,
    SetOptions,
    ShardOptions,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.compressed import check_truncate_dims, parse_vectors
from embedtrain.config.evaluation import Backend, EvaluationSet, SetKind, check_index
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.m3 import check_hybrid_weights
from embedtrain.config.parsing import parse_items
from embedtrain.config.reranker import parse_reranker
from embedtrain.config.validation import OptionChecks

BM25, MODEL = "bm25", "model"  # of `first_stage`
# Options of the bi-encoder, without effect if there is only a reranker.
OF_MODELS = (
    "adapter", "pooling", "normalize", "similarity", "max_length", "query_prompt", "document_prompt", "revision",
    "truncate_dims", "vectors", "vectors_dir", "function", "hybrid_weights", "backend",
)  # fmt: skip

# Options that a graph contains, or of what it does not use.
_NOT_OF_GRAPHS = ("adapter", "pooling", "normalize", "precision", "unshard")

HELP = f"""embedtrain evaluate: measure a model on evaluation sets or on tasks of MTEB

  embedtrain evaluate model=DIR sets=[PATH,...] [option=value ...]
  embedtrain evaluate model=DIR mteb=[TASK,...]
  embedtrain evaluate [model=DIR] reranker=DIR sets=[PATH,...]
  torchrun --nproc-per-node 8 -m embedtrain evaluate model=DIR sets=[PATH,...]

PATH: a BEIR folder, a table (scored or labelled pairs, ...), the id of a Hub
data set, or a mapping: sets='[{{path: DIR, kind: reranking, metrics: [map]}}]'.
TASK: a task or benchmark of mteb (pip install 'embedtrain[mteb]').

{{options: model! sets mteb reranker subset metrics truncate_dims vectors
  max_length precision output_dir save_runs vectors_dir}}

{LAUNCH_HELP}

Metrics are printed and added to OUTPUT_DIR/metrics.jsonl."""


@dataclass(kw_only=True)
class EvaluateOptions(
    EncodeOptions, RerankOptions, SetOptions, IndexOptions, ShardOptions, PrecisionOptions, RankOptions
):
    """Options of `python -m embedtrain evaluate`."""

    # What finds them: [model], [bm25], or [bm25,model] for both, one after the other. Default: the model if there is
    # one, else BM25. Sets with candidates of their own have no other first stage.
    first_stage: list[str] | None = None
    mteb: list[str] = field(default_factory=list)  # names of tasks or benchmarks of mteb
    # module:function, called with the encoder after the sets; its metrics are a set of the function's name.
    function: str | None = code_option(None)
    # Of each set those that its kind has, the main one first. Default, also of a set with none: those of its kind.
    metrics: list[str] | None = None
    truncate_dims: list[int] = field(default_factory=list)  # also measure the first so many dimensions, as SET@256
    # Also measure retrieval sets with compressed vectors: options of VectorFormat, or precisions, as [int8,binary].
    vectors: list[Any] = field(default_factory=list)
    calibration: int = 10000  # documents of a set whose vectors give the ranges of int8 and uint8
    output_dir: str = "runs/evaluate"  # for metrics.jsonl and the results of mteb
    # torch, or a graph that the export of the model has, on the CPU: onnx, onnx_fp16, onnx_int8 or openvino.
    backend: Backend = Backend.torch
    save_runs: bool = False  # write each retrieval set's ranking and judgements as TREC run and qrels files
    run_depth: int | None = None  # documents per query in a run file; default: 1000, or more if a metric needs them


def check_evaluate(options: EvaluateOptions) -> EvaluateOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    check.require(bool(options.model or options.reranker), "model", "is missing; write a model directory or a Hub id")
    check.require(
        bool(options.sets or options.mteb or options.function),
        "sets",
        "nothing to evaluate on; write sets=[PATH,...] (directories, tables or Hub data sets), or mteb=[TASK,...]",
    )
    check.require(options.function is None or is_code_path(options.function), "function", "must be module:function")
    check.require(
        options.kind not in list(SetKind),
        "kind",
        f"is that of a set: write sets=[{{path: PATH, kind: {options.kind}}}]",
    )
    check_sets(options.sets, "sets")
    check_truncate_dims(options.truncate_dims, "truncate_dims")
    check.at_least(1, "calibration")
    check_hybrid_weights(options.hybrid_weights, check)
    check.at_least(1, "subset", "null takes all queries or rows")
    check.at_least(1, "chunk_tokens")
    check_index(options.index, "index.", stores_vectors=options.vectors_dir is not None)
    check.require(options.metrics != [], "metrics", "is empty; write metrics, such as [ndcg@10], or null")
    _check_reranker(options, check)
    if options.backend is not Backend.torch:
        for name in _NOT_OF_GRAPHS:
            default = getattr(EvaluateOptions, name)
            message = f"is not for graphs (backend={options.backend.value}); leave it out"
            check.require(getattr(options, name) == default, name, message)
    check.at_least(1, "run_depth", "null writes all documents that the metrics need, at least 1000")
    check.length("max_length")
    check.positive("timeout")
    return options


def _check_reranker(options: EvaluateOptions, check: OptionChecks) -> None:
    if options.reranker is None:
        for name in ("rerank_depth", "first_stage"):
            default = getattr(EvaluateOptions, name)
            message = "has no effect without a reranker; write reranker=DIR"
            check.require(getattr(options, name) == default, name, message)
        return
    check.at_least(1, "rerank_depth")
    allowed = "must be [model], [bm25] or [bm25,model]"
    stages = first_stages(options)
    check.require(
        bool(stages) and set(stages) <= {BM25, MODEL} and len(set(stages)) == len(stages), "first_stage", allowed
    )
    check.require(
        bool(options.model) or MODEL not in stages, "first_stage", "needs a model; write model=DIR, or [bm25]"
    )
    message = "needs a model; write model=DIR: a reranker alone measures sets"
    check.require(bool(options.model) or not options.mteb, "mteb", message)
    if not options.model:
        for name in OF_MODELS:
            check.require(
                getattr(options, name) == getattr(EvaluateOptions(), name), name, "is of a model; write model=DIR"
            )


def first_stages(options: EvaluateOptions) -> list[str]:
    """What finds the documents for the reranker; by default the model if there is one, else BM25."""
    if options.first_stage is not None:
        return options.first_stage
    return [] if options.reranker is None else [MODEL if options.model else BM25]


def compose(arguments: list[str]) -> EvaluateOptions:
    """The options, checked."""
    options = compose_command("evaluate", EvaluateOptions, arguments, HELP)
    options.sets = parse_items(options.sets, EvaluationSet, "sets")
    options.vectors = parse_vectors(options.vectors, "vectors")
    options.reranker = parse_reranker(options.reranker, "reranker")
    return check_evaluate(options)
