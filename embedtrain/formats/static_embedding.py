"""Static embedding models: a text's vector is the mean of the rows of its tokens in a table, without a transformer.

Model2Vec and sentence-transformers' `StaticEmbedding` have this form. The table is a backbone of transformers without
layers, so that loading, sharding, packing and saving are those of other models.

V: tokens of the vocabulary; D: dimensions.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from embedtrain.errors import ModelError
from embedtrain.models.file_references import read_json
from embedtrain.models.security import require_bounded_time, require_safe_files
from embedtrain.utils.formatting import one_line

# The name of the module in sentence-transformers, and `model_type` in config.json and `model.config`.
STATIC_EMBEDDING, MODEL_TYPE = "StaticEmbedding", "static_embedding"
# The table in the encoder, and in files of sentence-transformers and of Model2Vec. The latter may have one row for
# several tokens (`mapping`), and a factor of each token (`weights`).
TABLE, STORED_TABLE, MODEL2VEC_TABLE = "backbone.embedding.weight", "embedding.weight", "embeddings"
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


class StaticConfig(PretrainedConfig):  # type: ignore[misc]
    """The size of a table [vocab_size, hidden_size], and the standard deviation of random rows."""

    model_type = MODEL_TYPE

    def __init__(
        self, vocab_size: int = 30522, hidden_size: int = 256, initializer_range: float = 1.0, **values: Any
    ) -> None:
        super().__init__(**values)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.initializer_range = initializer_range
        self.num_hidden_layers = 0


class StaticBackbone(PreTrainedModel):  # type: ignore[misc]
    """Token ids [N, L] to their rows [N, L, D]."""

    config_class = StaticConfig
    base_model_prefix = "static"

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table."""
        return self.embedding

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
        """The row of each token: neither a mask nor positions matter."""
        return BaseModelOutput(last_hidden_state=self.embedding(input_ids))


AutoConfig.register(MODEL_TYPE, StaticConfig)
AutoModel.register(StaticConfig, StaticBackbone)


def is_static(config: PretrainedConfig) -> bool:
    """Whether a configuration is that of a table."""
    return isinstance(config, StaticConfig)


def read_static_config(directory: Path) -> StaticConfig:
    """The size of the table of a StaticEmbedding module; of a run's directory without weights, from config.json.

    A ModelError if its files are not safe, are not supported, or hold no table.
    """
    require_safe_files(directory, trust_remote_code=False)
    path = directory / WEIGHTS
    if path.is_file():
        with _opened(path) as file:
            names = set(file.keys())
            rows = file.get_slice(_table_name(path, names)).get_shape()
            dtype = file.get_slice(_table_name(path, names)).get_dtype()
            num_tokens = file.get_slice("mapping").get_shape()[0] if "mapping" in names else rows[0]
        if len(rows) != 2 or dtype not in ("F64", "F32", "F16", "BF16"):
            raise ModelError(f"{path} has a table {rows} of the type {dtype}; supported are two dimensions, and floats")
        return StaticConfig(vocab_size=num_tokens, hidden_size=rows[1])
    settings = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    sizes: list[Any] = [settings.get(name) for name in ("vocab_size", "hidden_size")]
    if settings.get("model_type") != MODEL_TYPE or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"{path} is missing; save the model with sentence-transformers, which writes safetensors")
    return StaticConfig(vocab_size=sizes[0], hidden_size=sizes[1])


def read_static_max_length(directory: Path) -> int | None:
    """The tokens of a text that tokenizer.json keeps, as sentence-transformers applies it; None: all."""
    truncation = read_json(directory / TOKENIZER).get("truncation") if (directory / TOKENIZER).is_file() else None
    length = truncation.get("max_length") if isinstance(truncation, dict) else None
    return length if type(length) is int and length > 0 else None


def read_static_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in tokenizer.json, as sentence-transformers reads it; a ModelError if there is none.

    Transformers would apply the settings of further files, which change the tokens of some tokenizers.
    """
    require_safe_files(directory, trust_remote_code=False)
    try:
        loaded = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(directory / TOKENIZER)))
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ModelError(f"cannot read a tokenizer from {directory / TOKENIZER}: {one_line(error)}") from None
    require_bounded_time(loaded, str(directory))
    return loaded


def write_static_tokenizer(directory: Path, tokenizer: Any, max_length: int) -> None:
    """Write tokenizer.json, which cuts texts at `max_length` tokens: StaticEmbedding has no other setting for it."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.enable_truncation(max_length)
    backend.save(str(directory / TOKENIZER))


def read_table(directory: Path, *, if_stored_otherwise: bool = False) -> dict[str, Tensor]:
    """The table [V, D] in float32 by its name in the encoder; with Model2Vec's mapping and factors applied.

    With `if_stored_otherwise`, nothing if the file has it under the name that sentence-transformers writes.
    """
    with _opened(directory / WEIGHTS) as file:
        names = set(file.keys())
        name = _table_name(directory / WEIGHTS, names)
        if name == STORED_TABLE and if_stored_otherwise:
            return {}
        table: Tensor = file.get_tensor(name).float()
        if name == MODEL2VEC_TABLE and "mapping" in names:
            table = table[file.get_tensor("mapping").long()]
        if name == MODEL2VEC_TABLE and "weights" in names:
            table = table * file.get_tensor("weights").float()[:, None]
    return {TABLE: table}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors does not export its exception type
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None


def _table_name(path: Path, names: set[str]) -> str:
    for name in (STORED_TABLE, MODEL2VEC_TABLE):
        if name in names:
            return name
    raise ModelError(f"{path} has neither {STORED_TABLE} nor {MODEL2VEC_TABLE}, the table of a StaticEmbedding")
