"""Small late-interaction models in the formats of sentence-transformers 6, PyLate and Stanford's ColBERT."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from embedtrain.data.types import TextRole
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.inference.loading.load import bound_tokenizer
from embedtrain.models.build import assemble_encoder, full_state_dict
from tests.small import WORDS, model_options, save_small, small_model

DIM = 16
PUNCTUATION = [",", "."]
# Short, with words of the skip list, longer than the maximal lengths of both roles.
TEXTS = ["alpha", "alpha, beta. gamma", " ".join(WORDS) + ".", ". , alpha", "mu nu xi omicron pi " * 8]


def masked_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a mask token, punctuation, and further entries of the vocabulary."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    entries = [*specials, *PUNCTUATION, *WORDS, *"abcdefghijklmnopqrstuvwxyz", *more]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", cls_token="<s>", pad_token="<pad>", eos_token="</s>",
        sep_token="</s>", unk_token="<unk>", mask_token="<mask>", model_max_length=48,
    )  # fmt: skip


def save_backbone(directory: Path, architecture: str, *more: str) -> Path:
    """A small random model with `masked_tokenizer`."""
    save_small(small_model(architecture), directory)
    masked_tokenizer(*more).save_pretrained(directory)
    return directory


def multi_vector_model(backbone: Path, *, skip: list[str] | None = None, prompts: Any = None, **settings: Any) -> Any:
    """A model of sentence-transformers; `settings` are those of its Transformer module."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(1)
    tokens = {"module_input_name": "token_embeddings"}
    modules = [
        Transformer(str(backbone), **settings),
        Dense(32, DIM, bias=False, activation_function=torch.nn.Identity(), **tokens),
        MultiVectorMask(skiplist_words=skip),
        Normalize(**tokens),
    ]
    return MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")


def save_pylate(directory: Path, architecture: str, **settings: Any) -> Path:
    """A directory as PyLate 1.6 writes it, with its default settings: prefixes are tokens that it has added."""
    save_small(small_model(architecture), directory)
    tokenizer = masked_tokenizer()
    tokenizer.add_tokens(["[Q] ", "[D] "])
    tokenizer.pad_token = tokenizer.mask_token
    tokenizer.model_max_length = 11  # of what it has encoded last
    tokenizer.save_pretrained(directory)
    kinds = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    modules = [{"idx": i, "name": str(i), "path": ["", "1_Dense"][i], "type": kind} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 11, "do_lower_case": false}')
    save_dense(directory / "1_Dense", use_residual=False)
    stored = {
        "model_type": "ColBERT",
        "prompts": {"query": "", "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 12,
        "document_length": 20,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [*PUNCTUATION, "!"],
        "do_query_expansion": True,
    }
    settings = {key: value for key, value in (stored | settings).items() if value is not ...}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return directory


def save_dense(directory: Path, **settings: Any) -> None:
    """A projection of 32 to DIM dimensions."""
    directory.mkdir(parents=True, exist_ok=True)
    activation = "torch.nn.modules.linear.Identity"
    config = {"in_features": 32, "out_features": DIM, "bias": False, "activation_function": activation} | settings
    (directory / "config.json").write_text(json.dumps(config))
    weight = torch.randn(DIM, 32, generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": weight}, directory / "model.safetensors")


def save_stanford(directory: Path, **metadata: Any) -> Path:
    """A directory of Stanford's ColBERT."""
    save_backbone(directory, "bert", "[unused0]", "[unused1]")
    weights = {f"bert.{name}": weight for name, weight in load_file(directory / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(DIM, 32, generator=torch.Generator().manual_seed(1))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (directory / "config.json").write_text(json.dumps(config))
    stored = {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 12, "doc_maxlen": 20,
        "attend_to_mask_tokens": False, "mask_punctuation": True, "dim": DIM, "similarity": "cosine",
    }  # fmt: skip
    (directory / "artifact.metadata").write_text(json.dumps(stored | metadata))
    return directory


def token_vectors(directory: Path, role: TextRole, texts: list[str] = TEXTS, **options: Any) -> list[Tensor]:
    """The vectors of each text by our encoder: all texts padded in one batch."""
    source = open_model_source(model_options(path=str(directory), kind="late_interaction", **options))
    tokenizer = bound_tokenizer(source, load_tokenizer(source))
    encoder = assemble_encoder(source).eval()
    encoder.load_state_dict(full_state_dict(source, 0))
    prompt = source.prompts.get(role.value, "")
    tokens = tokenizer.tokens([prompt + text for text in texts], None, prompt, role)
    chunk = tokenizer.chunk(tokens, range(len(tokens)))
    assert chunk.sizes is not None
    with torch.no_grad():
        return list(encoder(chunk)[0].split(chunk.sizes.tolist()))


def added(text: str) -> AddedToken:
    """An entry of the vocabulary that a tokenizer never splits."""
    return AddedToken(text, normalized=False, special=True)
