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

from embedtrain.config.recipe import Layout, Precision, Recipe, Strategy
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
class Translation:
    """What a file says.

    Attributes:
        options: our options by name, such as `parallel.strategy`.
        said: the key and value that each was made of.
        unused: keys and values that have no effect here, by the reason.
    """

    options: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)

    def put(self, key: str, value: Any, option: str, ours: Any) -> None:
        """Say that `key=value` is `option=ours`."""
        self.options[option] = ours
        self.said[option] = f"{key}={_shown(value)}"

    def leave(self, key: str, value: Any, why: str) -> None:
        """Say that `key=value` has no effect."""
        self.unused.setdefault(why, []).append(f"{key}={_shown(value)}")


def with_accelerate(recipe: Recipe) -> Recipe:
    """The recipe itself, what its `parallel.accelerate_config` says put into it; its own options win.

    Raises:
        ConfigError: no such file, or a key that cannot hold here.
    """
    if recipe.parallel.accelerate_config is None:
        return recipe
    plain = Recipe()
    for option, value in translated(recipe.parallel.accelerate_config).options.items():
        if option == "parallel.shard_size" and recipe.parallel.strategy is not Strategy.hsdp:
            continue  # of a strategy that the recipe set aside
        if _get(recipe, option) == _get(plain, option):
            section, _, name = option.partition(".")
            setattr(getattr(recipe, section), name, value)
    return recipe


def notes_on_accelerate(recipe: Recipe) -> list[str]:
    """Each key of the file: what it became, or, those of one reason in one line, why it has no effect."""
    path = recipe.parallel.accelerate_config
    if path is None:
        return []
    found = translated(path)
    lines = []
    for option, value in found.options.items():
        ours = _get(recipe, option)
        told = f"{option}={_shown(value)}" if ours == value else f"the recipe's {option}={_shown(ours)} holds instead"
        lines.append(f"{path}: {found.said[option]} -> {told}")
    return lines + [f"{path}: no effect, for {why}: {', '.join(keys)}" for why, keys in found.unused.items()]


def translated(path: str) -> Translation:
    """What the file says in our options.

    Raises:
        ConfigError: it cannot be read, or a key cannot hold here: it is named, with what to write.
    """
    found = Translation()
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
            found.leave(key, value, f"distributed_type is {_shown(kind)}")
            continue
        if key in _NO_EFFECT:
            _refuse_sagemaker(key, value, path)
            found.leave(key, value, _NO_EFFECT[key])
        elif key in _REFUSED:
            if not _is_empty(value):
                raise _cannot(path, key, value, _REFUSED[key])
        else:
            _TRANSLATED[key](found, key, value, path)
    _parallelism(found, parallelism, path)
    if fsdp and str(kind).upper() == "FSDP" and "parallel.strategy" not in found.options:
        found.put("fsdp_config", "{...}", "parallel.strategy", Strategy.fsdp)
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
        raise ConfigError(f"{_OPTION}={path}: {what} holds {_shown(value)}, which is not a mapping")
    return {str(key): one for key, one in value.items()}


def _distributed_type(found: Translation, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "FSDP":
            # How it shards is said by other keys.
            found.options.setdefault("parallel.strategy", Strategy.fsdp)
            found.said.setdefault("parallel.strategy", f"{key}={_shown(value)}")
        case "MULTI_GPU" | "MULTI_CPU":
            found.put(key, value, "parallel.strategy", Strategy.ddp)
        case "NO" | "FALSE":  # which YAML makes of an unquoted NO
            found.leave(key, value, "the number of processes decides")
        case kind:
            raise _cannot(
                path, key, value, f"{kind} is not used here: write parallel.strategy=fsdp, ddp or hsdp, on GPUs or CPUs"
            )


def _sharding(found: Translation, key: str, value: Any, path: str) -> None:
    """FSDP1's sharding strategy, which newer files of FSDP1 call `fsdp_reshard_after_forward`; or FSDP2's flag."""
    if key == "fsdp_reshard_after_forward" and str(value).lower() in ("true", "false"):
        found.put(key, value, "parallel.reshard_after_forward", str(value).lower() == "true")
        return
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(_SHARDING):  # accelerate counts from 1
        name = list(_SHARDING)[int(name) - 1]
    if name not in _SHARDING:
        raise _cannot(path, key, value, f"it is one of {', '.join(_SHARDING)}, or true or false")
    strategy, reshard_after_forward = _SHARDING[name]
    found.put(key, value, "parallel.strategy", strategy)
    if reshard_after_forward is not None:
        found.put(key, value, "parallel.reshard_after_forward", reshard_after_forward)


def _flag(option: str) -> Callable[[Translation, str, Any, str], None]:
    def put(found: Translation, key: str, value: Any, path: str) -> None:
        if str(value).lower() not in ("true", "false"):
            raise _cannot(path, key, value, "it is true or false")
        found.put(key, value, option, str(value).lower() == "true")

    return put


def _wrapping(found: Translation, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "TRANSFORMER_BASED_WRAP":
            found.leave(key, value, "every layer is a group in any case")
        case _:
            raise _cannot(
                path,
                key,
                value,
                "layers are sharded, found in the model or named by fsdp_transformer_layer_cls_to_wrap: "
                "write TRANSFORMER_BASED_WRAP",
            )


def _layer_class(found: Translation, key: str, value: Any, path: str) -> None:
    names = value if isinstance(value, list) else str(value or "").split(",")
    wanted = ",".join(filter(None, (str(name).strip() for name in names)))
    if wanted:
        found.put(key, value, _BLOCK, wanted)
    else:
        found.leave(key, value, "the layers are found in the model")


def _state_dict(found: Translation, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "FULL_STATE_DICT":
            found.put(key, value, "checkpoint.layout", Layout.full)
        case "SHARDED_STATE_DICT" | "LOCAL_STATE_DICT":
            found.put(key, value, "checkpoint.layout", Layout.sharded)
        case _:
            raise _cannot(path, key, value, "it is FULL_STATE_DICT or SHARDED_STATE_DICT")


def _precision(found: Translation, key: str, value: Any, path: str) -> None:
    match str(value).lower():
        case "bf16":
            found.put(key, value, "parallel.precision", Precision.bf16)
        case "no" | "none" | "false":
            found.put(key, value, "parallel.precision", Precision.fp32)
        case _:
            raise _cannot(path, key, value, "models are computed in bf16 or fp32: write bf16, or no")


def _compiler(found: Translation, key: str, value: Any, path: str) -> None:
    match str(value).upper():
        case "INDUCTOR":
            found.put(key, value, "parallel.compile", True)
        case "NO" | "FALSE" | "NONE":
            found.put(key, value, "parallel.compile", False)
        case _:
            raise _cannot(path, key, value, "layers are compiled by torch's INDUCTOR alone: write INDUCTOR, or NO")


def _parallelism(found: Translation, values: Mapping[str, Any], path: str) -> None:
    sizes = {key.removeprefix("parallelism_config_"): (key, value) for key, value in values.items()}
    for name in _PARALLELISM:
        key, value = sizes.pop(name, (name, 1))
        if not _is_empty(value) and value != 1:
            raise _cannot(path, key, value, "every rank computes whole texts with whole layers: write 1")
    copies, parts = (sizes.pop(name, (name, 1)) for name in ("dp_replicate_size", "dp_shard_size"))
    for key, value in sizes.values():
        if not key.removeprefix("parallelism_config_").startswith(("cp_", "sp_", "tp_")):
            raise _cannot(path, key, value, "accelerate has no such key")
        found.leave(key, value, "there is no such parallelism here")
    for key, value in (copies, parts):
        if not isinstance(value, int) or isinstance(value, bool):
            raise _cannot(path, key, value, "it is a number of ranks")
    if copies[1] > 1 and parts[1] > 1:
        found.put(*copies, "parallel.strategy", Strategy.hsdp)
        found.put(*parts, "parallel.shard_size", parts[1])
    elif copies[1] > 1:
        found.put(*copies, "parallel.strategy", Strategy.ddp)
    elif parts[1] > 1:
        found.put(*parts, "parallel.strategy", Strategy.fsdp)


_TRANSLATED: dict[str, Callable[[Translation, str, Any, str], None]] = {
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
        raise _cannot(path, key, value, "training runs where it is started: write LOCAL_MACHINE")


def _is_empty(value: Any) -> bool:
    return value in _EMPTY or value in ({}, [])


def _cannot(path: str, key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{_OPTION}={path}: {key}={_shown(value)} cannot hold: {why}")


def _get(recipe: Recipe, option: str) -> Any:
    section, _, name = option.partition(".")
    return getattr(getattr(recipe, section), name)


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)
