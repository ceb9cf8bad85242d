"""The model of a command: from its options to those of a recipe, and back in errors."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.recipe import LoraConfig, ModelConfig, Pooling
from embedtrain.errors import ConfigError, ModelError


class ModelOptions(Protocol):
    """The options of commands that load a model."""

    model: str
    adapter: str | None
    pooling: Pooling | None
    normalize: bool | None
    similarity: VectorSimilarity | None
    max_length: int | None
    query_prompt: str | None
    document_prompt: str | None
    revision: str | None
    trust_remote_code: bool


def command_model_config(options: ModelOptions) -> ModelConfig:
    """The options of the model, as a recipe has them."""
    return ModelConfig(
        path=options.model,
        lora=LoraConfig(path=options.adapter),
        pooling=options.pooling,
        normalize=options.normalize,
        similarity=options.similarity,
        max_length=options.max_length,
        query_prompt=options.query_prompt,
        document_prompt=options.document_prompt,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


MODEL_OPTION_NAMES = {
    "path": "model",
    "lora.path": "adapter",
    "m3.hybrid_weights": "hybrid_weights",
    **{name: name for name in ("pooling", "normalize", "similarity", "max_length", "revision", "trust_remote_code")},
}
RERANKER_OPTION_NAMES = {
    "path": "reranker",
    "lora.path": "reranker.adapter",
    "trust_remote_code": "trust_remote_code",
    **{
        name: f"reranker.{name}" for name in ("max_length", "revision", "pair_template", "score_tokens", "score_labels")
    },
}
TEACHER_OPTION_NAMES = {
    "path": "teacher",
    "max_length": "teacher_max_length",
    "revision": "teacher_revision",
    "pair_template": "teacher_pair_template",
    "score_labels": "teacher_score_labels",
    "trust_remote_code": "trust_remote_code",
}


@contextlib.contextmanager
def command_option_names(options: Mapping[str, str]) -> Iterator[None]:
    """Replace names of options of `model` in errors by those of a command, given by names without `model.`."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        # The advice of training: commands have no `model.kind`.
        message = re.sub(
            r"set model\.kind=cross_encoder,.*", "write it as reranker (evaluate, search) or teacher (mine)", str(error)
        )
        message = re.sub(r"\bmodel\.((?:lora\.|m3\.)?\w+)", lambda match: options.get(match[1], match[0]), message)
        raise type(error)(message) from error.__cause__
