"""Directories of PEFT: adapters read, merged with their base model, on their own, and of several tasks on one base.

A checkpoint of a run with adapters does not hold the base model, which is read from `model.path` again.

A directory of several tasks has their adapters in `adapters/TASK`. The base is stored once, and sentence-transformers
and transformers open it without an adapter. Their `load_adapter` reads the folders, and `set_adapter` chooses the task.
"""

import itertools
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.snapshot import ENCODER, local_shards, rows_to_write, shard_position
from embedtrain.checkpoint.step_directory import Checkpoint
from embedtrain.checkpoint.tensor_files import TensorReader, TensorSpec, require_fit
from embedtrain.config.recipe import LoraConfig, ModelConfig
from embedtrain.config.validation import model_option
from embedtrain.errors import CheckpointError, ModelError
from embedtrain.formats.export_record import verify_settings, verify_weights
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.page_models import backbone_keys
from embedtrain.formats.sentence_transformers import SETTINGS, TASKS_FOLDER, load_model
from embedtrain.formats.source import open_model_source
from embedtrain.formats.verify import ExportReference, export_tolerance, probes_of_sentence_transformer, require_match
from embedtrain.formats.weights import ADAPTER_PREFIX, WeightRows, WeightStream, weights_digest
from embedtrain.models.adapter_types import PATTERN_MAPPINGS, PATTERN_SETTINGS, REFUSED, TYPES, stored_config
from embedtrain.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CLASSIFIER,
    PEFT_PREFIX,
    AdapterInfo,
    Merger,
    adapter_settings,
    add_adapters,
    base_name,
    four_bit_layers,
    initial_adapters,
    peft_key,
    quantization_round_trip,
)
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict, head_weights, locate_weights
from embedtrain.models.encoder import Encoder
from embedtrain.models.file_references import read_json, require_own_files
from embedtrain.models.own_class import HEAD
from embedtrain.models.stored_weights import read_tensor, stored_dtype
from embedtrain.models.types import HeadAdapter, ModelSource
from embedtrain.utils.files import remove_tree, write_json

# Key of the digest of the base weights in a run's identity; its value is null without adapters.
BASE_WEIGHTS = "weights of model.path"

_FILES = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
# Python's regular expressions have no limit of time: one with more repetitions, or of a group, may never end.
_MAX_REPETITIONS = 6
_MAX_PATTERNS = 1000  # in one setting; PEFT compiles all of them again for every layer
_POOLER = PEFT_PREFIX + "pooler."  # unused
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class AdapterFiles:
    """A directory written by PEFT."""

    directory: Path
    config: PeftConfig  # the supported part
    base_model: str  # name of the model it was trained on
    modules_to_save: tuple[str, ...]  # stored in full
    revision: str | None = None  # commit of the base model's Hub repository, if recorded

    @property
    def has_head(self) -> bool:
        """Whether it holds the head of a sequence classifier."""
        return self.config.task_type == CLASSIFIER and bool(self.modules_to_save)

    def read(
        self, names: Mapping[str, Sequence[int]], stored_name: Callable[[str], str], others: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Weights by the encoder's names; `names` has their shapes, `stored_name` is the encoder's.

        Files may have the keys `others` as well. Weights that are missing, left over, or of other shapes raise a
        ModelError: the adapter is of another model.
        """
        path = self.directory / ADAPTER_WEIGHTS
        expected = {peft_key(stored_name(name)): name for name in names}
        # The adapter of an embedding model on the backbone of a cross-encoder.
        aliases = {peft_key(name.removeprefix("backbone.")): key for key, name in expected.items()}
        tensors: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                keys = [key for key in file.keys() if key not in others]  # noqa: SIM118 - not a dict
                wrapped = backbone_keys(keys, [alias.removeprefix(PEFT_PREFIX) for alias in aliases])
                own = {key: aliases[PEFT_PREFIX + name] for name, key in wrapped.items()}
                stored = {own.get(key) or _normalized(key, aliases): key for key in keys}
                stored = {key: own for key, own in stored.items() if key in expected or not key.startswith(_POOLER)}
                for key in sorted(stored.keys() ^ expected.keys()):
                    raise ModelError(
                        self.mismatch_message(f"{key} is only in {'its files' if key in stored else 'the model'}")
                    )
                for key, name in expected.items():
                    shape = file.get_slice(stored[key]).get_shape()
                    if list(shape) != list(names[name]):
                        raise ModelError(
                            self.mismatch_message(f"{key} has the shape {shape}, in the model {list(names[name])}")
                        )
                    tensors[name] = file.get_tensor(stored[key]).float()
        except ModelError:
            raise
        except Exception as error:  # safetensors does not export its exception type
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
        return tensors

    def layers(self, encoder: Encoder) -> set[str]:
        """The names in the backbone of the layers that its files have adapters of; empty without weights."""
        if not (self.directory / ADAPTER_WEIGHTS).is_file():
            return set()
        found = backbone_keys(self.keys(), [f"{name}{_A}" for name, _ in encoder.backbone.named_modules()])
        return {name.removesuffix(_A) for name in found}

    def keys(self) -> list[str]:
        """The keys of its weights."""
        with safe_open(self.directory / ADAPTER_WEIGHTS, framework="pt") as file:
            return list(file.keys())

    def of_head(self, name: str) -> HeadAdapter | None:
        """The LoRA of a linear layer beside the backbone, `name` in the class; None if its files have none."""
        pairs = [key for key in self.keys() if key.endswith(f".{name}{_A}")]
        if not pairs:
            return None
        b = pairs[0].removesuffix(_A) + _B
        if b not in self.keys():
            raise ModelError(self.mismatch_message(f"{b} is only in the model"))
        config, path = self.config, self.directory / ADAPTER_WEIGHTS
        with safe_open(path, framework="pt") as file:
            rank = file.get_slice(pairs[0]).get_shape()[0]
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
        return HeadAdapter(path=path, a=pairs[0], b=b, scale=alpha / (rank**0.5 if config.use_rslora else rank))

    def mismatch_message(self, why: str) -> str:
        """The message about an adapter that does not fit."""
        base_model = f"it was trained on {self.base_model}" if self.base_model else "it does not name its base model"
        return (
            f"{model_option('lora.path')}={self.directory} is an adapter of another model: {why}; {base_model}: "
            f"set {model_option('path')} to it"
        )


def open_adapter(lora: LoraConfig) -> AdapterFiles | None:
    """The adapter in `model.lora.path`, if it is set.

    A ModelError if there is no such directory or Hub repository, or the adapter is not supported; a ConfigError if a
    revision is set for a local directory.
    """
    if lora.path is None:
        return None
    directory = resolve_directory(
        lora.path, lora.revision, model_option("lora.path"), model_option("lora.revision"), _FILES
    )
    require_own_files(directory)
    verify_settings(directory)
    verify_weights(directory)
    files = read_settings(directory)
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"{directory / ADAPTER_WEIGHTS} is missing: weights of an adapter are read only from safetensors"
        )
    return files


def _normalized(key: str, aliases: Mapping[str, str]) -> str:
    """A key without the additions of some PEFT versions, and without the `model.` of a model with a language head."""
    key = key.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".").replace(".default.", ".")
    without_head = PEFT_PREFIX + key.removeprefix(PEFT_PREFIX).removeprefix("model.")
    if key in aliases.values():
        return key
    return aliases.get(key, aliases.get(without_head, key))


def read_settings(directory: Path) -> AdapterFiles:
    """Read a directory's adapter_config.json; a ModelError if it is missing or the adapter is not supported."""
    path = directory / ADAPTER_CONFIG
    settings: dict[str, Any] = read_json(path)
    name = str(settings.get("peft_type"))
    kind = name.lower()
    if kind not in TYPES:
        reason = REFUSED.get(kind, "is not known")
        raise ModelError(f"{path}: peft_type={name}: {reason}; only {', '.join(TYPES).upper()} are supported")
    if not settings.get("target_modules") or (kind == "lora" and not isinstance(settings.get("r"), int)):
        raise ModelError(f"{path} must define the rank (r) and the layers (target_modules)")
    _check_patterns(path, settings)
    try:
        config = stored_config(kind, settings)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    modules = settings.get("modules_to_save") or ()
    base_model, revision = (settings.get(name) for name in ("base_model_name_or_path", "revision"))
    return AdapterFiles(
        directory, config, str(base_model or ""), tuple(map(str, modules)), None if revision is None else str(revision)
    )


def _check_patterns(path: Path, settings: Mapping[str, Any]) -> None:
    """Reject regular expressions that may take unbounded time; PEFT matches them with the name of every layer."""
    patterns = [(name, settings[name]) for name in PATTERN_SETTINGS if isinstance(settings.get(name), str)]
    for name in ("layers_pattern", *PATTERN_MAPPINGS):
        if isinstance(settings.get(name), list | dict):
            if len(settings[name]) > _MAX_PATTERNS:
                raise ModelError(
                    f"{path}: {name} has {len(settings[name]):,} patterns; at most {_MAX_PATTERNS:,} are allowed"
                )
            patterns += [(name, pattern) for pattern in settings[name]]
    for name, pattern in patterns:
        repetitions = len(re.findall(r"[*+{]|(?<![(*+}])\?", str(pattern)))
        if repetitions > _MAX_REPETITIONS or re.search(r"\)[*+{]", str(pattern)):
            raise ModelError(
                f"{path}: {name}={pattern!r:.200} is a regular expression that may never end: "
                f"at most {_MAX_REPETITIONS} repetitions are allowed, and none of a group"
            )


def require_same_base(checkpoint: Checkpoint, base: ModelSource) -> None:
    """Raise CheckpointError if the base model's weights are not those that the adapters were trained on."""
    digest = checkpoint.manifest.identity.get(BASE_WEIGHTS)
    if digest is not None and digest != weights_digest(base):
        raise CheckpointError(
            f"{checkpoint.path} holds adapters for other weights than {base.directory or 'model.config'} has now: "
            "restore its original files"
        )


def live_merged_weights(encoder: Encoder) -> WeightStream:
    """Merged weights of a sharded encoder with adapters. A collective: every rank needs all of the adapters."""
    state = cast("dict[str, Tensor]", get_model_state_dict(encoder))
    quantized = dict(four_bit_layers(encoder))
    unsharded = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
        for name, tensor in state.items()
        if base_name(name) is None
    }
    position, shards = shard_position(state), local_shards(state)
    dequantized = (
        (name, 0, layer.dequantized())
        for name, layer in quantized.items()
        if position.is_writer and position.shard == 0
    )
    specs = {name: shard.spec for name, shard in shards.items()}
    specs |= {n: TensorSpec(torch.float32, (layer.out_features, layer.in_features)) for n, layer in quantized.items()}
    rows = itertools.chain(rows_to_write(shards, position), dequantized)
    return _merge(specs, rows, Merger(encoder, unsharded), _adapter_weights(encoder))


def _merge(
    specs: Mapping[str, TensorSpec],
    weights: Iterable[WeightRows],
    merger: Merger,
    adapter_weights: Collection[str],
) -> WeightStream:
    def rows() -> Iterator[WeightRows]:
        for name, first, values in weights:
            base = base_name(name)
            if base is not None:
                yield base, first, merger.rows(base, values, first)
            if name in adapter_weights:
                yield ADAPTER_PREFIX + name, first, values

    base_specs = {base: spec for name, spec in specs.items() if (base := base_name(name)) is not None}
    return WeightStream(base_specs, rows(), {name: specs[name] for name in sorted(adapter_weights)})


def _adapter_weights(encoder: Encoder) -> set[str]:
    parts = (*(f"{prefix}backbone." for prefix in encoder.towers), HEAD)
    return {name for name, p in encoder.named_parameters() if p.requires_grad and name.startswith(parts)}


def write_adapter_config(directory: Path, adapted: AdapterInfo, model: ModelConfig, source: ModelSource) -> None:
    """Write adapter_config.json of a run; with a checkpoint and the base model, it is all that an export needs."""
    remove_tree(directory)
    _write_adapter_config(directory, adapted.config, model.path, source.commit)


def copy_adapter_config(directory: Path, target: Path, layers: Collection[str] = ()) -> None:
    """Write the settings of an adapter_config.json that we read to another directory.

    `layers` are the names of all adapted layers in the class of a model with several towers; ours begin with a tower.
    The file itself is not copied, because PEFT interprets more of it and its author may not be trusted. Raises
    ModelError if it is damaged, or describes an adapter that is not supported.
    """
    files = read_settings(directory)
    files.config.modules_to_save = list(files.modules_to_save) or None
    if layers:
        files.config.target_modules, files.config.exclude_modules = set(layers), None
        files.config.task_type = None  # PEFT's class of another task has no methods for texts and for pictures
    _write_adapter_config(target, files.config, files.base_model or None, files.revision)


def _write_adapter_config(directory: Path, config: PeftConfig, base: str | None, revision: str | None) -> None:
    directory.mkdir(parents=True)
    settings = adapter_settings(config) | {
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "peft_version": version("peft"),
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def encoder_rows(
    reader: TensorReader, state: Mapping[str, Tensor], ignored: Collection[str] = ()
) -> Iterator[WeightRows]:
    """Rows of the encoder's tensors in a checkpoint, which may also hold the tensors `ignored`.

    Raises CheckpointError if names or shapes are not those of `state`.
    """
    specs = {n.removeprefix(ENCODER): spec for n, spec in reader.specs.items() if n.startswith(ENCODER)}
    specs = {name: spec for name, spec in specs.items() if name not in ignored}
    require_fit(reader.folder, state, specs)
    for name in specs:
        for first, rows in reader.all_rows(ENCODER + name):
            yield name, first, rows


def load_rows(weights: Iterable[WeightRows], state: Mapping[str, Tensor]) -> None:
    """Copy rows into the tensors of a state dict."""
    for name, first, rows in weights:
        (state[name] if not rows.dim() else state[name][first : first + len(rows)]).copy_(rows)


def _stored_weights(source: ModelSource, specs: Mapping[str, TensorSpec], seed: int) -> Iterable[tuple[str, Tensor]]:
    """The weights of a model, one tensor at a time if its files allow it."""
    locations = locate_weights(source, {name: torch.Size(spec.shape) for name, spec in specs.items()})
    if locations is None:
        return full_state_dict(source, seed).items()
    stored = ((name, read_tensor(location)) for name, location in locations.items())
    return itertools.chain(stored, head_weights(source).items())


def _merge_trained(
    encoder: Encoder,
    specs: Mapping[str, TensorSpec],
    base_weights: Iterable[tuple[str, Tensor]],
    trained: Mapping[str, Tensor],
) -> WeightStream:
    """The weights of a base model, with the trained ones merged or in their place; `encoder` has the adapters."""
    base = ((name, 0, tensor) for name, tensor in base_weights if name not in trained)
    all_specs = dict(specs) | {name: TensorSpec.of(tensor) for name, tensor in trained.items()}
    weights = itertools.chain(base, ((name, 0, tensor) for name, tensor in trained.items()))
    return _merge(all_specs, weights, Merger(encoder, trained), _adapter_weights(encoder))


def merged_adapter(base: ModelSource, lora: LoraConfig, files: AdapterFiles) -> WeightStream:
    """All weights of a model with the adapter in `files` merged, in float32, one tensor at a time.

    Raises ModelError if the adapter is of another model.
    """
    encoder = build_encoder(base)
    specs = {name: TensorSpec.of(tensor) for name, tensor in encoder.state_dict().items()}
    trained = dict(initial_adapters(encoder, add_adapters(encoder, lora, files, torch.float32), seed=0))
    return _merge_trained(encoder, specs, _stored_weights(base, specs, 0), trained)


@dataclass(frozen=True)
class AdapterCheckpoint:
    """A checkpoint of adapters, and their base model."""

    base: ModelSource
    seed: int  # initialises a base model without weights
    files: AdapterFiles
    reader: TensorReader
    load_in_4bit: bool = False  # of the run: adapters are merged with the quantized weights

    @classmethod
    def open(
        cls, adapter: Path, model: ModelConfig, seed: int, run: ModelSource, reader: TensorReader
    ) -> "AdapterCheckpoint":
        """Open the base model that the recipe names; `run` is the architecture in the run directory.

        Raises ConfigError or ModelError if the base model no longer exists, or the settings are damaged.
        """
        try:
            base = open_model_source(model)
            base = base if base.towers else replace(base, config=run.config)
        except ModelError as error:
            if "auto_map" not in str(error):
                raise
            raise ModelError(
                f"{error}, and name this base model, which only recipe.yaml names, as base={model.path} of export"
            ) from None
        return cls(base, seed, read_settings(adapter), reader, model.lora.load_in_4bit)

    def base_encoder(self) -> Encoder:
        """The base model in this process's memory."""
        encoder = assemble_encoder(self.base)
        specs = {name: TensorSpec.of(tensor) for name, tensor in encoder.state_dict().items()}
        encoder.load_state_dict(dict(self._base_weights(specs)))
        return encoder

    def encoder(self) -> Encoder:
        """The encoder in this process's memory, with unmerged adapters as in training."""
        encoder = self.base_encoder()
        self._attach(encoder)
        load_rows(self._trained_rows(encoder), encoder.state_dict())
        return encoder

    def merged(self, trained: Mapping[str, Tensor] | None = None) -> WeightStream:
        """All weights of the merged model, one tensor at a time; `trained` are other values of the trained weights."""
        encoder = build_encoder(self.base)
        specs = {name: TensorSpec.of(tensor) for name, tensor in encoder.state_dict().items()}
        self._attach(encoder)
        trained = self._trained(encoder) if trained is None else trained
        return _merge_trained(encoder, specs, self._base_weights(specs), trained)

    def base_weights(self) -> WeightStream:
        """All weights of the base model, one tensor at a time."""
        specs = {name: TensorSpec.of(tensor) for name, tensor in build_encoder(self.base).state_dict().items()}
        return WeightStream(specs, ((name, 0, tensor) for name, tensor in self._base_weights(specs)))

    def trained(self) -> dict[str, Tensor]:
        """The trained weights, by the encoder's names: adapters, and modules that were trained in full."""
        encoder = build_encoder(self.base)
        self._attach(encoder)
        return self._trained(encoder)

    def _trained(self, encoder: Encoder) -> dict[str, Tensor]:
        # Adapters and a few whole modules: small compared with the model.
        parts: dict[str, list[Tensor]] = {}
        for name, _, rows in self._trained_rows(encoder):
            parts.setdefault(name, []).append(rows)
        return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}

    def _attach(self, encoder: Encoder, *, load_in_4bit: bool = False) -> None:
        heads = [
            f"{prefix}dense"
            for prefix in self.base.parts
            if any(name.startswith(f"{ENCODER}{prefix}dense.") for name in self.reader.specs)
        ]
        add_adapters(encoder, LoraConfig(modules_to_save=heads, load_in_4bit=load_in_4bit), self.files, torch.float32)

    def _trained_rows(self, encoder: Encoder) -> Iterator[WeightRows]:
        """The checkpoint's rows, compared with an encoder that has the adapters."""
        trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
        buffers = {name for name, _ in encoder.named_buffers()}
        # The temperature and the bias of CLIP and SigLIP, which a loss trains.
        own = {name for name in buffers if "backbone." not in name and ENCODER + name in self.reader.specs}
        trained, buffers = trained | own, buffers - own
        state = {name: tensor for name, tensor in encoder.state_dict().items() if name in trained}
        return encoder_rows(self.reader, state, ignored=buffers)

    def _base_weights(self, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        weights = _stored_weights(self.base, specs, self.seed)
        quantized = self._quantized_weights()
        for name, tensor in weights:
            yield name, quantization_round_trip(tensor) if name in quantized else tensor

    def _quantized_weights(self) -> set[str]:
        """Names of the weights that the run held in 4 bits."""
        if not self.load_in_4bit:
            return set()
        encoder = build_encoder(self.base)
        self._attach(encoder, load_in_4bit=True)
        return {str(base_name(name)) for name, _ in four_bit_layers(encoder)}


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """An adapter of a run, and the model that it was trained on."""

    directory: Path  # of its adapter_config.json
    source: ModelSource  # the model as it was trained, and the location of its weights
    seed: int  # initialises a model without weights
    rounded: bool = False  # whether the run held its weights in a coarser type than its files
    load_in_4bit: bool = False  # whether the run quantized its linear layers


def check_adapter(directory: Path, base: AdapterBase, source: ModelSource, reference: ExportReference) -> float:
    """Load the adapter on its base model with PEFT; the largest relative difference of its embeddings.

    `source` is the merged model, whose tokenizer the adapter shares.
    """

    def attach(model: nn.Module) -> nn.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # PEFT (0.21) only warns about missing weights.
                warnings.filterwarnings("error", message="Found missing adapter keys")
                adapted: nn.Module = PeftModel.from_pretrained(model, str(directory))
        except Exception as error:
            raise CheckpointError(f"PEFT cannot open {directory}: {type(error).__name__}: {error}") from error
        return adapted

    files, weights = base.source.kind.files, full_state_dict(base.source, base.seed)
    outputs = files.of_peft(base.source, weights, attach, source)
    if base.load_in_4bit:
        return 0.0  # the adapter was trained on the quantized base, not on this one: embeddings are not comparable
    if base.rounded:
        rounding = export_tolerance(torch.bfloat16, exact_encoder=True)
        reference = replace(reference, tolerance=max(reference.tolerance, rounding))
    if base.rounded or stored_dtype(source) != torch.float32:  # the merged weights are not those of base and adapter
        reference = replace(reference, same_weights=False)
    return require_match(outputs, reference, f"PEFT opens {directory}")


@dataclass(frozen=True)
class TaskAdapter:
    """The adapter of one task.

    Attributes:
        task: its name, that of its folder.
        checkpoint: where it is read from.
        base: its settings, and the model that it was trained on.
        prompts: those of its run, by name.
        description: its run and step, for the model card.
        reference: what the export has to reproduce; None if it is not checked.
    """

    task: str
    checkpoint: AdapterCheckpoint
    base: AdapterBase
    prompts: Mapping[str, str]
    description: str
    reference: ExportReference | None

    @property
    def folder(self) -> str:
        """Its folder below the model directory."""
        return f"{TASKS_FOLDER}/{self.task}"


def joint_prompts(adapters: Sequence[TaskAdapter]) -> dict[str, str]:
    """The prompts of the directory: `TASK_query` and `TASK_document`, and under their own names those of all tasks."""
    first = adapters[0].prompts
    prompts = {name: text for name, text in first.items() if all(a.prompts.get(name) == text for a in adapters)}
    own = {f"{a.task}_{role}": a.prompts.get(role, "") for a in adapters for role in ("query", "document")}
    return {"query": "", "document": ""} | prompts | own


def write_task_adapters(directory: Path, adapters: Sequence[TaskAdapter]) -> None:
    """Write the folders of the adapters into a model directory, and the prompts of all tasks."""
    for adapter in adapters:
        folder = directory / adapter.folder
        copy_adapter_config(adapter.base.directory, folder)
        weights = {
            peft_key(name.removeprefix("backbone.")): tensor.float()
            for name, tensor in adapter.checkpoint.trained().items()
        }
        (folder / ADAPTER_WEIGHTS).write_bytes(
            save(weights, {"format": "pt"})
        )  # files of `save_file` have the mode 0600
    settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    write_json(directory / SETTINGS, settings | {"prompts": joint_prompts(adapters)})


def check_task_adapters(directory: Path, adapters: Sequence[TaskAdapter], source: ModelSource) -> float:
    """Load all adapters with sentence-transformers, and each with PEFT; the largest relative difference of vectors.

    Raises CheckpointError if a library cannot load them, or computes other vectors than the run of the task.
    """
    differences = [0.0]
    checked = [(adapter, adapter.reference) for adapter in adapters if adapter.reference is not None]
    for adapter, reference in checked:
        differences.append(check_adapter(directory / adapter.folder, adapter.base, source, reference))
    try:
        model = load_model("SentenceTransformer", directory, source)
        for adapter in adapters:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # The call in the model card, which also opens a repository of the Hub.
                arguments = {"subfolder": adapter.folder}
                model.load_adapter(str(directory), adapter_name=adapter.task, adapter_kwargs=arguments)
    except Exception as error:
        raise CheckpointError(
            f"sentence-transformers cannot load the adapters in {directory / TASKS_FOLDER}: "
            f"{type(error).__name__}: {error}"
        ) from error
    for adapter, reference in checked:
        model.set_adapter(adapter.task)
        vectors = probes_of_sentence_transformer(model)
        subject = f"sentence-transformers opens {directory} with the adapter {adapter.task}"
        expected = reference.truncated(source.vectors.truncate_dim)
        differences.append(require_match(vectors, expected, subject))
    return max(differences)
