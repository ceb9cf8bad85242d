"""Low-rank adapters on a frozen encoder: injected by PEFT, initialised, and merged.

Adapters are injected into the backbone, which keeps its class and is not wrapped, so layers are found, sharded and
saved as without adapters. Other trained modules (embeddings, norms, heads) just keep their gradient.

The frozen linear layers may be in 4 bits, by bitsandbytes (Dettmers et al., "QLoRA", 2023): NF4 with quantised scales.
Their weights are neither parameters nor in any state dict: they are not sharded (every rank holds half a byte per
weight), not saved, and quantised from the model's files on every load.
"""

import contextlib
import copy
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import peft
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from embedtrain.config.recipe import ALL_LINEAR, BaseDtype, LoraConfig, Precision
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.encoder import Encoder
from embedtrain.models.own_class import HEAD
from embedtrain.models.security import BoundExceeded, run_bounded

if TYPE_CHECKING:
    from embedtrain.formats.peft import AdapterFiles

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
# PEFT adds these names to `modules_to_save` of every classifier, whether or not it has such a module.
CLASSIFIER, CLASSIFIER_MODULES = "SEQ_CLS", ("classifier", "score")
EMBEDDINGS, NORMS, DENSE = "embeddings", "norms", "dense"
NAME = "default"  # PEFT's default name of an adapter
_A, _B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
_BASE = ".base_layer."
_PATTERN_SECONDS = 20  # for the regular expressions of an adapter; those of real ones need milliseconds


@dataclass(frozen=True)
class AdapterInfo:
    """The adapters of an encoder."""

    config: peft.LoraConfig  # with resolved names of layers, saved with the adapter
    files: "AdapterFiles | None"  # of the initial weights; None: they are random
    stored: tuple[str, ...]  # the encoder's names of the weights in `files`
    # Modules that are trained in full: the backbone's, and in transformers' class those of a cross-encoder's head.
    modules_to_save: tuple[str, ...]
    heads: tuple[str, ...]  # layers after the backbone that are trained, which PEFT's format cannot store


@dataclass(frozen=True, slots=True)
class Delta:
    """The update of a weight [out, in] by an adapter: `scale` x B [out, r] x A [r, in]."""

    a: Tensor
    b: Tensor
    scale: float
    first: int = 0  # the row of the weight that `b` starts at

    def merged_rows(self, rows: Tensor, first: int) -> Tensor:
        """Rows of the weight from row `first` on with the adapter merged, in float32."""
        start = first - self.first
        b = self.b[start : start + len(rows)].to(rows.device, torch.float32)
        return rows.float() + self.scale * (b @ self.a.to(rows.device, torch.float32))


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
    modules = stored_modules | find_modules(encoder, lora.modules_to_save)
    head = encoder.output
    if head.peft_modules and not isinstance(config.target_modules, str):
        # Names in transformers' class, which PEFT writes for target_modules="all-linear".
        prefix = encoder.stored_name("backbone.")
        config.target_modules = {name.removeprefix(prefix) for name in config.target_modules or ()}
    on_meta = any(parameter.is_meta for parameter in encoder.parameters())
    with init_empty_weights(include_buffers=False) if on_meta else contextlib.nullcontext():
        _inject(encoder, config, files)
    modules |= head.beside_adapters  # would stay random
    for module in modules.values():
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    if lora.load_in_4bit:
        quantize_frozen(encoder)
    for parameter in encoder.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen)
    saved = tuple(sorted(encoder.stored_name(name) for name in modules if name.startswith("backbone.")))
    if head.peft_modules:
        saved += tuple(head.peft_modules)
        config.task_type = CLASSIFIER
    config.modules_to_save = list(saved) or None
    stored = [name for name, _ in encoder.named_parameters() if ".lora_" in name]
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
            target_layers(next(iter(towers.values())).backbone, [target])  # an error
    for name in saved:
        if not any(_modules_of_tower(towers, prefix, [name]) for prefix in towers):
            find_modules(next(iter(towers.values())), [name])  # an error
    added: dict[str, AdapterInfo] = {}
    for prefix, tower in towers.items():
        own = replace(lora, modules_to_save=_modules_of_tower(towers, prefix, saved))
        own_files, own_targets = None, _targets_of_tower(towers, prefix, targets)
        if files is not None:
            own_config = copy.deepcopy(files.config)
            own_config.target_modules = set(own_targets)
            own_config.exclude_modules = _names_in_tower(files.config.exclude_modules or (), prefix) or None
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
        raise ConfigError("model.lora: no tower has a linear layer for adapters; leave it out")
    shared = copy.deepcopy(next(iter(added.values())).config)
    # With the names of their towers: two may have layers of the same name, of which one is adapted.
    for setting in ("target_modules", "exclude_modules"):
        names = {prefix + name for prefix, info in added.items() for name in getattr(info.config, setting) or ()}
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


def has_adapters(module: nn.Module) -> bool:
    """Whether the module has adapters."""
    return any(isinstance(part, LoraLayer) for part in module.modules())


def base_name(name: str) -> str | None:
    """The name of a weight in a model without adapters; None for weights of adapters."""
    return None if ".lora_" in name else name.replace(_BASE, ".")


def initial_adapter_weight(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """An adapter's initial weight, float32: A uniform as in PEFT, B zero, so that vectors do not change.

    A function of the seed and the name: every rank draws the same tensor and keeps its rows.
    """
    if name.endswith(_B):
        return torch.zeros(*shape)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def initial_adapters(encoder: Encoder, adapters: AdapterInfo, seed: int) -> dict[str, Tensor]:
    """The initial weights of adapters, unsharded, by the encoder's names: from the adapter's files, or random.

    Files of another model's adapter raise a ModelError.
    """
    shapes = {name: tensor.shape for name, tensor in encoder.state_dict().items()}
    if adapters.files is not None:
        names = {name: shapes[name] for name in adapters.stored}
        return adapters.files.read(names, encoder.stored_name, encoder.output.merged_keys)
    return {
        name: initial_adapter_weight(name, shape, seed) for name, shape in shapes.items() if base_name(name) is None
    }


def adapter_deltas(
    tensors: Mapping[str, Tensor], scales: Mapping[str, float], first: Mapping[str, int] | None = None
) -> dict[str, Delta]:
    """The updates by adapters, by the base's names of the weights.

    `tensors` has, by the encoder's names, each adapter's A and its B or, from row `first` on, a part of it; other
    weights are ignored. `scales` are those of `adapter_scales`.
    """
    deltas = {}
    for name, b in tensors.items():
        if name.endswith(_B):
            layer = name.removesuffix(_B)
            deltas[f"{layer}.weight"] = Delta(tensors[layer + _A], b, scales[layer], (first or {}).get(name, 0))
    return deltas


def is_lora_a(name: str) -> bool:
    """Whether the weight is the matrix A of an adapter."""
    return name.endswith(_A)


def lora_b_name(name: str) -> str:
    """The name of the matrix B of the adapter of a weight."""
    return name.removesuffix(".weight").removesuffix(".base_layer") + _B


def adapter_scales(encoder: nn.Module) -> dict[str, float]:
    """The scale of each adapter, by the name of its layer."""
    return {name: float(part.scaling[NAME]) for name, part in encoder.named_modules() if isinstance(part, LoraLayer)}


@contextlib.contextmanager
def without_adapters(encoder: nn.Module) -> Iterator[None]:
    """Disable the adapters within the block; modules trained in full stay as they are."""
    layers = [part for part in encoder.modules() if isinstance(part, LoraLayer)]
    scales = [layer.scaling[NAME] for layer in layers]
    # PEFT's own switch also changes which parameters have a gradient, which FSDP has already recorded.
    for layer in layers:
        layer.scaling[NAME] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[NAME] = scale


def _peft_config(encoder: Encoder, lora: LoraConfig) -> peft.LoraConfig:
    assert lora.rank is not None
    # All linear layers are those of the language model, if there is one beside a vision tower.
    named = encoder.token_model if ALL_LINEAR in lora.targets else encoder.backbone
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=target_layers(named, lora.targets),
        exclude_modules=_read_layers(encoder.backbone) + _vision_layers(encoder, lora.targets) or None,
        task_type="FEATURE_EXTRACTION",
    )


def _inject(encoder: Encoder, config: peft.LoraConfig, files: "AdapterFiles | None") -> None:
    if files is not None:
        _require_bounded_patterns(encoder, config, files)
    try:
        peft.inject_adapter_in_model(config, encoder.backbone, adapter_name=NAME)
    except Exception as error:  # PEFT raises plain ValueErrors of many kinds
        where = "model.lora" if files is None else str(files.directory)
        raise ModelError(f"{where}: cannot add this adapter to {type(encoder.backbone).__name__}: {error}") from None


def _require_bounded_patterns(encoder: Encoder, config: peft.LoraConfig, files: "AdapterFiles") -> None:
    """Reject regular expressions that need long for the names of the encoder's layers, before PEFT matches them."""
    expressions = (config.target_modules, config.exclude_modules)
    patterns = [config.rank_pattern or {}, config.alpha_pattern or {}]
    if not any(patterns) and not config.layers_pattern and not any(isinstance(names, str) for names in expressions):
        return
    names = [name for name, _ in encoder.backbone.named_modules()]

    def match() -> None:
        for name in names:
            check_target_module_exists(config, name)
        # Each pattern alone, because PEFT also searches for patterns that match no layer.
        for pattern in {key for keys in patterns for key in keys}:
            for name in names:
                get_pattern_key((pattern,), name)

    try:
        run_bounded(match, _PATTERN_SECONDS)
    except BoundExceeded as error:
        raise ModelError(
            f"{files.directory / ADAPTER_CONFIG}: matching its regular expressions (target_modules, exclude_modules, "
            f"layers_pattern, rank_pattern, alpha_pattern) with the names of {len(names):,} modules {error}"
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
    num_layers = sum(isinstance(module, LoraLayer) for module in encoder.modules())
    modules = (*adapters.modules_to_save, *adapters.heads)
    in_full = f", in full: {', '.join(modules)}" if len(modules) <= 4 else f", {len(modules)} modules in full"
    config = adapters.config
    return (
        f"LoRA: rank {config.r}, alpha {config.lora_alpha:g}, on {num_layers} linear layers"
        f"{in_full if modules else ''}; {num_trained:,} of {total:,} parameters are trained, the others are frozen in "
        f"{' and '.join(dict.fromkeys(dtypes))}"
    )


def adapter_settings(config: peft.LoraConfig) -> dict[str, Any]:
    """The content of adapter_config.json as PEFT writes it."""
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in config.to_dict().items()
    }


def target_layers(backbone: nn.Module, targets: str | list[str]) -> list[str]:
    """The layers of `model.lora.targets` in PEFT's form; a ConfigError if a name matches nothing or no linear layer."""
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
                f"model.lora.targets: {type(backbone).__name__} has no layer {target}; its linear layers are "
                f"{', '.join(f'{name} x{count}' for name, count in linear.items())}: name some of them, or write "
                f"model.lora.targets={ALL_LINEAR}"
            )
        for name in matches:
            _require_linear(backbone.get_submodule(name), target)
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

    def matches(name: str, target: str) -> bool:
        return name == target or name.endswith(f".{target}")

    own = [target for target in given if not any(matches(name, target) for name in language)]
    return [
        name
        for name, part in parts.items()
        if id(part) in of_vision and not any(matches(name, target) for target in own)
    ]


def find_modules(encoder: Encoder, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules of `model.lora.modules_to_save`, by the encoder's names; a ConfigError if a name matches nothing."""
    modules: dict[str, nn.Module] = {}
    for option in names:
        matches = dict(_matching_modules(encoder, option))
        if not matches:
            named = encoder.backbone.named_modules()
            kinds = sorted({name.rsplit(".", 1)[-1] for name, module in named if _has_parameters(module)})
            raise ConfigError(
                f"model.lora.modules_to_save: {type(encoder.backbone).__name__} has no {option}; allowed are "
                f"{EMBEDDINGS}, {NORMS}, {DENSE} (heads after the pooling), or its modules: "
                f"{', '.join(kind for kind in kinds if not kind.isdigit())}"
            )
        modules |= matches
    return modules


def _require_linear(layer: nn.Module, target: str) -> None:
    if isinstance(layer, nn.Linear):
        return
    if isinstance(layer, nn.Embedding):
        raise ConfigError(
            f"model.lora.targets: {target} is an embedding, which supports no adapter: train it in full with "
            f"model.lora.modules_to_save=[{EMBEDDINGS}]"
        )
    linear = sorted({name.rsplit(".", 1)[-1] for name, part in layer.named_modules() if isinstance(part, nn.Linear)})
    raise ConfigError(
        f"model.lora.targets: {target} is a {type(layer).__name__}, and adapters need linear layers"
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
    return f"{PEFT_PREFIX}{stored_name.replace('.default.', '.')}"
