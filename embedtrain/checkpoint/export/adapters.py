"""Adapters and the model they were trained on, put together: merged rows, live or from files, and an adapter's own.

A checkpoint of a run with adapters holds them alone. The model that they belong to is where it was, and is read from
there.
"""

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig as LoraConfigOfPeft
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from embedtrain.checkpoint.export.model_directory import ADAPTER_PREFIX, WeightRows, WeightStream
from embedtrain.checkpoint.snapshot import ENCODER, local_shards, shard_position
from embedtrain.checkpoint.step_directory import Checkpoint
from embedtrain.checkpoint.tensor_files import TensorReader
from embedtrain.checkpoint.weight_files import TensorSpec
from embedtrain.config.recipe import LoraConfig, ModelConfig
from embedtrain.errors import CheckpointError
from embedtrain.models.adapter_files import CONFIG, AdapterFiles, read_settings
from embedtrain.models.adapters import (
    AdapterInfo,
    Delta,
    adapter_deltas,
    adapter_scales,
    adapter_settings,
    add_adapters,
    base_name,
    is_lora_a,
    lora_b_name,
)
from embedtrain.models.build import (
    TensorLocation,
    assemble_encoder,
    build_encoder,
    full_state_dict,
    locate_weights,
    weights_digest,
)
from embedtrain.models.encoder import Encoder
from embedtrain.models.four_bit import four_bit_layers, quantization_round_trip
from embedtrain.models.source import ModelSource, open_model_source

# What the identity of a run calls the digest of the weights that adapters were trained on; null where there are none.
BASE_WEIGHTS = "weights of model.path"


def require_same_base(folder: Checkpoint, base: ModelSource) -> None:
    """Refuse a base whose weights are not those that the checkpoint's adapters were trained on.

    Raises:
        CheckpointError: names both.
    """
    before = folder.manifest.get("identity", {}).get(BASE_WEIGHTS)
    if before is not None and before != weights_digest(base):
        raise CheckpointError(
            f"{folder.path} holds adapters of other weights than {base.directory or 'model.config'} has now: "
            "bring its old files back"
        )


def live_merged_weights(encoder: Encoder) -> WeightStream:
    """Of a sharded encoder with adapters. A collective: every rank needs all of each matrix A."""
    state = cast("dict[str, Tensor]", get_model_state_dict(encoder))
    # What is not cut is merged in one place, with all of B.
    of_packed = {lora_b_name(name) for name, _ in four_bit_layers(encoder)}
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
        if is_lora_a(name) or name in of_packed
    }
    share, parts = shard_position(state), local_shards(state)
    adds = adapter_deltas(
        {name: whole.get(name, part.rows) for name, part in parts.items()},
        adapter_scales(encoder),
        {name: part.first for name, part in parts.items() if name not in whole},
    )
    mine = (
        (name, part.first, part.rows)
        for name, part in parts.items()
        if share.writes and (part.cut or share.shard == 0) and part.rows.numel()
    )
    packed = dict(four_bit_layers(encoder))
    dequantized = (
        (name, 0, layer.dequantized()) for name, layer in packed.items() if share.writes and share.shard == 0
    )
    specs = {name: part.spec for name, part in parts.items()}
    specs |= {n: TensorSpec(torch.float32, (layer.out_features, layer.in_features)) for n, layer in packed.items()}
    return _merged(specs, itertools.chain(mine, dequantized), adds, _in_adapter(encoder))


def _merged(
    specs: Mapping[str, TensorSpec], pieces: Iterable[WeightRows], adds: Mapping[str, Delta], in_adapter: set[str]
) -> WeightStream:
    def rows() -> Iterator[WeightRows]:
        for name, first, values in pieces:
            base = base_name(name)
            if base is not None:
                yield base, first, adds[base].merged_rows(values, first) if base in adds else values
            if name in in_adapter:
                yield ADAPTER_PREFIX + name, first, values

    of_model = {base: spec for name, spec in specs.items() if (base := base_name(name)) is not None}
    return WeightStream(of_model, rows(), {name: specs[name] for name in sorted(in_adapter)})


def _whole(rows: list[Tensor]) -> Tensor:
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _read(place: TensorLocation) -> Tensor:
    with safe_open(place.path, framework="pt") as file:
        return file.get_tensor(place.key)  # type: ignore[no-any-return]


def _in_adapter(encoder: nn.Module) -> set[str]:
    return {name for name, p in encoder.named_parameters() if p.requires_grad and name.startswith("backbone.")}


def write_adapter_config(directory: Path, adapted: AdapterInfo, model: ModelConfig, source: ModelSource) -> None:
    """Write adapter_config.json: with any checkpoint, and the base, all that an export needs."""
    shutil.rmtree(directory, ignore_errors=True)
    _write_adapter_config(directory, adapted.config, model.path, source.commit)


def copy_adapter_config(settings: Path, to: Path) -> None:
    """Write once more what a folder's adapter_config.json says, as far as it is read here.

    Not the file itself: PEFT obeys more of it, and it may be somebody else's.

    Raises:
        ModelError: it is damaged, or of an adapter that cannot be trained here.
    """
    files = read_settings(settings)
    files.config.modules_to_save = list(files.parts) or None
    _write_adapter_config(to, files.config, files.base_model or None, files.revision)


def _write_adapter_config(directory: Path, config: LoraConfigOfPeft, base: str | None, revision: str | None) -> None:
    directory.mkdir(parents=True)
    settings = adapter_settings(config) | {
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "peft_version": version("peft"),
    }
    (directory / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class AdapterCheckpoint:
    """A checkpoint of adapters, and what they were trained on.

    Attributes:
        base: the model, its weights where they were.
        seed: of a model without weights, which follow from it.
        files: the settings that the run has left.
        stored: the checkpoint's tensors.
        load_in_4bit: whether the run held the base's linear layers in 4 bits; adapters are then merged with these.
    """

    base: ModelSource
    seed: int
    files: AdapterFiles
    stored: TensorReader
    load_in_4bit: bool = False

    @classmethod
    def open(
        cls, settings: Path, model: ModelConfig, seed: int, run: ModelSource, stored: TensorReader
    ) -> "AdapterCheckpoint":
        """Find the base where the recipe says.

        Args:
            settings: the folder with adapter_config.json.
            model: the recipe's.
            seed: the recipe's.
            run: the architecture that the run has left.
            stored: the checkpoint's.

        Raises:
            ConfigError, ModelError: the base is not there any more, or the settings are damaged.
        """
        base = replace(open_model_source(model), config=run.config)
        return cls(base, seed, read_settings(settings), stored, model.lora.load_in_4bit)

    def encoder(self) -> Encoder:
        """The encoder in this process's memory, its adapters beside their layers as in training.

        Raises:
            CheckpointError: the checkpoint is not this model's.
        """
        encoder = assemble_encoder(self.base)
        specs = {name: TensorSpec.of(tensor) for name, tensor in encoder.state_dict().items()}
        encoder.load_state_dict(dict(self._base(specs)))
        self._attach(encoder)
        state = encoder.state_dict()
        for name, first, rows in self._pieces(encoder):
            (state[name] if not rows.dim() else state[name][first : first + len(rows)]).copy_(rows)
        return encoder

    def merged(self) -> WeightStream:
        """All rows of the model, one tensor after the other.

        Raises:
            CheckpointError: the checkpoint is not this model's.
        """
        encoder = build_encoder(self.base)
        specs = {name: TensorSpec.of(tensor) for name, tensor in encoder.state_dict().items()}
        self._attach(encoder)
        pieces = list(self._pieces(encoder))  # adapters, and few parts: small beside the model
        names = [name for name, _, _ in pieces]
        trained = {name: _whole([rows for other, _, rows in pieces if other == name]) for name in dict.fromkeys(names)}
        adds = adapter_deltas(trained, adapter_scales(encoder))
        base = ((name, 0, tensor) for name, tensor in self._base(specs) if name not in trained)
        own = ((name, 0, tensor) for name, tensor in trained.items())
        every = specs | {name: TensorSpec.of(tensor) for name, tensor in trained.items()}
        return _merged(every, itertools.chain(base, own), adds, _in_adapter(encoder))

    def _attach(self, encoder: Encoder, *, load_in_4bit: bool = False) -> None:
        heads = ["dense"] if any(name.startswith(f"{ENCODER}dense.") for name in self.stored.specs) else []
        add_adapters(encoder, LoraConfig(modules_to_save=heads, load_in_4bit=load_in_4bit), self.files, torch.float32)

    def _pieces(self, encoder: Encoder) -> Iterator[WeightRows]:
        """The checkpoint's rows, when it has been compared with an encoder that adapters were put on."""
        names = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
        state, buffers = encoder.state_dict(), {name for name, _ in encoder.named_buffers()}
        specs = {n.removeprefix(ENCODER): spec for n, spec in self.stored.specs.items() if n.startswith(ENCODER)}
        specs = {name: spec for name, spec in specs.items() if name not in buffers}
        for name in sorted(names ^ specs.keys()):
            raise CheckpointError(f"{self.stored.folder} does not fit the model: {name} is in one of them alone")
        for name, spec in specs.items():
            if tuple(state[name].shape) != spec.shape:
                raise CheckpointError(
                    f"{self.stored.folder} does not fit the model: {name} has the shape {list(spec.shape)}, the "
                    f"model's {list(state[name].shape)}"
                )
            for first, rows in self.stored.parts(ENCODER + name):
                yield name, first, rows

    def _base(self, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
        places = locate_weights(self.base, {name: torch.Size(spec.shape) for name, spec in specs.items()})
        if places is None:
            found: Iterable[tuple[str, Tensor]] = full_state_dict(self.base, self.seed).items()
        else:
            found = ((name, _read(place)) for name, place in places.items())
        packed = self._packed()
        for name, tensor in found:
            yield name, quantization_round_trip(tensor) if name in packed else tensor

    def _packed(self) -> set[str]:
        """Names of the weights that the run held in 4 bits."""
        if not self.load_in_4bit:
            return set()
        encoder = build_encoder(self.base)
        self._attach(encoder, load_in_4bit=True)
        return {str(base_name(name)) for name, _ in four_bit_layers(encoder)}
