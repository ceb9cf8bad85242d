"""A file that `accelerate config` wrote -> our options: each key translated, without effect here, or refused by name.

The keys are those of accelerate 1.15's ClusterConfig, of its questions about FSDP 1 and 2, and of older files.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from embedtrain.config.recipe import CheckpointLayout, Precision, Recipe, Strategy
from embedtrain.errors import ConfigError

_OPTION = "parallel.accelerate_config"
_BLOCK = "parallel.block_class"
_SHARDING = {
    "FULL_SHARD": (Strategy.fsdp, True),
    "SHARD_GRAD_OP": (Strategy.fsdp, False),
    "NO_SHARD": (Strategy.ddp, None),
    "HYBRID_SHARD": (Strategy.hsdp, True),
    "HYBRID_SHARD_ZERO2": (Strategy.hsdp, False),
}
_LAUNCHER = "the launcher reads it"
# Keys that mean nothing here, each with why.
_NO_EFFECT = {
    "compute_environment": _LAUNCHER,
    "debug": _LAUNCHER,
    "enable_cpu_affinity": _LAUNCHER,
    "gpu_ids": _LAUNCHER,
    "machine_rank": _LAUNCHER,
    "main_process_ip": _LAUNCHER,
    "main_process_port": _LAUNCHER,
    "main_training_function": _LAUNCHER,
    "mpirun_config": _LAUNCHER,
    "num_machines": _LAUNCHER,
    "num_processes": _LAUNCHER,
    "rdzv_backend": _LAUNCHER,
    "same_network": _LAUNCHER,
    "use_cpu": "GPUs are used where there are any",
    "downcast_bf16": "it is for TPUs",
    "fsdp_version": "sharding is FSDP2's in any case",
    "fsdp_min_num_params": "layers are groups, whatever their size",
    "fsdp_backward_prefetch": "FSDP2 fetches the next layer's weights ahead by itself",
    "fsdp_forward_prefetch": "FSDP2 fetches the next layer's weights ahead by itself",
    "fsdp_use_orig_params": "FSDP2 keeps parameters as they are",
    "fsdp_cpu_ram_efficient_loading": "every rank reads its own slices of the weights in any case",
    "fsdp_sync_module_states": "every rank reads its own slices of the weights in any case",
    "dynamo_mode": "layers are compiled one by one, in the default mode",
    "dynamo_use_dynamic": "layers are compiled for all lengths",
    "dynamo_use_fullgraph": "layers are compiled one by one, in the default mode",
    "dynamo_use_regional_compilation": "layers are compiled one by one in any case",
}
# Keys that mean something else was asked for wherever they have a value.
_REFUSED = {
    "deepspeed_config": "DeepSpeed is not used here: write parallel.strategy=fsdp",
    "megatron_lm_config": "Megatron-LM is not used here: write parallel.strategy=fsdp",
    "fp8_config": "models are computed in bf16 or fp32: write parallel.precision=bf16",
    "fsdp_activation_checkpointing_offload": "recomputed activations stay on the device: leave it out",
    "tpu_name": "TPUs are not used here",
    "tpu_zone": "TPUs are not used here",
    "tpu_use_cluster": "TPUs are not used here",
    "tpu_use_sudo": "TPUs are not used here",
    "tpu_vm": "TPUs are not used here",
    "tpu_env": "TPUs are not used here",
    "command_file": "commands of a TPU pod are not run here",
    "commands": "commands of a TPU pod are not run here",
}
_PARALLELISM = ("tp_size", "cp_size", "sp_size", "pp_size", "ep_size")
_EMPTY: tuple[Any, ...] = (None, False, "", 0, "no", "NO", "false", "False")


@dataclass
class AccelerateOptions:
    """What a file says.

    Attributes:
        options: our options by name, such as `parallel.strategy`.
        sources: the key and value that each was made of.
        ignored: keys and values that have no effect here, by the reason.
    """

    options: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, list[str]] = field(default_factory=dict)

    def set_option(self, key: str, value: Any, option: str, ours: Any) -> None:
        """Say that `key=value` is `option=ours`."""
        self.options[option] = ours
        self.sources[option] = f"{key}={_format_value(value)}"

    def ignore(self, key: str, value: Any, why: str) -> None:
        """Say that `key=value` has no effect."""
        self.ignored.setdefault(why, []).append(f"{key}={_format_value(value)}")


def apply_accelerate_config(recipe: Recipe) -> Recipe:
    """The recipe itself, what its `parallel.accelerate_config` says put into it; its own options win.

    Raises:
        ConfigError: no such file, or a key that cannot hold here.
    """
    if recipe.parallel.accelerate_config is None:
        return recipe
    plain = Recipe()
    for option, value in translate_accelerate_config(recipe.parallel.accelerate_config).options.items():
        if option == "parallel.shard_size" and recipe.parallel.strategy is not Strategy.hsdp:
            continue  # of a strategy that the recipe set aside
        if _get(recipe, option) == _get(plain, option):
            section, _, name = option.partition(".")
            setattr(getattr(recipe, section), name, value)
    return recipe


def describe_accelerate_config(recipe: Recipe) -> list[str]:
    """Each key of the file: what it became, or, those of one reason in one line, why it has no effect."""
    path = recipe.parallel.accelerate_config
    if path is None:
        return []
    found = translate_accelerate_config(path)
    lines = []
    for option, value in found.options.items():
        ours = _get(recipe, option)
        told = (
            f"{option}={_format_value(value)}"
            if ours == value
            else f"the recipe's {option}={_format_value(ours)} holds instead"
        )
        lines.append(f"{path}: {found.sources[option]} -> {told}")
    return lines + [f"{path}: no effect, for {why}: {', '.join(keys)}" for why, keys in found.ignored.items()]


def translate_accelerate_config(path: str) -> AccelerateOptions:
    """What the file says in our options.

    Raises:
        ConfigError: it cannot be read, or a key cannot hold here: it is named, with what to write.
    """
    found = AccelerateOptions()
    values = _read(path)
    fsdp = _mapping(values.pop("fsdp_config", None), "fsdp_config", path)
    dynamo = _mapping(values.pop("dynamo_config", None), "dynamo_config", path)
    parallelism = _mapping(values.pop("parallelism_config", None), "parallelism_config", path)
    if "dynamo_backend" in values:  # of older files
        dynamo.setdefault("dynamo_backend", values.pop("dynamo_backend"))
    if "fp16" in values:
        values.setdefault("mixed_precision", "fp16" if values.pop("fp16") else "no")
    kind = values.get("distributed_type", "FSDP")
    for key, value in {**values, **fsdp, **dynamo}.items():
        _refuse_unknown(key, path)
        if key in _TRANSLATED and value is None:
            continue
        if key in fsdp and str(kind).upper() != "FSDP":
            found.ignore(key, value, f"distributed_type is {_format_value(kind)}")
            continue
        if key in _NO_EFFECT:
            _refuse_sagemaker(key, value, path)
            found.ignore(key, value, _NO_EFFECT[key])
        elif key in _REFUSED:
            if not _is_empty(value):
                raise _unsupported(path, key, value, _REFUSED[key])
        else:
            _TRANSLATED[key](found, key, value, path)
    _parallelism(found, parallelism, path)
    if fsdp and str(kind).upper() == "FSDP" and "parallel.strategy" not in found.options:
        found.set_option("fsdp_config", "{...}", "parallel.strategy", Strategy.fsdp)
    return found


def _read(path: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))  # JSON is YAML too
    except FileNotFoundError:
        raise ConfigError(f"{_OPTION}={path}: there is no such file; `accelerate config` writes one") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{_OPTION}={path} cannot be read: {' '.join(str(error).split())}") from None
    return _mapping(values, "the file", path) if values is not None else {}


def _mapping(value: Any, what: str, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{_OPTION}={path}: {what} holds {_format_value(value)}, which is not a mapping")
    return {str(key): one for key, one in value.items()}


def _distributed_type(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "FSDP":
            # How it shards is said by other keys.
            found.options.setdefault("parallel.strategy", Strategy.fsdp)
            found.sources.setdefault("parallel.strategy", f"{key}={_format_value(value)}")
        case "MULTI_GPU" | "MULTI_CPU":
            found.set_option(key, value, "parallel.strategy", Strategy.ddp)
        case "NO" | "FALSE":  # which YAML makes of an unquoted NO
            found.ignore(key, value, "the number of processes decides")
        case kind:
            raise _unsupported(
                path, key, value, f"{kind} is not used here: write parallel.strategy=fsdp, ddp or hsdp, on GPUs or CPUs"
            )


def _sharding(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
    """FSDP1's sharding strategy, which newer files of FSDP1 call `fsdp_reshard_after_forward`; or FSDP2's flag."""
    if key == "fsdp_reshard_after_forward" and str(value).lower() in ("true", "false"):
        found.set_option(key, value, "parallel.reshard_after_forward", str(value).lower() == "true")
        return
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(_SHARDING):  # accelerate counts from 1
        name = list(_SHARDING)[int(name) - 1]
    if name not in _SHARDING:
        raise _unsupported(path, key, value, f"it is one of {', '.join(_SHARDING)}, or true or false")
    strategy, reshard_after_forward = _SHARDING[name]
    found.set_option(key, value, "parallel.strategy", strategy)
    if reshard_after_forward is not None:
        found.set_option(key, value, "parallel.reshard_after_forward", reshard_after_forward)


def _flag(option: str) -> Callable[[AccelerateOptions, str, Any, str], None]:
    def set_option(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
        if str(value).lower() not in ("true", "false"):
            raise _unsupported(path, key, value, "it is true or false")
        found.set_option(key, value, option, str(value).lower() == "true")

    return set_option


def _wrapping(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "TRANSFORMER_BASED_WRAP":
            found.ignore(key, value, "every layer is a group in any case")
        case _:
            raise _unsupported(
                path,
                key,
                value,
                "layers are sharded, found in the model or named by fsdp_transformer_layer_cls_to_wrap: "
                "write TRANSFORMER_BASED_WRAP",
            )


def _layer_class(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
    names = value if isinstance(value, list) else str(value or "").split(",")
    wanted = ",".join(filter(None, (str(name).strip() for name in names)))
    if wanted:
        found.set_option(key, value, _BLOCK, wanted)
    else:
        found.ignore(key, value, "the layers are found in the model")


def _state_dict(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "FULL_STATE_DICT":
            found.set_option(key, value, "checkpoint.layout", CheckpointLayout.full)
        case "SHARDED_STATE_DICT" | "LOCAL_STATE_DICT":
            found.set_option(key, value, "checkpoint.layout", CheckpointLayout.sharded)
        case _:
            raise _unsupported(path, key, value, "it is FULL_STATE_DICT or SHARDED_STATE_DICT")


def _precision(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
    match str(value).lower():
        case "bf16":
            found.set_option(key, value, "parallel.precision", Precision.bf16)
        case "no" | "none" | "false":
            found.set_option(key, value, "parallel.precision", Precision.fp32)
        case _:
            raise _unsupported(path, key, value, "models are computed in bf16 or fp32: write bf16, or no")


def _compiler(found: AccelerateOptions, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "INDUCTOR":
            found.set_option(key, value, "parallel.compile", True)
        case "NO" | "FALSE" | "NONE":
            found.set_option(key, value, "parallel.compile", False)
        case _:
            raise _unsupported(path, key, value, "layers are compiled by torch's INDUCTOR alone: write INDUCTOR, or NO")


def _parallelism(found: AccelerateOptions, values: Mapping[str, Any], path: str) -> None:
    sizes = {key.removeprefix("parallelism_config_"): (key, value) for key, value in values.items()}
    for name in _PARALLELISM:
        key, value = sizes.pop(name, (name, 1))
        if not _is_empty(value) and value != 1:
            raise _unsupported(path, key, value, "every rank computes whole texts with whole layers: write 1")
    copies, parts = (sizes.pop(name, (name, 1)) for name in ("dp_replicate_size", "dp_shard_size"))
    for key, value in sizes.values():
        if not key.removeprefix("parallelism_config_").startswith(("cp_", "sp_", "tp_")):
            raise _unsupported(path, key, value, "accelerate has no such key")
        found.ignore(key, value, "there is no such parallelism here")
    for key, value in (copies, parts):
        if not isinstance(value, int) or isinstance(value, bool):
            raise _unsupported(path, key, value, "it is a number of ranks")
    if copies[1] > 1 and parts[1] > 1:
        found.set_option(*copies, "parallel.strategy", Strategy.hsdp)
        found.set_option(*parts, "parallel.shard_size", parts[1])
    elif copies[1] > 1:
        found.set_option(*copies, "parallel.strategy", Strategy.ddp)
    elif parts[1] > 1:
        found.set_option(*parts, "parallel.strategy", Strategy.fsdp)


_TRANSLATED: dict[str, Callable[[AccelerateOptions, str, Any, str], None]] = {
    "distributed_type": _distributed_type,
    "mixed_precision": _precision,
    "fsdp_sharding_strategy": _sharding,
    "fsdp_reshard_after_forward": _sharding,
    "fsdp_offload_params": _flag("parallel.cpu_offload"),
    "fsdp_activation_checkpointing": _flag("parallel.activation_checkpointing"),
    "fsdp_auto_wrap_policy": _wrapping,
    "fsdp_transformer_layer_cls_to_wrap": _layer_class,
    "fsdp_state_dict_type": _state_dict,
    "dynamo_backend": _compiler,
}


def _refuse_unknown(key: str, path: str) -> None:
    known = [*_TRANSLATED, *_NO_EFFECT, *_REFUSED]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{_OPTION}={path}: {key} is no key of accelerate's that embedtrain knows{hint}")


def _refuse_sagemaker(key: str, value: Any, path: str) -> None:
    if key == "compute_environment" and value not in (None, "LOCAL_MACHINE"):
        raise _unsupported(path, key, value, "training runs where it is started: write LOCAL_MACHINE")


def _is_empty(value: Any) -> bool:
    return value in _EMPTY or value in ({}, [])


def _unsupported(path: str, key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{_OPTION}={path}: {key}={_format_value(value)} cannot hold: {why}")


def _get(recipe: Recipe, option: str) -> Any:
    section, _, name = option.partition(".")
    return getattr(getattr(recipe, section), name)


def _format_value(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)
