"""Options of `embedtrain.load_encoder`."""

from dataclasses import dataclass

from embedtrain.config.code import code_option
from embedtrain.config.evaluation import Unshard
from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.recipe import Pooling, Precision
from embedtrain.config.validation import OptionChecks


@dataclass(kw_only=True)
class EncoderOptions:
    """Options of `embedtrain.load_encoder`."""

    model: str = ""  # model directory or Hub id
    adapter: str | None = None  # a LoRA adapter in PEFT's format: directory or Hub id
    pooling: Pooling | None = None
    normalize: bool | None = None  # L2-normalize vectors; default: the model's setting
    # How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting.
    similarity: VectorSimilarity | None = None
    max_length: int | None = None  # tokens; default: the model's
    query_prompt: str | None = None  # default: the model's
    document_prompt: str | None = None  # default: the model's
    revision: str | None = None  # a commit, tag or branch of the model's Hub repository
    # Execute Python code of the model: only for authors you trust
    trust_remote_code: bool = code_option(False, "model", "revision")
    precision: Precision = Precision.fp32
    chunk_tokens: int = 16384  # per forward pass of a rank, including padding
    unshard: Unshard = Unshard.layer
    timeout: float = 1800.0  # seconds that a rank waits for the others before all fail


def check_encoder(options: EncoderOptions) -> EncoderOptions:
    """The options themselves, if they can work."""
    check = OptionChecks(options)
    check.require(bool(options.model), "model", "is missing; write a model directory or a Hub id")
    check.at_least(1, "chunk_tokens")
    check.length("max_length")
    check.positive("timeout")
    return options
