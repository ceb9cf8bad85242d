"""Two small models that differ in everything but the dimension of their vectors: architecture, tokenizer, lengths."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from embedtrain.config.kind_settings import HeadConfig
from embedtrain.config.recipe import ModelConfig
from embedtrain.kinds.dual_encoder.options import TowerOptions
from tests.small import WORDS, model_options, save_small, small_model

QUERY_LENGTH, DOCUMENT_LENGTH = 6, 9


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Words in another order than `small_tokenizer`, and a token at the end of every text only."""
    words = [*reversed(WORDS), "[PAD]", "[END]", "[UNK]", "<s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [END]", pair="$A [END] $B [END]", special_tokens=[("[END]", words.index("[END]"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[END]", unk_token="[UNK]", model_max_length=48
    )


def save_towers(folder: Path, *, query: str = "bert", document: str = "modernbert") -> tuple[Path, Path]:
    """The directories of transformers of a tower for queries and of one for documents."""
    of_queries = save_small(small_model(query), folder / "query", seed=1)
    of_documents = save_small(small_model(document, config=_wider(document)), folder / "document", seed=2)
    other_tokenizer().save_pretrained(of_documents)
    return of_queries, of_documents


def _wider(architecture: str) -> dict[str, Any]:
    config: dict[str, Any] = small_model(architecture).config
    return config | {"hidden_size": 48, "num_hidden_layers": 3}


def dual_options(folder: Path, **options: Any) -> ModelConfig:
    """The options of a dual encoder of the towers in `folder`, whose documents get a head down to 32 dimensions."""
    query = TowerOptions(path=str(folder / "query"), pooling="mean", max_length=QUERY_LENGTH)
    document = TowerOptions(
        path=str(folder / "document"), pooling="cls", max_length=DOCUMENT_LENGTH, heads=[HeadConfig(out=32, bias=True)]
    )
    return model_options("dual_encoder", query=query, document=document, **options)
