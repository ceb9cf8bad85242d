"""Exported tokenizers of decoders begin and end pairs as the template says, when transformers opens them again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from embedtrain.errors import ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.formats.verify import PROBES
from embedtrain.formats.weights import write_architecture
from embedtrain.inference.loading.load import bound_tokenizer
from embedtrain.kinds.cross_encoder.files import formatted_pairs, probe_pairs
from embedtrain.models.types import ModelSource
from tests.small import model_options, save_small, small_model

TEMPLATE = {"query": "Query: {query}\n", "document": "Document: {document}\n", "suffix": "Relevant:"}


Family = Callable[[], tuple[PreTrainedTokenizerFast, dict[str, object]]]


def byte_level(name: str, specials: list[str]) -> Tokenizer:
    """A byte-level BPE with Qwen's pre-tokenizer; that of Llama 3 only splits numbers otherwise."""
    tokenizer = Tokenizer(models.BPE())
    expression = PRETOKENIZE_REGEX if name == "qwen" else PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
    byte_pairs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), byte_pairs])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*PROBES, *TEMPLATE.values()] * 9, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_bos(bos: str, number: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, number)]
    )


def qwen() -> tuple[PreTrainedTokenizerFast, dict[str, object]]:
    tokenizer = byte_level("qwen", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    return fast, {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False}


def llama3() -> tuple[PreTrainedTokenizerFast, dict[str, object]]:
    bos, pad, eos = names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = byte_level("llama3", names)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), with_bos(bos, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    return fast, {"tokenizer_class": "PreTrainedTokenizerFast"}


def gemma() -> tuple[PreTrainedTokenizerFast, dict[str, object]]:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=[*names, *fallback])
    tokenizer.train_from_iterator([*PROBES, *TEMPLATE.values()] * 9, trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = with_bos("<bos>", 2)
    tokens = {f"{name[1:-1]}_token": name for name in names}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    return fast, {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False}


def llama2() -> tuple[PreTrainedTokenizerFast, dict[str, object]]:
    names = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=[*names, *fallback])
    tokenizer.train_from_iterator([*PROBES, *TEMPLATE.values()] * 9, trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = with_bos("<s>", 1)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    return fast, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}


def write(directory: Path, architecture: str, family: Family, template: dict[str, str]) -> ModelSource:
    """A run's architecture in `out` of a small model with this tokenizer."""
    model = small_model(architecture)
    model.config |= {"vocab_size": 1000, "max_position_embeddings": 256}
    save_small(model, directory)
    tokenizer, settings = family()
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    options = model_options(path=str(directory), kind="cross_encoder", pair_template=template, max_length=256)
    return open_model_source(options)


@pytest.mark.parametrize(
    ("architecture", "family", "template"),
    [
        ("qwen3", qwen, TEMPLATE),
        ("llama", llama3, TEMPLATE),
        ("gemma3_text", gemma, TEMPLATE),
        ("llama", llama2, {"prefix": "Judge:\n", "query": "{query}", "document": "{document}", "suffix": "Relevant:"}),
    ],
    ids=["qwen", "llama3", "gemma", "llama2"],
)
def test_pairs_have_the_tokens_of_the_run(tmp_path, architecture, family, template):
    """Byte-level BPE, with a beginning-of-text token in a sequence of post-processors, and BPE of sentencepiece."""
    source = write(tmp_path / "model", architecture, family, template)
    own = bound_tokenizer(source, load_tokenizer(source))
    expected = own.ids(probe_pairs(PROBES))
    write_architecture(tmp_path / "out", source, own)
    opened = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len([ids for ids in expected if len(ids) < 256]) >= 5
    for ids, texts in zip(expected, formatted_pairs(source, PROBES), strict=True):
        read = opened(*texts, truncation=True)["input_ids"]
        assert read[-3:] == ids[-3:]
        assert read == ids or len(ids) == 256
    if template is TEMPLATE:
        text = f"Query: {PROBES[0]}\nDocument: {PROBES[1]}\nRelevant:"
        assert opened.decode(expected[0], skip_special_tokens=True) == text


def test_a_tokenizer_that_begins_each_part_with_a_space_has_a_prefix_and_a_suffix_only(tmp_path):
    source = write(tmp_path / "model", "llama", llama2, TEMPLATE)
    with pytest.raises(ModelError, match=r"model\.pair_template .*prefix and suffix"):
        write_architecture(tmp_path / "out", source, bound_tokenizer(source, load_tokenizer(source)))
