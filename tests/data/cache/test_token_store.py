"""The store of tokens: those of the tokenizer itself, for every text; built once by any number of processes."""

import copy
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache import row_store as stored
from embedtrain.data.cache import token_store as token_files
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import RowStore, read_sources
from embedtrain.data.cache.token_store import TokenRequest, TokenStore, prepare_all
from embedtrain.data.rows import NO_PROMPT, Prompt, TextFormat, instructed_query, text_keys
from embedtrain.data.tokens import Layout, TextTokenizer
from embedtrain.data.types import Tokens
from embedtrain.data.vocabulary import train_tokenizer
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from tests.data.files import write
from tests.small import small_tokenizer, text

INSTRUCT = "Instruct: {instruction}\nQuery: {text}"
LENGTHS = {"query_max_length": 6, "document_max_length": None}
PROMPTS = {"query_prompt": "alpha ", "document_prompt": "beta ", "instruction_format": INSTRUCT}


def row(i: int) -> dict[str, Any]:
    negatives = [text(7 * i + j, 2 + (i + j) % 30) for j in range(i % 4)]
    return {"query": text(i, 1 + i % 9), "pos": [text(3 * i, 5), text(5 * i + 1, 20)], "neg": negatives}


def prepare_tokens(rows: RowStore, tokenizer: TextTokenizer, *, cache: Cache, **text_format: Any) -> TokenStore:
    return prepare_all([TokenRequest(rows, TextFormat(**text_format))], tokenizer, cache)[0]


def rows_of(path: Path, cache: Cache, **options: Any) -> RowStore:
    return read_sources([TrainSource(path=str(path), **options)], OnError.stop, RowRequirements(), cache)[0]


def texts_of(rows: RowStore) -> list[list[str]]:
    return [[e.query, *e.positives.texts, *e.negatives.texts] for e in rows]


def plain(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> list[list[int]]:
    return tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]


def check(rows: RowStore, tokens: TokenStore, tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int]) -> None:
    """Every text's tokens are those that the tokenizer gives it behind its prompt."""
    texts = texts_of(rows)
    assert tokens.row_starts.tolist() == np.cumsum([0, *map(len, texts)]).tolist()
    assert tokens.keys.tolist() == text_keys([text for row in texts for text in row]).tolist()
    expected = [
        plain(tokenizer, [("alpha ", "beta ")[index > 0] + text], lengths[index > 0])[0]
        for row in texts
        for index, text in enumerate(row)
    ]
    assert tokens.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    order = np.random.default_rng(0).permutation(len(expected))
    assert tokens.lengths(order).tolist() == [len(expected[i]) for i in order]
    assert tokens.tokens(order).ids.tolist() == [token for i in order for token in expected[i]]
    assert tokens.tokens(order).ids.dtype == np.int32
    assert tokens.tokens(order[:0]).ids.tolist() == []


def test_every_text_has_the_tokens_of_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(token_files, "ROWS_PER_PART", 60)
    reported: list[tuple[str, int, int]] = []
    cache = Cache(directory=tmp_path / "cache", progress=lambda *what: reported.append(what))
    rows = rows_of(write(tmp_path / "a.jsonl", *map(row, range(300))), cache)
    reported.clear()
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    tokens = prepare_tokens(rows, tokenizer, **PROMPTS, **LENGTHS, cache=cache)
    check(rows, tokens, small_tokenizer(), (6, 16))
    assert tokens.values.dtype == np.uint16
    assert not tokens.cached
    num_parts = reported[0][2]
    assert num_parts > 3
    assert reported == [("tokenising a", done, num_parts) for done in range(num_parts + 1)]
    again = prepare_tokens(rows, tokenizer, **PROMPTS, **LENGTHS, cache=cache)
    assert again.cached
    assert len(reported) == num_parts + 1
    (folder,) = (tmp_path / "cache").glob("tokens-*")
    assert sorted(path.name for path in folder.iterdir()) == ["checksums", "complete.json", "joined"]
    shutil.rmtree(tmp_path / "cache")
    check(rows, again, small_tokenizer(), (6, 16))  # open maps outlive their files


def test_rows_of_one_text(tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    path = write(tmp_path / "a.jsonl", *({"text": text(i, 3), "label": i} for i in range(5)))
    classes = RowRequirements(documents=False, label=True)
    (rows,) = read_sources([TrainSource(path=str(path))], OnError.stop, classes, cache)
    tokens = prepare_tokens(rows, TextTokenizer(small_tokenizer(), 16), **PROMPTS, **LENGTHS, cache=cache)
    check(rows, tokens, small_tokenizer(), (6, 16))


def test_changes_that_tokenise_texts_again(tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    path = write(tmp_path / "a.jsonl", *map(row, range(20)))
    rows, base = rows_of(path, cache), small_tokenizer()

    def built(tokenizer: PreTrainedTokenizerBase = base, max_length: int = 16, **changes: Any) -> bool:
        options = {**PROMPTS, **LENGTHS, **changes}
        return not prepare_tokens(rows, TextTokenizer(tokenizer, max_length), **options, cache=cache).cached

    assert built()
    assert not built(small_tokenizer())
    assert not built(instruction_format="{instruction} {text}")  # no row carries an instruction
    assert built(query_prompt="gamma ")
    assert built(document_prompt="")
    assert built(max_length=17)
    assert not built(max_length=17, document_max_length=17)
    assert not built(max_length=20, document_max_length=17)
    assert built(query_max_length=5)
    other = small_tokenizer()
    other.add_tokens(["alphabeta"])
    assert built(other)
    base(["a"], truncation=True, max_length=3, padding="max_length")
    assert not built()  # what a call left behind in the tokenizer is no other tokenizer
    write(path, *map(row, range(21)))
    rows = rows_of(path, cache)
    assert built()


def test_instructions_of_rows_replace_prompts(tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    own: list[dict[str, Any]] = [{"prompt": "gamma"}, {}, {"prompt": "delta mu"}]
    path = write(tmp_path / "a.jsonl", *(row(i) | own[i % 3] for i in range(9)))
    rows, tokenizer = rows_of(path, cache), small_tokenizer()
    for instruction_format in (INSTRUCT, "{text} nu {instruction}"):
        options = PROMPTS | {"instruction_format": instruction_format}
        tokens = prepare_tokens(
            rows, TextTokenizer(tokenizer, 40), **options, **LENGTHS | {"query_max_length": 30}, cache=cache
        )
        for i, example in enumerate(rows):
            before, around = TextFormat(**options).prompts(example)
            assert example.instruction == own[i % 3].get("prompt")
            expected = plain(tokenizer, [before(example.query)], 30)[0]
            assert tokens.tokens(tokens.row_starts[i : i + 1]).ids.tolist() == expected
            expected = plain(tokenizer, [around(example.positives.texts[0])], 40)[0]
            assert tokens.tokens(tokens.row_starts[i : i + 1] + 1).ids.tolist() == expected
        assert (
            tokens.keys[tokens.row_starts[:-1]].tolist()
            == text_keys([instructed_query(e.query, e.instruction) for e in rows]).tolist()
        )


def test_one_text_with_two_instructions_is_two_queries(tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    own: list[dict[str, Any]] = [{"prompt": "gamma"}, {"prompt": "delta"}, {"prompt": ""}, {}, {"prompt": "gamma"}]
    path = write(tmp_path / "a.jsonl", *({"query": "alpha", "pos": ["alpha"]} | one for one in own))
    # With the prompt of the source all queries and documents but one look alike to the model.
    options = PROMPTS | dict.fromkeys(["query_prompt", "document_prompt"], "Instruct: gamma\nQuery: ")
    lengths = {"query_max_length": None, "document_max_length": None}
    tokens = prepare_tokens(
        rows_of(path, cache), TextTokenizer(small_tokenizer(), 16), **options, **lengths, cache=cache
    )
    queries, documents = tokens.keys[tokens.row_starts[:-1]], tokens.keys[tokens.row_starts[:-1] + 1]
    assert documents.tolist() == text_keys(["alpha"] * 5).tolist()
    assert queries.tolist() == text_keys(["gamma\0alpha", "delta\0alpha", "alpha", "alpha", "gamma\0alpha"]).tolist()
    first = [tokens.tokens(tokens.row_starts[i : i + 1]).ids.tolist() for i in range(5)]
    assert first[0] == first[3] == first[4]


def test_lengths_beyond_the_models_are_reported(tmp_path: Path) -> None:
    rows, tokenizer = rows_of(write(tmp_path / "fe_plain.jsonl", row(1)), Cache(directory=tmp_path / "cache")), 48

    def notes(**lengths: int | None) -> list[str]:
        requests = TokenRequest(rows, TextFormat(**PROMPTS, **LENGTHS | lengths))
        return requests.notes(TextTokenizer(small_tokenizer(), tokenizer))

    assert notes() == notes(query_max_length=48, document_max_length=48) == []
    assert notes(query_max_length=5000, document_max_length=49) == [
        "fe_plain: query_max_length=5000 is more than the model's 48 tokens, which are kept",
        "fe_plain: document_max_length=49 is more than the model's 48 tokens, which are kept",
    ]


def test_prompts() -> None:
    text_format = TextFormat(query_prompt="q: ", instruction_format=INSTRUCT)
    assert text_format.query(None) == Prompt("q: ")
    assert text_format.query("") == NO_PROMPT
    assert text_format.query("find {text}")("x") == "Instruct: find {text}\nQuery: x"
    assert TextFormat(instruction_format="<{text}> {instruction}").query("find")("x") == "<x> find"
    assert TextFormat(instruction_format="{text}").query("find")("x") == "x"
    for bad in ("{instruction}", "{text} {text}", "{instruction} {text} {text}"):
        with pytest.raises(ConfigError, match=re.escape(f"data.instruction_format={bad!r}")):
            TextFormat(instruction_format=bad).query("find")


def test_equal_texts_are_tokenised_once(tmp_path: Path) -> None:
    class Counting(Layout):
        num_texts = 0

        def tokenize(self, texts: Any, *options: Any) -> Tokens:
            self.num_texts += len(texts)
            return super().tokenize(texts, *options)

    cache = Cache(directory=tmp_path / "cache")
    same = {"query": "a", "pos": ["a", "b"], "neg": ["c"]}
    rows = rows_of(write(tmp_path / "a.jsonl", *[same] * 5000), cache)
    for prompts, count in (({}, 4), ({"query_prompt": "", "document_prompt": ""}, 3)):
        layout = Counting(small_tokenizer())
        tokens = prepare_tokens(
            rows,
            TextTokenizer(small_tokenizer(), 16, layout),
            **PROMPTS | prompts,
            query_max_length=None,
            document_max_length=None,
            cache=cache,
        )
        assert layout.num_texts == count
        assert len(tokens.keys) == 20_000
        assert len(np.unique(tokens.keys)) == 3


def test_a_large_vocabulary_needs_larger_numbers(tmp_path: Path) -> None:
    vocabulary = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, 70_000)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    cache = Cache(directory=tmp_path / "cache")
    rows = rows_of(write(tmp_path / "a.jsonl", {"query": "w69999 w3", "pos": ["w65536"]}), cache)
    options = PROMPTS | {"query_prompt": "", "document_prompt": ""}
    tokens = prepare_tokens(rows, TextTokenizer(tokenizer, 8), **options, **LENGTHS, cache=cache)
    assert tokens.values.tolist() == [69_999, 3, 65_536]


def test_a_disk_too_small_for_the_tokens(tmp_path: Path, small_disk: Path) -> None:
    long = {"query": "alpha " * 9000, "pos": ["beta " * 9000]}
    rows = rows_of(write(tmp_path / "a.jsonl", *[long] * 40), Cache(directory=tmp_path / "cache"))
    options = PROMPTS | {"query_max_length": None, "document_max_length": None}
    tokenizer, cache = TextTokenizer(small_tokenizer(), 99_999), Cache(directory=small_disk / "cache")
    with pytest.raises(DataError, match=r"MB free.* data\.cache_dir"):
        prepare_tokens(rows, tokenizer, **options, cache=cache)


# Several processes


def tokenise_there(world: World, paths: list[str], directory: str) -> list[list[int]]:
    token_files.ROWS_PER_PART = 60
    stored.PIECE_BYTES = 20_000
    cache = Cache(directory=Path(directory))
    stores = read_sources([TrainSource(path=path) for path in paths], OnError.stop, cache=cache)
    requests = [TokenRequest(rows, TextFormat(**PROMPTS, **LENGTHS)) for rows in stores]
    token_stores = prepare_all(requests, TextTokenizer(small_tokenizer(), 16), cache)
    return [tokens.values.tolist() + tokens.offsets.tolist() + tokens.keys.tolist() for tokens in token_stores]


def test_several_processes_build_the_same_as_one(tmp_path: Path, ranks: Any) -> None:
    paths = [str(write(tmp_path / f"{name}.jsonl", *map(row, range(count)))) for name, count in (("a", 300), ("b", 9))]
    (alone,) = ranks(1, tokenise_there, paths, str(tmp_path / "one"))
    for rank in ranks(2, tokenise_there, paths, str(tmp_path / "many")):
        assert rank == alone


# The short way through a tokenizer


SENTENCES = [text(i, 1 + i % 40) for i in range(60)] + [
    "", " ", "a", "  two  words ", "Ünïcödé ﬁ ½ 中文字 日本語\n\ttabs",
    "<s> </s> [CLS] <pad> <|endoftext|>", "\x00\u200b",
    "naïve café ❤️ 🤦🏽‍♀️", "x" * 500, "1234567890 " * 30, "don't stop-me_now! (really?)",
]  # fmt: skip


def byte_level(**options: Any) -> PreTrainedTokenizerBase:
    """GPT-2's kind: byte-level pieces, no special tokens around a text, and padding by the end of text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = options.pop("post_processor", processors.ByteLevel(trim_offsets=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>", **options
    )


def unigram() -> PreTrainedTokenizerBase:
    """XLM-R's kind."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<pad>"], unk_token="<unk>")
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")


def roberta_like() -> PreTrainedTokenizerBase:
    end = ("<|endoftext|>", 0)
    return byte_level(post_processor=processors.RobertaProcessing(end, end, trim_offsets=True, add_prefix_space=False))


def with_end(**options: Any) -> PreTrainedTokenizerBase:
    """Qwen3-Embedding's kind: nothing before a text, its end behind it."""
    template = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    return byte_level(post_processor=processors.Sequence([processors.ByteLevel(), template]), **options)


TOKENIZERS = {
    "words": small_tokenizer,
    "trained": lambda: train_tokenizer(SENTENCES, 600, 48),
    "unigram": unigram,
    "byte_level": byte_level,
    "roberta": roberta_like,
    "end": with_end,
    "end_cut_left": lambda: with_end(truncation_side="left"),
    "padded_left": lambda: with_end(padding_side="left"),
    "split_specials": lambda: with_end(split_special_tokens=True),
}


def check_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    ours, other = TextTokenizer(tokenizer, 64), copy.deepcopy(tokenizer)
    for length in (64, 300, 17, 3):
        expected = plain(other, SENTENCES, min(length, 64))
        assert ours.ids(SENTENCES, length) == [ids or [ours.layout.nothing] for ids in expected]
    assert ours.ids(SENTENCES) == ours.ids(SENTENCES, 64)
    assert ours.ids([]) == []
    tokenizer.backend_tokenizer.no_truncation()
    ours.ids(SENTENCES, 17)
    assert tokenizer.backend_tokenizer.truncation is None, "transformers set it, so the copy was not used"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_fast_tokenizer_gives_the_same_ids(name: str) -> None:
    check_ids(TOKENIZERS[name]())


def test_fast_tokenizer_with_a_real_vocabulary(minilm_dir: Path) -> None:
    check_ids(AutoTokenizer.from_pretrained(minilm_dir))


def test_tokenizers_that_cannot_be_copied() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
            return super()._encode_plus([one.upper() for one in text], *args, **options)

    backend = small_tokenizer().backend_tokenizer
    own = Own(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    slow = ByT5Tokenizer()
    assert TextTokenizer(own, 16).ids(["alpha"]) == plain(own, ["alpha"], 16) == [[0, 3, 2]]
    assert TextTokenizer(slow, 16).ids(["abc", "x" * 99], 9) == plain(slow, ["abc", "x" * 99], 9)
    assert TextTokenizer(own, 16).fingerprint != TextTokenizer(small_tokenizer(), 16).fingerprint
    assert TextTokenizer(slow, 16).fingerprint == TextTokenizer(ByT5Tokenizer(), 99).fingerprint
    assert TextTokenizer(slow, 16).fingerprint != TextTokenizer(ByT5Tokenizer(extra_ids=9), 16).fingerprint


def test_threads_share_a_tokenizer() -> None:
    tokenizer = small_tokenizer()
    ours = TextTokenizer(tokenizer, 48)
    texts = [text(i, 30) for i in range(400)]
    expected = {length: [[*ids[: length - 1], 2] for ids in ours.ids(texts, 48)] for length in (5, 9, 20)}
    failures: list[BaseException] = []

    def work(length: int) -> None:
        try:
            for _ in range(10):
                assert ours.ids(texts, length) == expected[length]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(length,)) for length in (5, 9, 20)]
    for thread in threads:
        thread.start()
    for length in range(3, 40):  # as another part of the program may, with settings of its own
        tokenizer(["alpha"], truncation=True, max_length=length, padding="max_length")
    for thread in threads:
        thread.join()
    assert not failures


def test_texts_of_a_chunk_are_padded_on_the_right() -> None:
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    texts = tokenizer.tokens([text(i, 1 + i % 12) for i in range(30)])
    rows, ids = [3, 17, 0, 8], texts.lists()
    tokens = tokenizer.chunk(texts, rows)
    longest = max(len(ids[row]) for row in rows)
    assert tokens.ids.tolist() == [ids[row] + [1] * (longest - len(ids[row])) for row in rows]
    assert tokens.mask.tolist() == [[1] * len(ids[row]) + [0] * (longest - len(ids[row])) for row in rows]
    assert tokens.rows == tuple(rows)
    assert tokens.ids.dtype == tokens.mask.dtype == torch.int64
    again = tokenizer.make_chunk(Tokens.of([ids[row] for row in rows]), rows)
    assert again.ids.equal(tokens.ids)
    assert again.mask.equal(tokens.mask)
