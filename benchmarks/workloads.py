"""Pairs with four distributions of lengths, built from the quickstart's texts, so that anyone can reproduce them."""

import gzip
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs import QUICKSTART, text_tokenizer
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data

MAX_LENGTH = 256  # all-MiniLM-L6-v2's own
SPECIAL = 2  # tokens around a text

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Workload:
    """Pairs of texts with one distribution of lengths.

    Attributes:
        name: name in the table.
        num_pairs: pairs in a batch.
        steps: steps in a round, enough to last a few seconds.
        max_length: maximal number of tokens of a text.
        pairs: returns the requested number of pairs; no text occurs twice.
    """

    name: str
    num_pairs: int
    steps: int
    max_length: int
    pairs: Callable[[int], list[Pair]]

    def data(self, num_batches: int, tokenizer: TextTokenizer) -> TrainData:
        """`num_batches` batches with their tokens, as a run reads them from its cache."""
        pairs = self.pairs(num_batches * self.num_pairs)
        # Equal texts are not negatives of each other here, but they are in sentence-transformers.
        assert len({text for pair in pairs for text in pair}) == 2 * len(pairs)
        rows = [{"query": query, "pos": [text], "neg": []} for query, text in pairs]
        return load_rows(rows, self.max_length, self.num_pairs, tokenizer)


def load_rows(rows: Sequence[dict[str, Any]], max_length: int, batch_size: int, tokenizer: TextTokenizer) -> TrainData:
    """Batches of these rows with their tokens; `max_length` is that of a text."""
    with tempfile.TemporaryDirectory() as folder:  # mapped files remain readable after deletion
        path, cache = Path(folder) / "rows.jsonl", Cache(directory=Path(folder) / "cache")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = TrainSource(path=str(path), query_max_length=max_length, document_max_length=max_length)
        data = load_train_data([source], seed=0, global_batch_size=batch_size, cache=cache)
        data.prepare(tokenizer, cache)
    return data


def question_passage(num_pairs: int = 64, steps: int = 2) -> Workload:
    """Short questions and passages of varied lengths, as in retrieval sets: log-normal about 120 tokens."""
    pairs = partial(_joined, median=120, spread=0.45)
    return Workload("question/passage", num_pairs, steps, MAX_LENGTH, pairs)


def web(num_pairs: int = 32, steps: int = 2) -> Workload:
    """Titles and bodies of pages: most are short, a few are truncated at the model's maximal length."""
    return Workload("web title/body", num_pairs, steps, MAX_LENGTH, partial(_joined, median=65, spread=1.0))


def short_pairs(num_pairs: int = 64, steps: int = 3) -> Workload:
    """A synopsis and the first sentence of its description, unchanged."""
    return Workload("short pairs", num_pairs, steps, MAX_LENGTH, _first_sentences)


def equal_lengths(num_pairs: int = 64, steps: int = 2) -> Workload:
    """All texts truncated to 64 tokens: there is no padding to save."""
    return Workload("equal lengths", num_pairs, steps, 64, _equal)


@cache
def descriptions() -> tuple[Pair, ...]:
    """The quickstart's English rows, shuffled: a package's synopsis and its description; no text occurs twice."""
    with gzip.open(QUICKSTART / "train-en.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    order = np.random.default_rng(0).permutation(len(rows))
    return tuple(_without_duplicates((rows[row]["query"], rows[row]["pos"][0]) for row in order))


def _without_duplicates(pairs: Iterable[Pair]) -> Iterator[Pair]:
    seen: set[str] = set()
    for pair in pairs:
        if len({*pair} - seen) == 2:
            seen.update(pair)
            yield pair


def _joined(count: int, median: float, spread: float) -> list[Pair]:
    """Each synopsis with its description, extended by further descriptions and truncated to a log-normal length."""
    generator, synopses = np.random.default_rng(1), [synopsis for synopsis, _ in descriptions()]
    lengths = np.clip(generator.lognormal(np.log(median), spread, count), 16, MAX_LENGTH).astype(int)
    return [(synopses[row], _text_of_length(row, int(length))) for row, length in enumerate(lengths)]


def _equal(count: int) -> list[Pair]:
    texts = [_text_of_length(row, 80) for row in range(2 * count)]  # longer than max_length
    return list(zip(texts[:count], texts[count:], strict=True))


def _first_sentences(count: int) -> list[Pair]:
    pairs = ((synopsis, " ".join(text.split()).split(". ")[0]) for synopsis, text in descriptions())
    return list(itertools.islice(_without_duplicates(pairs), count))


def _text_of_length(row: int, length: int) -> str:
    """The description `row` and the following ones, truncated to `length` tokens."""
    text = ""
    for _, description in itertools.islice(itertools.cycle(descriptions()), row, None):
        text = f"{text} {description}".strip()
        ends = _token_ends(text)
        if len(ends) >= length:
            break
    return text[: ends[length - SPECIAL]]


def _token_ends(text: str) -> list[int]:
    """End offset of each token in the text, including special tokens."""
    return [end for _, end in text_tokenizer(10**6)(text, return_offsets_mapping=True)["offset_mapping"]]
