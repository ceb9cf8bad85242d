"""A trimmed vocabulary gives texts of kept tokens the same tokens and exactly the same outputs."""

import json
from pathlib import Path

import pytest
import sentence_transformers.models as parts
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from embedtrain.commands.trim import compose
from embedtrain.commands.trim import compose as compose_trim
from embedtrain.commands.trim import run as main
from embedtrain.commands.trim.vocabulary import merges_of, with_parts
from embedtrain.errors import ConfigError
from tests.small import save_small, small_model

SUBJECTS = {"editor": "images", "player": "music", "viewer": "video", "library": "text", "daemon": "fonts"}
TEXTS = [
    *(f"the {subject} {number} compresses files of {kind}" for number, (subject, kind) in enumerate(SUBJECTS.items())),
    *("naïve café, Straße", "如何压缩文件", "a b c"),
] * 5
OTHER_TEXTS = ["kernel modules unload", "quantum chromodynamics", "многоязычный текст", "emacs lisp macros"] * 5
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]


def build_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of this kind, trained on all texts, with a mask token at the end as XLM-R's."""
    if kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    elif kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(TEXTS + OTHER_TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="<s>", sep_token="</s>", **names)


def save_model(folder: Path, kind: str, architecture: str = "xlm-roberta") -> Path:
    """A sentence-transformers directory with a tokenizer of this kind."""
    tokenizer, model = build_tokenizer(kind), small_model(architecture)
    assert model.config is not None
    model.config["vocab_size"] = len(tokenizer) + 5  # a padded matrix
    backbone = save_small(model, folder / "backbone")
    tokenizer.save_pretrained(backbone)
    pooling = parts.Pooling(model.config["hidden_size"], pooling_mode="mean")
    modules = [parts.Transformer(str(backbone), max_seq_length=30), pooling, parts.Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "model"))
    return folder / "model"


def write_texts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "BPE"])
def test_texts_of_kept_tokens_have_the_same_outputs(tmp_path, kind, capsys):
    directory = save_model(tmp_path / "whole", kind)
    corpus = write_texts(tmp_path / "corpus.jsonl")
    main(compose([f"model={directory}", f"corpus=[{corpus}]", f"output_dir={tmp_path}/small"]))
    assert "100.00%" in capsys.readouterr().out
    whole, small = (SentenceTransformer(str(path), device="cpu") for path in (directory, tmp_path / "small"))
    matrices = [model[0].auto_model.get_input_embeddings().weight for model in (whole, small)]
    assert matrices[1].shape[0] < 0.9 * matrices[0].shape[0]
    assert matrices[1].shape[0] == small[0].auto_model.config.vocab_size == len(small.tokenizer)
    distinct = list(dict.fromkeys(TEXTS))
    for text in distinct:  # one at a time: rounding depends on the padding of a batch
        before, after = (torch.from_numpy(model.encode([text])) for model in (whole, small))
        assert torch.equal(before, after), text
    tokens = [[model.tokenizer.convert_ids_to_tokens(model.tokenizer(text)["input_ids"]) for text in distinct]
              for model in (whole, small)]  # fmt: skip
    assert tokens[0] == tokens[1]
    assert small.tokenizer.mask_token_id == len(small.tokenizer) - 1
    assert small.tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == SPECIALS


def test_the_most_frequent_tokens_are_kept(tmp_path):
    directory = save_model(tmp_path / "whole", "WordPiece", "bert")
    corpus = write_texts(tmp_path / "corpus.jsonl")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query": "emacs emacs emacs", "positive": "emacs lisp"}\n' * 50)
    options = [f"model={directory}", f"corpus={corpus}", f"data=[{rows}]", f"output_dir={tmp_path}/small", "top=30"]
    main(compose(options))
    small = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert len(small.tokenizer) == 30
    assert "emacs" in small.tokenizer.get_vocab()
    assert "kernel" not in small.tokenizer.get_vocab()


def test_merges_keep_their_intermediate_tokens():
    merges = [["a", "b"], ["ab", "c"], ["b", "c"], "a bc"]
    vocabulary = {token: index for index, token in enumerate(["a", "b", "c", "d", "ab", "abc", "bc"])}
    content = {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    assert with_parts(content, {vocabulary["abc"]}) == {
        vocabulary[token] for token in ("a", "b", "c", "ab", "abc", "bc")
    }
    assert with_parts(content, {vocabulary["d"]}) == {vocabulary["d"]}
    assert merges_of(content["model"])[3] == ("a", "bc")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"data=null: is missing"),
        (["corpus=[a.jsonl]", "top=0"], r"top=0: "),
        (["corpus=[a.jsonl]", "min_count=0"], r"min_count=0: "),
        (["corpus=[3]"], r"corpus\[0\]=3 is neither a path nor a mapping"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        compose_trim(["model=here", "output_dir=there", *options])


def test_a_top_below_the_required_tokens_is_named(tmp_path):
    directory = save_model(tmp_path / "whole", "BPE")
    corpus = write_texts(tmp_path / "corpus.jsonl")
    with pytest.raises(ConfigError, match=r"top=100: .* 2\d\d "):
        main(compose([f"model={directory}", f"corpus=[{corpus}]", f"output_dir={tmp_path}/small", "top=100"]))
