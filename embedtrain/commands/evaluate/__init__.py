"""`torchrun -m embedtrain evaluate model=DIR sets=[...] mteb=[...]`: evaluate a model, sharded over all ranks."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.checks import check_sets, prompt_warnings
from embedtrain.config.code import code_option, is_code_path
from embedtrain.config.command_options import (
    EncodeOptions,
    IndexOptions,
    OutputOptions,
    PrecisionOptions,
    RankOptions,
    RerankOptions,
    SetOptions,
    ShardOptions,
    check_no_reranker,
    parse_reranker,
)
from embedtrain.config.compose import compose_command
from embedtrain.config.evaluation import (
    BM25,
    MODEL,
    Backend,
    SetKind,
    VectorFormat,
    check_index,
    check_truncate_dims,
    parse_suites,
)
from embedtrain.config.kind_settings import check_hybrid_weights
from embedtrain.config.launch import HELP as LAUNCH_HELP
from embedtrain.config.options import option
from embedtrain.config.parsing import parse_sets, parse_vectors
from embedtrain.config.paths import require_models, require_sets
from embedtrain.config.validation import OptionChecks
from embedtrain.utils.files import expand_user

if TYPE_CHECKING:
    from embedtrain.commands.evaluate.stages import Inputs
    from embedtrain.distributed.world import World
    from embedtrain.evaluation.evaluator import Evaluator, ResultCallback
    from embedtrain.evaluation.types import CompressedVectors
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.loading.load import LoadedModel
    from embedtrain.inference.pair_scorer import PairScorer
    from embedtrain.inference.vector_cache import VectorCache
    from embedtrain.models.types import ModelSource
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.metrics import DatasetInfo, MetricsFile, QueryMetrics


OUTPUT_DIR = "runs/evaluate"  # unless `output_dir` names another
# Options of the bi-encoder, without effect if there is only a reranker.
OF_MODELS = (
    "adapter", "pooling", "normalize", "similarity", "max_length", "query_prompt", "document_prompt", "revision",
    "truncate_dims", "vectors", "vectors_dir", "function", "hybrid_weights", "backend",
)  # fmt: skip

# Options that a graph contains, or of what it does not use.
_NOT_OF_GRAPHS = ("adapter", "pooling", "normalize", "precision", "unshard")

HELP = f"""embedtrain evaluate: measure a model on evaluation sets or on tasks of MTEB

  embedtrain evaluate model=DIR sets=[PATH,...] [option=value ...]
  embedtrain evaluate model=DIR suite=nanobeir
  embedtrain evaluate [model=DIR] reranker=DIR sets=[PATH,...]
  torchrun --nproc-per-node 8 -m embedtrain evaluate model=DIR sets=[PATH,...]

PATH: a BEIR folder, a table (scored or labelled pairs, ...), the id of a Hub
data set, or a mapping: sets='[{{path: DIR, kind: reranking, metrics: [map]}}]'.
Also suite=rteb, bright, mteb_en, mmteb_multi or vidore, and tasks of mteb by
name: mteb=[TASK,...] (pip install 'embedtrain[mteb]').

{{options: model! sets suite mteb reranker subset metrics truncate_dims vectors
  max_length precision output_dir save_runs}}

{LAUNCH_HELP}

Metrics are printed, and added to metrics.jsonl in runs/evaluate or output_dir."""


@dataclass(kw_only=True)
class EvaluateOptions(
    RankOptions, PrecisionOptions, ShardOptions, OutputOptions, IndexOptions, SetOptions, RerankOptions, EncodeOptions
):
    """Options of `python -m embedtrain evaluate`."""

    # What finds them: [model], [bm25], or [bm25,model] for both, one after the other. Default: the model if there is
    # one, else BM25. Sets with candidates of their own have no other first stage.
    first_stage: list[str] | None = None
    mteb: list[str] = field(default_factory=list)  # names of tasks or benchmarks of mteb
    # One or several of nanobeir, rteb, bright, mteb_en, mmteb_multi and vidore: the tasks of a benchmark of mteb whose
    # data is public, and the mean that people quote.
    suite: Any = None
    # module:function, called with the encoder after the sets; its metrics are a set of the function's name.
    function: str | None = code_option(None)
    # Of each set those that its kind has, the main one first. Default, also of a set with none: those of its kind.
    metrics: list[str] | None = None
    truncate_dims: list[int] = field(default_factory=list)  # also measure the first so many dimensions, as SET@256
    # Also measure retrieval sets with compressed vectors: options of VectorFormat, or precisions, as [int8,binary].
    vectors: list[Any] = option(factory=list, items=VectorFormat)
    # documents of a set whose vectors give the ranges of int8 and uint8
    calibration: int = option(10000, at_least=1)
    # torch, or a graph that the export of the model has, on the CPU: onnx, onnx_fp16, onnx_int8 or openvino.
    backend: Backend = Backend.torch
    save_runs: bool = False  # write each retrieval set's ranking and judgements as TREC run and qrels files
    # documents per query in a run file; default: 1000, or more if a metric needs them
    run_depth: int | None = option(
        None, at_least=1, hint="null writes all documents that the metrics need, at least 1000", in_result=False
    )

    @property
    def first_stages(self) -> list[str]:
        """What finds the documents for the reranker; by default the model if there is one, else BM25."""
        if self.first_stage is not None:
            return self.first_stage
        return [] if self.reranker is None else [MODEL if self.model else BM25]


def check_evaluate(options: EvaluateOptions) -> EvaluateOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    check.require(bool(options.model or options.reranker), "model", "is missing; write a model directory or a Hub id")
    check.require(
        bool(options.sets or options.mteb or options.suite or options.function),
        "sets",
        "nothing to evaluate on; write sets=[PATH,...] (directories, tables or Hub data sets), mteb=[TASK,...] or "
        "suite=NAME",
    )
    check.require(options.function is None or is_code_path(options.function), "function", "must be module:function")
    check_sets(options.sets, "sets")
    check_truncate_dims(options.truncate_dims, "truncate_dims")
    check_hybrid_weights(options.hybrid_weights, check)
    check_index(options.index, "index.", stores_vectors=options.vectors_dir is not None)
    check.require(options.metrics != [], "metrics", "is empty; write metrics, such as [ndcg@10], or null")
    _check_reranker(options, check)
    if options.backend is not Backend.torch:
        for name in _NOT_OF_GRAPHS:
            default = getattr(EvaluateOptions, name)
            message = f"is not for graphs (backend={options.backend.value}); leave it out"
            check.require(getattr(options, name) == default, name, message)
    return options


def _check_use(options: EvaluateOptions) -> None:
    """Nothing is set that is of something else."""
    OptionChecks(options).require(
        options.kind not in list(SetKind),
        "kind",
        f"is that of a set: write sets=[{{path: PATH, kind: {options.kind}}}]",
    )
    if options.reranker is None:
        check_no_reranker(options, "rerank_depth", "first_stage")


def _check_reranker(options: EvaluateOptions, check: OptionChecks) -> None:
    if options.reranker is None:
        return
    allowed = "must be [model], [bm25] or [bm25,model]"
    stages = options.first_stages
    check.require(
        bool(stages) and set(stages) <= {BM25, MODEL} and len(set(stages)) == len(stages), "first_stage", allowed
    )
    check.require(
        bool(options.model) or MODEL not in stages, "first_stage", "needs a model; write model=DIR, or [bm25]"
    )
    message = "needs a model; write model=DIR: a reranker alone measures sets"
    for name in ("mteb", "suite"):
        check.require(bool(options.model) or not getattr(options, name), name, message)
    if not options.model:
        for name in OF_MODELS:
            check.require(
                getattr(options, name) == getattr(EvaluateOptions(), name), name, "is of a model; write model=DIR"
            )


def compose(arguments: list[str]) -> EvaluateOptions:
    """The options, checked."""
    options = compose_command("evaluate", EvaluateOptions, arguments, HELP, _check_use)
    options.output_dir = options.output_dir or OUTPUT_DIR
    options.sets = parse_sets(options.sets, "sets")
    options.suite = parse_suites(options.suite)
    options.vectors = parse_vectors(options.vectors, "vectors")
    options.reranker = parse_reranker(options.reranker, "reranker")
    return check_evaluate(options)


Metrics = dict[str, dict[str, float]]


def require_paths(options: EvaluateOptions) -> None:
    """Raise a ConfigError for a path that does not exist."""
    reranker = options.reranker
    require_models(model=options.model or None, adapter=options.adapter, reranker=reranker and reranker.path)
    require_sets(options.sets)


def run(options: EvaluateOptions) -> Metrics:
    """Load the model, measure it on every set and task, append a row to metrics.jsonl after each; print tables.

    Returns the metrics of each set and task, on every rank.
    """
    from embedtrain.commands.evaluate.mteb_client import EvaluatedModel, TaskResults, run_tasks
    from embedtrain.commands.evaluate.stages import Models, read_inputs, stages
    from embedtrain.distributed.world import joined_world
    from embedtrain.errors import DataError
    from embedtrain.inference.loading.command_model import open_reranker
    from embedtrain.tracking.console import Console

    output_dir = Path(options.output_dir)
    with joined_world(options.timeout) as world:
        console = Console(enabled=world.is_main)
        console.warn(*prompt_warnings(options))
        inputs = read_inputs(options, world, console)
        reranker = open_reranker(options.reranker, world, trust_remote_code=options.trust_remote_code)
        with world.fail_together("opening metrics.jsonl"):
            output_dir.mkdir(parents=True, exist_ok=True)
            metrics_file = _open_metrics(output_dir) if world.is_main else None
        rows = _Rows(metrics_file, options.model)
        model = _load_model(options, world, console) if options.model else None
        scorer = _load_scorer(options, reranker, world, console)
        encoder, identity, vector_cache = (
            (None, {}, None) if model is None else _open_encoder(options, model, inputs, world)
        )
        models = Models(encoder, scorer, vector_cache, inputs.function, _compressed(options, model))
        metrics: Metrics = {}
        of_queries: dict[str, QueryMetrics] = {}  # of sets that a reranker orders
        task_results = TaskResults()
        with console.progress() as progress:
            if inputs.sets or inputs.function is not None:
                with console.phase("evaluating"):
                    for stage in stages(options, inputs.sets, models, world):
                        record = functools.partial(rows.record, origin=stage.origin)
                        metrics |= stage.evaluator.evaluate(
                            save_runs=output_dir / "runs" if options.save_runs else None,
                            run_depth=options.run_depth,
                            progress=progress,
                            on_result=_noting_speed(stage.evaluator, record, console),
                            on_queries=None if scorer is None else of_queries.__setitem__,
                        )
            if (options.mteb or options.suite) and model is not None and encoder is not None:
                task_results = run_tasks(
                    inputs.tasks,
                    EvaluatedModel(encoder, model.source, options.model, identity),
                    console,
                    output_dir / "mteb",
                    names=options.mteb,
                    suites=options.suite,
                    index=options.index,
                    vector_cache=vector_cache,
                    progress=progress,
                    on_result=rows.record,
                )
        _report(options, metrics | task_results.metrics, rows.datasets, of_queries, world, console)
        if task_results.failures:
            raise DataError(task_results.describe_failures())
        return metrics | task_results.metrics


@dataclass
class _Rows:
    """Writes a row to metrics.jsonl for each result, and remembers what it was measured on."""

    file: "MetricsFile | None"  # of rank 0
    model: str
    datasets: "dict[str, DatasetInfo]" = field(default_factory=dict)  # by the name of the result

    def record(
        self,
        name: str,
        values: Mapping[str, float],
        dataset: "DatasetInfo",
        origin: Mapping[str, str] | None = None,
    ) -> None:
        """A result; `origin` is what its row has besides the metrics, by default the model."""
        from embedtrain.tracking.metrics import evaluation_row

        self.datasets[name] = dataset
        if self.file is not None:
            row = evaluation_row(0, name, values, dataset)
            self.file.append_new({**row, **({"model": self.model} if origin is None else origin)})


def _noting_speed(evaluator: "Evaluator", record: "ResultCallback", console: "Console") -> "ResultCallback":
    """`record`, and a line about the size of the set and the time that it took."""

    def record_and_note(name: str, values: Mapping[str, float], dataset: "DatasetInfo") -> None:
        record(name, values, dataset)
        if name in evaluator.seconds:
            console.note(f"{name}: {dataset.label}, {dataset.size}, {evaluator.speed(name)}")

    return record_and_note


def _open_metrics(output_dir: Path) -> "MetricsFile":
    from embedtrain.tracking.metrics import METRICS_FILE, MetricsFile
    from embedtrain.utils.files import require_no_links, require_own_file

    require_own_file(output_dir / METRICS_FILE)
    for folder in (output_dir / "runs", output_dir / "mteb"):
        require_no_links(folder)
    return MetricsFile(output_dir / METRICS_FILE)


def _load_model(options: EvaluateOptions, world: "World", console: "Console") -> "LoadedModel":
    from embedtrain.config.evaluation import check_kind_of_vectors, dims_of
    from embedtrain.inference.loading.command_model import command_model_config, load_encoder_model

    with console.phase("loading the model"):
        config = command_model_config(options, options.hybrid_weights)
        model = load_encoder_model(config, options.precision, world, backend=options.backend)
    model.source.require_dimensions(options.truncate_dims, "truncate_dims", truncated=True)
    if options.vectors:
        check_kind_of_vectors(model.source.kind, "vectors")
        model.source.require_inner_products("vectors")
        model.source.require_dimensions(dims_of(options.vectors), "vectors", truncated=True)
    for note in model.notes:
        console.note(note)
    return model


def _open_encoder(
    options: EvaluateOptions, model: "LoadedModel", inputs: "Inputs", world: "World"
) -> "tuple[SentenceEncoder, dict[str, Any], VectorCache | None]":
    """What encodes texts with the model, the identity of its vectors, and their cache if the user wants one."""
    from embedtrain.commands.evaluate.mteb_client import check_tasks
    from embedtrain.evaluation.types import check_sets_of_kind
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.vector_cache import VectorCache

    check_sets_of_kind(inputs.sets, model.source.kind, "sets")
    with world.fail_together("comparing the tasks of mteb with the model"):
        check_tasks(inputs.tasks, model.tokenizer.layout)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=options.chunk_tokens, unshard=options.unshard)
    directory = options.vectors_dir
    identity = _identity(options, model, world) if directory or options.mteb or options.suite else {}
    vector_cache = VectorCache(expand_user(directory), identity) if directory else None
    return encoder, identity | {"index": options.index.search_identity}, vector_cache


def _compressed(options: EvaluateOptions, model: "LoadedModel | None") -> "CompressedVectors":
    """The forms of vectors to measure, with the ranges in the model's directory if it has any."""
    from embedtrain.evaluation.types import CompressedVectors
    from embedtrain.inference.quantised import read_ranges

    ranges = read_ranges(model.source.directory) if model is not None and options.vectors else {}
    return CompressedVectors(options.vectors, options.calibration, ranges)


def _load_scorer(
    options: EvaluateOptions, source: "ModelSource | None", world: "World", console: "Console"
) -> "PairScorer | SentenceEncoder | None":
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.loading.command_model import load_reranker
    from embedtrain.inference.pair_scorer import PairScorer

    if source is None:
        return None
    with console.phase("loading the reranker"):
        model = load_reranker(source, options.reranker, options.precision, world)
    for note in model.notes:
        console.note(f"reranker: {note}")
    common: dict[str, Any] = {"chunk_tokens": options.chunk_tokens, "unshard": options.unshard}
    if not source.kind.scores_pairs:
        return SentenceEncoder.from_model(model, world, **common)
    return PairScorer.from_model(model, world, windows=options.reranker.document_windows, **common)


def _identity(options: EvaluateOptions, model: "LoadedModel", world: "World") -> dict[str, Any]:
    from embedtrain.distributed.sharding import resolve_precision
    from embedtrain.inference.loading.graph import graph_file
    from embedtrain.inference.vector_cache import model_identity

    precision = resolve_precision(options.precision, world)
    graph = None if options.backend is Backend.torch else graph_file(model.source, options.backend)
    identity = {**model_identity(model.source, precision, world, graph), "index": options.index.identity}
    return identity if options.backend is Backend.torch else identity | {"backend": options.backend.value}


def _report(
    options: EvaluateOptions,
    metrics: Metrics,
    datasets: "Mapping[str, DatasetInfo]",
    of_queries: "Mapping[str, QueryMetrics]",
    world: "World",
    console: "Console",
) -> None:
    """Print tables, what a reranker has changed, and the memory used."""
    from embedtrain.commands.evaluate.stages import describe_gains
    from embedtrain.tracking.metrics import METRICS_FILE
    from embedtrain.tracking.tracker import describe_peak_memory, peak_memory_gib
    from embedtrain.utils.formatting import format_count

    console.evaluation(0, metrics, datasets=datasets, title=f"evaluation of {' and '.join(_names(options))}")
    for line in describe_gains(of_queries) if world.is_main else ():
        console.note(line)
    peak = max(world.gather(peak_memory_gib(world.device)))
    measured = describe_peak_memory(world.device)
    console.note(f"{format_count(world.size, 'rank')}, at most {peak:.2f} GiB of memory on each ({measured})")
    if metrics:
        console.note(f"rows are in {Path(options.output_dir) / METRICS_FILE}")


def _names(options: EvaluateOptions) -> list[str]:
    """What is evaluated, for the user."""
    reranker = [] if options.reranker is None else [f"the reranker {options.reranker.path}"]
    return [*([options.model] if options.model else []), *reranker]
