"""Reads an adapter written by PEFT: its configuration, if it is supported, and its weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
from safetensors import safe_open
from torch import Tensor

from embedtrain.config.recipe import LoraConfig
from embedtrain.errors import ModelError
from embedtrain.models.export_record import verify_settings, verify_weights
from embedtrain.models.file_references import read_json, require_own_files
from embedtrain.models.hub import one_line, resolve_directory

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FILES = [CONFIG, WEIGHTS]
_PREFIX = "base_model.model."
# Python's regular expressions have no limit of time: one with more repetitions, or of a group, may never end.
_MAX_REPETITIONS = 6
_MAX_PATTERNS = 1000  # in one setting; PEFT compiles all of them again for every layer
_POOLER = _PREFIX + "pooler."  # unused
# PEFT adds these names to `modules_to_save` of every classifier, whether or not it has such a module.
CLASSIFIER, CLASSIFIER_MODULES = "SEQ_CLS", ("classifier", "score")
# The supported keys of a configuration.
_SUPPORTED = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "use_rslora",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "task_type",
)
# Kinds of adapters that compute something other than W + scale x B A, and the values that switch them off.
_UNSUPPORTED = {
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "lora_bias": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "megatron_config": None,
    "ensure_weight_tying": False,
}
# Keys that say where an adapter comes from or how it was trained; those of initial values count only with theirs.
_INFORMATIVE = (
    *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("modules_to_save", "init_lora_weights", "runtime_config", "megatron_core", "qalora_group_size"),
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "velora_config"),
)
KNOWN_KEYS = frozenset((*_SUPPORTED, *_UNSUPPORTED, *_INFORMATIVE))
# Initial values that change only the adapter. All others, such as pissa, olora, corda, loftq and lora_ga, change the
# weights of the base model as well, which the adapter's files do not hold.
_OWN_INITIAL_VALUES = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True)
class AdapterFiles:
    """A directory written by PEFT."""

    directory: Path
    config: peft.LoraConfig  # the supported part
    base_model: str  # name of the model it was trained on
    modules_to_save: tuple[str, ...]  # stored in full
    revision: str | None = None  # commit of the base model's Hub repository, if recorded

    @property
    def has_head(self) -> bool:
        """Whether it holds the head of a sequence classifier."""
        return self.config.task_type == CLASSIFIER and bool(self.modules_to_save)

    def read(self, names: Mapping[str, Sequence[int]], stored_name: Callable[[str], str]) -> dict[str, Tensor]:
        """Weights by the encoder's names; `names` has their shapes, `stored_name` is the encoder's.

        Weights that are missing, left over, or of other shapes raise a ModelError: the adapter is of another model.
        """
        path = self.directory / WEIGHTS
        expected = {peft_key(stored_name(name)): name for name in names}
        # The adapter of an embedding model on the backbone of a cross-encoder.
        aliases = {peft_key(name.removeprefix("backbone.")): key for key, name in expected.items()}
        tensors: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                stored = {_normalized(key, aliases): key for key in file.keys()}  # noqa: SIM118 - not a dict
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

    def mismatch_message(self, why: str) -> str:
        """The message about an adapter that does not fit."""
        base_model = f"it was trained on {self.base_model}" if self.base_model else "it does not name its base model"
        return (
            f"model.lora.path={self.directory} is an adapter of another model: {why}; {base_model}: "
            "set model.path to it"
        )


def open_adapter(lora: LoraConfig) -> AdapterFiles | None:
    """The adapter in `model.lora.path`, if it is set.

    A ModelError if there is no such directory or Hub repository, or the adapter is not supported; a ConfigError if a
    revision is set for a local directory.
    """
    if lora.path is None:
        return None
    directory = resolve_directory(lora.path, lora.revision, "model.lora.path", "model.lora.revision", _FILES)
    require_own_files(directory)
    verify_settings(directory)
    verify_weights(directory)
    files = read_settings(directory)
    if not (directory / WEIGHTS).is_file():
        raise ModelError(f"{directory / WEIGHTS} is missing: weights of an adapter are read only from safetensors")
    return files


def peft_key(stored_name: str) -> str:
    """The key of a weight in an adapter's file, from its name in transformers' class."""
    return f"{_PREFIX}{stored_name.replace('.default.', '.')}"


def _normalized(key: str, aliases: Mapping[str, str]) -> str:
    """A key without the additions of some PEFT versions, and without the `model.` of a model with a language head."""
    key = key.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".").replace(".default.", ".")
    without_head = _PREFIX + key.removeprefix(_PREFIX).removeprefix("model.")
    if key in aliases.values():
        return key
    return aliases.get(key, aliases.get(without_head, key))


def read_settings(directory: Path) -> AdapterFiles:
    """Read a directory's adapter_config.json; a ModelError if it is missing or the adapter is not supported."""
    settings: dict[str, Any] = read_json(directory / CONFIG)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{directory / CONFIG}: peft_type={kind}; only LORA is supported")
    for name, default in _UNSUPPORTED.items():
        if settings.get(name) not in (default, None, {}, []):
            raise ModelError(
                f"{directory / CONFIG}: {name}={settings[name]!r} is not plain LoRA, which is all that is supported"
            )
    initial = settings.get("init_lora_weights", True)
    if initial not in _OWN_INITIAL_VALUES:
        raise ModelError(
            f"{directory / CONFIG}: init_lora_weights={initial} changes the weights of the base model, which the "
            "adapter does not hold: convert it with PEFT's option path_initial_model_for_weight_conversion of "
            "save_pretrained"
        )
    for name in sorted(settings.keys() - KNOWN_KEYS):
        if settings[name] not in (None, False, {}, []):
            raise ModelError(
                f"{directory / CONFIG}: {name}={settings[name]!r:.80} is not known, and may change what the adapter "
                f"computes (it was written by PEFT {settings.get('peft_version', 'of unknown version')}, this is "
                f"{peft.__version__}): save it as plain LoRA"
            )
    if not isinstance(settings.get("r"), int) or not settings.get("target_modules"):
        raise ModelError(f"{directory / CONFIG} must define the rank (r) and the layers (target_modules)")
    _check_patterns(directory / CONFIG, settings)
    try:
        config = peft.LoraConfig(**{name: settings[name] for name in _SUPPORTED if name in settings})
    except Exception as error:  # PEFT raises nearly anything for invalid values
        raise ModelError(f"{directory / CONFIG}: {one_line(error)}") from None
    modules = settings.get("modules_to_save") or ()
    base_model, revision = (settings.get(name) for name in ("base_model_name_or_path", "revision"))
    return AdapterFiles(
        directory, config, str(base_model or ""), tuple(map(str, modules)), None if revision is None else str(revision)
    )


def _check_patterns(path: Path, settings: Mapping[str, Any]) -> None:
    """Reject regular expressions that may take unbounded time; PEFT matches them with the name of every layer."""
    names = ("target_modules", "exclude_modules", "layers_pattern")
    patterns = [(name, settings[name]) for name in names if isinstance(settings.get(name), str)]
    for name in ("layers_pattern", "rank_pattern", "alpha_pattern"):
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
