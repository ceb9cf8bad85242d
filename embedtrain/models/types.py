"""What is known about a model before its weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PretrainedConfig

from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.m3 import M3Settings
from embedtrain.config.recipe import ModelKind, Pooling
from embedtrain.config.token_vectors import TokenVectors
from embedtrain.errors import ConfigError
from embedtrain.models.encoder import hidden_size
from embedtrain.models.module_settings import DenseSource
from embedtrain.models.score_head import HeadSource
from embedtrain.models.word_weights import WordWeights


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How texts become tokens, besides the tokenizer's files."""

    max_length: int | None = None  # tokens per text; None: what the tokenizer and the position embeddings allow
    append_eos: bool | None = None  # whether texts end with the end-of-text token; None: decided by `load_tokenizer`
    lowercase: bool = False
    is_sentence_transformers: bool = False  # the tokenizer of such a directory already ends texts as needed
    prompt_tokens: tuple[str, ...] = ()  # entries of the vocabulary that prompts begin with, each one token


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Everything known about a model before its weights are read."""

    directory: Path | None  # holds weights and tokenizer; None for a model made from a configuration
    config: PretrainedConfig  # of the backbone: no cache, `model.bidirectional` and `model.rope_*` applied
    pooling: Pooling
    include_prompt: bool = True  # whether the pooling includes the prompt's tokens
    dense: tuple[DenseSource, ...] = ()  # heads between pooling and normalisation
    normalize: bool
    similarity: VectorSimilarity = VectorSimilarity.cosine  # of vectors, one of each text
    tokenization: Tokenization
    truncate_dim: int | None = None  # dimensions of a vector that are used, the first of all; None: all
    prompts: dict[str, str] = field(default_factory=dict)  # by name, `query` and `document` among them
    trust_remote_code: bool = False  # whether Python in `directory` may run
    head: HeadSource | None = None  # of a cross-encoder; None for a model of vectors
    token_vectors: TokenVectors | None = None  # of a late-interaction model, whose projection is `dense`
    m3: M3Settings | None = None  # of a model of three representations
    words: WordWeights | None = None  # of a learned sparse model
    adapter: Path | None = None  # a LoRA adapter in PEFT's format that a command loads onto it
    commit: str | None = None  # of the Hub repository that it was downloaded from; None for a local directory

    @property
    def kind(self) -> ModelKind:
        """What the model computes."""
        if self.token_vectors is not None:
            return ModelKind.late_interaction
        if self.m3 is not None:
            return ModelKind.m3
        if self.words is not None:
            return ModelKind.sparse
        return ModelKind.dense if self.head is None else ModelKind.cross_encoder

    @property
    def has_new_head(self) -> bool:
        """Whether a part is not in the files and starts from the seed."""
        parts = (self.head, self.token_vectors, self.m3)
        return any(part is not None and part.is_new for part in parts) or any(d.directory is None for d in self.dense)

    @property
    def dimension(self) -> int:
        """The dimension of the vectors, before `truncate_dim`; 1 for the score of a cross-encoder, V of sparse ones."""
        if self.words is not None:
            return int(self.config.get_text_config().vocab_size)
        if self.head is not None:
            return 1
        return self.dense[-1].num_out if self.dense else hidden_size(self.config)

    def require_inner_products(self, option: str) -> None:
        """Raise a ConfigError if the vectors are compared by a distance, as compressed ones are not."""
        if self.similarity in (VectorSimilarity.euclidean, VectorSimilarity.manhattan):
            raise ConfigError(
                f"{option}: compressed vectors are compared by inner products, and the model compares vectors by their "
                f"{self.similarity.value} distance; leave it out"
            )

    def require_dimensions(self, dims: Sequence[int | None], option: str, *, truncated: bool = False) -> None:
        """Raise a ConfigError if the vectors, perhaps `truncated`, have fewer than one of these dimensions."""
        if self.m3 is not None and any(dim is not None for dim in dims):
            raise ConfigError(f"{option}: is for one vector of each text, and model.kind=m3 has others; leave it out")
        available = min(self.dimension, self.truncate_dim or self.dimension) if truncated else self.dimension
        for dim in dims:
            if dim is not None and dim > available:
                raise ConfigError(f"{option}: {dim} is more than the {available} dimensions of the model's vectors")
