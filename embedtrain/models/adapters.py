"""Adapters on a frozen encoder: injected by PEFT, initialised, and merged.

Adapters are injected into the backbone, which keeps its class and is not wrapped, so layers are found, sharded and
saved as without adapters. Other trained modules (embeddings, norms, heads) just keep their gradient.

The frozen linear layers may be in 4 bits, by bitsandbytes (Dettmers et al., "QLoRA", 2023): NF4 with quantised scales.
Their weights are neither parameters nor in any state dict: they are not sharded (every rank holds half a byte per
weight), not saved, and quantised from the model's files on every load.
"""

import contextlib
import copy
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.tuners.vera.layer import VeraLayer
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from embedtrain.config.recipe import ALL_LINEAR, BaseDtype, LoraConfig, Precision
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.adapter_types import (
    DENSE,
    EMBEDDINGS,
    NORMS,
    PATTERN_MAPPINGS,
    PATTERN_SETTINGS,
    adapter_type,
    new_config,
)
from embedtrain.models.encoder import Encoder
from embedtrain.models.own_class import HEAD
from embedtrain.models.security import BoundExceeded, run_bounded
from embedtrain.utils.formatting import one_line

if TYPE_CHECKING:
    from embedtrain.formats.peft import AdapterFiles

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
# PEFT adds these names to `modules_to_save` of every classifier, whether or not it has such a module.
CLASSIFIER, CLASSIFIER_MODULES = "SEQ_CLS", ("classifier", "score")
NAME = "default"  # PEFT's default name of an adapter, which is in the name of each of its weights
_OWN = re.compile(rf"\.{NAME}(?=\.|$)")
# The lengths of the rows of weights, which DoRA trains; its files have another name for them.
_MAGNITUDE, _STORED_MAGNITUDE = f".lora_magnitude_vector.{NAME}.weight", "lora_magnitude_vector.weight"
_BASE = ".base_layer."
_WRITTEN = {"loha": "LoHa", "lokr": "LoKr", "ia3": "IA3", "vera": "VeRA", "randlora": "RandLora", "oft": "OFT"} | {
    "boft": "BOFT", "hra": "HRA", "fourierft": "FourierFT", "waveft": "WaveFT", "c3a": "C3A", "miss": "MiSS",
    "hira": "HiRA", "gralora": "GraLoRA", "beft": "BEFT",
}  # fmt: skip
_PATTERN_SECONDS = 20  # for the regular expressions of an adapter; those of real ones need milliseconds


@dataclass(frozen=True)
class AdapterInfo:
    """The adapters of an encoder."""

    config: PeftConfig  # with resolved names of layers, saved with the adapter
    files: "AdapterFiles | None"  # of the initial weights; None: they are random
    stored: tuple[str, ...]  # the encoder's names of the weights in `files`
    # Modules that are trained in full: the backbone's, and in transformers' class those of a cross-encoder's head.
    modules_to_save: tuple[str, ...]
    heads: tuple[str, ...]  # layers after the backbone that are trained, which PEFT's format cannot store


def add_adapters(encoder: Encoder, lora: LoraConfig, files: "AdapterFiles | None", frozen: torch.dtype) -> AdapterInfo:
    """Add adapters to an encoder, in place, and freeze its other weights in the dtype `frozen`.

    Parameters may be on the meta device. `files` are those of the adapter in `lora.path`. A ConfigError if a target or
    module matches nothing, or a target is not a linear layer.
    """
    if len(encoder.towers) > 1:
        return _add_to_towers(encoder, lora, files, frozen)
    # A copy, because what is set below would be injected into the next encoder with the adapter of these files.
    config = _peft_config(encoder, lora) if files is None else copy.deepcopy(files.config)
    if files is not None and encoder.vision is not None and isinstance(config.target_modules, str):
        # Its expression is one of the names in a class that wraps the backbone, which has others.
        config.target_modules, config.exclude_modules = files.layers(encoder) or config.target_modules, None
    for parameter in encoder.parameters():
        parameter.requires_grad_(False)
    stored_modules = _modules_of_files(encoder, files)
    modules = stored_modules | find_modules(encoder, lora.modules_to_save, lora.section)
    head = encoder.output
    if head.peft_modules and not isinstance(config.target_modules, str):
        # Names in transformers' class, which PEFT writes for target_modules="all-linear".
        prefix = encoder.stored_name("backbone.")
        config.target_modules = {name.removeprefix(prefix) for name in config.target_modules or ()}
    on_meta = any(parameter.is_meta for parameter in encoder.parameters())
    with _in_memory(encoder) if on_meta else contextlib.nullcontext():
        _inject(encoder, config, files, lora)
    modules |= head.beside_adapters  # would stay random
    for module in modules.values():
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    if lora.load_in_4bit:
        if adapter_kind(config) != "lora" or config.use_dora:
            raise ConfigError(
                f"model.lora.load_in_4bit=true: {describe_kind(config)} computes with the weights themselves; it is "
                "for LoRA alone"
            )
        quantize_frozen(encoder)
    for parameter in encoder.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen)
    saved = tuple(sorted(encoder.stored_name(name) for name in modules if name.startswith("backbone.")))
    if head.peft_modules:
        saved += tuple(head.peft_modules)
        config.task_type = CLASSIFIER
    config.modules_to_save = list(saved) or None
    stored = [name for name, _ in encoder.named_parameters() if base_name(name) is None]
    stored += [f"{name}.{inside}" for name, module in stored_modules.items() for inside, _ in module.named_parameters()]
    return AdapterInfo(
        config=config,
        files=files,
        stored=tuple(dict.fromkeys(stored)) if files is not None else (),
        modules_to_save=saved,
        heads=tuple(
            dict.fromkeys(
                name.split(".")[0] for name in modules if not name.startswith(("backbone.", HEAD.rstrip(".")))
            )
        ),
    )


def _add_to_towers(
    encoder: Encoder, lora: LoraConfig, files: "AdapterFiles | None", frozen: torch.dtype
) -> AdapterInfo:
    """Add adapters to each tower that has one of the targets, and freeze the others; names begin with the tower."""
    towers, config = encoder.towers, None if files is None else files.config
    targets = lora.targets if config is None else sorted(config.target_modules or ())
    targets = [targets] if isinstance(targets, str) else list(targets)
    saved = list(lora.modules_to_save)
    for target in targets if config is None and targets != [ALL_LINEAR] else ():
        if not any(_targets_of_tower(towers, prefix, [target]) for prefix in towers):
            target_layers(next(iter(towers.values())).backbone, [target], lora.targets_option)  # an error
    for name in saved:
        if not any(_modules_of_tower(towers, prefix, [name]) for prefix in towers):
            find_modules(next(iter(towers.values())), [name], lora.section)  # an error
    added: dict[str, AdapterInfo] = {}
    for prefix, tower in towers.items():
        own = replace(lora, modules_to_save=_modules_of_tower(towers, prefix, saved))
        own_files, own_targets = None, _targets_of_tower(towers, prefix, targets)
        if files is not None:
            own_config = copy.deepcopy(files.config)
            own_config.target_modules = set(own_targets)
            excluded = getattr(files.config, "exclude_modules", None) or ()
            own_config.exclude_modules = _names_in_tower(excluded, prefix) or None
            stored = tuple(_names_in_tower(files.modules_to_save, prefix))
            own_files = replace(files, config=own_config, modules_to_save=stored)
        if own_files is None and own_targets:
            own = replace(own, targets=own_targets)
        is_frozen = not any(parameter.requires_grad for parameter in tower.backbone.parameters())
        if own_targets and not is_frozen:
            added[prefix] = add_adapters(tower, own, own_files, frozen)
            continue
        modules = find_modules(tower, own.modules_to_save) | tower.output.beside_adapters
        tower.requires_grad_(False)
        for module in modules.values():
            module.requires_grad_(True)
        for parameter in tower.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(frozen)
    if not added:
        raise ConfigError(f"{lora.section}: no tower has a linear layer for adapters; leave it out")
    shared = copy.deepcopy(next(iter(added.values())).config)
    if shares_state(shared):
        raise ConfigError(
            f"{lora.section}.type: {describe_kind(shared)} shares projections between the layers of a tower, and PEFT "
            "between those of all; write another type"
        )
    # With the names of their towers: two may have layers of the same name, of which one is adapted.
    for setting in ("target_modules", "exclude_modules"):
        names = {prefix + name for prefix, info in added.items() for name in getattr(info.config, setting, None) or ()}
        setattr(shared, setting, names or None)
    stored_modules = tuple(prefix + name for prefix, info in added.items() for name in info.modules_to_save)
    shared.modules_to_save = list(stored_modules) or None
    heads = tuple(prefix + name for prefix, info in added.items() for name in info.heads)
    return AdapterInfo(config=shared, files=files, stored=(), modules_to_save=stored_modules, heads=heads)


def _names_in_tower(names: Iterable[str], prefix: str) -> list[str]:
    """Those that begin with that of a tower, without it."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _targets_of_tower(towers: Mapping[str, Encoder], prefix: str, targets: Iterable[str]) -> list[str]:
    """Those of the targets that a tower has; their names may begin with that of a tower, which has them alone."""
    others = tuple(other for other in towers if other != prefix)
    own = (target.removeprefix(prefix) for target in targets if not target.startswith(others))
    return list(dict.fromkeys(target for target in own if _has_layer(towers[prefix], target)))


def _has_layer(tower: Encoder, target: str) -> bool:
    """Whether a tower has a layer of this name, or any if all linear layers are meant."""
    if target == ALL_LINEAR:
        return tower.has_layers
    names = (name for name, _ in tower.backbone.named_modules())
    return any(name == target or name.endswith(f".{target}") for name in names)


def _modules_of_tower(towers: Mapping[str, Encoder], prefix: str, names: Iterable[str]) -> list[str]:
    """Those of the names of modules that are in a tower, which they may begin with, by its own names."""
    others = tuple(other for other in towers if other != prefix)
    own = (name.removeprefix(prefix) for name in names if not name.startswith(others))
    return [name for name in own if dict(_matching_modules(towers[prefix], name))]


def frozen_dtype(base_dtype: BaseDtype, precision: Precision, stored: torch.dtype) -> torch.dtype:
    """The dtype of frozen weights; `stored` is that of the model's files. For bf16, storing bf16 loses nothing."""
    if base_dtype is BaseDtype.auto:
        is_bf16 = precision is Precision.bf16 or stored is torch.bfloat16
    else:
        is_bf16 = base_dtype is BaseDtype.bf16
    return torch.bfloat16 if is_bf16 else torch.float32


def shares_state(config: PeftConfig) -> bool:
    """Whether layers share what is not trained, so that PEFT and transformers cannot load two beside each other."""
    return bool(PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type].uses_shared_state)


def has_adapters(module: nn.Module) -> bool:
    """Whether the module has adapters."""
    return any(isinstance(part, BaseTunerLayer) for part in module.modules())


def base_name(name: str) -> str | None:
    """The name of a weight in a model without adapters; None for weights of adapters."""
    return None if _OWN.search(name) else name.replace(_BASE, ".")


def adapter_kind(config: PeftConfig) -> str:
    """The type of an adapter, one of TYPES."""
    return str(getattr(config.peft_type, "value", config.peft_type)).lower()


def describe_kind(config: PeftConfig) -> str:
    """The type of an adapter for the user, as its authors write it where that is known."""
    kind = adapter_kind(config)
    if kind != "lora":
        return _WRITTEN.get(kind, kind)
    return "DoRA" if config.use_dora else "rsLoRA" if config.use_rslora else "LoRA"


def initial_adapters(encoder: Encoder, adapters: AdapterInfo, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The initial weights of adapters, unsharded, by the encoder's names: from the adapter's files, or PEFT's own.

    PEFT draws those of one layer at a time, from a seed that is a function of `seed` and the name of the layer: every
    rank has the same. `copy_base_values` follows. Files of another model's adapter raise a ModelError.
    """
    shapes = {name: tensor.shape for name, tensor in encoder.state_dict().items()}
    if adapters.files is not None:
        names = {name: shapes[name] for name in adapters.stored}
        yield from adapters.files.read(names, encoder.stored_name, encoder.output.merged_keys).items()
        return
    for name, layer in encoder.named_modules():
        if isinstance(layer, BaseTunerLayer):
            drawn = _initial_layer(name, layer, adapters.config, seed)
            yield from ((f"{name}.{inside}", value) for inside, value in drawn.items() if f"{name}.{inside}" in shapes)


def _initial_layer(full_name: str, layer: BaseTunerLayer, config: PeftConfig, seed: int) -> dict[str, Tensor]:
    """The weights that PEFT gives to the adapter of a linear layer, float32, as if the weight of the layer were 0."""
    base = layer.get_base_layer()
    place = model = nn.Module()
    name = full_name.partition("backbone.")[2] or full_name
    *path, last = name.split(".")
    for part in path:  # the same place as in the backbone, because settings may have patterns of names
        place.add_module(part, nn.Module())
        place = place.get_submodule(part)
    linear = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
    place.add_module(last, _without_memory(linear))
    config = copy.deepcopy(config)
    # The names were matched with the whole model, whose layers these settings count.
    config.target_modules, config.exclude_modules = [name], None
    config.layers_to_transform = config.layers_pattern = None
    digest = hashlib.blake2b(f"{seed} {full_name}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest))
        _tuner(config, model)
        return {
            inside: value.detach().float()
            for inside, value in model.get_submodule(name).named_parameters()
            if base_name(f".{inside}") is None
        }


def copy_base_values(
    state: Mapping[str, Tensor], adapters: AdapterInfo, local_rows: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> None:
    """Set the initial weights of new adapters that are computed from weights of the model.

    `local_rows` are those of a tensor of `state` that this rank has.
    """
    if adapters.files is not None:
        return
    for name, tensor in state.items():
        if name.endswith(_MAGNITUDE):
            # Both are cut at the same rows. The update of the weight is 0 at the start.
            weight = local_rows(state[f"{name.removesuffix(_MAGNITUDE)}{_BASE}weight"])
            local_rows(tensor).copy_(torch.linalg.norm(weight.float(), dim=1))


def cast_projections(encoder: nn.Module, dtype: torch.dtype) -> None:
    """Convert the random projections of VeRA, which PEFT multiplies by inputs without converting either.

    They are no parameters, which FSDP converts.
    """
    for layer in encoder.modules():
        if isinstance(layer, VeraLayer):
            for projections in (layer.vera_A, layer.vera_B):
                for name, tensor in projections._buffers.items():
                    projections._buffers[name] = None if tensor is None else tensor.to(dtype)


@contextlib.contextmanager
def without_adapters(encoder: nn.Module) -> Iterator[None]:
    """Disable the adapters within the block; modules trained in full stay as they are."""
    layers = [part for part in encoder.modules() if isinstance(part, BaseTunerLayer)]
    # PEFT's own switch also changes which parameters have a gradient, which FSDP has already recorded.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class Merger:
    """Merges adapters into rows of the model's weights.

    Args:
        encoder: has the adapters. Its parameters are not read and may be sharded or on the meta device.
        weights: of the adapters, unsharded, by the encoder's names; others are ignored.
    """

    def __init__(self, encoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._layers = {name: part for name, part in encoder.named_modules() if isinstance(part, BaseTunerLayer)}
        self._weights = {name: tensor for name, tensor in weights.items() if base_name(name) is None}

    def rows(self, name: str, rows: Tensor, first: int) -> Tensor:
        """Rows of a weight or bias from row `first` on, merged, in float32; `name` is that without adapters.

        PEFT merges whole weights. The other rows are 0 here: no row of a merged weight depends on another one.
        """
        layer_name, _, kind = name.rpartition(".")
        layer = self._layers.get(layer_name)
        if layer is None:
            return rows
        base = layer.get_base_layer()
        linear = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        # What is copied is replaced: the layer below the adapter, and the adapter's weights. All else is shared.
        memo: dict[int, Any] = {id(base): linear.to_empty(device=rows.device)}
        for inside, tensor in layer.named_parameters():
            own = self._weights.get(f"{layer_name}.{inside}")
            if own is not None:
                memo[id(tensor)] = nn.Parameter(own.to(rows.device, torch.float32), requires_grad=False)
        for buffer in layer.buffers():
            dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
            memo[id(buffer)] = buffer.to(rows.device, dtype)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.zero_()
            getattr(linear, kind)[first : first + len(rows)] = rows
            merged = copy.deepcopy(layer, memo)
            merged.merge(adapter_names=[NAME])
            return getattr(merged.get_base_layer(), kind).data[first : first + len(rows)].clone()  # type: ignore[no-any-return]


def _without_memory(linear: nn.Linear) -> nn.Linear:
    """Replace the parameters by zeros without memory; beside meta weights, PEFT computes nothing."""
    for name, parameter in list(linear.named_parameters()):
        setattr(linear, name, nn.Parameter(torch.zeros(1).expand(parameter.shape), requires_grad=False))
    return linear


@contextlib.contextmanager
def _in_memory(encoder: Encoder) -> Iterator[None]:
    """Within the block, linear layers on the meta device are zeros; new parameters are on the meta device.

    So PEFT computes the buffers of adapters, which are no parameters and in no file.
    """
    layers = [part for part in encoder.backbone.modules() if type(part) is nn.Linear and part.weight.is_meta]
    before = [dict(layer.named_parameters()) for layer in layers]
    for layer in layers:
        _without_memory(layer)
    try:
        with init_empty_weights(include_buffers=False):
            yield
    finally:
        for layer, parameters in zip(layers, before, strict=True):
            for name, parameter in parameters.items():
                setattr(layer, name, parameter)


def check_settings(lora: LoraConfig) -> PeftConfig:
    """PEFT's configuration of new adapters, without names of layers; a ConfigError for a type or setting it has not."""
    kind, settings = lora.peft_settings()
    kind, implied = adapter_type(kind, f"{lora.section}.type")
    return new_config(kind, settings | implied, lora.section)


def _peft_config(encoder: Encoder, lora: LoraConfig) -> PeftConfig:
    # All linear layers are those of the language model, if there is one beside a vision tower.
    named = encoder.token_model if ALL_LINEAR in lora.targets else encoder.backbone
    config = check_settings(lora)
    config.target_modules = set(target_layers(named, lora.targets, lora.targets_option))
    _require_targets(encoder, config, f"{lora.section}.feedforward_modules")
    config.task_type = "FEATURE_EXTRACTION"
    excluded = _read_layers(encoder.backbone) + _vision_layers(encoder, lora.targets)
    if excluded and hasattr(config, "exclude_modules"):
        given = config.exclude_modules or []
        config.exclude_modules = excluded + ([given] if isinstance(given, str) else list(given))
    elif excluded:  # this type has no such setting: the names of all others
        config.target_modules = {
            name
            for name, part in encoder.backbone.named_modules()
            if isinstance(part, nn.Linear) and name not in excluded and _is_target(name, config.target_modules)
        }
    return config


def _require_targets(encoder: Encoder, config: PeftConfig, option: str) -> None:
    """Reject names of layers whose inputs are scaled (IA3) that are no adapted layers: PEFT would ignore them."""
    given = getattr(config, "feedforward_modules", None)
    if not given or isinstance(given, str):
        return
    names = [name for name, _ in encoder.backbone.named_modules() if _is_target(name, config.target_modules)]
    for each in given:
        if not any(_is_target(name, [each]) for name in names):
            layers = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise ConfigError(f"{option}: {each} is none of the adapted layers, which are {', '.join(layers)}")


def _is_target(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _tuner(config: PeftConfig, model: nn.Module) -> None:
    """Add adapters to a model, in place. `inject_adapter_in_model` refuses types that share what is not trained."""
    PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, {NAME: config}, NAME)


def _inject(encoder: Encoder, config: PeftConfig, files: "AdapterFiles | None", lora: LoraConfig) -> None:
    if files is not None:
        _require_bounded_patterns(encoder, config, files)
    try:
        _tuner(config, encoder.backbone)
    except Exception as error:  # PEFT raises plain ValueErrors of many kinds
        where = lora.section if files is None else str(files.directory)
        message = f"{where}: cannot add this adapter to {type(encoder.backbone).__name__}: {one_line(error)}"
        raise (ConfigError if files is None else ModelError)(message) from None
    if adapter_kind(config) == "beft" or getattr(config, "lora_bias", False):
        for name, layer in encoder.backbone.named_modules():
            if isinstance(layer, BaseTunerLayer) and layer.get_base_layer().bias is None:
                where, trains = (lora.section, "trains") if files is None else (str(files.directory), "has")
                message = f"{where}: the adapter {trains} biases, which cannot be merged into layers without: {name}"
                raise (ConfigError if files is None else ModelError)(message)


def _require_bounded_patterns(encoder: Encoder, config: PeftConfig, files: "AdapterFiles") -> None:
    """Reject regular expressions that need long for the names of the encoder's layers, before PEFT matches them."""
    expressions = [getattr(config, name, None) for name in PATTERN_SETTINGS if name != "layers_pattern"]
    patterns = [getattr(config, name, None) or {} for name in PATTERN_MAPPINGS]
    has_patterns = any(patterns) or bool(getattr(config, "layers_pattern", None))
    if not has_patterns and not any(isinstance(names, str) for names in expressions):
        return
    names = [name for name, _ in encoder.backbone.named_modules()]

    def match() -> None:
        for name in names:
            check_target_module_exists(config, name)
            for expression in expressions:
                if isinstance(expression, str):
                    re.fullmatch(expression, name)
        # Each pattern alone, because PEFT also searches for patterns that match no layer.
        for pattern in {key for keys in patterns for key in keys}:
            for name in names:
                get_pattern_key((pattern,), name)

    try:
        run_bounded(match, _PATTERN_SECONDS)
    except BoundExceeded as error:
        raise ModelError(
            f"{files.directory / ADAPTER_CONFIG}: matching its regular expressions ({', '.join(PATTERN_SETTINGS)}, "
            f"{', '.join(PATTERN_MAPPINGS)}) with the names of {len(names):,} modules {error}"
        ) from None


def _modules_of_files(encoder: Encoder, files: "AdapterFiles | None") -> dict[str, nn.Module]:
    if files is None:
        return {}
    names, modules = set(files.modules_to_save), {}
    if encoder.output.peft_modules:
        # PEFT stores the parts whose names end with one of these.
        parts = [part for part in encoder.output.peft_modules if part.endswith(files.modules_to_save)]
        modules = {f"{HEAD}{part}": encoder.get_submodule(f"{HEAD}{part}") for part in parts}
        names -= {name for name in names if any(part.endswith(name) for part in parts)} | set(CLASSIFIER_MODULES)
        names = {name.removeprefix(encoder.stored_name("backbone.")) for name in names}
    try:
        return modules | find_modules(encoder, sorted(names))
    except ConfigError:
        kind = type(encoder.backbone).__name__
        raise ModelError(
            files.mismatch_message(f"it stores {', '.join(files.modules_to_save)}, which {kind} does not have")
        ) from None


def describe_adapters(adapters: AdapterInfo, encoder: Encoder) -> str:
    """A line for the user about trained and frozen weights."""
    num_trained = sum(parameter.numel() for parameter in encoder.parameters() if parameter.requires_grad)
    num_quantized = sum(
        layer.in_features * layer.out_features for layer in encoder.modules() if isinstance(layer, FourBitLinear)
    )
    total = num_quantized + sum(parameter.numel() for parameter in encoder.parameters())
    dtypes = ["4 bits"] * (num_quantized > 0) + [
        str(parameter.dtype).removeprefix("torch.") for parameter in encoder.parameters() if not parameter.requires_grad
    ]
    num_layers = sum(isinstance(module, BaseTunerLayer) for module in encoder.modules())
    modules = (*adapters.modules_to_save, *adapters.heads)
    in_full = f", in full: {', '.join(modules)}" if len(modules) <= 4 else f", {len(modules)} modules in full"
    config = adapters.config
    return (
        f"{describe_kind(config)}: {describe_settings(config)}on {num_layers} linear layers"
        f"{in_full if modules else ''}; {num_trained:,} of {total:,} parameters are trained, the others are frozen in "
        f"{' and '.join(dict.fromkeys(dtypes))}"
    )


def describe_settings(config: PeftConfig) -> str:
    """The rank and the scale of an adapter, as far as its type has them, before further words."""
    alpha = getattr(config, "lora_alpha", getattr(config, "alpha", None))
    settings = {"rank": getattr(config, "r", None) or None, "alpha": alpha}
    return "".join(f"{name} {value:g}, " for name, value in settings.items() if value is not None)


def adapter_settings(config: PeftConfig) -> dict[str, Any]:
    """The content of adapter_config.json as PEFT writes it."""
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in config.to_dict().items()
    }


def target_layers(backbone: nn.Module, targets: str | list[str], option: str = "model.lora.targets") -> list[str]:
    """The layers of the option in PEFT's form; a ConfigError if a name matches nothing or no linear layer."""
    targets = [targets] if isinstance(targets, str) else list(targets)
    linear = Counter(
        name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if isinstance(module, nn.Linear)
    )
    if targets == [ALL_LINEAR]:
        return sorted(linear)
    names = [name for name, _ in backbone.named_modules()]
    for target in targets:
        matches = [name for name in names if name == target or name.endswith(f".{target}")]
        if not matches:
            raise ConfigError(
                f"{option}: {type(backbone).__name__} has no layer {target}; its linear layers are "
                f"{', '.join(f'{name} x{count}' for name, count in linear.items())}: name some of them, or write "
                f"{option}={ALL_LINEAR}"
            )
        for name in matches:
            _require_linear(backbone.get_submodule(name), target, option)
    return targets


def _read_layers(backbone: nn.Module) -> list[str]:
    """Linear layers whose weights are read by another module and which are not called, so that adapters do nothing."""
    return [f"{name}.out_proj" for name, part in backbone.named_modules() if isinstance(part, nn.MultiheadAttention)]


def _vision_layers(encoder: Encoder, targets: str | list[str]) -> list[str]:
    """Layers of a vision tower that targets of the language model would adapt as well, by the same names.

    A target that only the tower has is adapted there; all linear layers are those of the language model.
    """
    of_vision = {id(part) for module in encoder.vision_modules for part in module.modules()}
    if not of_vision:
        return []
    parts = dict(encoder.backbone.named_modules())
    language = [name for name, part in parts.items() if isinstance(part, nn.Linear) and id(part) not in of_vision]
    given = [] if ALL_LINEAR in targets else [targets] if isinstance(targets, str) else targets

    own = [target for target in given if not any(_is_target(name, [target]) for name in language)]
    return [name for name, part in parts.items() if id(part) in of_vision and not _is_target(name, own)]


def find_modules(encoder: Encoder, names: Iterable[str], section: str = "model.lora") -> dict[str, nn.Module]:
    """Modules of the option `modules_to_save`, by the encoder's names; a ConfigError if a name matches nothing."""
    modules: dict[str, nn.Module] = {}
    for option in names:
        matches = dict(_matching_modules(encoder, option))
        if not matches:
            named = encoder.backbone.named_modules()
            kinds = sorted({name.rsplit(".", 1)[-1] for name, module in named if _has_parameters(module)})
            raise ConfigError(
                f"{section}.modules_to_save: {type(encoder.backbone).__name__} has no {option}; allowed are "
                f"{EMBEDDINGS}, {NORMS}, {DENSE} (heads after the pooling), or its modules: "
                f"{', '.join(kind for kind in kinds if not kind.isdigit())}"
            )
        modules |= matches
    return modules


def _require_linear(layer: nn.Module, target: str, option: str) -> None:
    if isinstance(layer, nn.Linear):
        return
    if isinstance(layer, nn.Embedding):
        raise ConfigError(
            f"{option}: {target} is an embedding, which supports no adapter: train it in full with "
            f"{option.rpartition('.')[0]}.modules_to_save=[{EMBEDDINGS}]"
        )
    linear = sorted({name.rsplit(".", 1)[-1] for name, part in layer.named_modules() if isinstance(part, nn.Linear)})
    raise ConfigError(
        f"{option}: {target} is a {type(layer).__name__}, and adapters need linear layers"
        + (f": it contains {', '.join(linear)}" if linear else "")
    )


def _matching_modules(encoder: Encoder, option: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in encoder.named_modules():
        inside = name.removeprefix("backbone.")
        match option:
            case "embeddings":
                matches = isinstance(module, nn.Embedding)
            case "norms":
                matches = "norm" in type(module).__name__.lower() and _has_parameters(module)
            case "dense":
                matches = name.startswith("dense.") and _has_parameters(module)
            case _:
                matches = inside == option or inside.endswith(f".{option}")
        if matches:
            yield name, module


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


class FourBitLinear(nn.Module):
    """A frozen linear layer [..., in] -> [..., out] with the bias of `linear`; `quantize_weight` sets its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed: Tensor
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        self._scales: Any = None

    @property
    def num_bytes(self) -> int:
        """Memory on every rank: 4 bits per weight, 8 bits for every 64 weights, and the scales of these."""
        return round(self.in_features * self.out_features * (1 / 2 + 1 / 64 + 4 / (64 * 256)))

    def quantize_weight(self, weight: Tensor) -> None:
        """Quantise a weight [out, in] on the device of the layer."""
        self.packed, self._scales = _quantize(weight)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] used in the forward pass."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.packed, self._scales).to(dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = _Linear.apply(x, self)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Linear(torch.autograd.Function):
    """x W^T with W dequantised for each pass, so that only the 4 bits are held between passes.

    bitsandbytes' own product looks for a kernel on the Hub when it runs on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.dequantized(grad.dtype), None


def quantize_frozen(encoder: nn.Module) -> None:
    """Replace, in place, every frozen linear layer of the backbone by a FourBitLinear."""
    for parent in list(encoder.backbone.modules()):  # type: ignore[union-attr]
        for name, child in parent.named_children():
            if type(child) is nn.Linear and not any(parameter.requires_grad for parameter in child.parameters()):
                setattr(parent, name, FourBitLinear(child))


def four_bit_layers(encoder: nn.Module) -> Iterator[tuple[str, FourBitLinear]]:
    """Every FourBitLinear, by the name of its weight."""
    for name, part in encoder.named_modules():
        if isinstance(part, FourBitLinear):
            yield f"{name}.weight", part


def quantization_round_trip(weight: Tensor) -> Tensor:
    """A weight [out, in] quantised and dequantised again, float32."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(*_quantize(weight)).float()  # type: ignore[no-any-return]


def _quantize(weight: Tensor) -> tuple[Tensor, Any]:
    from bitsandbytes.functional import quantize_4bit

    values = weight.detach().float().contiguous()
    packed, scales = quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    return packed, scales


def peft_key(stored_name: str) -> str:
    """The key of a weight in an adapter's file, from its name in transformers' class."""
    name = _OWN.sub("", stored_name)
    return PEFT_PREFIX + (name.removesuffix(".weight") if name.endswith(_STORED_MAGNITUDE) else name)


def adapted_layer(name: str, key: str) -> str:
    """The layer, by its name in an adapter's file, of an adapter's weight, from its names in the encoder and there."""
    kind = name.partition(f".{NAME}")[0].rpartition(".")[2]  # such as lora_A
    return key.removeprefix(PEFT_PREFIX).rpartition(f".{kind}")[0]
