"""Translates a file that `accelerate config` wrote into options of a recipe.

Each key is translated, reported as without effect, or rejected. The keys are those of `ClusterConfig` of accelerate
1.15, of its questions about FSDP 1 and 2, and of older files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import yaml

from embedtrain.config.hydra_files import load_yaml
from embedtrain.config.recipe import CheckpointLayout, Precision, Recipe, Strategy
from embedtrain.config.validation import did_you_mean, written
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user

_OPTION = "parallel.accelerate_config"
_SHARDING = {
    "FULL_SHARD": (Strategy.fsdp, True),
    "SHARD_GRAD_OP": (Strategy.fsdp, False),
    "NO_SHARD": (Strategy.ddp, None),
    "HYBRID_SHARD": (Strategy.hsdp, True),
    "HYBRID_SHARD_ZERO2": (Strategy.hsdp, False),
}
# Keys without effect, and the reason.
_LAUNCHER_KEYS = """
    compute_environment debug enable_cpu_affinity gpu_ids machine_rank main_process_ip main_process_port
    main_training_function mpirun_config num_machines num_processes rdzv_backend same_network
"""
_NO_EFFECT = dict.fromkeys(_LAUNCHER_KEYS.split(), "the launcher reads it") | {
    "use_cpu": "GPUs are used if there are any",
    "downcast_bf16": "it is for TPUs",
    "fsdp_version": "models are always sharded with FSDP2",
    "fsdp_min_num_params": "each layer is an FSDP unit, whatever its size",
    "fsdp_backward_prefetch": "FSDP2 prefetches the next layer's weights by itself",
    "fsdp_forward_prefetch": "FSDP2 prefetches the next layer's weights by itself",
    "fsdp_use_orig_params": "FSDP2 keeps parameters as they are",
    "fsdp_cpu_ram_efficient_loading": "every rank always reads its own slices of the weights",
    "fsdp_sync_module_states": "every rank always reads its own slices of the weights",
    "dynamo_mode": "layers are compiled one by one, in the default mode",
    "dynamo_use_dynamic": "layers are compiled for all lengths",
    "dynamo_use_fullgraph": "layers are compiled one by one, in the default mode",
    "dynamo_use_regional_compilation": "layers are always compiled one by one",
}
# Keys that are rejected when they have a value, and what to write instead.
_TPU_KEYS = "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "commands"
_REJECTED = dict.fromkeys(_TPU_KEYS, "training runs on GPUs or CPUs, not on TPUs") | {
    "deepspeed_config": "write parallel.strategy=fsdp instead of DeepSpeed",
    "megatron_lm_config": "write parallel.strategy=fsdp instead of Megatron-LM",
    "fp8_config": "write parallel.fp8=true with parallel.precision=bf16, which chooses its own scales",
    "fsdp_activation_checkpointing_offload": "recomputed activations stay on the device; leave it out",
}
_PARALLELISM = ("tp_size", "cp_size", "sp_size", "pp_size", "ep_size")
_EMPTY: tuple[Any, ...] = (None, False, "", 0, "no", "NO", "false", "False", {}, [])


@dataclass
class AccelerateOptions:
    """The content of one file of accelerate's."""

    path: str  # the file
    options: dict[str, Any] = field(default_factory=dict)  # options of the recipe by name, such as parallel.strategy
    origins: dict[str, str] = field(default_factory=dict)  # key and value of the file that each option comes from
    unused: dict[str, list[str]] = field(default_factory=dict)  # keys and values without effect, by reason

    def set(self, key: str, value: Any, option: str, translated: Any) -> None:
        """Translate `key=value` into `option=translated`."""
        self.options[option] = translated
        self.origins[option] = f"{key}={written(value)}"

    def ignore(self, key: str, value: Any, reason: str) -> None:
        """Note that `key=value` has no effect."""
        self.unused.setdefault(reason, []).append(f"{key}={written(value)}")

    def error(self, key: str, value: Any, reason: str) -> ConfigError:
        """The error for a `key=value` that cannot be translated."""
        return ConfigError(f"{_OPTION}={self.path}: {key}={written(value)} is not supported: {reason}")


Translator = Callable[[AccelerateOptions, str, Any], None]


def apply_accelerate_config(recipe: Recipe) -> Recipe:
    """The recipe itself, with the options of its `parallel.accelerate_config`; options that the recipe sets win."""
    if recipe.parallel.accelerate_config is None:
        return recipe
    defaults = Recipe()
    for option, value in translate_accelerate_config(recipe.parallel.accelerate_config).options.items():
        if option == "parallel.shard_size" and recipe.parallel.strategy is not Strategy.hsdp:
            continue  # it belongs to a strategy that the recipe overrides
        get = attrgetter(option)
        if get(recipe) == get(defaults):
            section, _, name = option.partition(".")
            setattr(getattr(recipe, section), name, value)
    return recipe


def describe_accelerate_config(recipe: Recipe) -> list[str]:
    """One line per key of the file with the option it became, and one per reason with the keys without effect."""
    path = recipe.parallel.accelerate_config
    if path is None:
        return []
    accelerate = translate_accelerate_config(path)
    lines = []
    for option, value in accelerate.options.items():
        used = attrgetter(option)(recipe)
        result = f"{option}={written(used)}"
        if used != value:
            result = f"overridden by the recipe's {result}"
        lines.append(f"{path}: {accelerate.origins[option]} -> {result}")
    for reason, keys in accelerate.unused.items():
        lines.append(f"{path}: no effect, because {reason}: {', '.join(keys)}")
    return lines


def translate_accelerate_config(path: str) -> AccelerateOptions:
    """The options of the recipe that the file sets; a ConfigError if it has a key that is unknown or not supported."""
    accelerate = AccelerateOptions(path)
    keys = [*_TRANSLATORS, *_NO_EFFECT, *_REJECTED]
    values = _read(path)
    sections = ("fsdp_config", "dynamo_config", "parallelism_config")
    fsdp, dynamo, parallelism = (_mapping(values.pop(name, None), name, path) for name in sections)
    if "dynamo_backend" in values:  # of older files
        dynamo.setdefault("dynamo_backend", values.pop("dynamo_backend"))
    if "fp16" in values:
        values.setdefault("mixed_precision", "fp16" if values.pop("fp16") else "no")
    distributed_type = values.get("distributed_type", "FSDP")
    uses_fsdp = str(distributed_type).upper() == "FSDP"
    for key, value in {**values, **fsdp, **dynamo}.items():
        if key not in keys:
            raise ConfigError(f"{_OPTION}={path}: {key} is not a key of accelerate's{did_you_mean(key, keys)}")
        if key in _TRANSLATORS and value is None:
            continue
        if key in fsdp and not uses_fsdp:
            accelerate.ignore(key, value, f"distributed_type is {written(distributed_type)}")
        elif key in _NO_EFFECT:
            if key == "compute_environment" and value not in (None, "LOCAL_MACHINE"):
                raise accelerate.error(key, value, "training runs on this machine; write LOCAL_MACHINE")
            accelerate.ignore(key, value, _NO_EFFECT[key])
        elif key in _REJECTED:
            if value not in _EMPTY:
                raise accelerate.error(key, value, _REJECTED[key])
        else:
            _TRANSLATORS[key](accelerate, key, value)
    _translate_parallelism(accelerate, parallelism)
    if fsdp and uses_fsdp and "parallel.strategy" not in accelerate.options:
        accelerate.set("fsdp_config", "{...}", "parallel.strategy", Strategy.fsdp)
    return accelerate


def _read(path: str) -> dict[str, Any]:
    try:
        values = load_yaml(expand_user(path), yaml.SafeLoader)  # JSON is YAML too
    except FileNotFoundError:
        raise ConfigError(f"{_OPTION}={path}: there is no such file; `accelerate config` writes one") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{_OPTION}={path} cannot be read: {' '.join(str(error).split())}") from None
    return _mapping(values, "the file", path)


def _mapping(value: Any, name: str, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{_OPTION}={path}: {name} holds {written(value)}, which is not a mapping")
    return {str(key): item for key, item in value.items()}


def _translate_distributed_type(accelerate: AccelerateOptions, key: str, value: Any) -> None:
    match str(value).upper():
        case "FSDP":
            if "parallel.strategy" not in accelerate.options:  # other keys define the sharding, and win
                accelerate.set(key, value, "parallel.strategy", Strategy.fsdp)
        case "MULTI_GPU" | "MULTI_CPU":
            accelerate.set(key, value, "parallel.strategy", Strategy.ddp)
        case "NO" | "FALSE":  # YAML reads an unquoted NO as false
            accelerate.ignore(key, value, "the number of processes decides")
        case _:
            raise accelerate.error(key, value, "write parallel.strategy=fsdp, ddp or hsdp, on GPUs or CPUs")


def _translate_sharding(accelerate: AccelerateOptions, key: str, value: Any) -> None:
    """FSDP1's sharding strategy, which newer files of FSDP1 call `fsdp_reshard_after_forward`; or FSDP2's flag."""
    if key == "fsdp_reshard_after_forward" and str(value).lower() in ("true", "false"):
        accelerate.set(key, value, "parallel.reshard_after_forward", str(value).lower() == "true")
        return
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(_SHARDING):  # accelerate counts from 1
        name = list(_SHARDING)[int(name) - 1]
    if name not in _SHARDING:
        raise accelerate.error(key, value, f"write one of {', '.join(_SHARDING)}, or true or false")
    strategy, reshard = _SHARDING[name]
    accelerate.set(key, value, "parallel.strategy", strategy)
    if reshard is not None:
        accelerate.set(key, value, "parallel.reshard_after_forward", reshard)


def _choice(option: str, allowed: dict[str, Any], hint: str) -> Translator:
    def translate(accelerate: AccelerateOptions, key: str, value: Any) -> None:
        name = str(value).upper()
        if name not in allowed:
            raise accelerate.error(key, value, hint)
        accelerate.set(key, value, option, allowed[name])

    return translate


def _flag(option: str) -> Translator:
    return _choice(option, {"TRUE": True, "FALSE": False}, "write true or false")


def _translate_wrap_policy(accelerate: AccelerateOptions, key: str, value: Any) -> None:
    if str(value).upper() != "TRANSFORMER_BASED_WRAP":
        hint = "layers are sharded, those in fsdp_transformer_layer_cls_to_wrap or those of the model"
        raise accelerate.error(key, value, f"{hint}; write TRANSFORMER_BASED_WRAP")
    accelerate.ignore(key, value, "every layer is always an FSDP unit")


def _translate_layer_class(accelerate: AccelerateOptions, key: str, value: Any) -> None:
    names = value if isinstance(value, list) else str(value or "").split(",")
    classes = ",".join(filter(None, (str(name).strip() for name in names)))
    if classes:
        accelerate.set(key, value, "parallel.block_class", classes)
    else:
        accelerate.ignore(key, value, "the layer class is detected")


def _translate_parallelism(accelerate: AccelerateOptions, values: Mapping[str, Any]) -> None:
    sizes = {key.removeprefix("parallelism_config_"): (key, value) for key, value in values.items()}
    for name in _PARALLELISM:
        key, value = sizes.pop(name, (name, 1))
        if value not in _EMPTY and value != 1:
            raise accelerate.error(key, value, "every rank computes whole texts with whole layers; write 1")
    replicas, shards = (sizes.pop(name, (name, 1)) for name in ("dp_replicate_size", "dp_shard_size"))
    for key, value in sizes.values():
        if not key.removeprefix("parallelism_config_").startswith(("cp_", "sp_", "tp_")):
            raise accelerate.error(key, value, "accelerate has no such key")
        accelerate.ignore(key, value, "this kind of parallelism is not supported")
    for key, value in (replicas, shards):
        if not isinstance(value, int) or isinstance(value, bool):
            raise accelerate.error(key, value, "write a number of ranks")
    if replicas[1] > 1 and shards[1] > 1:
        accelerate.set(*replicas, "parallel.strategy", Strategy.hsdp)
        accelerate.set(*shards, "parallel.shard_size", shards[1])
    elif replicas[1] > 1:
        accelerate.set(*replicas, "parallel.strategy", Strategy.ddp)
    elif shards[1] > 1:
        accelerate.set(*shards, "parallel.strategy", Strategy.fsdp)


_TRANSLATORS: dict[str, Translator] = {
    "distributed_type": _translate_distributed_type,
    "mixed_precision": _choice(
        "parallel.precision",
        # YAML reads an unquoted no as false
        {"BF16": Precision.bf16} | dict.fromkeys(["NO", "NONE", "FALSE"], Precision.fp32),
        "models are computed in bf16 or fp32; write bf16, or no (parallel.fp8=true is an option of the recipe)",
    ),
    "fsdp_sharding_strategy": _translate_sharding,
    "fsdp_reshard_after_forward": _translate_sharding,
    "fsdp_offload_params": _flag("parallel.cpu_offload"),
    "fsdp_activation_checkpointing": _flag("parallel.activation_checkpointing"),
    "fsdp_auto_wrap_policy": _translate_wrap_policy,
    "fsdp_transformer_layer_cls_to_wrap": _translate_layer_class,
    "fsdp_state_dict_type": _choice(
        "checkpoint.layout",
        {"FULL_STATE_DICT": CheckpointLayout.full}
        | dict.fromkeys(["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"], CheckpointLayout.sharded),
        "write FULL_STATE_DICT or SHARDED_STATE_DICT",
    ),
    "dynamo_backend": _choice(
        "parallel.compile",
        {"INDUCTOR": True} | dict.fromkeys(["NO", "NONE", "FALSE"], False),
        "layers are compiled with torch's inductor only; write INDUCTOR, or NO",
    ),
}
