"""The types of PEFT's adapters that can be trained, and their configurations, checked against PEFT's own classes."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import peft
from huggingface_hub.dataclasses import type_validator
from huggingface_hub.errors import StrictDataclassFieldValidationError
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from embedtrain.config.validation import did_you_mean, written
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import one_line

# Groups of modules that are trained in full beside adapters.
EMBEDDINGS, NORMS, DENSE = "embeddings", "norms", "dense"
# Other names of types: the type and the settings that they stand for.
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("lora", {"use_dora": True}),
    "rslora": ("lora", {"use_rslora": True}),
}
# Of these, every row of a merged weight depends on the same row of the weight alone, so that shards are merged without
# a collective, and everything that is not trained follows from the settings.
TYPES = (
    *("lora", "loha", "lokr", "ia3", "vera", "randlora", "oft", "boft", "hra", "fourierft", "waveft", "c3a", "miss"),
    *("hira", "gralora", "beft"),
)
_GENERATES = "changes the input or the attention of a model that generates text"
_SHARED = "shares trained weights between layers, which cannot be sharded with the blocks"
_FROM_WEIGHTS = "keeps tensors computed from the whole weights of the model, of which a rank has a shard"
_WHOLE_MERGE = "cannot be merged row by row, as the weights of a sharded model are"
_ROUTES = "chooses among several adapters for each input"
REFUSED = {
    **dict.fromkeys(("prompt_tuning", "multitask_prompt_tuning", "p_tuning", "prefix_tuning"), _GENERATES),
    **dict.fromkeys(("cpt", "cartridge", "adaption_prompt"), _GENERATES),
    "shadow": "runs a second network beside the model",
    "adalora": "changes its ranks in training by the gradients of whole matrices, and adds a term to the loss",
    **dict.fromkeys(("vblora", "unilora", "lily", "tinylora"), _SHARED),
    **dict.fromkeys(("adamss", "delora", "psoft", "osf", "supertuning", "frod", "shira"), _FROM_WEIGHTS),
    **dict.fromkeys(("peanut", "road", "glora", "deft"), _WHOLE_MERGE),
    "pvera": "draws random numbers for each input, which differ with the number of ranks",
    **dict.fromkeys(("xlora", "poly"), _ROUTES),
    "ln_tuning": f"trains norms alone: name them beside adapters, modules_to_save=[{NORMS}]",
    "trainable_tokens": f"trains rows of an embedding: train all of it, modules_to_save=[{EMBEDDINGS}]",
}
# Settings of PEFT that may only have these values, and why.
_PLAIN = "computes something that is not supported"
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_qalora": ((False,), _PLAIN),
    "use_bdlora": ((None,), _PLAIN),
    "bias": (("none",), "trains biases of the model beside the adapter, which is not supported"),
    "fan_in_fan_out": ((False,), "is for layers of GPT-2 that are no linear layers"),
    "trainable_token_indices": ((None,), f"write modules_to_save=[{EMBEDDINGS}]"),
    "target_parameters": ((None,), "adapters are for linear layers: write target_modules"),
    "layer_replication": ((None,), _PLAIN),
    "alora_invocation_tokens": ((None,), _PLAIN),
    "arrow_config": ((None,), _PLAIN),
    "kasa_config": ((None,), _PLAIN),
    "monteclora_config": ((None,), _PLAIN),
    "megatron_config": ((None,), _PLAIN),
    "ensure_weight_tying": ((False,), _PLAIN),
    "module_dropout": ((0,), "leaves out whole layers at random, by which ranks would compute different ones"),
    "boft_n_butterfly_factor": ((1,), "depends on an extension that PEFT builds on each machine"),
    "save_projection": (
        (False,),
        "is not needed: projections follow from projection_prng_key; write false",
    ),
}
# Settings that say where an adapter comes from or how it was trained; those of initial values count only with theirs.
INFORMATIVE = (
    *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("modules_to_save", "runtime_config", "megatron_core", "qalora_group_size", "save_precomputed_indices"),
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "velora_config"),
)
# Initial values of LoRA that change only the adapter. All others, such as pissa, olora, corda, loftq and lora_ga,
# change the weights of the base model as well, which the adapter's files do not hold. `eva` and `mica` are computed
# from data; the files of an adapter have their result.
_OWN_INITIAL_VALUES = (True, False, None, "gaussian", "orthogonal")
_DATA_INITIAL_VALUES = ("eva", "mica")
# Names of layers or regular expressions of them.
PATTERN_SETTINGS = ("target_modules", "exclude_modules", "layers_pattern", "feedforward_modules")
# Mappings with regular expressions of names of layers as keys.
PATTERN_MAPPINGS = ("rank_pattern", "alpha_pattern", "n_frequency_pattern", "block_size_pattern")


class _Unfit(Exception):
    """A setting that is refused."""


def adapter_type(name: str, option: str) -> tuple[str, dict[str, Any]]:
    """PEFT's type of a name, and the settings that it stands for; a ConfigError for one that cannot be trained."""
    kind, implied = ALIASES.get(name.lower(), (name.lower(), {}))
    if kind in TYPES:
        return kind, implied
    if kind in REFUSED:
        raise ConfigError(f"{option}={name}: {REFUSED[kind]}; allowed are {_allowed_types()}")
    hint = did_you_mean(kind, (*ALIASES, *TYPES, *REFUSED))
    raise ConfigError(f"{option}={name}: is no type of adapter{hint} Allowed are {_allowed_types()}")


def new_config(kind: str, settings: Mapping[str, Any], section: str) -> PeftConfig:
    """PEFT's configuration of a new adapter; a ConfigError for a setting that it has not, or a value it cannot have.

    Args:
        kind: one of TYPES.
        settings: by PEFT's names, with names of layers as PEFT matches them.
        section: of the recipe, for messages.
    """
    names = setting_names(kind)
    own = {each.name for each in fields(config_class(kind))}
    for name in settings:
        if name not in names and not (name in FIXED and name in own):
            raise ConfigError(
                f"{section}.{name}: {kind} of PEFT has no such setting{did_you_mean(name, names)} "
                f"Allowed are {', '.join(names)}"
            )
    initial = settings.get("init_lora_weights")
    if isinstance(initial, str) and initial in _DATA_INITIAL_VALUES:
        raise ConfigError(
            f"{section}.init_lora_weights={initial}: computes initial values from data; allowed are "
            f"{_written_values(_OWN_INITIAL_VALUES)}"
        )
    try:
        return _checked(kind, settings)
    except _Unfit as error:
        raise ConfigError(f"{section}.{error}") from None


def stored_config(kind: str, settings: Mapping[str, Any]) -> PeftConfig:
    """PEFT's configuration of an adapter's files.

    Raises:
        ValueError: with a message that begins with a setting, for one that is unknown or changes what is computed.
    """
    known = {*setting_names(kind), *INFORMATIVE, "task_type", *FIXED}
    for name in sorted(settings.keys() - known):
        if settings[name] not in (None, False, {}, []):
            raise ValueError(
                f"{name}={settings[name]!r:.80} is not known, and may change what the adapter computes (it was written "
                f"by PEFT {settings.get('peft_version', 'of unknown version')}, this is {peft.__version__})"
            )
    kept = {name: value for name, value in settings.items() if name not in INFORMATIVE and name in known}
    if kept.get("init_lora_weights") in _DATA_INITIAL_VALUES:
        del kept["init_lora_weights"]
    try:
        return _checked(kind, {name: value for name, value in kept.items() if value is not None})
    except _Unfit as error:
        hint = (
            ""
            if not str(error).startswith("init_lora_weights=")
            else (": convert it with PEFT's option path_initial_model_for_weight_conversion of save_pretrained")
        )
        raise ValueError(f"{error}{hint}") from None


def setting_names(kind: str) -> list[str]:
    """The settings of a type that a recipe may have: those of PEFT's class."""
    left_out = {*INFORMATIVE, "task_type", *FIXED} - {"modules_to_save"}
    return [each.name for each in fields(config_class(kind)) if each.name not in left_out]


def _checked(kind: str, settings: Mapping[str, Any]) -> PeftConfig:
    cls = config_class(kind)
    hints, own = get_type_hints(cls), {each.name for each in fields(cls)}
    for name, value in settings.items():
        if name in FIXED:
            allowed, reason = FIXED[name]
            if value not in (*allowed, None, {}, []):
                raise _Unfit(f"{name}={written(value)}: {reason}")
    initial = settings.get("init_lora_weights")
    if initial not in _OWN_INITIAL_VALUES:
        raise _Unfit(
            f"init_lora_weights={written(initial)}: changes the weights of the base model, which an adapter does not "
            f"hold; allowed are {_written_values(_OWN_INITIAL_VALUES)}"
        )
    kept = {name: value for name, value in settings.items() if name in own and name not in FIXED}
    for name, value in kept.items():
        hint = hints[name]
        # PEFT declares scales as whole numbers, and computes with any.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and hint in (int, float) and (name.endswith("alpha") or hint is float):
            continue
        try:
            type_validator(name, value, hint)
        except (TypeError, StrictDataclassFieldValidationError):
            expected = re.sub(r"typing\.|<class '|'>", "", str(hint))
            raise _Unfit(f"{name}={written(value)}: must be of the type {expected}") from None
    for name in ("r", "block_size", "n_frequency"):
        if isinstance(kept.get(name), int) and kept[name] < 1 and kind != "oft":
            raise _Unfit(f"{name}={kept[name]}: must be at least 1")
    for name, value in kept.items():
        if name.endswith("dropout") and not 0 <= value < 1:
            raise _Unfit(f"{name}={value}: must be from 0 to below 1")
    if "save_projection" in own:
        kept["save_projection"] = False
    try:
        return cls(**kept)
    except Exception as error:  # PEFT raises nearly anything for invalid values
        raise _Unfit(one_line(error)) from None


def config_class(kind: str) -> Any:
    """PEFT's class of the configuration of a type."""
    return next(cls for name, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if str(name.value).lower() == kind)


def _allowed_types() -> str:
    return ", ".join(("lora", *ALIASES, *TYPES[1:]))


def _written_values(values: tuple[Any, ...]) -> str:
    return ", ".join(written(value) for value in values if value is not None)
