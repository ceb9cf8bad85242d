"""Small rerankers whose score is the logit of a token, in directories as their authors write them."""

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from embedtrain.utils.files import write_json
from tests.small import small_model

# Qwen2's, which joins a punctuation mark and the line breaks after it.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
_CORPUS = [
    "yes no Yes No Is it? What?\n Where?\n\n", "用于 YUV 缩放的库（工具）。 如何训练？\n", "Yes\nYes\nYes\n",
    " alpha beta gamma delta yes no Yes\n",
    "<Query>: query: document: instruction: <Document>: <Instruct>: Given a query A and a passage B\n", "1 0 1\n0\n",
]  # fmt: skip
QWEN3_CHAT = (
    '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct '
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    '{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("Given a web search query, retrieve relevant passages that answer the query") }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"  # Jinja drops the last line break
)  # fmt: skip


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 9, trainer)
    return tokenizer.to_str()


def chat_tokenizer(*, bos: bool = False, max_length: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with Qwen2's rules and special tokens.

    With `bos` it begins texts with a special token, and line breaks are tokens of their own, as in Gemma's.
    """
    tokenizer = Tokenizer.from_str(_trained())
    if bos:
        lines = pre_tokenizers.Split("\n", behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, tokenizer.pre_tokenizer])
        start = "<|im_start|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start}:1 $B:1", special_tokens=[(start, 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", model_max_length=max_length,
        **({"bos_token": "<|im_start|>"} if bos else {}),
    )  # fmt: skip


def save_causal(
    directory: Path, architecture: str = "qwen3", *, tied: bool = True, max_shard_size: str = "5GB", **more: Any
) -> Path:
    """A small random causal language model with `chat_tokenizer`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = dict(small_model(architecture).config)
    values |= {"vocab_size": 432, "max_position_embeddings": 512, "tie_word_embeddings": tied, "pad_token_id": 0}
    values |= {"bos_token_id": 1, "eos_token_id": 2} | more
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size=max_shard_size)
    chat_tokenizer(bos="gemma" in architecture).save_pretrained(directory)
    return directory


def add_logit_score(directory: Path, true: str, false: str | None, chat_template: str, **settings: Any) -> Path:
    """Add the files with which sentence-transformers reads `directory` as a reranker."""
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    kinds = {
        "": "sentence_transformers.base.modules.transformer.Transformer",
        "1_LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    }
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(kinds.items())]
    write_json(directory / "modules.json", modules)
    tokens = chat_tokenizer().convert_tokens_to_ids
    ids = {"true_token_id": tokens(true), "false_token_id": None if false is None else tokens(false)}
    write_json(directory / "1_LogitScore/config.json", ids | {"module_input_name": "causal_logits"})
    output = {"method": "forward", "method_output_name": "logits"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": output, "message": output | {"format": "flat"}},
        "module_output_name": "causal_logits",
    }
    write_json(directory / "sentence_bert_config.json", transformer)
    ours = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"}
    write_json(directory / "config_sentence_transformers.json", ours | settings)
    return directory


GEMMA_CHAT = (
    '<|im_start|>A: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    'B: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}\n'
    "Yes or No?"
)
