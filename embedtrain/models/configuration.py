"""Reads the configuration of a backbone, and rejects what cannot be trained or is not safe."""

import difflib
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.encoder import disable_unused
from embedtrain.models.file_references import read_json
from embedtrain.models.hub import one_line
from embedtrain.models.security import require_safe_config


def read_config(directory: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration in a model directory; a ModelError if it cannot be read, or needs code that is not trusted."""
    settings = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    if "auto_map" in settings and not trust_remote_code and str(settings.get("model_type")) not in CONFIG_MAPPING:
        raise ModelError(
            f"{directory / 'config.json'} needs Python code of the model (auto_map): review it, and if you trust its "
            "authors write trust_remote_code=true (model.trust_remote_code=true for train) on the command line"
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises nearly anything for invalid values
        raise ModelError(
            f"cannot read a model configuration from {directory} ({type(error).__name__}: {one_line(error)})"
        ) from None
    return check_config(config, str(directory))


def check_config(config: PretrainedConfig, where: str) -> PretrainedConfig:
    """The same configuration without what training does not use; a ModelError if it is not supported."""
    if config.is_encoder_decoder:
        raise ModelError(f"{where} holds {config.model_type}, an encoder-decoder; supported are encoders and decoders")
    require_safe_config(config, where)
    disable_unused(config)
    return config


def reject_typos(values: dict[str, Any], config: PretrainedConfig) -> None:
    """Transformers accepts an unknown key silently and builds the model without it."""
    for name in values:
        matches = difflib.get_close_matches(name, config.to_dict(), n=1, cutoff=0.8)
        if matches and not hasattr(config, name):
            raise ConfigError(f"model.config.{name}: {config.model_type} has no such value; did you mean {matches[0]}?")
