"""The cross-encoder of a command that ranks documents: the options `reranker` and `teacher`."""

from dataclasses import dataclass
from typing import Any

from embedtrain.config.evaluation import Backend
from embedtrain.config.kinds import kind_of_pairs
from embedtrain.config.model_checks import check_model
from embedtrain.config.options import LENGTH, check_values, option
from embedtrain.config.parsing import parse_items
from embedtrain.config.recipe import LoraConfig, ModelConfig
from embedtrain.config.validation import OptionChecks
from embedtrain.errors import ConfigError


@dataclass(kw_only=True)
class RerankerConfig:
    """The option `reranker` of `evaluate` and `search`: a finished cross-encoder or late-interaction model.

    A string is its `path`.
    """

    path: str = option(is_input=True)  # model directory or Hub id
    adapter: str | None = option(None, is_input=True)  # a LoRA adapter in PEFT's format: directory or Hub id
    revision: str | None = None  # a commit, tag or branch of its Hub repository
    max_length: int | None = option(None, **LENGTH)  # tokens of a pair; default: the reranker's
    query_prompt: str | None = None  # default: the reranker's
    document_prompt: str | None = None  # default: the reranker's
    pair_template: Any = None  # as model.pair_template
    score_tokens: list[str] | None = None  # as model.score_tokens
    score_labels: list[int] | None = None  # as model.score_labels
    # Of a cross-encoder: read a document that is too long in overlapping windows, of which the best counts.
    document_windows: bool = False
    backend: Backend = Backend.torch  # as the option of this name of evaluate

    def model_config(self, *, trust_remote_code: bool) -> ModelConfig:
        """The options of the model, as a recipe has them."""
        options: ModelConfig = kind_of_pairs().options(
            path=self.path,
            lora=LoraConfig(path=self.adapter),
            revision=self.revision,
            max_length=self.max_length,
            query_prompt=self.query_prompt,
            document_prompt=self.document_prompt,
            pair_template=self.pair_template,
            score_tokens=self.score_tokens,
            score_labels=self.score_labels,
            trust_remote_code=trust_remote_code,
        )
        return options


def parse_reranker(value: Any, option: str) -> RerankerConfig | None:
    """The value of an option, a path or a mapping, with its values checked; None stays.

    Raises ConfigError, with the name of the option, for a value that cannot work.
    """
    if value is None:
        return None
    if isinstance(value, list):
        raise ConfigError(f"{option}={value!r} is neither a path nor a mapping with `path`")
    (reranker,) = parse_items(value, RerankerConfig, option)
    check_values(reranker, f"{option}.")
    check = OptionChecks(reranker, f"{option}.")
    check.require(bool(reranker.path), "path", "is empty; write a directory or a Hub id")
    check.require(
        reranker.backend is Backend.torch or reranker.adapter is None, "adapter", "is not part of a graph; leave it out"
    )
    try:
        check_model(reranker.model_config(trust_remote_code=False))
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.", f"{option}.")) from None
    return reranker
