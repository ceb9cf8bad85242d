"""Convert a checkpoint to a model directory in one process, without ranks and without a GPU."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.snapshot import AVERAGE, ENCODER
from embedtrain.checkpoint.step_directory import Checkpoint, find_checkpoint
from embedtrain.checkpoint.tensor_files import TensorReader
from embedtrain.config.code import is_code_path
from embedtrain.config.compose import load_recipe, to_plain
from embedtrain.config.evaluation import Backend
from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_checks import matryoshka_dims_of
from embedtrain.config.recipe import ADAPTER, LOGIT_SCORE, ONNX, ExportConfig, Recipe
from embedtrain.config.validation import written
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World, joined_world
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.first_stage import with_bm25_candidates
from embedtrain.evaluation.sets import load_sets
from embedtrain.evaluation.types import LoadedSet, RetrievalSet, check_sets_of_kind
from embedtrain.formats.export import (
    DerivedModel,
    ExportResult,
    checkpoint_weights,
    export_dtype,
    load_checkpoint_encoder,
    plan_export,
    write_derived,
)
from embedtrain.formats.export_record import export_lock, require_replaceable
from embedtrain.formats.hub import split_revision
from embedtrain.formats.model_card import UNNAMED, hub_id, model_card, recipe_of_weights, tasks_card
from embedtrain.formats.onnx import GraphMeasure, require_graph
from embedtrain.formats.peft import (
    BASE_WEIGHTS,
    AdapterBase,
    AdapterCheckpoint,
    TaskAdapter,
    joint_prompts,
    require_same_base,
)
from embedtrain.formats.source import (
    CommandModel,
    different_setting,
    different_tokens,
    open_model_source,
    require_trained,
    with_kind_of_files,
)
from embedtrain.formats.transformers import complete_older_files
from embedtrain.formats.verify import ExportReference, export_tolerance, probe_outputs
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.graph import load_graph
from embedtrain.inference.loading.load import model_tokenizer
from embedtrain.inference.pair_scorer import PairScorer
from embedtrain.inference.quantised import write_trained_ranges
from embedtrain.losses.quantisation import ranges_dimension
from embedtrain.models.adapters import describe_kind, shares_state, without_adapters
from embedtrain.models.build import full_state_dict
from embedtrain.models.security import require_no_links
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console

if TYPE_CHECKING:
    from embedtrain.commands.export import ExportOptions


@dataclass(frozen=True)
class ExportedRun:
    """A run and the checkpoint to export."""

    run_dir: RunDirectory
    recipe: Recipe
    checkpoint: Checkpoint
    kind: str  # of its tensors that are exported


def open_run(path: str, options: "ExportOptions") -> ExportedRun:
    """The run at a path and its step `options.step`.

    Raises ConfigError if Python code in the run is not permitted, CheckpointError if a file is damaged or there is no
    such step.
    """
    run_dir = RunDirectory(Path(path))
    recipe = load_recipe(run_dir.recipe)
    if recipe.model.trust_remote_code and not options.trust_remote_code:
        raise ConfigError(
            f"{run_dir.recipe} has model.trust_remote_code: true, but a file does not grant this permission: if you "
            f"trust the Python in {run_dir.architecture}, write trust_remote_code=true"
        )
    _check_kind(recipe, options.kind)
    _check_pooling(run_dir, recipe, options.pooling)
    # The file names the base model of adapters as well, and does not make its code trusted. Nor that of a tokenizer.
    trusted = options.trust_remote_code and options.base is not None
    if options.base is not None:
        name, revision = split_revision(options.base)
        recipe.model = replace(recipe.model, path=name, revision=revision)
    if trusted:
        recipe.model = replace(recipe.model, tokenizer=None, tokenizer_revision=None)
    recipe.model.trust_remote_code = trusted
    require_no_links(run_dir.architecture)
    run_dir.require_intact()
    checkpoint = find_checkpoint(run_dir.checkpoints, options.step)
    return ExportedRun(run_dir, recipe, checkpoint, checkpoint.weights_kind(options.weights_of))


def _check_kind(recipe: Recipe, kind: str | None) -> None:
    """Raise a ConfigError for another kind than that of the run: an export has the kind of its weights."""
    if kind not in (None, recipe.model.kind):
        raise ConfigError(f"kind={kind}: the run has model.kind={recipe.model.kind}; leave it out")


def _check_pooling(run_dir: RunDirectory, recipe: Recipe, pooling: str | None) -> None:
    """Raise a ConfigError for another pooling than the run's, or for a class that only its recipe names."""
    trained = vars(recipe.model).get("pooling")  # of the kinds that pool
    if pooling is None and trained is not None and is_code_path(trained):
        raise ConfigError(
            f"{run_dir.recipe} has model.pooling: {trained}, but a file cannot name code to run: if you trust it, "
            f"write pooling={trained}"
        )
    if pooling not in (None, trained):
        raise ConfigError(
            f"pooling={pooling}: {run_dir.recipe} has model.pooling: {written(trained)}, with which the weights were "
            f"trained; {'leave pooling out' if trained is None else f'write pooling={trained}'}"
        )


def export_checkpoint(
    run: ExportedRun,
    output_dir: Path,
    config: ExportConfig,
    *,
    trust_remote_code: bool,
    console: Console,
    measure: GraphMeasure | None = None,
) -> ExportResult:
    """Write a checkpoint as a model directory, which replaces `output_dir` once it has passed all checks.

    At most one copy of the model is in memory, and none if `config.check` is false. `measure` is called with each
    graph, see `write_variants`.

    Raises CheckpointError if the checkpoint does not fit the model, or the directory does not reproduce its embeddings;
    ConfigError if another export to the directory is running.
    """
    run_dir, recipe, checkpoint = run.run_dir, run.recipe, run.checkpoint
    source = _open_architecture(run, config, trust_remote_code=trust_remote_code)
    tokenizer = model_tokenizer(source)
    dtype = export_dtype(config.dtype, source)
    base: ModelSource | None = None
    if ONNX in config.formats:
        require_graph(source)
    if ADAPTER in config.formats:
        source.kind.check_other_options(replace(recipe, export=config))
    if LOGIT_SCORE in config.formats or source.kind.files.further_specs(run_dir.architecture):
        base = open_model_source(recipe.model)
    if base is not None and LOGIT_SCORE in config.formats:
        base.kind.files.require_logit_score(base, run_dir.architecture)
    reference: ExportReference | None = None
    if run.kind == AVERAGE:
        console.note("exporting the moving average of the weights (optim.ema)")
    with export_lock(output_dir) as unfinished, checkpoint.tensors(run.kind) as reader:
        adapters, adapter = _open_adapters(run, source, reader)
        if config.check:
            with console.phase("encoding probe texts with the checkpoint's weights"):
                tolerance = export_tolerance(dtype, exact_encoder=True)
                reference = _reference(adapters, source, reader, tokenizer, tolerance)
        weights = checkpoint_weights(reader) if adapters is None else adapters.merged()
        export = plan_export(
            output_dir, unfinished, run_dir.architecture, weights, dtype, config, adapter=adapter, base=base
        )
        export = replace(export, matryoshka_dims=frozenset(matryoshka_dims_of(recipe.loss)))
        with console.phase("writing the directory"):
            export.begin()
            complete_older_files(unfinished, source, tokenizer)
            export.write(weights.rows, main=True)
        names = [name for name in reader.specs if ranges_dimension(name) is not None]
        ranges = {name: rows for name in names for _, rows in reader.all_rows(name)}
        write_trained_ranges(unfinished, ranges, checkpoint.step)
        card = model_card(
            recipe_of_weights(checkpoint.manifest.recipe, to_plain(recipe)),
            run_dir.path,
            step=checkpoint.step,
            dimension=config.truncate_dim or source.dimension,
            max_length=tokenizer.max_length,
            prompts=source.prompts,
            formats=config.formats,
            name=config.push_to_hub,
        )
        return export.finish(card, reference, trust_remote_code=trust_remote_code, phase=console.phase, measure=measure)


def convert_directory(options: "ExportOptions", config: ExportConfig, console: Console) -> ExportResult:
    """Write a model directory as another library computes it, and say what that changes.

    At most two copies of the model are in memory. Raises ConfigError if the model has no class of that library, or
    CheckpointError if the library computes other vectors of the directory than the encoder.
    """
    assert options.output_dir is not None
    assert options.page_library is not None
    name, revision = split_revision(options.model)
    model = CommandModel(path=name, revision=revision, trust_remote_code=options.trust_remote_code)
    settings, what = with_kind_of_files(model)
    source = require_trained(open_model_source(settings), settings, what)
    converted = source.kind.convert(source, options.page_library)
    assert source.directory is not None
    output_dir = require_replaceable(Path(options.output_dir), source.directory)
    weights = full_state_dict(source, 0)
    with console.phase("comparing the vectors of both libraries"):
        for note in source.kind.conversion_notes(source, converted, weights):
            console.note(note)
    made = DerivedModel(
        source=converted,
        weights=weights,
        tokenizer=model_tokenizer(converted),
        original=options.model,
        description=f"that of {{}}, for {options.page_library.value.replace('_', '-')}.",
    )
    return write_derived(made, output_dir, config, console, trust_remote_code=options.trust_remote_code)


def _open_architecture(run: ExportedRun, config: ExportConfig, *, trust_remote_code: bool) -> ModelSource:
    """The model of a run; a ConfigError if it cannot be exported with these options."""
    kind = run.recipe.model.kind
    source = open_model_source(
        load_kind(kind).model_options(
            path=str(run.run_dir.architecture),
            rope_theta=config.rope_theta,
            trust_remote_code=trust_remote_code,
        )
    )
    source.kind.files.check_export(config, kind)
    source.require_dimensions([config.truncate_dim], "truncate_dim")
    return source


def _open_adapters(
    run: ExportedRun, source: ModelSource, reader: TensorReader
) -> tuple[AdapterCheckpoint, AdapterBase] | tuple[None, None]:
    """The trained adapters, and what an export of them alone depends on; None without adapters."""
    recipe, directory = run.recipe, run.run_dir.adapter
    if not recipe.model.adapters.on:
        return None, None
    adapters = AdapterCheckpoint.open(directory, recipe.model, recipe.seed, source, reader)
    require_same_base(run.checkpoint, adapters.base)
    return adapters, AdapterBase(directory, adapters.base, recipe.seed, load_in_4bit=recipe.model.lora.load_in_4bit)


def _reference(
    adapters: AdapterCheckpoint | None,
    source: ModelSource,
    reader: TensorReader,
    tokenizer: TextTokenizer,
    tolerance: float,
) -> ExportReference:
    """What the export has to reproduce. Adapters stay unmerged here, so that the check includes the merge."""
    if adapters is None:
        return ExportReference.of(load_checkpoint_encoder(source, reader), source, tokenizer, tolerance)
    encoder = adapters.encoder()
    reference = ExportReference.of(encoder, source, tokenizer, tolerance)
    with without_adapters(encoder):
        return replace(reference, base_vectors=probe_outputs(encoder, source, tokenizer))


@dataclass(frozen=True)
class _Task:
    """The run of one task."""

    name: str
    run: ExportedRun
    source: ModelSource  # the architecture of the run
    tokenizer: TextTokenizer

    def __str__(self) -> str:
        return f"adapters.{self.name}={self.run.run_dir.path}"


def export_adapters(
    runs: Mapping[str, ExportedRun],
    output_dir: Path,
    config: ExportConfig,
    *,
    trust_remote_code: bool,
    console: Console,
) -> ExportResult:
    """Write the base model and the adapters of the runs, by task; replaces `output_dir` once it has passed all checks.

    One copy of the model is in memory, and none if `config.check` is false.

    Raises ConfigError for a run that has no adapters, or that trained more than these; ModelError or CheckpointError
    for runs with different base models, tokenizers or settings.
    """
    tasks = [
        _open_task(name, run, config.rope_theta, trust_remote_code=trust_remote_code) for name, run in runs.items()
    ]
    first, *others = tasks
    for other in others:
        _require_compatible(first, other)
    first.source.require_dimensions([config.truncate_dim], "truncate_dim")
    dtype = export_dtype(config.dtype, first.source)
    tolerance = export_tolerance(dtype, exact_encoder=True) if config.check else None
    with export_lock(output_dir) as unfinished, ExitStack() as stack:
        adapters = [_open_adapter(task, stack, tolerance, console) for task in tasks]
        _require_same_modules(adapters, tasks)
        weights = adapters[0].checkpoint.base_weights()
        export = plan_export(output_dir, unfinished, first.run.run_dir.architecture, weights, dtype, config)
        export = replace(export, tasks=tuple(adapters))
        with console.phase("writing the directory"):
            export.begin()
            export.write(weights.rows, main=True)
        card = tasks_card(
            adapters,
            title=(config.push_to_hub or output_dir.name).rpartition("/")[2],
            name=config.push_to_hub or UNNAMED,
            base=hub_id(first.run.recipe.model.path),
            dimension=config.truncate_dim or first.source.dimension,
            max_length=first.tokenizer.max_length,
        )
        reference = adapters[0].reference
        if reference is not None:  # of the directory without adapters
            assert reference.base_vectors is not None
            prompts = joint_prompts(adapters)
            reference = replace(reference, vectors=reference.base_vectors, base_vectors=None, prompts=prompts)
        return export.finish(card, reference, trust_remote_code=first.source.trust_remote_code, phase=console.phase)


def _open_adapter(task: _Task, stack: ExitStack, tolerance: float | None, console: Console) -> TaskAdapter:
    """The adapter of a run, with the vectors to reproduce unless `tolerance` is None; `stack` closes its files."""
    run, recipe = task.run, task.run.recipe
    reader = stack.enter_context(run.checkpoint.tensors(run.kind))
    checkpoint = AdapterCheckpoint.open(run.run_dir.adapter, recipe.model, recipe.seed, task.source, reader)
    require_same_base(run.checkpoint, checkpoint.base)
    if any(name.startswith(f"{ENCODER}dense.") for name in reader.specs):
        raise ConfigError(f"{task} trained heads after the pooling, which PEFT cannot store: export it alone")
    config = checkpoint.files.config
    if shares_state(config):
        raise ConfigError(
            f"{task} trained {describe_kind(config)}, which transformers cannot load beside others: export it alone"
        )
    if getattr(config, "use_dora", False):  # transformers 5.23 looks for them by another name, and warns
        raise ConfigError(
            f"{task} trained DoRA, whose lengths of rows transformers does not load with an adapter: export it alone"
        )
    reference: ExportReference | None = None
    if tolerance is not None:
        with console.phase(f"encoding probe texts with the adapter {task.name}"):
            base = probe_outputs(checkpoint.base_encoder(), task.source, task.tokenizer)
            vectors = probe_outputs(checkpoint.encoder(), task.source, task.tokenizer)
        reference = ExportReference(vectors, tolerance, {}, task.tokenizer.max_length, base_vectors=base)
    return TaskAdapter(
        task=task.name,
        checkpoint=checkpoint,
        base=AdapterBase(run.run_dir.adapter, checkpoint.base, recipe.seed),
        prompts=task.source.prompts,
        description=f"`{recipe.name}`, step {run.checkpoint.step}",
        reference=reference,
    )


def _require_same_modules(adapters: Sequence[TaskAdapter], tasks: Sequence[_Task]) -> None:
    # transformers' `set_adapter` fails for an adapter without a module that another one replaces.
    modules = [adapter.checkpoint.files.modules_to_save for adapter in adapters]
    for other, task in zip(modules[1:], tasks[1:], strict=True):
        different = sorted(set(other) ^ set(modules[0]))
        if different:
            owner = task if different[0] in other else tasks[0]
            raise ConfigError(
                f"{task} and {tasks[0]} cannot share a base model: only {owner} trained {different[0]} in full "
                "(model.lora.modules_to_save), which transformers expects of all adapters or of none"
            )


def _open_task(name: str, run: ExportedRun, rope_theta: float | None, *, trust_remote_code: bool) -> _Task:
    recipe = run.recipe
    shown = f"adapters.{name}={run.run_dir.path}"
    if not recipe.model.adapters.on:
        raise ConfigError(f"{shown}: the run has no adapter (model.lora.rank, model.adapter); name runs that train one")
    if recipe.model.lora.load_in_4bit:
        raise ConfigError(
            f"{shown}: its base model was quantized (model.lora.load_in_4bit), which the directory cannot store; "
            "export it alone"
        )
    kind = load_kind(recipe.model.kind)
    if not (kind.has_one_vector and kind.has_one_model):
        raise ConfigError(f"{shown}: must be of model.kind=dense, not {recipe.model.kind}; export it alone")
    source = open_model_source(
        kind.model_options(
            path=str(run.run_dir.architecture),
            rope_theta=rope_theta,
            trust_remote_code=trust_remote_code,
        )
    )
    return _Task(name, run, source, model_tokenizer(source))


def _require_compatible(first: _Task, other: _Task) -> None:
    """Raise ModelError or CheckpointError, with both runs, unless one directory can hold both adapters."""
    subject = f"{other} and {first} cannot share a base model"
    digests = [task.run.checkpoint.manifest.identity.get(BASE_WEIGHTS) for task in (first, other)]
    if digests[0] != digests[1]:
        raise CheckpointError(
            f"{subject}: the weights of {other.run.recipe.model.path} and {first.run.recipe.model.path}, on which "
            "they were trained, are different"
        )
    difference = different_setting(first.source, other.source)
    difference = difference or different_tokens(first.tokenizer.tokenizer, other.tokenizer.tokenizer)
    if difference is None and first.tokenizer.max_length != other.tokenizer.max_length:
        difference = f"the maximum length is {other.tokenizer.max_length}, not {first.tokenizer.max_length}"
    if difference is not None:
        raise ModelError(f"{subject}: {difference}")


_CHUNK_TOKENS = 16384
_DEPTH = 100  # documents of BM25 that a reranker orders


@dataclass
class GraphMetrics:
    """Measures graphs by the main metric of each set, and rejects those that are much worse than the fp32 graph."""

    sets: Sequence[LoadedSet]
    world: World
    console: Console
    max_loss: float
    expected: Mapping[str, float] = field(default_factory=dict)  # of the fp32 graph, which is measured first

    def __call__(self, source: ModelSource, name: str) -> dict[str, float]:
        """The metrics of the graph of a format, by set and metric. Raises CheckpointError if one is too low."""
        model = load_graph(source, Backend(name), self.world)
        is_scorer = source.kind.scores_pairs
        encoder = (PairScorer if is_scorer else SentenceEncoder).from_model(
            model, self.world, chunk_tokens=_CHUNK_TOKENS
        )
        with self.console.progress() as progress:
            results = Evaluator(self.sets, encoder, self.world).evaluate(progress=progress)
        names = [loaded.data.name for loaded in self.sets]
        measured = {f"{name} {metric}": results[name][metric] for name in names for metric in list(results[name])[:1]}
        if name == ONNX:
            self.expected = measured
        for metric, value in measured.items():
            self.console.note(f"{name}: {metric} {value:.4f}")
            if not value >= self.expected[metric] - self.max_loss:
                raise CheckpointError(
                    f"{name}: {metric} is {value:.4f}, and that of the fp32 graph {self.expected[metric]:.4f}: more "
                    f"than max_metric_loss={self.max_loss} below; leave {name} out of formats, or raise the bound"
                )
        return measured


@contextlib.contextmanager
def graph_metrics(options: "ExportOptions", kind: str, console: Console) -> Iterator[GraphMetrics | None]:
    """The metrics on the sets that the command names; None without sets."""
    if not options.sets:
        yield None
        return
    if not load_kind(kind).has_one_tower:
        raise ConfigError(
            f"sets: measure a graph of the whole model, and each of model.kind={kind} has one tower; leave sets out"
        )
    with joined_world() as world:
        sets = load_sets(options.sets, world, subset=options.subset, option="sets")
        check_sets_of_kind(sets, load_kind(kind), "sets")
        if load_kind(kind).scores_pairs:
            sets = [_with_candidates(loaded, world) for loaded in sets]
        yield GraphMetrics(sets, world, console, options.max_metric_loss)


def _with_candidates(loaded: LoadedSet, world: World) -> LoadedSet:
    is_searched = isinstance(loaded.data, RetrievalSet) and loaded.data.candidates is None
    return with_bm25_candidates(loaded, _DEPTH, world) if is_searched else loaded
