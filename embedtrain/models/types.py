"""What is known about a model before its weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from embedtrain.config.kind_settings import HeadInit
from embedtrain.config.kinds import Kind
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import Pooling
from embedtrain.errors import ConfigError
from embedtrain.models.pooling import has_weights
from embedtrain.models.vision_language import FAMILIES


@dataclass(frozen=True, kw_only=True)
class HeadAdapter:
    """An adapter of PEFT of a head: its update of the weight is scale x B A, both in `path` under these keys."""

    path: Path
    a: str
    b: str
    scale: float


@dataclass(frozen=True, kw_only=True)
class DenseSource:
    """A Dense head of a sentence-transformers directory, with its weights in `directory`, or a new one."""

    directory: Path | None  # None: its weights start from the seed
    num_in: int
    num_out: int
    bias: bool
    activation: str
    init: HeadInit | None = None  # of a new one; None: as torch initialises a linear layer
    inline: str | None = None  # its name among the weights of the backbone, if it is in the same files
    adapter: HeadAdapter | None = None  # merged when its weights are read


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How texts become tokens, besides the tokenizer's files."""

    max_length: int | None = None  # tokens per text; None: what the tokenizer and the position embeddings allow
    append_eos: bool | None = None  # whether texts end with the end-of-text token; None: decided by `load_tokenizer`
    lowercase: bool = False
    is_sentence_transformers: bool = False  # the tokenizer of such a directory already ends texts as needed
    prompt_tokens: tuple[str, ...] = ()  # entries of the vocabulary that prompts begin with, each one token


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """How the hidden states of tokens become a vector, and how vectors compare."""

    pooling: Pooling | str = Pooling.cls  # of a kind that pools: a mode, or the path of a user's class
    pooling_directory: Path | None = None  # of the weights of a user's class; None: they start from the seed
    include_prompt: bool = True  # whether the pooling includes the prompt's tokens
    dense: tuple[DenseSource, ...] = ()  # heads between pooling and normalisation
    normalize: bool = True
    similarity: VectorSimilarity = VectorSimilarity.cosine
    truncate_dim: int | None = None  # dimensions of a vector that are used, the first of all; None: all
    late_chunking: bool = False  # whether documents in chunks have a vector of each
    chunk_negatives: bool = True  # whether all chunks of a document have one in training


@dataclass(frozen=True)
class Towers:
    """Settings of a model that has models of their own for some of the texts, which alone have weights.

    Its `config` is that of the last one.
    """

    sources: Mapping[str, "ModelSource"]  # by name

    @property
    def is_new(self) -> bool:
        """Whether a part is not in the files and starts from the seed."""
        return any(source.has_new_head for source in self.sources.values())


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Everything known about a model before its weights are read."""

    kind: Kind
    # Of the kind, an object of its own type, which has `is_new`, and perhaps `folders` of further weights by name; None
    # for a dense model.
    settings: Any = None
    directory: Path | None  # holds weights and tokenizer; None for a model made from a configuration
    config: PretrainedConfig  # of the backbone: no cache, `model.bidirectional` and `model.rope_*` applied
    vectors: VectorSettings = VectorSettings()
    tokenization: Tokenization
    prompts: dict[str, str] = field(default_factory=dict)  # by name, `query` and `document` among them
    trust_remote_code: bool = False  # whether Python in `directory` may run
    adapter: Path | None = None  # a LoRA adapter in PEFT's format that a command loads onto it
    commit: str | None = None  # of the Hub repository that it was downloaded from; None for a local directory

    @property
    def towers(self) -> Mapping[str, "ModelSource"]:
        """The models that encode some of the texts each, by name; empty if one encodes all."""
        settings = self.settings
        return settings.sources if isinstance(settings, Towers) else {}

    @property
    def parts(self) -> Mapping[str, "ModelSource"]:
        """The models with weights, by the prefix of the names of their weights in the encoder."""
        return {f"{name}.": tower for name, tower in self.towers.items()} or {"": self}

    @property
    def module_folders(self) -> dict[str, Path]:
        """The folders of modules that have weights besides those in `directory`, by a name of each."""
        folders = {str(number): dense.directory for number, dense in enumerate(self.vectors.dense, 1)}
        folders["pooling"] = self.vectors.pooling_directory
        folders |= getattr(self.settings, "folders", {})
        return {name: folder for name, folder in folders.items() if folder is not None}

    @property
    def has_new_head(self) -> bool:
        """Whether a part is not in the files and starts from the seed."""
        is_new = self.settings is not None and self.settings.is_new
        if self.vectors.pooling_directory is None:
            is_new |= has_weights(self.vectors.pooling, self.config)
        return is_new or any(dense.directory is None for dense in self.vectors.dense)

    @property
    def dimension(self) -> int:
        """The dimension of the vectors, before `truncate_dim`; 1 for the score of a cross-encoder, V of sparse ones."""
        return self.kind.dimension(self)

    def require_one_model(self, option: str) -> None:
        """Raise a ConfigError if queries and documents have a model each."""
        if self.towers:
            where = [str(tower.directory) for tower in self.towers.values()]
            raise ConfigError(
                f"{option}: has a model for queries and another for documents; write the folder of one, "
                f"{' or '.join(where)}"
            )

    def require_one_tower(self, option: str) -> None:
        """Raise a ConfigError also if texts have a tower and pictures another."""
        self.require_one_model(option)
        if not self.kind.has_one_tower:
            raise ConfigError(
                f"{option}: is a model of kind={self.kind.name}, which has a tower of texts and one of pictures; this "
                "command takes a model with one"
            )

    def require_texts_alone(self, option: str) -> None:
        """Raise a ConfigError also for a vision-language model."""
        self.require_one_tower(option)
        if self.config.model_type in FAMILIES:
            raise ConfigError(
                f"{option}: is a vision-language model ({self.config.model_type}); this command takes a model that "
                "reads texts alone"
            )

    def require_inner_products(self, option: str) -> None:
        """Raise a ConfigError if vectors are compared as compressed ones are not: by a distance, or chunk by chunk."""
        if self.vectors.late_chunking:
            raise ConfigError(
                f"{option}: compressed vectors are one of each text, and the model has one of each chunk of a document "
                "(chunking.late); leave it out"
            )
        if self.vectors.similarity in (VectorSimilarity.euclidean, VectorSimilarity.manhattan):
            raise ConfigError(
                f"{option}: compressed vectors are compared by inner products, and the model compares vectors by their "
                f"{self.vectors.similarity.value} distance; leave it out"
            )

    def require_dimensions(self, dims: Sequence[int | None], option: str, *, truncated: bool = False) -> None:
        """Raise a ConfigError if the vectors, perhaps `truncated`, have fewer than one of these dimensions, or none."""
        if self.kind.why_no_dimensions and any(dim is not None for dim in dims):
            raise ConfigError(f"{option}: {self.kind.why_no_dimensions}; leave it out")
        available = min(self.dimension, self.vectors.truncate_dim or self.dimension) if truncated else self.dimension
        for dim in dims:
            if dim is not None and dim > available:
                raise ConfigError(f"{option}: {dim} is more than the {available} dimensions of the model's vectors")
