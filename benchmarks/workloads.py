"""Pairs of four shapes, made of the quickstart's texts: nothing else is needed, and anybody can measure the same."""

import gzip
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.inputs import MINILM, QUICKSTART
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data

MAX_LENGTH = 256  # all-MiniLM-L6-v2's own
SPECIAL = 2  # tokens around a text

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts of one shape.

    Attributes:
        name: for the table.
        num_pairs: of a batch.
        steps: of a round, so that it lasts some seconds.
        max_length: tokens that are kept of a text.
        pairs: so many pairs of texts, none twice.
    """

    name: str
    num_pairs: int
    steps: int
    max_length: int
    pairs: Callable[[int], list[Pair]]

    def data(self, num_batches: int, tokenizer: TextTokenizer) -> TrainData:
        """So many batches with their tokens, as a run finds them in its cache."""
        with tempfile.TemporaryDirectory() as folder:  # what is mapped stays
            path, pairs = Path(folder) / "pairs.jsonl", self.pairs(num_batches * self.num_pairs)
            # Equal texts are no negatives of each other here, but are in sentence-transformers.
            assert len({text for pair in pairs for text in pair}) == 2 * len(pairs)
            rows = [{"query": query, "pos": [text], "neg": []} for query, text in pairs]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            cache, most = Cache(directory=Path(folder) / "cache"), self.max_length
            source = TrainSource(path=str(path), query_max_length=most, document_max_length=most)
            data = load_train_data([source], seed=0, global_batch_size=self.num_pairs, cache=cache)
            data.prepare(tokenizer, cache)
        return data


def question_passage(num_pairs: int = 64, steps: int = 2) -> Workload:
    """Short questions and passages of many lengths, as retrieval sets have them: log-normal about 120 tokens."""
    pairs = partial(_joined, median=120, spread=0.45)
    return Workload("question/passage", num_pairs, steps, MAX_LENGTH, pairs)


def web(num_pairs: int = 32, steps: int = 2) -> Workload:
    """Titles and bodies of pages: most are short, a few are cut at the model's length."""
    return Workload("web title/body", num_pairs, steps, MAX_LENGTH, partial(_joined, median=65, spread=1.0))


def short_pairs(num_pairs: int = 64, steps: int = 3) -> Workload:
    """A synopsis and the first sentence of its description, as they are."""
    return Workload("short pairs", num_pairs, steps, MAX_LENGTH, _first_sentences)


def equal_lengths(num_pairs: int = 64, steps: int = 2) -> Workload:
    """All texts cut to 64 tokens: there is no padding to save."""
    return Workload("equal lengths", num_pairs, steps, 64, _equal)


@cache
def descriptions() -> tuple[Pair, ...]:
    """The quickstart's English rows, shuffled: a package's synopsis and its description; no text twice."""
    with gzip.open(QUICKSTART / "train-en.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    order = np.random.default_rng(0).permutation(len(rows))
    return tuple(_unlike((rows[row]["query"], rows[row]["pos"][0]) for row in order))


def _unlike(pairs: Iterable[Pair]) -> Iterator[Pair]:
    seen: set[str] = set()
    for pair in pairs:
        if len({*pair} - seen) == 2:
            seen.update(pair)
            yield pair


def _joined(count: int, median: float, spread: float) -> list[Pair]:
    """A synopsis and its description, which goes on with others as long as it has to be, and is cut there."""
    random, found = np.random.default_rng(1), descriptions()
    lengths = np.clip(random.lognormal(np.log(median), spread, count), 16, MAX_LENGTH).astype(int)
    return [(found[row][0], _of_length(row, int(length))) for row, length in enumerate(lengths)]


def _equal(count: int) -> list[Pair]:
    own = [_of_length(row, 80) for row in range(2 * count)]  # longer than what is kept
    return list(zip(own[:count], own[count:], strict=True))


def _first_sentences(count: int) -> list[Pair]:
    firsts = ((synopsis, " ".join(text.split()).split(". ")[0]) for synopsis, text in descriptions())
    return list(itertools.islice(_unlike(firsts), count))


def _of_length(row: int, length: int) -> str:
    """The description `row` and as many of the ones after it as make a text of `length` tokens."""
    text, found = "", descriptions()
    for _, more in itertools.islice(itertools.cycle(found), row, None):
        text = f"{text} {more}".strip()
        ends = _ends(text)
        if len(ends) >= length:
            break
    return text[: ends[length - SPECIAL]]


def _ends(text: str) -> list[int]:
    """Where each token ends in the text, special ones included."""
    return [end for _, end in _tokenizer()(text, return_offsets_mapping=True)["offset_mapping"]]


@cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MINILM, model_max_length=10**6)
