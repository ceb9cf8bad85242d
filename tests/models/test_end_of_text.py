"""Every text ends with the end-of-text token exactly once, truncated or not, also in an export."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from embedtrain.config.recipe import ModelConfig, Pooling
from embedtrain.data.tokens import TextTokenizer
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.models.build import assemble_encoder
from embedtrain.models.types import ModelSource
from tests.checkpoint.exporting import architecture_of, export_model
from tests.small import model_options, save_small, small_model

BOS, EOS, PAD, SEP = "<|begin|>", "<|end|>", "<|pad|>", "<|sep|>"
TEXTS = ["alpha beta", "alpha beta gamma delta alpha beta", "", "beta<|end|>", "a"]
MAX_LENGTH = 4


@cache
def rules() -> str:
    """A byte-level vocabulary like that of Llama 3, Qwen and GPT-2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[BOS, EOS, PAD, SEP], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["alpha beta gamma delta"] * 9, trainer)
    return backend.to_str()


def template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[(BOS, 0), (EOS, 1), (SEP, 3)])


def generic(processor: object = None, **options: object) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(rules())
    if processor is not None:
        backend.post_processor = processor
    names = {"bos_token": BOS, "eos_token": EOS, **options}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: value for name, value in names.items() if value is not None}
    )


def of_class(kind: type, processor: object = None, **options: object) -> PreTrainedTokenizerBase:
    model = json.loads(rules())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": PAD, **options}
    tokenizer: PreTrainedTokenizerBase = kind(vocab=model["vocab"], merges=merges, **names)
    if processor is not None:
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


LEVEL = processors.ByteLevel(trim_offsets=False)
# The ids before a text, and a tokenizer that appends nothing.
WITHOUT_END: dict[str, tuple[list[int], Callable[[], PreTrainedTokenizerBase]]] = {
    "llama 3": ([0], lambda: generic(processors.Sequence([LEVEL, template(f"{BOS} $A")]))),
    "llama 2": ([0], lambda: of_class(LlamaTokenizer, template(f"{BOS} $A"))),
    "llama 2, by an option": ([0], lambda: of_class(LlamaTokenizer, add_bos_token=True)),
    "gemma": ([0], lambda: of_class(GemmaTokenizer, template(f"{BOS} $A"), mask_token=PAD)),
    "qwen 2": ([], lambda: of_class(Qwen2Tokenizer, LEVEL)),
    "gpt 2": ([], lambda: generic(LEVEL)),
    "no post-processor": ([], generic),
    "truncated on the left": ([0], lambda: generic(template(f"{BOS} $A"), truncation_side="left")),
}
WITH_END: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "both": lambda: generic(template(f"{BOS} $A {EOS}")),
    "end only": lambda: generic(template(f"$A {EOS}")),
    "roberta": lambda: generic(processors.RobertaProcessing((EOS, 1), (BOS, 0))),
    "in python": ByT5Tokenizer,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Hugging Face directory; each test replaces its tokenizer."""
    model = small_model("llama")
    model.config |= {"vocab_size": 400}
    return save_small(model, tmp_path_factory.mktemp("llama"))


def source_with(llama: Path, tokenizer: PreTrainedTokenizerBase, **options: object) -> tuple[ModelConfig, ModelSource]:
    for path in llama.glob("*token*"):
        path.unlink()
    tokenizer.save_pretrained(llama)
    model = model_options(**{"path": str(llama), "pooling": Pooling.last, "max_length": MAX_LENGTH, **options})
    return model, open_model_source(model)


def ids(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer(text, truncation=True, max_length=MAX_LENGTH)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("name", WITHOUT_END)
def test_token_is_appended_once_and_exported(name, llama, tmp_path):
    prefix, make = WITHOUT_END[name]
    bare = make()(TEXTS, add_special_tokens=False)["input_ids"]
    num_tokens = MAX_LENGTH - len(prefix) - 1
    expected = [
        [*prefix, *(row[-num_tokens:] if name == "truncated on the left" else row[:num_tokens]), 1] for row in bare
    ]
    model, source = source_with(llama, make())
    loaded = load_tokenizer(source)
    assert ids(loaded) == expected
    bound = TextTokenizer(loaded, MAX_LENGTH)
    assert bound.ids(TEXTS) == expected
    exported = architecture_of(tmp_path / "made", model)
    export_model(tmp_path / "out", exported)
    assert ids(AutoTokenizer.from_pretrained(tmp_path / "out")) == expected
    sentence_transformer = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for text, text_ids in zip(TEXTS, expected, strict=True):
        assert sentence_transformer.preprocess([text])["input_ids"].tolist() == [text_ids]
    # Nothing is appended twice when the export is opened again.
    for append_eos in (None, True):
        again = open_model_source(model_options(path=str(tmp_path / "out"), append_eos=append_eos))
        assert ids(load_tokenizer(again)) == expected


@pytest.mark.parametrize("name", WITH_END)
def test_tokenizer_with_end_token_is_unchanged(name, llama):
    expected = ids(WITH_END[name]())
    for append_eos in (None, True):
        _, source = source_with(llama, WITH_END[name](), append_eos=append_eos)
        assert ids(load_tokenizer(source)) == expected
    _, source = source_with(llama, WITH_END[name](), append_eos=False)
    with pytest.raises(ConfigError, match=r"model\.append_eos=false"):
        load_tokenizer(source)


def test_default_of_append_eos(llama, tmp_path):
    def ends(tokenizer: PreTrainedTokenizerBase, **options: object) -> bool:
        _, source = source_with(llama, tokenizer, **options)
        return bool(load_tokenizer(source)("alpha")["input_ids"][-1] == 1)

    assert ends(generic())
    assert not ends(generic(), append_eos=False)
    assert not ends(generic(), pooling=Pooling.mean)
    assert ends(generic(), pooling=Pooling.mean, append_eos=True)
    # Another special token at the end counts as the model's end; with append_eos=true texts end with both.
    assert not ends(generic(template(f"$A {SEP}"), sep_token=SEP))
    for processor in (template(f"$A {SEP}"), processors.Sequence([LEVEL, template(f"{BOS} $A {SEP}")])):
        _, source = source_with(llama, generic(processor, sep_token=SEP), append_eos=True)
        assert load_tokenizer(source)("alpha")["input_ids"][-2:] == [3, 1]
    # The tokenizer of a sentence-transformers directory already decides.
    model, _ = source_with(llama, generic(), append_eos=False)
    export_model(tmp_path / "out", architecture_of(tmp_path / "made", model))
    for options, expected in (({}, False), ({"append_eos": True}, True)):
        again = open_model_source(model_options(path=str(tmp_path / "out"), **options))
        assert (load_tokenizer(again)("alpha")["input_ids"][-1] == 1) is expected


def test_missing_special_tokens(llama, tmp_path):
    _, source = source_with(llama, generic(eos_token=None, pad_token=PAD), append_eos=True)
    with pytest.raises(ConfigError, match=r"model\.append_eos=true: .* eos_token"):
        load_tokenizer(source)
    _, source = source_with(llama, generic(eos_token=None, pad_token=PAD))
    assert load_tokenizer(source)("alpha")["input_ids"][-1] != 1
    _, source = source_with(llama, generic(eos_token=None))
    with pytest.raises(ModelError, match="pad_token"):
        load_tokenizer(source)


def test_last_token_pooling_if_the_end_token_is_also_the_padding(llama):
    _, source = source_with(llama, generic(template(f"{BOS} $A")), max_length=16)
    loaded = load_tokenizer(source)
    assert loaded.pad_token_id == loaded.eos_token_id == 1
    tokenizer = TextTokenizer(loaded, 16)
    torch.manual_seed(0)
    encoder = assemble_encoder(source).eval()
    texts = ["alpha", "alpha beta gamma delta alpha beta", ""]
    (chunk,) = tokenizer.chunks(texts, 999)
    with torch.no_grad():
        vectors = encoder(chunk)[0]
        for vector, row in zip(vectors, chunk.rows, strict=True):
            text_ids = torch.tensor(tokenizer.ids([texts[row]]))
            assert text_ids[0, -1] == 1
            hidden = encoder.backbone(input_ids=text_ids, attention_mask=torch.ones_like(text_ids)).last_hidden_state[
                0, -1
            ]
            torch.testing.assert_close(vector, torch.nn.functional.normalize(hidden, dim=0), atol=1e-5, rtol=0)


def test_truncated_texts_keep_their_end(llama):
    """Truncation would remove a token that is not added by the post-processor."""
    _, source = source_with(llama, generic(template(f"{BOS} $A")))
    tokenizer = TextTokenizer(load_tokenizer(source), 40)
    for length in range(3, 12):
        for row in tokenizer.ids(["alpha beta gamma delta " * 3] * 2, length):
            assert (len(row), row[0], row[-1], row.count(1)) == (length, 0, 1, 1)
