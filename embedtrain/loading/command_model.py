"""The model that a door is to load, as its options say it."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from embedtrain.config.recipe import LoraConfig, ModelConfig
from embedtrain.errors import ConfigError, ModelError
from embedtrain.evaluate.options import EvaluateOptions
from embedtrain.mine.options import MineOptions


def model_of(options: EvaluateOptions | MineOptions) -> ModelConfig:
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


OF_MODEL = {
    "path": "model",
    "lora.path": "adapter",
    **{name: name for name in ("pooling", "normalize", "max_length", "revision", "trust_remote_code")},
}
OF_TEACHER = {
    "path": "teacher",
    "max_length": "teacher_max_length",
    "revision": "teacher_revision",
    "trust_remote_code": "trust_remote_code",
}


@contextlib.contextmanager
def naming(options: Mapping[str, str]) -> Iterator[None]:
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
