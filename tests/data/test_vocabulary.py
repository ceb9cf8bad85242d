"""A vocabulary trained on texts, and texts cut into chunks of tokens."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from embedtrain.data.tokens import TextTokenizer, cut_by_length
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.errors import ConfigError, DataError
from tests.conftest import ROOT

SENTENCES = [
    "The cat sat on 12 mats.",
    "用于 YUV 缩放的库（工具）",
    "filezilla的架构无关文件",
    "  ",
    "日本語のテキスト 😀",
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    texts_of_files = []
    for name in ("train-en", "train-zh2en", "train-zh2zh"):
        with gzip.open(ROOT / "recipes" / "quickstart" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            for line in list(file)[:700]:
                row = json.loads(line)
                texts_of_files += [row["query"], *row["pos"]]
    return texts_of_files


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    return train_tokenizer(texts, 3000, 64)


def test_special_tokens_have_the_ids_of_xlm_r(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 3000
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 2999]
    assert (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    assert (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id) == (2, 2, 3)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("right", 64)
    ids = tokenizer("hello")["input_ids"]
    assert (ids[0], ids[-1]) == (0, 2)
    assert tokenizer("")["input_ids"] == [0, 2]


def test_saved_and_loaded_it_is_the_same(tokenizer: PreTrainedTokenizerFast, texts: list[str], tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    some = texts[1::50] + SENTENCES
    assert loaded(some)["input_ids"] == tokenizer(some)["input_ids"]
    assert (len(loaded), loaded.padding_side, loaded.model_max_length) == (3000, "right", 64)
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    batch = loaded(some, padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape[1] == 64
    assert int(batch["input_ids"].max()) < 3000


def test_two_processes_train_the_same_vocabulary(texts: list[str], tmp_path: Path) -> None:
    """Byte for byte, whatever the seed of hash tables and the number of threads."""
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    program = (
        "import json, sys; from embedtrain.data.vocabulary import train_tokenizer\n"
        "train_tokenizer(json.load(open(sys.argv[1])), 3000, 64).save_pretrained(sys.argv[2])"
    )
    for name, threads in (("one", "1"), ("two", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": threads, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", program, str(tmp_path / "texts.json"), str(tmp_path / name)]
        subprocess.run(command, check=True, timeout=120, env=environment)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "tokenizer.json" in names
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_words_have_the_same_tokens_at_any_position(tokenizer: PreTrainedTokenizerFast) -> None:
    word = tokenizer.tokenize("package")
    for text in ("the package", "(package)", "用于package的", "ｐａｃｋａｇｅ", "\tpackage\n\n", "PACKAGE,"):
        tokens = tokenizer.tokenize(text)
        assert any(tokens[i : i + len(word)] == word for i in range(len(tokens))), (text, tokens)
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert tokenizer.tokenize("的 的") == tokenizer.tokenize("的，的")[::2] == ["的", "的"]
    cased = train_tokenizer(["The cat. the Cat."] * 20, 400, 16, lowercase=False)
    assert cased.tokenize("The") != cased.tokenize("the")


def test_unknown_characters_become_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("龘", "ไทย", "\U0001f980"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids).strip() == text
    assert tokenizer("龘")["input_ids"] != tokenizer("靐")["input_ids"]


def test_few_texts_none_and_many_characters(texts: list[str]) -> None:
    few = train_tokenizer(["a cat", "a dog"], 16_000, 16)
    assert 261 < len(few) < 300
    assert few.convert_tokens_to_ids("<mask>") == len(few) - 1
    assert few.unk_token_id not in few("anything else 你好")["input_ids"]
    for nothing in ([], ["", " \n"]):
        with pytest.raises(DataError, match="no training texts"):
            train_tokenizer(nothing, 16_000, 16)
    crowded = train_tokenizer([text for text in texts if not text.isascii()], 400, 16)  # over 1,000 characters
    assert len(crowded) <= 400
    with pytest.raises(ConfigError, match="vocab_size=300"):
        train_tokenizer(texts, 300, 16)


def test_chunks_hold_every_text_once_within_the_budget(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
    cutter = TextTokenizer(tokenizer, 48)
    some = texts[:200]
    chunks = cutter.chunks(some, 512)
    assert sorted(row for chunk in chunks for row in chunk.rows) == list(range(200))
    expected = tokenizer(some, truncation=True, max_length=48)["input_ids"]
    for chunk in chunks:
        assert chunk.ids.numel() <= 512
        assert chunk.ids.shape == chunk.mask.shape
        for i, row in enumerate(chunk.rows):
            assert chunk.ids[i][chunk.mask[i] == 1].tolist() == expected[row]
    assert cutter.chunks([], 512) == []
    assert cut_by_length([5, 100, 3], 10) == [[1], [0, 2]]
    assert cutter.dummy().rows == (-1,)


def test_a_text_without_tokens_still_has_one() -> None:
    bare = train_tokenizer(["a cat", "a dog"], 400, 16)
    bare.backend_tokenizer.post_processor = None  # as with models that know no special tokens
    tokenizer = TextTokenizer(bare, 16)
    assert tokenizer.ids(["", "cat"])[0] == [bare.eos_token_id]
    (chunk,) = tokenizer.chunks(["", "cat"], 64)
    assert torch.all(chunk.mask.sum(1) >= 1)
