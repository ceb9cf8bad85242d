"""Opens the models to merge: their settings, where their weights are stored, and whether they fit."""

import itertools
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.checkpoint.snapshot import ENCODER
from embedtrain.checkpoint.step_directory import (
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    list_steps,
    open_checkpoint,
    step_path,
)
from embedtrain.checkpoint.tensor_files import (
    DTYPES_BY_NAME,
    RowWriter,
    TensorReader,
    TensorSpec,
    bytes_of,
    file_layout,
    require_fit,
)
from embedtrain.commands.merge.options import LoraMerge, MergeOptions, selected_steps
from embedtrain.config.compose import load_recipe
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ExportConfig, LoraConfig, ModelConfig, Recipe, WeightsOf
from embedtrain.config.validation import model_options_named, written
from embedtrain.distributed.world import World
from embedtrain.errors import CheckpointError, ConfigError, ModelError
from embedtrain.formats.export_record import verify_weights
from embedtrain.formats.hub import split_revision
from embedtrain.formats.peft import AdapterCheckpoint, merged_adapter, open_adapter, require_same_base
from embedtrain.formats.source import (
    CommandModel,
    different_setting,
    different_tokens,
    open_model_source,
    with_kind_of_files,
)
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.formats.weights import WeightStream
from embedtrain.models.adapters import ADAPTER_CONFIG
from embedtrain.models.build import build_encoder, full_state_dict, head_weights, locate_weights
from embedtrain.models.security import require_no_links
from embedtrain.models.types import ModelSource
from embedtrain.tracking.metrics import metrics_at
from embedtrain.utils.files import expand_user

_LENGTH = struct.Struct("<Q")  # of a safetensors header


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows [first, end) of a tensor, contiguous in a file."""

    path: Path
    offset: int  # bytes
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in one file or several, or a small one in memory."""

    spec: TensorSpec
    parts: tuple[StoredRows, ...] = ()
    value: Tensor | None = None

    def rows(self, start: int, end: int) -> Tensor:
        """Rows [start, end) in host memory; of a scalar, [0, 1) is the scalar itself.

        Raises CheckpointError if a file cannot be read, or is too short.
        """
        if self.value is not None:
            return self.value[start:end] if self.value.dim() else self.value
        rows = torch.empty((end - start, *self.spec.shape[1:]) if self.spec.shape else (), dtype=self.spec.dtype)
        buffer, row_bytes = bytes_of(rows), self.spec.row_bytes
        for part in self.parts:
            low, high = max(start, part.first), min(end, part.end)
            if low < high:
                target = buffer[(low - start) * row_bytes : (high - start) * row_bytes]
                _read_into(part.path, part.offset + (low - part.first) * row_bytes, target)
        return rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, end) of a tensor: what is read, combined and written at a time."""

    name: str
    start: int
    end: int


def tensors_of_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises ModelError if it is damaged, or has a type that is not supported."""
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES_BY_NAME:
                raise ModelError(f"{path}: {name} has the type {entry['dtype']}, which cannot be merged")
            spec = TensorSpec(DTYPES_BY_NAME[entry["dtype"]], tuple(entry["shape"]))
            offset = _LENGTH.size + length + entry["data_offsets"][0]
            tensors[name] = StoredTensor(spec, (StoredRows(path, offset, 0, spec.num_rows),))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    return tensors


def tensors_of_checkpoint(reader: TensorReader, prefix: str) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint whose names have a prefix, by their names without it."""
    files, tensors = reader.files, {}
    for name, spec in reader.specs.items():
        if name.startswith(prefix):
            parts = []
            for shard in files.tensor_shards(name):
                (first, end), (file, offset, size) = files.row_bounds(name, shard), files.byte_range(name, shard)
                if size:
                    parts.append(StoredRows(reader.folder / file, offset, first, end))
            tensors[name.removeprefix(prefix)] = StoredTensor(spec, tuple(parts))
    return tensors


def write_stream(path: Path, weights: WeightStream) -> None:
    """Write weights that can only be read in order, one tensor at a time, into a safetensors file."""
    layout = file_layout(weights.specs)
    with RowWriter(path, layout, writes_header=True) as writer:
        for name, first, rows in weights.rows:
            if name in weights.specs:
                writer.write(name, rows.detach().to("cpu", weights.specs[name].dtype), first)


def split_pieces(specs: Mapping[str, TensorSpec], max_values: int) -> list[Piece]:
    """Pieces of all tensors with at most so many values each, or one row."""
    pieces = []
    for name, spec in specs.items():
        width = max(1, spec.row_bytes // spec.dtype.itemsize)
        step = max(1, max_values // width)
        bounds = itertools.chain(range(0, spec.num_rows, step), [spec.num_rows])
        pieces += [Piece(name, start, end) for start, end in itertools.pairwise(bounds)]
    return pieces


def pieces_of_rank(
    pieces: Sequence[Piece], specs: Mapping[str, TensorSpec], rank: int, world_size: int
) -> Iterator[Piece]:
    """A contiguous part of the pieces, such that each rank has about as many bytes."""
    total = sum(specs[piece.name].row_bytes * (piece.end - piece.start) for piece in pieces)
    done = 0
    for piece in pieces:
        size = specs[piece.name].row_bytes * (piece.end - piece.start)
        if min(world_size - 1, (2 * done + size) * world_size // (2 * max(1, total))) == rank:
            yield piece
        done += size


def _read_into(path: Path, offset: int, target: memoryview) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while target:
                count = file.readinto(target)
                if not count:
                    raise CheckpointError(f"{path} is damaged: it ends before byte {offset + len(target)}")
                target = target[count:]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


@dataclass(frozen=True)
class RunCheckpoint:
    """Which weights of a run a member is.

    Attributes:
        checkpoint: whose checksums are verified.
        weights: which of its weights: the trained ones, or their average.
        architecture: a directory as `write_architecture` writes it.
        export: how the run is exported.
        adapters: with `lora=factors`; specs and tensors of the member are those of the trained weights alone.
    """

    checkpoint: Checkpoint
    weights: str
    architecture: Path
    export: ExportConfig
    adapters: AdapterCheckpoint | None = None


@dataclass(frozen=True, kw_only=True)
class Member:
    """A model that is merged.

    Attributes:
        name: for messages and merge.json: as the user wrote it, and the step.
        source: its settings and tokenizer.
        specs: types and shapes of its weights, by the encoder's names.
        tensors: where they are stored. Empty until `store_streams`, if they can only be read in order.
        stream: reads such weights; None for the others.
        run: where the weights of a run are from; None for other models.
    """

    name: str
    source: ModelSource
    specs: Mapping[str, TensorSpec]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    stream: Callable[[], WeightStream] | None = None
    run: RunCheckpoint | None = None

    @property
    def adapters(self) -> AdapterCheckpoint | None:
        """The adapters whose factors are merged; None if whole models are."""
        return None if self.run is None else self.run.adapters

    @property
    def truncate_dim(self) -> int | None:
        """The dimensions of its vectors that are used; None: all."""
        return self.source.vectors.truncate_dim if self.run is None else self.run.export.truncate_dim


def open_members(options: MergeOptions) -> list[Member]:
    """The models in `models`, or the steps of `run`, in this order.

    Raises ConfigError, ModelError or CheckpointError for a model that cannot be opened.
    """
    if options.run:
        members = [_open_checkpoint(Path(options.run), path, options) for path in _paths_of_steps(options)]
    else:
        members = [open_member(path, f"models[{index}]", options) for index, path in enumerate(options.models)]
    if options.weights_of is WeightsOf.ema and all(member.run is None for member in members):
        raise ConfigError("weights_of=ema: no model is a run or a checkpoint; leave it out")
    if options.lora is LoraMerge.factors:
        architectures = [
            None if member.run is None or member.adapters is None else member.run.architecture for member in members
        ]
        other = next(
            (
                member
                for member, own in zip(members, architectures, strict=True)
                if own is None or own != architectures[0]
            ),
            None,
        )
        if other is not None:
            raise ConfigError(
                f"lora=factors: {other.name} and {members[0].name} are not checkpoints of one run with model.lora, and "
                "factors of other runs have other coordinates; write lora=product"
            )
    return members


def open_member(path: str, option: str, options: MergeOptions) -> Member:
    """The model at a path, which `option` names in messages."""
    local = expand_user(path)
    if (local / MANIFEST).is_file():
        return _open_checkpoint(local.resolve().parent.parent, local, options)
    if (local / "recipe.yaml").is_file() and not (local / "config.json").exists():
        exported, default = RunDirectory(local).model, MergeOptions()
        reads_export = (options.weights_of, options.lora) == (default.weights_of, default.lora)
        if not exported.is_dir() or not reads_export:
            return _open_checkpoint(local, find_checkpoint(RunDirectory(local).checkpoints, "latest").path, options)
        local, path = exported, str(exported)
    own = {name: name for name in ("kind", "pooling", "trust_remote_code")}
    with model_options_named({"path": option, "lora.path": option, **own}):
        if (local / ADAPTER_CONFIG).is_file() and not (local / "config.json").exists():
            return _open_adapter(path, options)
        return _open_directory(path, options)


def _open_directory(path: str, options: MergeOptions) -> Member:
    source = open_model_source(_model_config(path, options))
    source.require_one_model(path)
    specs = encoder_specs(source)
    shapes = {name: torch.Size(spec.shape) for name, spec in specs.items()}
    locations = locate_weights(source, shapes)
    if source.has_new_head:
        raise ConfigError(f"{path} has no head of a model of the kind {source.kind.name}: it would be random")
    if locations is None:  # a pickle, or names of an old version of transformers
        return Member(name=path, source=source, specs=specs, stream=lambda: _stream_of(source, specs))
    files = {file: tensors_of_file(file) for file in {location.path for location in locations.values()}}
    tensors = {name: files[location.path][location.key] for name, location in locations.items()}
    heads = {name: StoredTensor(TensorSpec.of(value), value=value) for name, value in head_weights(source).items()}
    tensors |= heads
    return Member(name=path, source=source, specs={name: tensors[name].spec for name in specs}, tensors=tensors)


def _stream_of(source: ModelSource, specs: Mapping[str, TensorSpec]) -> WeightStream:
    weights = full_state_dict(source, 0)
    return WeightStream(specs, ((name, 0, weights[name]) for name in specs))


def _open_checkpoint(run: Path, path: Path, options: MergeOptions) -> Member:
    run_dir = RunDirectory(run)
    if not run_dir.recipe.is_file():
        raise CheckpointError(f"{path} is in no run: {run_dir.recipe} is missing")
    recipe = load_recipe(run_dir.recipe)
    _require_trust(run_dir, recipe, options)
    require_no_links(run_dir.architecture)
    run_dir.require_intact()
    model = load_kind(recipe.model.kind).model_options(
        path=str(run_dir.architecture),
        rope_theta=recipe.export.rope_theta,
        trust_remote_code=options.trust_remote_code,
    )
    source = open_model_source(model)
    source.require_one_model(str(path))
    checkpoint = open_checkpoint(path)
    origin = RunCheckpoint(checkpoint, checkpoint.weights_kind(options.weights_of), run_dir.architecture, recipe.export)
    reader = checkpoint.tensors(origin.weights)
    if recipe.model.adapters.on:
        own = replace(recipe.model, trust_remote_code=False)  # the recipe does not make its base model's code trusted
        adapters = AdapterCheckpoint.open(run_dir.adapter, own, recipe.seed, source, reader)
        require_same_base(checkpoint, adapters.base)
        if options.lora is LoraMerge.factors:
            factors = tensors_of_checkpoint(reader, ENCODER)
            specs = {name: tensor.spec for name, tensor in factors.items()}
            origin = replace(origin, adapters=adapters)
            return Member(name=str(path), source=source, specs=specs, tensors=factors, run=origin)
        merged = adapters.merged
        return Member(name=str(path), source=source, specs=merged().specs, stream=merged, run=origin)
    tensors = tensors_of_checkpoint(reader, ENCODER)
    state = build_encoder(source).state_dict()
    specs = {name: tensor.spec for name, tensor in tensors.items()}
    require_fit(path, state, specs)
    specs = {name: specs[name] for name in state}
    return Member(name=str(path), source=source, specs=specs, tensors=tensors, run=origin)


def _open_adapter(path: str, options: MergeOptions) -> Member:
    """An adapter in PEFT's format, merged with the base model that it names, or with `base`."""
    lora = LoraConfig(path=path)
    files = open_adapter(lora)
    assert files is not None
    base = options.base or files.base_model
    if not base:
        raise ModelError(f"{files.directory / ADAPTER_CONFIG} does not name the base model: set base")
    # The adapter's file names a base model, but does not make its code trusted.
    config = _model_config(base, options if base == options.base else replace(options, trust_remote_code=False))
    source = open_model_source(replace(config, lora=lora))
    verify_weights(files.directory)
    return Member(
        name=path,
        source=source,
        specs=merged_adapter(source, lora, files).specs,
        stream=lambda: merged_adapter(source, lora, files),
    )


def _model_config(path: str, options: MergeOptions) -> ModelConfig:
    name, revision = split_revision(path)
    trust = options.trust_remote_code
    model = CommandModel(path=name, revision=revision, pooling=options.pooling, trust_remote_code=trust)
    return with_kind_of_files(model, options.kind)[0]


def encoder_specs(source: ModelSource) -> dict[str, TensorSpec]:
    """Types and shapes of the weights of a model, in float32, by the encoder's names."""
    return {name: TensorSpec.of(tensor) for name, tensor in build_encoder(source).state_dict().items()}


def _require_trust(run_dir: RunDirectory, recipe: Recipe, options: MergeOptions) -> None:
    if recipe.model.trust_remote_code and not options.trust_remote_code:
        raise ConfigError(
            f"{run_dir.recipe} has model.trust_remote_code: true, but a file does not grant this permission: if you "
            f"trust the Python in {run_dir.architecture}, write trust_remote_code=true"
        )


def _paths_of_steps(options: MergeOptions) -> list[Path]:
    """The checkpoints that `steps` selects, oldest first, or in the order of the list."""
    assert options.run is not None
    run_dir = RunDirectory(Path(options.run))
    saved = sorted(step for step, _ in list_steps(run_dir.checkpoints))
    available = f"{run_dir.checkpoints} has the steps {', '.join(map(str, saved)) or '(none)'}"
    selection = selected_steps(options.steps)
    if isinstance(selection, list):
        steps = selection
        for step in steps:
            if step not in saved:
                raise CheckpointError(f"steps={written(options.steps)}: {step} is missing; {available}")
        return [step_path(run_dir.checkpoints, step) for step in steps]
    kind, number = selection
    if number > len(saved):
        raise CheckpointError(f"steps={options.steps}: there are only {len(saved)}; {available}")
    if kind == "last":
        return [step_path(run_dir.checkpoints, step) for step in saved[-number:]]
    metric = options.best_metric or load_recipe(run_dir.recipe).checkpoint.best_metric
    if metric is None:
        raise ConfigError(
            f"steps={options.steps}: the run has no checkpoint.best_metric; write best_metric=SET/METRIC, or "
            "steps=last-N"
        )
    name, _, key = metric.partition("/")
    values = {step: metrics_at(run_dir.path, step).get(name, {}).get(key) for step in saved}
    measured = {step: value for step, value in values.items() if value is not None}
    if len(measured) < number:
        raise ConfigError(
            f"steps={options.steps}: {len(measured)} of the saved steps were measured by {metric}; {available}"
        )
    best = sorted(measured, key=lambda step: (-measured[step], step))[:number]
    return [step_path(run_dir.checkpoints, step) for step in sorted(best)]


def verify_member(member: Member, world: World) -> None:
    """Compare this rank's part of a member's files with their checksums, if there are any."""
    if member.run is not None:
        member.run.checkpoint.tensors(member.run.weights).verify_checksums(world.rank, world.size)
    elif member.source.directory is not None:
        verify_weights(member.source.directory, world.local_rank, world.local_size)


def store_streams(members: list[Member], folder: Path, world: World) -> list[Member]:
    """Write weights that can only be read in order into files below `folder`, on rank 0. A collective.

    At most one model is in memory.
    """
    names = {index: folder / f"{index}.safetensors" for index, member in enumerate(members) if member.stream}
    with world.fail_together("writing the weights of models with adapters, or in old formats"):
        if world.is_main and names:
            folder.mkdir()
            for index, path in names.items():
                stream = members[index].stream
                assert stream is not None
                write_stream(path, stream())
    stored = list(members)
    with world.fail_together("opening the models"):
        for index, path in names.items():
            tensors = tensors_of_file(path)
            specs = {name: tensors[name].spec for name in members[index].specs}
            stored[index] = replace(members[index], tensors=tensors, specs=specs)
    return stored


def require_compatible(members: Sequence[Member]) -> list[str]:
    """Warnings about differences that do not matter for the weights.

    Raises ModelError for models that differ in tensors, in what surrounds them, or in their tokenizers, with both
    values and the names of the models.
    """
    first, *others = members
    warnings = []
    for other in others:
        _compare_tensors(first, other)
        _compare_settings(first, other)
        warnings += _differences_of_prompts(first, other)
    tokenizer = load_tokenizer(first.source)
    compared = {first.source.directory}
    for other in others:
        if other.source.directory not in compared:
            compared.add(other.source.directory)
            difference = different_tokens(tokenizer, load_tokenizer(other.source))
            if difference is not None:
                raise ModelError(f"{other.name} cannot be merged with {first.name}: {difference}")
    return warnings


def shown_name(name: str) -> str:
    """The name of a weight without the encoder's own prefix."""
    return name.removeprefix("backbone.")


def _compare_tensors(first: Member, other: Member) -> None:
    missing = [name for name in first.specs if name not in other.specs]
    extra = [name for name in other.specs if name not in first.specs]
    for names, owner, lacking in ((missing, first, other), (extra, other, first)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {owner.name} has the tensor {shown_name(names[0])}"
                f"{more}, which {lacking.name} lacks"
            )
    for name, spec in first.specs.items():
        if other.specs[name].shape != spec.shape:
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {shown_name(name)} has the shape "
                f"{list(other.specs[name].shape)}, not {list(spec.shape)}"
            )
        if other.specs[name].dtype.is_floating_point is not spec.dtype.is_floating_point:
            raise ModelError(
                f"{other.name} cannot be merged with {first.name}: {shown_name(name)} has the type "
                f"{other.specs[name].dtype}, not {spec.dtype}"
            )


def _compare_settings(first: Member, other: Member) -> None:
    difference = different_setting(first.source, other.source)
    if difference is not None:
        raise ModelError(f"{other.name} cannot be merged with {first.name}: {difference}")


def _differences_of_prompts(first: Member, other: Member) -> list[str]:
    warnings = []
    for role in sorted(first.source.prompts.keys() | other.source.prompts.keys()):
        prompts = [member.source.prompts.get(role, "") for member in (first, other)]
        if prompts[0] != prompts[1]:
            warnings.append(
                f"the prompt {role} of {other.name} is {prompts[1]!r}, that of {first.name} {prompts[0]!r}: "
                "settings_from chooses the model whose prompts are written"
            )
    return warnings
