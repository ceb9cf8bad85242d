"""Small models of real architectures, a tokenizer, and batches to run them on."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedTokenizerFast

from embedtrain.config.kinds import load_kind
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Pooling, Precision, Strategy
from embedtrain.data.rows import Documents, Example, text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import GlobalBatch, TextRole, Tokens
from embedtrain.models.own_class import language_model_class

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu"]

# Wide random weights: with the usual 0.02 all texts get nearly one vector, and fp32 noise is all one compares.
_SMALL = {
    "initializer_range": 0.1,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
_LLAMA = _SMALL | {"num_key_value_heads": 1, "max_position_embeddings": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "xlm-roberta": _SMALL | {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "bert": _SMALL | {"max_position_embeddings": 64},
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 16},
    "gemma3_text": _LLAMA | {"head_dim": 16},
    "modernbert": _SMALL | {"max_position_embeddings": 64, "local_attention": 8},
}
# Architectures that only tests of models look at.
MORE_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mistral": _LLAMA,
    "gemma": _LLAMA | {"head_dim": 16},
    "mpnet": _SMALL | {"max_position_embeddings": 66},
    "electra": _SMALL | {"max_position_embeddings": 64},
    "deberta-v2": _SMALL | {"max_position_embeddings": 64},
    "distilbert": {
        "initializer_range": 0.1, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48,
        "max_position_embeddings": 64,
    },
}  # fmt: skip
# A table without a transformer.
STATIC: dict[str, dict[str, Any]] = {"static_embedding": {"hidden_size": 32, "initializer_range": 0.1}}
# Architectures whose heads tests of cross-encoders look at.
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "albert": _SMALL | {"max_position_embeddings": 64, "embedding_size": 16},
    "roberta": _SMALL | {"max_position_embeddings": 66},
    "camembert": _SMALL | {"max_position_embeddings": 66},
    "eurobert": _LLAMA,
}
POOLINGS = {"llama": Pooling.last, "qwen2": Pooling.last, "qwen3": Pooling.last}


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over WORDS and letters, `<s> ... </s>` around every text."""
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *WORDS, *"abcdefghijklmnopqrstuvwxyz0123456789"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>", cls_token="<s>", pad_token="<pad>", eos_token="</s>", sep_token="</s>", unk_token="<unk>",
        model_max_length=48,
    )  # fmt: skip


@cache
def text_tokenizer() -> TextTokenizer:
    """`small_tokenizer` with texts of 48 tokens, padded."""
    return TextTokenizer(small_tokenizer(), 48)


def model_options(kind: str = "dense", **options: Any) -> ModelConfig:
    """The options of a model of this kind; those that are None may be of another one."""
    chosen = load_kind(kind)
    known = {field.name for field in fields(chosen.options)}
    values = {name: value for name, value in options.items() if name in known or value is not None}
    model: ModelConfig = chosen.options(**values)
    return model


def small_model(architecture: str, *, dropout: float = 0.0, **changes: Any) -> ModelConfig:
    """A recipe's model options for a small random model of the named architecture."""
    config: dict[str, Any] = {"model_type": architecture, "vocab_size": 64, "pad_token_id": 1, "bos_token_id": 0}
    config |= {"eos_token_id": 2} | (ARCHITECTURES | MORE_ARCHITECTURES | CLASSIFIERS | STATIC)[architecture]
    if architecture in ("bert", "xlm-roberta", "electra", "deberta-v2"):
        config |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    elif architecture == "modernbert":
        config |= {"cls_token_id": 0, "sep_token_id": 2, "mlp_dropout": dropout, "attention_dropout": dropout}
    elif architecture in ("mpnet", "distilbert", "albert", "roberta", "camembert"):
        config |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config |= {"dropout": dropout, "attention_dropout": dropout}
    else:
        config["attention_dropout"] = dropout
    values: dict[str, Any] = {"config": config, "pooling": POOLINGS.get(architecture, Pooling.mean)} | changes
    if changes.get("kind", "dense") != "dense" and isinstance(values["pooling"], Pooling):
        values["pooling"] = None
    return model_options(**values)


def parallel(strategy: Strategy = Strategy.fsdp, **changes: Any) -> ParallelConfig:
    """A recipe's parallel options in fp32, without compilation, which takes longer than the tests."""
    values: dict[str, Any] = {"strategy": strategy, "precision": Precision.fp32, "compile": False} | changes
    return ParallelConfig(**values)


def text(seed: int, length: int) -> str:
    """A text of `length` words, a function of `seed`."""
    return " ".join(WORDS[(seed * 7 + i * (seed % 5 + 1)) % len(WORDS)] for i in range(length))


def batch(num_rows: int, step: int = 0, first: int = 0) -> GlobalBatch:
    """Rows of unequal lengths with 0 to 2 hard negatives; one document stands twice."""
    rows = []
    for i in range(first, first + num_rows):
        documents = [text(100 + i, 3 + i % 9), *(text(200 + 3 * i + n, 2 + (i + n) % 11) for n in range(i % 3))]
        rows.append(Example(text(i, 1 + i % 4), Documents(tuple(documents))))
    if num_rows > 3:
        texts = rows[0].documents.texts[0], *rows[3].documents.texts[1:]
        rows[3] = Example(rows[3].query, Documents(texts))
    return tokenised(GlobalBatch(step, tuple(rows)), text_tokenizer())


class TextTokens:
    """The tokens of a batch's texts, made of the texts; see BatchTokens."""

    def __init__(self, batch: GlobalBatch, tokenizer: TextTokenizer) -> None:
        queries = [row.query for row in batch.rows]
        documents = [text for row in batch.rows for text in row.documents.texts]
        texts = queries + documents
        layout = tokenizer.layout
        role = TextRole.query if layout.roles_differ else TextRole.document
        of_queries = layout.tokenize(queries, tokenizer.limit(TextRole.query), "", role)
        of_documents = layout.tokenize(documents, tokenizer.limit(TextRole.document))
        self._tokens = Tokens.concatenated([of_queries, of_documents])
        self.num_documents = np.array([len(row.documents.texts) for row in batch.rows], dtype=np.int64)
        self.lengths = self._tokens.lengths
        self.keys = text_keys(texts)

    def tokens(self, texts: np.ndarray) -> Tokens:
        return self._tokens.take(texts)


def tokenised(batch: GlobalBatch, tokenizer: TextTokenizer) -> GlobalBatch:
    """The same batch with the tokens of its texts."""
    return replace(batch, tokens=TextTokens(batch, tokenizer))


def save_language_model(model: ModelConfig, directory: Path, seed: int = 0) -> Path:
    """A random language model of `model.config` with `small_tokenizer`, as transformers saves it."""
    config = AutoConfig.for_model(**model.config)
    torch.manual_seed(seed)
    network = language_model_class(config).from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1 and not parameter.any():
                parameter.normal_(std=0.5)  # biases are zero otherwise
        # The padding token's row too, so that all tokens would have the same logit of this word.
        network.get_input_embeddings().weight[1].normal_(std=0.1)
    network.save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return directory


def save_small(model: ModelConfig, directory: Path, seed: int = 0) -> Path:
    """The small model as a Hugging Face directory with its tokenizer, weights random from `seed`."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    values = dict(model.config)
    AutoModel.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return directory


def save_guide(model: ModelConfig, directory: Path, seed: int = 0) -> Path:
    """The small model as a sentence-transformers directory, mean pooling, normalised."""
    import sentence_transformers.models as parts
    from sentence_transformers import SentenceTransformer

    backbone = save_small(model, directory / "backbone", seed)
    modules = [
        parts.Transformer(str(backbone), max_seq_length=48),
        parts.Pooling(model.config["hidden_size"], pooling_mode="mean"),
        parts.Normalize(),
    ]
    SentenceTransformer(modules=modules, device="cpu").save(str(directory / "guide"))
    return directory / "guide"


def add_own_pooling(model: Path, pooling: str, seed: int = 0) -> Path:
    """Give a directory of `save_guide` a user's pooling, with a linear layer `score` of random weights."""
    from safetensors.torch import save_file

    folder, generator = model / "1_Pooling", torch.Generator().manual_seed(seed)
    (folder / "config.json").write_text(json.dumps({"pooling": pooling, "include_prompt": True}))
    weights = {"score.weight": torch.randn(1, 32, generator=generator), "score.bias": torch.zeros(1)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return model


def save_adapter(base: Path, directory: Path, seed: int) -> Path:
    """A LoRA adapter of a BERT's attention with an effect, as PEFT saves it."""
    import peft
    import torch
    from transformers import AutoModel

    config = peft.LoraConfig(r=2, lora_alpha=16, target_modules=["query", "value"], init_lora_weights=False)
    torch.manual_seed(seed)
    peft.get_peft_model(AutoModel.from_pretrained(base), config).save_pretrained(directory)
    return directory


def write_rows(path: Path, num_rows: int) -> Path:
    """Training rows in FlagEmbedding's layout."""
    lines = [
        json.dumps({"query": row.query, "pos": [row.documents.texts[0]], "neg": list(row.documents.texts[1:])})
        for row in batch(num_rows).rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_beir(folder: Path, num_rows: int) -> Path:
    """A retrieval set in BEIR's layout: one document answers each query."""
    (folder / "qrels").mkdir(parents=True)
    rows = list(enumerate(batch(num_rows).rows))
    corpus = [json.dumps({"_id": f"d{i}", "title": "", "text": row.documents.texts[0]}) for i, row in rows]
    queries = [json.dumps({"_id": f"q{i}", "text": row.query}) for i, row in rows]
    (folder / "corpus.jsonl").write_text("\n".join(corpus))
    (folder / "queries.jsonl").write_text("\n".join(queries))
    judged = "".join(f"q{i}\td{i}\t1\n" for i, _ in rows)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


def assert_same_gradient(grads: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """All gradients, within rounding; those that are small beside the others with a tolerance of the whole."""
    assert grads.keys() == expected.keys()
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        error = (grads[name].double() - grad).norm() / max(grad.norm(), 1e-3 * norm)
        assert error < 1e-5, name


class Collectives(TorchDispatchMode):
    """The collectives that this rank calls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
