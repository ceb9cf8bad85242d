"""Which linear layers adapters are put on, and which parts of an encoder are trained whole besides."""

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
from accelerate import init_empty_weights
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from embedtrain.config.recipe import ALL_LINEAR, BaseDtype, LoraConfig, Precision
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.adapter_files import AdapterFiles
from embedtrain.models.encoder import Encoder
from embedtrain.models.four_bit import FourBitLinear, quantize_frozen

EMBEDDINGS, NORMS, DENSE = "embeddings", "norms", "dense"


def chosen_layers(backbone: nn.Module, asked: str | list[str]) -> list[str]:
    """Names of layers as PEFT takes them, where each stands for at least one linear layer.

    Args:
        backbone: without adapters.
        asked: `model.lora.targets`.

    Raises:
        ConfigError: one of them matches nothing, or something else than a linear layer.
    """
    targets = [asked] if isinstance(asked, str) else list(asked)
    linear = Counter(name.rsplit(".", 1)[-1] for name, part in backbone.named_modules() if isinstance(part, nn.Linear))
    if targets == [ALL_LINEAR]:
        return sorted(linear)
    names = [name for name, _ in backbone.named_modules()]
    for target in targets:
        found = [name for name in names if name == target or name.endswith(f".{target}")]
        if not found:
            raise ConfigError(
                f"model.lora.targets: {type(backbone).__name__} has no layer {target}; its linear layers are "
                f"{', '.join(f'{name} x{count}' for name, count in linear.items())}: name some of them, or write "
                f"model.lora.targets={ALL_LINEAR}"
            )
        for name in found:
            _require_linear(backbone.get_submodule(name), target)
    return targets


def chosen_parts(encoder: Encoder, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules to be trained whole, by the encoder's names.

    Args:
        encoder: with all its layers, adapted or not.
        names: `model.lora.modules_to_save`.

    Raises:
        ConfigError: one of them matches nothing.
    """
    found: dict[str, nn.Module] = {}
    for asked in names:
        chosen = dict(_part(encoder, asked))
        if not chosen:
            kinds = sorted({name.rsplit(".", 1)[-1] for name, part in encoder.backbone.named_modules() if _owns(part)})
            raise ConfigError(
                f"model.lora.modules_to_save: {type(encoder.backbone).__name__} has no {asked}; allowed are "
                f"{EMBEDDINGS}, "
                f"{NORMS}, {DENSE} (heads behind the pooling), or its modules: "
                f"{', '.join(kind for kind in kinds if not kind.isdigit())}"
            )
        found |= chosen
    return found


def _require_linear(layer: nn.Module, target: str) -> None:
    if isinstance(layer, nn.Linear):
        return
    if isinstance(layer, nn.Embedding):
        raise ConfigError(
            f"model.lora.targets: {target} is an embedding, which has no adapter here: train it whole with "
            f"model.lora.modules_to_save=[{EMBEDDINGS}]"
        )
    inside = sorted({name.rsplit(".", 1)[-1] for name, part in layer.named_modules() if isinstance(part, nn.Linear)})
    raise ConfigError(
        f"model.lora.targets: {target} is a {type(layer).__name__}, and adapters are put on linear layers"
        + (f": it holds {', '.join(inside)}" if inside else "")
    )


def _part(encoder: Encoder, asked: str) -> Iterator[tuple[str, nn.Module]]:
    for name, module in encoder.named_modules():
        inside = name.removeprefix("backbone.")
        match asked:
            case "embeddings":
                chosen = isinstance(module, nn.Embedding)
            case "norms":
                chosen = "norm" in type(module).__name__.lower() and _owns(module)
            case "dense":
                chosen = name.startswith("dense.") and _owns(module)
            case _:
                chosen = inside == asked or inside.endswith(f".{asked}")
        if chosen:
            yield name, module


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


NAME = "default"  # what PEFT calls an adapter that has no other name
_A, _B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
_BASE = ".base_layer."


@dataclass(frozen=True)
class AdapterInfo:
    """What adapters were put on an encoder.

    Attributes:
        config: as PEFT keeps it, names of layers resolved; to be saved beside an adapter.
        files: what the first weights are read from; None where they are made.
        stored: the encoder's names of the weights that the files hold.
        parts: names of the backbone's modules that are trained whole besides.
        heads: whether dense heads are trained as well; an adapter of PEFT's has no place for them.
    """

    config: peft.LoraConfig
    files: AdapterFiles | None
    stored: tuple[str, ...]
    parts: tuple[str, ...]
    heads: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to a weight [out, in]: `scale` x B [out, r] x A [r, in]."""

    a: Tensor
    b: Tensor
    scale: float
    first: int = 0  # the row of the weight that `b` begins with

    def merged_rows(self, rows: Tensor, first: int) -> Tensor:
        """Rows of the weight from row `first` on, with the adapter merged into them, in float32."""
        start = first - self.first
        b = self.b[start : start + len(rows)].to(rows.device, torch.float32)
        return rows.float() + self.scale * (b @ self.a.to(rows.device, torch.float32))


def add_adapters(encoder: Encoder, lora: LoraConfig, files: AdapterFiles | None, frozen: torch.dtype) -> AdapterInfo:
    """Put adapters on an encoder, in place, and freeze the rest of it.

    Args:
        encoder: with parameters on the meta device, or in memory.
        lora: what is asked for.
        files: the adapter that `lora.path` names.
        frozen: type that frozen weights are held in.

    Raises:
        ConfigError: a target or a part matches nothing, or is no linear layer.
    """
    config = _of_options(encoder, lora) if files is None else files.config
    for parameter in encoder.parameters():
        parameter.requires_grad_(False)
    of_files = _parts_of_files(encoder, files)
    modules = of_files | chosen_parts(encoder, lora.modules_to_save)
    on_meta = any(parameter.is_meta for parameter in encoder.parameters())
    with init_empty_weights(include_buffers=False) if on_meta else contextlib.nullcontext():
        _inject(encoder, config, files)
    for module in modules.values():
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    if lora.load_in_4bit:
        quantize_frozen(encoder)
    for parameter in encoder.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen)
    whole = tuple(sorted(name.removeprefix("backbone.") for name in modules if name.startswith("backbone.")))
    config.modules_to_save = list(whole) or None
    stored = [name for name, _ in encoder.named_parameters() if ".lora_" in name]
    stored += [f"{name}.{inside}" for name, part in of_files.items() for inside, _ in part.named_parameters()]
    return AdapterInfo(
        config=config,
        files=files,
        stored=tuple(dict.fromkeys(stored)) if files is not None else (),
        parts=whole,
        heads=any(name.startswith("dense") for name in modules),
    )


def frozen_dtype(asked: BaseDtype, precision: Precision, stored: torch.dtype) -> torch.dtype:
    """The type that frozen weights are held in.

    Args:
        asked: `model.lora.base_dtype`.
        precision: what is computed in: what is held in bf16 for bf16 arithmetic is rounded once either way.
        stored: the type in the model's files.
    """
    match asked:
        case BaseDtype.bf16:
            return torch.bfloat16
        case BaseDtype.fp32:
            return torch.float32
        case BaseDtype.auto:
            return torch.bfloat16 if torch.bfloat16 in (stored, _computed_in(precision)) else torch.float32


def has_adapters(module: nn.Module) -> bool:
    """Whether adapters are trained here, and most weights are frozen."""
    return any(isinstance(part, LoraLayer) for part in module.modules())


def base_name(name: str) -> str | None:
    """What a weight is called in a model without adapters; None for an adapter's own."""
    return None if ".lora_" in name else name.replace(_BASE, ".")


def first_weights(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """An adapter's weight before training, float32: A uniform as PEFT draws it, B zero, so that nothing is changed yet.

    A function of the seed and the name alone: every rank makes the same, and takes its rows.
    """
    if name.endswith(_B):
        return torch.zeros(*shape)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def initial_adapters(encoder: nn.Module, adapted: AdapterInfo, seed: int) -> dict[str, Tensor]:
    """The first weights of adapters, whole, by the encoder's names: from the adapter's files, or made.

    Args:
        encoder: with adapters; their shapes are looked at.
        adapted: what was put on it.
        seed: the recipe's.

    Raises:
        ModelError: the files are of another model.
    """
    shapes = {name: tensor.shape for name, tensor in encoder.state_dict().items()}
    if adapted.files is not None:
        return adapted.files.read({name: shapes[name] for name in adapted.stored})
    return {name: first_weights(name, shape, seed) for name, shape in shapes.items() if base_name(name) is None}


def adapter_deltas(
    tensors: Mapping[str, Tensor], scales: Mapping[str, float], first: Mapping[str, int] | None = None
) -> dict[str, Delta]:
    """What adapters add, by the base's names of the weights that they add to.

    Args:
        tensors: adapters' whole A, and B or rows of it, among others, by the encoder's names.
        scales: see `adapter_scales`.
        first: the row that a B begins with, where it is not whole.
    """
    found = {}
    for name, b in tensors.items():
        if name.endswith(_B):
            layer = name.removesuffix(_B)
            found[f"{layer}.weight"] = Delta(tensors[layer + _A], b, scales[layer], (first or {}).get(name, 0))
    return found


def is_lora_a(name: str) -> bool:
    """Whether this is the matrix A of an adapter."""
    return name.endswith(_A)


def lora_b_name(name: str) -> str:
    """The matrix B of the adapter on a weight, by the encoder's names."""
    return name.removesuffix(".weight").removesuffix(".base_layer") + _B


def adapter_scales(encoder: nn.Module) -> dict[str, float]:
    """How often each adapter counts, by the encoder's name of its layer."""
    return {name: float(part.scaling[NAME]) for name, part in encoder.named_modules() if isinstance(part, LoraLayer)}


@contextlib.contextmanager
def without_adapters(encoder: nn.Module) -> Iterator[None]:
    """During the block the encoder gives the vectors of its base; parts trained whole stay as they are."""
    layers = [part for part in encoder.modules() if isinstance(part, LoraLayer)]
    scales = [layer.scaling[NAME] for layer in layers]
    # Not PEFT's own switch, which also changes what has a gradient: FSDP has looked at that once and for all.
    for layer in layers:
        layer.scaling[NAME] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[NAME] = scale


def _of_options(encoder: Encoder, lora: LoraConfig) -> peft.LoraConfig:
    assert lora.rank is not None
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=chosen_layers(encoder.backbone, lora.targets),
        task_type="FEATURE_EXTRACTION",
    )


def _inject(encoder: Encoder, config: peft.LoraConfig, files: AdapterFiles | None) -> None:
    try:
        peft.inject_adapter_in_model(config, encoder.backbone, adapter_name=NAME)
    except Exception as error:  # PEFT raises plain ValueErrors of many kinds
        where = "model.lora" if files is None else str(files.directory)
        raise ModelError(f"{where}: no such adapter can be put on {type(encoder.backbone).__name__}: {error}") from None


def _parts_of_files(encoder: Encoder, files: AdapterFiles | None) -> dict[str, nn.Module]:
    if files is None:
        return {}
    try:
        return chosen_parts(encoder, files.parts)
    except ConfigError:
        kind = type(encoder.backbone).__name__
        raise ModelError(
            files.mismatch_message(f"it holds {', '.join(files.parts)} whole, and not all is in a {kind}")
        ) from None


def _computed_in(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


def described(adapted: AdapterInfo, encoder: Encoder) -> str:
    """A line for the user: what is trained of what."""
    trained = sum(parameter.numel() for parameter in encoder.parameters() if parameter.requires_grad)
    packed = sum(part.in_features * part.out_features for part in encoder.modules() if isinstance(part, FourBitLinear))
    every = packed + sum(parameter.numel() for parameter in encoder.parameters())
    frozen = Counter({"4 bits": 1} if packed else {}) + Counter(
        str(p.dtype).removeprefix("torch.") for p in encoder.parameters() if not p.requires_grad
    )
    layers = sum(isinstance(part, LoraLayer) for part in encoder.modules())
    besides = (
        f", and whole: {', '.join(adapted.parts)}"
        if 0 < len(adapted.parts) <= 4
        else (f", and {len(adapted.parts)} modules whole" if adapted.parts else "")
    )
    config = adapted.config
    return (
        f"LoRA: rank {config.r}, alpha {config.lora_alpha:g}, on {layers} linear layers{besides}; {trained:,} of "
        f"{every:,} parameters are trained, the others are frozen in {' and '.join(frozen)}"
    )


def adapter_settings(config: peft.LoraConfig) -> dict[str, Any]:
    """The configuration as PEFT writes it into adapter_config.json."""
    settings: dict[str, Any] = config.to_dict()
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in settings.items()
    }
