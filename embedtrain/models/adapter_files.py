"""An adapter that PEFT wrote: its configuration, as far as it can be trained here, and its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
from safetensors import safe_open
from torch import Tensor

from embedtrain.config.recipe import LoraConfig
from embedtrain.errors import ModelError
from embedtrain.models.hub import one_line, resolve_directory
from embedtrain.models.security import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FILES = [CONFIG, WEIGHTS]
_BEFORE = "base_model.model."
_POOLER = _BEFORE + "pooler."  # which no vector here goes through
# What is taken of a configuration; the rest says how the adapter came about, or is refused below.
_TAKEN = (
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
# Kinds of adapters that compute something else than W + scale x B A.
_OTHER = {
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
    "megatron_config": None,
}


@dataclass(frozen=True)
class AdapterFiles:
    """A directory that PEFT wrote.

    Attributes:
        directory: with adapter_config.json and adapter_model.safetensors.
        config: as far as it decides what is computed.
        base_model: the model it was trained on, as its authors called it.
        parts: modules that are stored whole besides.
        revision: commit of that model's Hub repository, where it has one.
    """

    directory: Path
    config: peft.LoraConfig
    base_model: str
    parts: tuple[str, ...]
    revision: str | None = None

    def read(self, names: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Weights by the encoder's names.

        Args:
            names: those asked for, with their shapes.

        Raises:
            ModelError: one is missing, left over, or of another shape: the adapter is another model's.
        """
        path = self.directory / WEIGHTS
        wanted = {peft_key(name): name for name in names}
        found: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                stored = {_plain(key, wanted): key for key in file.keys() if not key.startswith(_POOLER)}  # noqa: SIM118 - not a dict
                for key in sorted(stored.keys() ^ wanted.keys()):
                    raise ModelError(
                        self.mismatch_message(f"{key} is in {'its files' if key in stored else 'the model'} alone")
                    )
                for key, name in wanted.items():
                    shape = file.get_slice(stored[key]).get_shape()
                    if list(shape) != list(names[name]):
                        raise ModelError(
                            self.mismatch_message(f"{key} has the shape {shape}, here it is {list(names[name])}")
                        )
                    found[name] = file.get_tensor(stored[key]).float()
        except ModelError:
            raise
        except Exception as error:  # safetensors raises an exception type of its own that it does not export
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
        return found

    def mismatch_message(self, why: str) -> str:
        """What is said of an adapter that does not fit."""
        base_model = f"it was made for {self.base_model}" if self.base_model else "it does not say for which"
        return (
            f"model.lora.path={self.directory} is an adapter of another model: {why}; {base_model}: "
            "write model.path=THAT"
        )


def open_adapter(lora: LoraConfig) -> AdapterFiles | None:
    """The adapter that `model.lora.path` names; None where none is named.

    Raises:
        ModelError: no such directory or Hub repository, or an adapter that cannot be trained here.
        ConfigError: a revision of a directory.
    """
    if lora.path is None:
        return None
    directory = resolve_directory(lora.path, lora.revision, "model.lora.path", "model.lora.revision", _FILES)
    found = read_settings(directory)
    if not (directory / WEIGHTS).is_file():
        raise ModelError(f"{directory / WEIGHTS} is missing: an adapter's weights are read from safetensors alone")
    return found


def peft_key(name: str) -> str:
    """What PEFT calls a weight in an adapter's file, by the encoder's name."""
    return f"{_BEFORE}{name.removeprefix('backbone.').replace('.default.', '.')}"


def _plain(key: str, wanted: Mapping[str, str]) -> str:
    """A key without what versions of PEFT put into it, and without the `model.` of a model with a vocabulary's head."""
    key = key.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".").replace(".default.", ".")
    without_head = _BEFORE + key.removeprefix(_BEFORE).removeprefix("model.")
    return key if key in wanted or without_head not in wanted else without_head


def read_settings(directory: Path) -> AdapterFiles:
    """What a directory's adapter_config.json says.

    Raises:
        ModelError: it is missing, or of an adapter that cannot be trained here.
    """
    settings: dict[str, Any] = read_json(directory / CONFIG)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{directory / CONFIG}: peft_type={kind}; embedtrain trains LORA")
    for name, harmless in _OTHER.items():
        if settings.get(name) not in (harmless, None, {}, []):
            raise ModelError(
                f"{directory / CONFIG}: {name}={settings[name]!r} is not plain LoRA, which is what is trained here"
            )
    if not isinstance(settings.get("r"), int) or not settings.get("target_modules"):
        raise ModelError(f"{directory / CONFIG} does not say both the rank (r) and the layers (target_modules)")
    try:
        config = peft.LoraConfig(**{name: settings[name] for name in _TAKEN if name in settings})
    except Exception as error:  # of values that make no sense PEFT raises nearly anything
        raise ModelError(f"{directory / CONFIG}: {one_line(error)}") from None
    parts = settings.get("modules_to_save") or ()
    base_model, revision = (settings.get(name) for name in ("base_model_name_or_path", "revision"))
    return AdapterFiles(
        directory, config, str(base_model or ""), tuple(map(str, parts)), None if revision is None else str(revision)
    )
