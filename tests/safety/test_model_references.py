"""A model directory reads no other file: nothing of the user's reaches its vocabulary, which is saved and published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizer

from embedtrain.errors import ModelError
from embedtrain.formats.transformers import read_tokenizer
from embedtrain.models.security import require_safe_files
from tests.safety.payloads import edit

SECRET = "secretword"
Attack = Callable[[Path, Path], object]  # changes a model directory so that it names or leads to a file of the user's


def setting(file: str, **changes: Any) -> Attack:
    """Settings, in which `SECRET` stands for the path of the user's file."""

    def attack(model: Path, secret: Path) -> None:
        edit(model / file, **json.loads(json.dumps(changes).replace("SECRET", str(secret))))

    return attack


def linked(name: str) -> Attack:
    def attack(model: Path, secret: Path) -> None:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(secret)

    return attack


def vocabulary(content: object) -> Attack:
    rules = {"version": "1.0", "added_tokens": [], "model": {"type": "WordPiece", "vocab": content}}
    return setting("tokenizer.json", **rules)


# Attacks and a part of the error message.
REFERENCES: dict[str, tuple[Attack, str]] = {
    "vocabulary": (setting("tokenizer_config.json", vocab="SECRET"), "vocab="),
    "vocabulary of a token map": (setting("special_tokens_map.json", vocab_file="SECRET"), "vocab_file="),
    "vocabulary of a tokenizer": (vocabulary("SECRET"), "model.vocab="),
    "vocabulary that is a path": (lambda model, _: (model / "vocab.json").write_text('"x"'), "vocab.json"),
    "relative path": (setting("special_tokens_map.json", vocab_file="../secret.txt"), "vocab_file="),
    "path in a list": (setting("tokenizer_config.json", any=[{"name": "SECRET"}]), "name="),
    "a process": (setting("special_tokens_map.json", vocab_file="/proc/self/environ"), "vocab_file="),
    "open file": (setting("special_tokens_map.json", vocab_file="/dev/fd/1000"), "vocab_file="),
    "positional argument": (setting("tokenizer_config.json", init_inputs=["x"]), "init_inputs="),
    "folder and file": (setting("tokenizer_config.json", subfolder="..", gguf_file="x.gguf"), "_f"),
    "other tokenizer": (setting("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.1.json"]), "../tok"),
    "template to write": (
        setting("tokenizer_config.json", chat_template=[{"name": "../../x", "template": ""}]), "../../x"
    ),
    "dictionary": (setting("tokenizer_config.json", mecab_kwargs={"mecab_option": "-d x"}), "mecab_option="),
    "rules of bytes": (setting("byte_maps.json", decompose_map="SECRET"), "decompose_map="),
    "other config": (setting("config.json", configuration_files=["config.1.json"]), "configuration_files="),
    "other weights": (setting("config.json", transformers_weights="x.safetensors"), "transformers_weights="),
    "other backbone": (setting("config.json", use_pretrained_backbone=True), "use_pretrained_backbone="),
    "quantization data": (setting("config.json", quantization_config={"dataset": "SECRET"}), "dataset="),
    "audio tokenizer": (setting("processor_config.json", audio_tokenizer={"a": "b"}), "audio_tokenizer="),
    "arguments": (setting("sentence_bert_config.json", tokenizer_args={"vocab": "SECRET"}), "vocab"),
    "base model": (setting("adapter_config.json", base_model_name_or_path="SECRET"), "adapter_config.json"),
    "index": (setting("model.safetensors.index.json", weight_map={"a": "../secret.txt"}), "secret.txt"),
} | {
    f"link {name}": (linked(name), "outside")
    for name in (
        "vocab.txt", "tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors", "spiece.model",
        "additional_chat_templates/a.jinja",
    )
}  # fmt: skip


@pytest.fixture
def model(tmp_path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\nalpha\n")
    edit(directory / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    (tmp_path / "secret.txt").write_text(f"[UNK]\n{SECRET}\n")
    return directory


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_rejected(model, name, trust):
    attack, part = REFERENCES[name]
    attack(model, model.parent / "secret.txt")
    with pytest.raises(ModelError) as error:
        read_tokenizer(model, trust_remote_code=trust)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["vocabulary", "link vocab.txt"])
def test_transformers_reads_them(model, name):
    """Otherwise the test above could not fail."""
    REFERENCES[name][0](model, model.parent / "secret.txt")
    assert SECRET in BertTokenizer.from_pretrained(model).get_vocab()


def test_relative_paths_are_those_of_the_working_directory_too(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    edit(model / "tokenizer_config.json", anything="secret.txt")
    with pytest.raises(ModelError, match=r"anything='secret.txt'"):
        read_tokenizer(model, trust_remote_code=False)


def test_files_of_the_hub_cache_are_links(model):
    """As huggingface_hub stores them: to blobs of the repository, or of the cache; no link leads elsewhere."""
    cache = model.parent / "hub"
    snapshot, blobs = cache / "models--a--b" / "snapshots" / "c0ffee", cache / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    model.rename(snapshot)
    (snapshot / "vocab.txt").rename(blobs / "1")
    (snapshot / "vocab.txt").symlink_to("../../blobs/1")
    assert "alpha" in read_tokenizer(snapshot, trust_remote_code=False).get_vocab()
    (cache / "blobs" / "ab").mkdir(parents=True)
    (blobs / "1").rename(cache / "blobs" / "ab" / "abc")
    (blobs / "1").symlink_to("../../blobs/ab/abc")
    assert "alpha" in read_tokenizer(snapshot, trust_remote_code=False).get_vocab()
    (blobs / "1").unlink()
    (blobs / "1").symlink_to(model.parent / "secret.txt")
    with pytest.raises(ModelError, match="outside the model directory"):
        read_tokenizer(snapshot, trust_remote_code=False)


_TOKEN = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
# Settings as they are on the Hub, with the keys that hold texts and paths.
ON_THE_HUB: dict[str, dict[str, Any]] = {
    "all-MiniLM-L6-v2": {
        "do_lower_case": True, "unk_token": "[UNK]", "tokenize_chinese_chars": True, "strip_accents": None,
        "name_or_path": "nreimers/MiniLM-L6-H384-uncased", "do_basic_tokenize": True, "never_split": None,
        "tokenizer_class": "BertTokenizer", "model_max_length": 512,
        "special_tokens_map_file": "/root/.cache/huggingface/transformers/special_tokens_map.json",
    },
    "mpnet": {"tokenizer_class": "MPNetTokenizer", "tokenizer_file": "/home/author/tokenizer.json", "vocab_file": None},
    "bce-embedding (XLM-R)": {
        "added_tokens_decoder": {"0": _TOKEN}, "additional_special_tokens": [], "bos_token": "<s>", "eos_token": "</s>",
        "mask_token": _TOKEN | {"__type": "AddedToken"}, "sp_model_kwargs": {},
        "tokenizer_class": "XLMRobertaTokenizer",
        "clean_up_tokenization_spaces": True, "pad_token": "<pad>", "max_length": 512, "truncation_side": "right",
        "truncation_strategy": "longest_first", "stride": 0, "pad_token_type_id": 0, "pad_to_multiple_of": None,
    },
    "Llama 3": {
        "added_tokens_decoder": {"128000": _TOKEN | {"content": "<|begin_of_text|>", "special": True}},
        "bos_token": "<|begin_of_text|>", "chat_template": "{% set loop_messages = messages %}{{ '/n/a' }}",
        "model_input_names": ["input_ids", "attention_mask"], "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "Qwen 3": {
        "add_bos_token": False, "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": [{"name": "default", "template": "/"}, {"name": "tool_use", "template": "../x"}],
        "errors": "replace", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    },
    "ModernBERT": {"added_tokens_decoder": {"0": _TOKEN | {"content": "|||IP_ADDRESS|||"}}, "cls_token": "[CLS]"},
    "Mistral": {
        "legacy": True, "sp_model_kwargs": {}, "spaces_between_special_tokens": False, "init_inputs": [],
        "use_default_system_prompt": False, "extra_special_tokens": {"image_token": "/"},
    },
    "Gemma": {"boi_token": "<start_of_image>", "processor_class": "Gemma3Processor", "image_token": "<image>"},
    "NLLB": {"src_lang": "eng_Latn", "tgt_lang": None, "language_codes": "ML50", "tokenizer_file": None},
    "BERT for Japanese": {"word_tokenizer_type": "mecab", "mecab_kwargs": {"mecab_dic": "ipadic"}, "spm_file": None},
    "code of its own": {"auto_map": {"AutoTokenizer": ["author/model--tok.Tok", None]}, "license": "https://a.b/c"},
}  # fmt: skip


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_settings_of_the_hub_are_accepted(model, name):
    edit(model / "tokenizer_config.json", **ON_THE_HUB[name])
    edit(model / "special_tokens_map.json", eos_token=_TOKEN, additional_special_tokens=["<s>", "/", "~", ".", ".."])
    edit(model / "config.json", _name_or_path=str(model.parent / "secret.txt"), architectures=["BertModel"])
    for trust in (False, True):
        require_safe_files(model, trust_remote_code=trust)
