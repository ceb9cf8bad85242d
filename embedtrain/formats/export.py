"""Export: write a model directory, reopen it with every library it is meant for, and compare its embeddings.

A directory that another library opens with other embeddings than the encoder's is worse than none. So an export that
does not match fails, and leaves nothing under the requested name.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from embedtrain.checkpoint.snapshot import ENCODER, local_shards, rows_to_write, shard_position
from embedtrain.checkpoint.tensor_files import TensorReader, TensorSpec
from embedtrain.config.kinds import kind_of_files
from embedtrain.config.recipe import (
    ADAPTER,
    LOGIT_SCORE,
    ONNX,
    ExportConfig,
    ExportDtype,
)
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import CheckpointError, ConfigError, EmbedtrainError, ModelError
from embedtrain.formats.export_record import export_lock, replace_export, require_only_export, write_record
from embedtrain.formats.hub import split_revision
from embedtrain.formats.model_card import UNNAMED, card_header, description, hub_id
from embedtrain.formats.onnx import (
    GRAPH,
    GRAPH_TOLERANCE,
    GraphMeasure,
    check_graph,
    variant_table,
    write_graph,
    write_variants,
)
from embedtrain.formats.peft import (
    AdapterBase,
    TaskAdapter,
    check_adapter,
    check_task_adapters,
    copy_adapter_config,
    encoder_rows,
    live_merged_weights,
    load_rows,
    write_task_adapters,
)
from embedtrain.formats.serving import ServedModel, changed_outputs, serving_section
from embedtrain.formats.source import CommandModel, open_model_source, require_trained, with_kind_of_files
from embedtrain.formats.transformers import remove_code
from embedtrain.formats.verify import (
    ExportReference,
    check_sentence_transformers,
    check_transformers,
    describe_check,
    export_tolerance,
    require_shapes,
)
from embedtrain.formats.weights import (
    ADAPTER_FOLDER,
    ADAPTER_PREFIX,
    DTYPES,
    WeightPlan,
    WeightRows,
    WeightStream,
    create_model_directory,
    plan_weights,
    pooler_rows,
    write_architecture,
    write_weights,
)
from embedtrain.models.adapters import adapted_layer, has_adapters
from embedtrain.models.build import assemble_encoder, build_encoder
from embedtrain.models.encoder import Encoder
from embedtrain.models.stored_weights import stored_dtype
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A finished export."""

    directory: Path
    # The largest relative difference of the reopened model's outputs from the encoder's, and the largest that passes;
    # None if not checked. Adapters and graphs are compared as well, each within a limit of its own.
    difference: float | None
    tolerance: float | None
    dtype: torch.dtype
    notes: tuple[str, ...] = ()  # for the console: a raised tolerance, and what engines would compute otherwise

    def describe(self) -> str:
        """Type and check, for a message."""
        check = "not checked"
        if self.difference is not None:
            assert self.tolerance is not None
            check = f"compared with the encoder: {describe_check(self.difference, self.tolerance)}"
        return f"{str(self.dtype).removeprefix('torch.')}; {check}"


@dataclass(frozen=True, slots=True)
class ModelExport:
    """An export in progress: begun by one process, written by all, finished by one."""

    output_dir: Path  # replaced once the new directory has passed all checks
    unfinished: Path  # the scratch folder in which it is written, from `export_lock`
    architecture: Path  # written by `write_architecture`
    plan: WeightPlan  # the same in every process
    dtype: torch.dtype
    config: ExportConfig
    base: ModelSource | None = None  # the model that was trained, whose vocabulary head some exports need
    adapter: AdapterBase | None = None  # written on its own as well
    matryoshka_dims: frozenset[int] = frozenset()  # the first dimensions on which the model was trained as well
    tasks: tuple[TaskAdapter, ...] = ()  # the weights are those of the base model of these adapters

    def begin(self) -> None:
        """Create the directory without weights; in one process."""
        create_model_directory(
            self.unfinished,
            self.architecture,
            self.plan,
            self.dtype,
            truncate_dim=self.config.truncate_dim,
            rope_theta=self.config.rope_theta,
            matryoshka_dims=self.matryoshka_dims,
        )
        if self.adapter is not None:
            layers = set[str]()
            if not self.adapter.source.kind.has_one_tower:
                stored = self.plan.locations.items()
                keys = {name: key for name, (_, key) in stored if name.startswith(ADAPTER_PREFIX)}
                layers = {adapted_layer(name, key) for name, key in keys.items()}
            copy_adapter_config(self.adapter.directory, self.unfinished / ADAPTER_FOLDER, layers)
        if self.tasks:
            write_task_adapters(self.unfinished, self.tasks)

    def write(self, weights: Iterable[WeightRows], *, main: bool) -> None:
        """Write this process's rows of weights, after `begin`; `main` is the process that begins and finishes.

        Raises CheckpointError if a weight exceeds the range of the type in which it is stored.
        """
        pooler = pooler_rows(self.architecture) if main else ()
        further = () if self.base is None or not main else self.base.kind.files.further_rows(self.base)
        planned = (item for item in itertools.chain(weights, pooler, further) if item[0] in self.plan.locations)
        write_weights(self.unfinished, self.plan, planned, writes_header=main)

    def finish(
        self,
        card: str,
        reference: ExportReference | None,
        *,
        trust_remote_code: bool = False,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        measure: GraphMeasure | None = None,
        bf16_tokenizer: TextTokenizer | None = None,
    ) -> ExportResult:
        """Reopen the directory, compare, and rename it; in one process, after all have written.

        Without a reference all checks that load the model are skipped, except for tracing a requested ONNX graph.
        `phase` displays progress while a block runs; `measure` is called with each graph, see `write_variants`.
        `bf16_tokenizer` is that of a reference that was computed in bf16, see `ExportReference.of_bf16`.

        Raises CheckpointError if a library cannot open the directory or computes other embeddings; the directory then
        keeps its unfinished name.
        """
        directory = self.unfinished
        (directory / "README.md").write_text(card, encoding="utf-8")
        difference, of_graphs = 0.0, list[str]()
        try:
            if not trust_remote_code:  # the architecture may be that of somebody else's run
                remove_code(directory)
            kind_of_files(directory)[0].files.finish_weights(directory)
            source = require_shapes(directory, trust_remote_code=trust_remote_code)
            files = source.kind.files
            if reference is not None:
                if bf16_tokenizer is not None:
                    reference = reference.of_bf16(source, bf16_tokenizer)
                difference = self._compare(source, reference, phase)
            if ONNX in self.config.formats:
                with phase("writing an ONNX graph"):
                    traced = write_graph(directory, source)
                if reference is not None:
                    with phase("reopening it with onnxruntime"):
                        of_graph = check_graph(directory, source, traced)
                    of_graphs.append(
                        f"{GRAPH}: {describe_check(of_graph, GRAPH_TOLERANCE)} (compared with the weights)"
                    )
                with phase("writing other graphs"):
                    agreement = self.config.onnx_min_agreement
                    variants = write_variants(directory, source, self.config.formats, agreement, measure)
                with (directory / "README.md").open("a", encoding="utf-8") as file:
                    file.write(variant_table(variants, source))
            if self.base is not None and LOGIT_SCORE in self.config.formats:
                with phase("writing the causal language model"):
                    folder = files.write_logit_score(directory, self.base, self.config.max_file_size)
                if reference is not None:
                    # The score is added to a row of the vocabulary head, and rounded with it.
                    reference = replace(reference, same_weights=self.dtype == torch.float32)
                    with phase("reopening it with sentence-transformers"):
                        difference = max(difference, check_sentence_transformers(folder, source, reference))
            notes = (*of_graphs, *self._describe_serving(source))
            write_record(directory)
            require_only_export(self.output_dir)  # files may have been added during the training
        except EmbedtrainError as error:
            raise CheckpointError(
                f"export to {self.output_dir} failed, and is kept as {directory} for inspection: {error}"
            ) from error
        replace_export(self.output_dir, directory)
        if reference is None:
            return ExportResult(self.output_dir, None, None, self.dtype, notes)
        notes = (*reference.describe_raised(difference), *notes)
        return ExportResult(self.output_dir, difference, reference.allowed(difference), self.dtype, notes)

    def _compare(
        self, source: ModelSource, reference: ExportReference, phase: Callable[[str], AbstractContextManager[None]]
    ) -> float:
        """Open the directory with the libraries that it is meant for; the largest difference of the model's outputs."""
        directory, files, difference = self.unfinished, source.kind.files, 0.0
        if files.is_transformers(source):
            with phase("reopening it with transformers"):
                difference = check_transformers(directory, source, reference)
        if files.is_sentence_transformers(source):
            with phase("reopening it with sentence-transformers"):
                difference = max(difference, check_sentence_transformers(directory, source, reference))
        if self.adapter is not None:
            with phase("reopening the adapter with PEFT"):
                check_adapter(directory / ADAPTER_FOLDER, self.adapter, source, reference)
        if self.tasks:
            with phase("loading the adapters with PEFT and sentence-transformers"):
                check_task_adapters(directory, self.tasks, source)
        return difference

    def _describe_serving(self, source: ModelSource) -> tuple[str, ...]:
        """Add to the model card which engines serve the directory; lines for the console about what they change."""
        if source.towers:  # engines open one model, and the card says where each is
            return ()
        served = ServedModel.open(self.unfinished, source)
        with (self.unfinished / "README.md").open("a", encoding="utf-8") as file:
            file.write(f"\n{serving_section(served, self.config.push_to_hub or UNNAMED)}")
        return tuple(changed_outputs(served))


def plan_export(
    output_dir: Path,
    unfinished: Path,
    architecture: Path,
    weights: WeightStream,
    dtype: torch.dtype,
    config: ExportConfig,
    *,
    adapter: AdapterBase | None = None,
    base: ModelSource | None = None,
) -> ModelExport:
    """An export of the weights, with the adapter on its own if `export.formats` requests it.

    `base` is the model that was trained, whose vocabulary head the format `logit_score` needs, or the weights that a
    directory has besides those of the encoder: a ConfigError if it needs them without `base`.

    `unfinished` is the scratch folder that `export_lock` yields, the same in every process.

    Raises CheckpointError if files of the architecture are damaged.
    """
    adapter_specs = weights.adapter if ADAPTER in config.formats else {}
    try:
        if base is None and kind_of_files(architecture)[0].files.further_specs(architecture):
            raise ConfigError(
                f"{output_dir}: has weights besides those that are trained, such as a vocabulary head, which only the "
                "files of a finished model have; write exports, such as RUN/model"
            )
        plan = plan_weights(architecture, weights.specs, dtype, config.max_file_size, adapter_specs)
    except ModelError as error:
        raise CheckpointError(f"export to {output_dir} failed before it wrote anything: {error}") from error
    adapter = adapter if adapter_specs else None
    return ModelExport(output_dir, unfinished, architecture, plan, dtype, config, base, adapter)


def live_weights(encoder: Encoder) -> WeightStream:
    """Types and shapes of all weights of a sharded encoder, and the rows that this rank writes.

    A collective if there are adapters, because they are merged.
    """
    if has_adapters(encoder):
        return live_merged_weights(encoder)
    state = cast("dict[str, Tensor]", get_model_state_dict(encoder))
    shards = local_shards(state)
    specs = {name: shard.spec for name, shard in shards.items()}
    return WeightStream(specs, rows_to_write(shards, shard_position(state)))


def checkpoint_weights(reader: TensorReader) -> WeightStream:
    """All encoder weights of a checkpoint, one stored shard at a time."""
    names = [name for name in reader.specs if name.startswith(ENCODER)]
    rows = ((name.removeprefix(ENCODER), first, rows) for name in names for first, rows in reader.all_rows(name))
    return WeightStream({name.removeprefix(ENCODER): reader.specs[name] for name in names}, rows)


def load_checkpoint_encoder(source: ModelSource, reader: TensorReader) -> Encoder:
    """An encoder in this process's memory; raises CheckpointError if the checkpoint does not fit it."""
    encoder = build_encoder(source)
    rows = encoder_rows(reader, encoder.state_dict())
    encoder._apply(  # type: ignore[no-untyped-call]
        lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t
    )
    load_rows(rows, encoder.state_dict())
    return encoder


def export_dtype(option: ExportDtype, source: ModelSource) -> torch.dtype:
    """The torch type for `export.dtype`."""
    return stored_dtype(source) if option is ExportDtype.source else DTYPES[option]


@dataclass(frozen=True)
class DerivedModel:
    """A model that was made from another one."""

    source: ModelSource  # its settings; the directory is that of the original
    weights: Mapping[str, Tensor]  # by the encoder's names
    tokenizer: TextTokenizer
    original: str  # the model directory or Hub id that it was made from
    description: str  # for the model card, with {} for the name of the original


def open_model(
    path: str, revision: str | None, kind: str | None, pooling: str | None, *, trust_remote_code: bool
) -> ModelSource:
    """A model directory or Hub id (ID@REVISION) of any kind, by default the kind of the directory.

    Raises a ConfigError if it has several models, reads pictures, or its files lack a part.
    """
    name, own_revision = split_revision(path)
    revision = revision or own_revision
    model = CommandModel(path=name, revision=revision, pooling=pooling, trust_remote_code=trust_remote_code)
    options, what = with_kind_of_files(model, kind)
    source = require_trained(open_model_source(options), options, what)
    source.require_texts_alone(f"model={path}")
    return source


def num_parameters(source: ModelSource) -> int:
    """The number of weights of the encoder."""
    return sum(parameter.numel() for parameter in build_encoder(source).parameters())


def write_derived(
    model: DerivedModel, output_dir: Path, config: ExportConfig, console: Console, *, trust_remote_code: bool
) -> ExportResult:
    """Write the directory, which replaces `output_dir` once it reproduces the outputs of the weights in memory.

    Raises CheckpointError if it does not.
    """
    source, tokenizer = model.source, model.tokenizer
    dtype = export_dtype(config.dtype, source)
    reference: ExportReference | None = None
    if config.check:
        with console.phase("encoding probe texts"):
            encoder = assemble_encoder(source)
            encoder.load_state_dict(dict(model.weights))
            tolerance = export_tolerance(dtype, exact_encoder=True)
            reference = ExportReference.of(encoder, source, tokenizer, tolerance)
    with export_lock(output_dir) as unfinished, tempfile.TemporaryDirectory() as folder:
        architecture = Path(folder) / "architecture"
        write_architecture(architecture, source, tokenizer)
        specs = {name: TensorSpec.of(value) for name, value in model.weights.items()}
        stream = WeightStream(specs, ((name, 0, value) for name, value in model.weights.items()))
        export = plan_export(output_dir, unfinished, architecture, stream, dtype, config)
        with console.phase("writing the directory"):
            export.begin()
            export.write(stream.rows, main=True)
        card = _card(model, output_dir.name, config.truncate_dim or source.dimension, architecture)
        result = export.finish(card, reference, trust_remote_code=trust_remote_code, phase=console.phase)
    console.note(f"model: {result.directory} ({result.describe()})")
    for note in result.notes:
        console.note(note)
    return result


def _card(model: DerivedModel, title: str, dimension: int, architecture: Path) -> str:
    """README.md of the model."""
    kind, base = model.source.kind, hub_id(split_revision(model.original)[0])
    described = description(kind, dimension, model.tokenizer.max_length)
    lines = [
        card_header(kind, base, "embedtrain"),
        f"# {title}",
        "",
        f"{described}: {model.description.format(base or 'a larger model')}",
        "",
        *kind.files.usage(UNNAMED, model.source.prompts, architecture),
    ]
    return "\n".join(lines)
