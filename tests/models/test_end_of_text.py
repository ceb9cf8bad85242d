"""Every text ends with the end-of-text token once, cut or not, and does so again where the export is opened."""

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
from embedtrain.models.build import assemble_encoder
from embedtrain.models.source import ModelSource, open_model_source
from embedtrain.models.tokenizer import load_tokenizer
from tests.checkpoint.exporting import architecture_of, export_model
from tests.small import save_small, small_model

BOS, EOS, PAD, SEP = "<|begin|>", "<|end|>", "<|pad|>", "<|sep|>"
TEXTS = ["alpha beta", "alpha beta gamma delta alpha beta", "", "beta<|end|>", "a"]
MOST = 4


@cache
def rules() -> str:
    """A byte-level vocabulary as Llama 3, Qwen and GPT-2 have it."""
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
    made: PreTrainedTokenizerBase = kind(vocab=model["vocab"], merges=merges, **names)
    if processor is not None:
        made.backend_tokenizer.post_processor = processor
    return made


LEVEL = processors.ByteLevel(trim_offsets=False)
# What stands before a text, and a tokenizer that ends it with nothing.
OPEN: dict[str, tuple[list[int], Callable[[], PreTrainedTokenizerBase]]] = {
    "llama 3": ([0], lambda: generic(processors.Sequence([LEVEL, template(f"{BOS} $A")]))),
    "llama 2": ([0], lambda: of_class(LlamaTokenizer, template(f"{BOS} $A"))),
    "llama 2, told by an option": ([0], lambda: of_class(LlamaTokenizer, add_bos_token=True)),
    "gemma": ([0], lambda: of_class(GemmaTokenizer, template(f"{BOS} $A"), mask_token=PAD)),
    "qwen 2": ([], lambda: of_class(Qwen2Tokenizer, LEVEL)),
    "gpt 2": ([], lambda: generic(LEVEL)),
    "without anything": ([], generic),
    "cut on the left": ([0], lambda: generic(template(f"{BOS} $A"), truncation_side="left")),
}
CLOSED: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "both": lambda: generic(template(f"{BOS} $A {EOS}")),
    "end alone": lambda: generic(template(f"$A {EOS}")),
    "roberta": lambda: generic(processors.RobertaProcessing((EOS, 1), (BOS, 0))),
    "in python": ByT5Tokenizer,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Hugging Face directory whose tokenizer each test replaces."""
    model = small_model("llama")
    model.config |= {"vocab_size": 400}
    return save_small(model, tmp_path_factory.mktemp("llama"))


def source_with(llama: Path, tokenizer: PreTrainedTokenizerBase, **options: object) -> tuple[ModelConfig, ModelSource]:
    for path in llama.glob("*token*"):
        path.unlink()
    tokenizer.save_pretrained(llama)
    model = ModelConfig(**{"path": str(llama), "pooling": Pooling.last, "max_length": MOST, **options})
    return model, open_model_source(model)


def ids(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer(text, truncation=True, max_length=MOST)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("name", OPEN)
def test_it_is_appended_once_and_survives_the_export(name, llama, tmp_path):
    before, make = OPEN[name]
    bare = make()(TEXTS, add_special_tokens=False)["input_ids"]
    room = MOST - len(before) - 1
    expected = [[*before, *(one[-room:] if name == "cut on the left" else one[:room]), 1] for one in bare]
    model, source = source_with(llama, make())
    loaded = load_tokenizer(source)
    assert ids(loaded) == expected
    bound = TextTokenizer(loaded, MOST)
    assert bound.ids(TEXTS) == expected
    assert bound._fast._copy is not None
    made = architecture_of(tmp_path / "made", model)
    export_model(tmp_path / "out", made)
    assert ids(AutoTokenizer.from_pretrained(tmp_path / "out")) == expected
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for text, wanted in zip(TEXTS, expected, strict=True):
        assert theirs.preprocess([text])["input_ids"].tolist() == [wanted]
    # Opened again nothing is appended twice, asked for or not.
    for asked in (None, True):
        again = open_model_source(ModelConfig(path=str(tmp_path / "out"), append_eos=asked))
        assert ids(load_tokenizer(again)) == expected


@pytest.mark.parametrize("name", CLOSED)
def test_who_ends_texts_already_is_left_alone(name, llama):
    expected = ids(CLOSED[name]())
    for asked in (None, True):
        _, source = source_with(llama, CLOSED[name](), append_eos=asked)
        assert ids(load_tokenizer(source)) == expected
    _, source = source_with(llama, CLOSED[name](), append_eos=False)
    with pytest.raises(ConfigError, match=r"model\.append_eos=false: .* ends every text with .* itself"):
        load_tokenizer(source)


def test_what_decides_where_nothing_is_asked(llama, tmp_path):
    def ends(tokenizer: PreTrainedTokenizerBase, **options: object) -> bool:
        _, source = source_with(llama, tokenizer, **options)
        return bool(load_tokenizer(source)("alpha")["input_ids"][-1] == 1)

    assert ends(generic())
    assert not ends(generic(), append_eos=False)
    assert not ends(generic(), pooling=Pooling.mean)
    assert ends(generic(), pooling=Pooling.mean, append_eos=True)
    # Another special token at the end is what the model knows as its end; asked for, both stand there.
    assert not ends(generic(template(f"$A {SEP}"), sep_token=SEP))
    for processor in (template(f"$A {SEP}"), processors.Sequence([LEVEL, template(f"{BOS} $A {SEP}")])):
        _, source = source_with(llama, generic(processor, sep_token=SEP), append_eos=True)
        assert load_tokenizer(source)("alpha")["input_ids"][-2:] == [3, 1]
    # A sentence-transformers directory has said how its texts end.
    model, _ = source_with(llama, generic(), append_eos=False)
    export_model(tmp_path / "out", architecture_of(tmp_path / "made", model))
    for options, expected in (({}, False), ({"append_eos": True}, True)):
        again = open_model_source(ModelConfig(path=str(tmp_path / "out"), **options))
        assert (load_tokenizer(again)("alpha")["input_ids"][-1] == 1) is expected


def test_a_tokenizer_without_what_is_needed(llama, tmp_path):
    _, source = source_with(llama, generic(eos_token=None, pad_token=PAD), append_eos=True)
    with pytest.raises(ConfigError, match=r"append_eos=true: .* has no end-of-text token; name one"):
        load_tokenizer(source)
    _, source = source_with(llama, generic(eos_token=None, pad_token=PAD))
    assert load_tokenizer(source)("alpha")["input_ids"][-1] != 1
    _, source = source_with(llama, generic(eos_token=None))
    with pytest.raises(ModelError, match=r"neither a padding nor an end-of-text token: name one of its tokens as pad_"):
        load_tokenizer(source)


def test_the_last_token_counts_where_it_is_also_the_padding(llama):
    _, source = source_with(llama, generic(template(f"{BOS} $A")), max_length=16)
    loaded = load_tokenizer(source)
    assert loaded.pad_token_id == loaded.eos_token_id == 1
    tokenizer = TextTokenizer(loaded, 16)
    torch.manual_seed(0)
    encoder = assemble_encoder(source).eval()
    texts = ["alpha", "alpha beta gamma delta alpha beta", ""]
    (chunk,) = tokenizer.chunks(texts, 999)
    with torch.no_grad():
        found = encoder(chunk.ids, chunk.mask)
        for vector, row in zip(found, chunk.rows, strict=True):
            one = torch.tensor(tokenizer.ids([texts[row]]))
            assert one[0, -1] == 1
            hidden = encoder.backbone(input_ids=one, attention_mask=torch.ones_like(one)).last_hidden_state[0, -1]
            torch.testing.assert_close(vector, torch.nn.functional.normalize(hidden, dim=0), atol=1e-5, rtol=0)


def test_a_text_that_is_cut_never_loses_its_end(llama):
    """A token added behind the text, and not by the tokenizer, is what is cut off."""
    _, source = source_with(llama, generic(template(f"{BOS} $A")))
    tokenizer = TextTokenizer(load_tokenizer(source), 40)
    for length in range(3, 12):
        for found in tokenizer.ids(["alpha beta gamma delta " * 3] * 2, length):
            assert (len(found), found[0], found[-1], found.count(1)) == (length, 0, 1, 1)
