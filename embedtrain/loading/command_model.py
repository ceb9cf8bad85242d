"""The model that a door is to load, as its options say it."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from embedtrain.config.recipe import LoraConfig, ModelConfig, Pooling
from embedtrain.errors import ConfigError, ModelError


class ModelOptions(Protocol):
    """Options that commands which load a model have in common."""

    model: str
    adapter: str | None
    pooling: Pooling | None
    normalize: bool | None
    max_length: int | None
    query_prompt: str | None
    document_prompt: str | None
    revision: str | None
    trust_remote_code: bool


def command_model_config(options: ModelOptions) -> ModelConfig:
    """Directory or Hub id, with what differs from what it says itself."""
    return ModelConfig(
        path=options.model,
        lora=LoraConfig(path=options.adapter),
        pooling=options.pooling,
        normalize=options.normalize,
        max_length=options.max_length,
        query_prompt=options.query_prompt,
        document_prompt=options.document_prompt,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


MODEL_OPTION_NAMES = {
    "path": "model",
    "lora.path": "adapter",
    **{name: name for name in ("pooling", "normalize", "max_length", "revision", "trust_remote_code")},
}
TEACHER_OPTION_NAMES = {
    "path": "teacher",
    "max_length": "teacher_max_length",
    "revision": "teacher_revision",
    "trust_remote_code": "trust_remote_code",
}


@contextlib.contextmanager
def command_option_names(options: Mapping[str, str]) -> Iterator[None]:
    """Call options of `model` in errors as they are called here.

    Args:
        options: by their names in a recipe, without `model.`.
    """

    def here(found: re.Match[str]) -> str:
        return options.get(found[1], found[0])

    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(re.sub(r"\bmodel\.((?:lora\.)?\w+)", here, str(error))) from error.__cause__
