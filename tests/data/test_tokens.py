"""Which tokens of a text are its prompt's, from the tokenizer to the padded chunk, and on disk."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.cache.row_store import read_sources
from embedtrain.data.cache.token_store import TokenRequest, prepare_all
from embedtrain.data.rows import TextFormat
from embedtrain.data.tokens import Layout, TextTokenizer
from embedtrain.data.types import NOT_POOLED, Tokens
from tests.small import small_tokenizer

INSTRUCT = "{instruction} kappa {text} mu"


def counting(texts: list[str], prompts: str | list[str], most: int = 16, template: str = "<s> $A </s>") -> list[str]:
    """Of each text's tokens which count, as 1 and 0; after padding them together."""
    loaded = small_tokenizer()
    loaded.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer = TextTokenizer(loaded, most, Layout(loaded, include_prompt=False))
    chunk = tokenizer.chunk(tokenizer.tokens(texts, prompts=prompts), range(len(texts)))
    plain = TextTokenizer(loaded, most)
    assert [row[mask.bool()].tolist() for row, mask in zip(chunk.ids, chunk.mask, strict=True)] == plain.ids(texts)
    pooled = chunk.mask if chunk.pooled is None else chunk.pooled
    assert bool((pooled <= chunk.mask).all())
    return ["".join(map(str, row[mask.bool()].tolist())) for row, mask in zip(pooled, chunk.mask, strict=True)]


def test_tokens_of_prompts_are_not_pooled() -> None:
    texts = ["alpha beta gamma", "alpha beta", "alpha beta gamma delta mu"]
    # What stands before the prompt belongs to it, what ends a text does not.
    assert counting(texts, "alpha beta ") == ["00011", "0001", "0001111"]
    assert counting(texts, "alpha beta ", template="$A") == ["001", "01", "00111"]
    assert counting(texts, "alpha beta ", template="<s> $A") == ["0001", "001", "000111"]
    assert counting(texts, ["", "alpha ", "alpha beta gamma "]) == ["11111", "0011", "0000111"]
    assert counting(texts, "") == ["11111", "1111", "1111111"]
    assert counting(texts, "alpha beta ", most=4) == ["0001", "0001", "0001"]
    # A text that is cut within its prompt keeps one token.
    assert counting(["alpha beta gamma delta"], "alpha beta gamma delta ", most=4, template="$A") == ["0001"]
    assert counting([""], "", template="$A") == ["1"]


def test_tokens_of_prompts_are_pooled_by_default() -> None:
    tokenizer = TextTokenizer(small_tokenizer(), 16)
    assert tokenizer.ids(["alpha beta"], prompts="alpha ") == tokenizer.ids(["alpha beta"])
    assert tokenizer.chunk(tokenizer.tokens(["alpha beta"], prompts="alpha "), [0]).pooled is None
    left_out = TextTokenizer(small_tokenizer(), 16, Layout(small_tokenizer(), include_prompt=False))
    assert left_out.fingerprint != tokenizer.fingerprint
    chunk = left_out.chunk(left_out.tokens(["alpha beta"], prompts="alpha "), [0])
    assert chunk.to("cpu").pooled is not None
    (first, second) = left_out.chunks(["alpha beta gamma", "mu"], 5, ["alpha ", ""])
    assert (first.pooled.tolist(), second.pooled) == ([[0, 0, 1, 1, 1]], None)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_cached_tokens_equal_those_computed_on_the_fly(tmp_path: Path, include_prompt: bool) -> None:
    rows = [
        {"query": "gamma", "pos": ["delta mu"], "prompt": "eta theta", "type": "symmetric_sts"},
        {"query": "gamma nu", "pos": ["mu"], "neg": ["nu"]},
        {"query": "gamma nu", "pos": ["mu"], "prompt": ""},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = Cache(directory=tmp_path / "cache")
    (store,) = read_sources([TrainSource(path=str(path))], OnError.stop, cache=cache)
    tokenizer = TextTokenizer(small_tokenizer(), 16, Layout(small_tokenizer(), include_prompt=include_prompt))
    prompted_texts = [
        ("eta theta kappa ", "eta theta kappa gamma mu"),
        ("eta theta kappa ", "eta theta kappa delta mu mu"),
        ("alpha ", "alpha gamma nu"),
        ("beta beta ", "beta beta mu"),
        ("beta beta ", "beta beta nu"),
        ("", "gamma nu"),
        ("beta beta ", "beta beta mu"),
    ]
    expected = Tokens.concatenated([tokenizer.tokens([text], prompts=prompt) for prompt, text in prompted_texts])
    assert bool((expected.flags & NOT_POOLED).any()) is not include_prompt
    text_format = TextFormat(query_prompt="alpha ", document_prompt="beta beta ", instruction_format=INSTRUCT)
    request = TokenRequest(store, text_format)
    for cached in (False, True):
        (tokens,) = prepare_all([request], tokenizer, cache)
        assert tokens.cached is cached
        stored = tokens.tokens(np.arange(len(expected)))
        for name in ("ids", "flags", "lengths"):
            assert getattr(stored, name).tolist() == getattr(expected, name).tolist()
    layout = Layout(small_tokenizer(), include_prompt=not include_prompt)
    (other,) = prepare_all([request], TextTokenizer(small_tokenizer(), 16, layout), cache)
    assert not other.cached
