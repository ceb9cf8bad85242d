"""Export of the adapters of several runs on one base model as one directory."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from embedtrain.checkpoint.snapshot import ENCODER
from embedtrain.commands.export.runs import ExportedRun
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ExportConfig
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.export import ExportResult, export_dtype, plan_export
from embedtrain.formats.model_card import UNNAMED, hub_id, tasks_card
from embedtrain.formats.peft import (
    BASE_WEIGHTS,
    AdapterBase,
    AdapterCheckpoint,
    TaskAdapter,
    joint_prompts,
    require_same_base,
)
from embedtrain.formats.replacement import export_lock
from embedtrain.formats.verify import ExportReference, export_tolerance, probe_outputs
from embedtrain.inference.loading.bound_tokenizer import bound_tokenizer
from embedtrain.models.compatibility import different_setting, different_tokens
from embedtrain.models.source import open_model_source
from embedtrain.models.tokenizer import load_tokenizer
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console


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
    if not recipe.model.lora.on:
        raise ConfigError(f"{shown}: the run has no adapter (model.lora.rank); name runs that train one")
    if recipe.model.lora.load_in_4bit:
        raise ConfigError(
            f"{shown}: its base model was quantized (model.lora.load_in_4bit), which the directory cannot store; "
            "export it alone"
        )
    if not load_kind(recipe.model.kind).has_one_vector:
        raise ConfigError(f"{shown}: must be of model.kind=dense, not {recipe.model.kind}; export it alone")
    source = open_model_source(
        load_kind(recipe.model.kind).options(
            path=str(run.run_dir.architecture),
            rope_theta=rope_theta,
            trust_remote_code=trust_remote_code,
        )
    )
    return _Task(name, run, source, bound_tokenizer(source, load_tokenizer(source)))


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
