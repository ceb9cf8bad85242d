"""Models of real sizes with random weights, and random texts of mixed lengths; nothing is downloaded."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from benchmarks.inputs import text_tokenizer
from embedtrain.config.compose import compose_recipe
from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import Attention, LoraConfig, Pooling
from embedtrain.data.rows import Documents, Example
from embedtrain.data.types import GlobalBatch, Tokens
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import LoadedModel, load_model

MEAN_LENGTH, SPREAD, SHORTEST, LONGEST = 100, 0.75, 8, 512
_FIRST_ID, _LAST_ID = 1000, 30000  # no special tokens


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A model and the batch that fits on a GPU of 141 GB.

    Attributes:
        name: name in the table.
        config: values of `config.json`; dropout is off.
        pooling: pooling of the token embeddings.
        pairs: pairs in a batch whose graphs are all cached.
        chunk_tokens: tokens of one forward pass.
        kind: a cross-encoder reads both texts of a pair together; a sparse model has a vocabulary head.
        length: tokens of every text; None: log-normal with a mean of about 100.
    """

    name: str
    config: dict[str, Any]
    pooling: Pooling
    pairs: int
    chunk_tokens: int
    kind: str = "dense"
    length: int | None = None

    def of_length(self, length: int) -> "Sized":
        """The same with texts of `length` tokens, and about as many tokens in a batch."""
        return replace(self, pairs=max(2, self.pairs * MEAN_LENGTH // length), length=length)


_XLMR = {
    "model_type": "xlm-roberta",
    "vocab_size": 250002,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151669,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def _sizes(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": intermediate}


MODELS = (
    Sized(
        name="XLM-R-base",
        config={**_XLMR, **_sizes(768, 12, 12, 3072)},
        pooling=Pooling.cls,
        pairs=512,
        chunk_tokens=65536,
    ),
    Sized(
        name="XLM-R-large",
        config={**_XLMR, **_sizes(1024, 24, 16, 4096)},
        pooling=Pooling.cls,
        pairs=256,
        chunk_tokens=32768,
    ),
    Sized(
        name="XLM-R-large reranker",
        config={**_XLMR, **_sizes(1024, 24, 16, 4096)},
        pooling=Pooling.cls,
        pairs=256,
        chunk_tokens=32768,
        kind="cross_encoder",
    ),
    Sized(
        name="XLM-R-base ColBERT",
        config={**_XLMR, **_sizes(768, 12, 12, 3072)},
        pooling=Pooling.cls,
        pairs=512,
        chunk_tokens=65536,
        kind="late_interaction",
    ),
    Sized(
        name="BERT-base SPLADE",
        config={**_BERT, **_sizes(768, 12, 12, 3072)},
        pooling=Pooling.cls,
        pairs=256,
        chunk_tokens=32768,
        kind="sparse",
    ),
    Sized(
        name="Qwen3-0.6B",
        config={**_QWEN3, **_sizes(1024, 28, 16, 3072)},
        pooling=Pooling.last,
        pairs=160,
        chunk_tokens=16384,
    ),
    Sized(
        name="Qwen3-4B",
        config={**_QWEN3, **_sizes(2560, 36, 32, 9728)},
        pooling=Pooling.last,
        pairs=32,
        chunk_tokens=4096,
    ),
)


_CLASSES: dict[str, Any] = {
    "cross_encoder": AutoModelForSequenceClassification,
    "sparse": AutoModelForMaskedLM,
}


def tiny(model: Sized) -> Sized:
    """The same architecture, small enough to train quickly on a CPU."""
    small = {"vocab_size": 31000, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 2} | (
        {"num_key_value_heads": 1, "head_dim": 16} if "head_dim" in model.config else {}
    )
    return replace(model, config={**model.config, **small, **heads}, pairs=4, chunk_tokens=512)


def sized_named(name: str, *, small: bool = False) -> Sized:
    """The model of MODELS with this name."""
    (model,) = (model for model in MODELS if model.name == name)
    return tiny(model) if small else model


@contextmanager
def saved(model: Sized, device: torch.device) -> Iterator[Path]:
    """A directory of the model, with random bf16 weights that are initialized on `device`.

    A dense model is one of sentence-transformers, the others are of a class of transformers.
    """
    with TemporaryDirectory(prefix="embedtrain-bench-") as folder:
        values = dict(model.config)
        torch.manual_seed(0)
        with torch.device(device):
            model_class = _CLASSES.get(model.kind, AutoModel)
            labels = {"num_labels": 1} if model.kind == "cross_encoder" else {}
            config = AutoConfig.for_model(values.pop("model_type"), **values, **labels)
            backbone = model_class.from_config(config)
        backbone.to(torch.bfloat16).save_pretrained(folder)
        del backbone
        text_tokenizer(LONGEST).save_pretrained(folder)
        if model.kind == "dense":
            _write_sentence_transformers_files(model, Path(folder))
        yield Path(folder)


def _write_sentence_transformers_files(model: Sized, folder: Path) -> None:
    """Write the files that make `folder` a sentence-transformers directory."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    mode = {Pooling.cls: "cls_token", Pooling.mean: "mean_tokens", Pooling.last: "lasttoken"}[model.pooling]
    pooling = {"word_embedding_dimension": model.config["hidden_size"], f"pooling_mode_{mode}": True}
    if model.pooling is not Pooling.mean:
        pooling["pooling_mode_mean_tokens"] = False  # True by default
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))


def load(
    folder: Path,
    world: World,
    *,
    attention: Attention = Attention.auto,
    options: Sequence[str] = (),
    kind: str = "dense",
    lora: LoraConfig | None = None,
) -> LoadedModel:
    """Load the saved model as a bf16 run does: weights in fp32, computation in bf16.

    `options` are those of a recipe's `parallel`, such as compile=true; a ConfigError if there is none of this name and
    value.
    """
    config = load_kind(kind).options(path=str(folder), attention=attention, lora=lora or LoraConfig())
    parallel = compose_recipe([f"parallel.{option}" for option in ("precision=bf16", *options)]).parallel
    return load_model(config, parallel, world, seed=0)


class RandomTexts:
    """Tokens of queries and documents with `length` tokens, or log-normal lengths (implements BatchTokens)."""

    def __init__(self, pairs: int, seed: int, length: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        median = MEAN_LENGTH / np.exp(SPREAD**2 / 2)
        lengths = generator.lognormal(np.log(median), SPREAD, 2 * pairs)
        self.lengths = np.clip(lengths, SHORTEST, LONGEST).astype(np.int64)
        if length is not None:
            self.lengths[:] = length
        self.num_documents = np.ones(pairs, dtype=np.int64)
        self.keys = np.arange(2 * pairs, dtype=np.int64)
        ids = generator.integers(_FIRST_ID, _LAST_ID, int(self.lengths.sum()), dtype=np.int32)
        self._tokens = Tokens.plain(ids, self.lengths)

    def tokens(self, texts: NDArray[np.int64]) -> Tokens:
        """The tokens of these texts."""
        return self._tokens.take(texts)

    def batch(self) -> GlobalBatch:
        """All texts as one batch."""
        return GlobalBatch(
            0, [Example("", Documents(("",)))] * len(self.num_documents), tokens=self, has_loss_columns=False
        )
