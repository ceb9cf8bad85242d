"""From files to chunks beside sentence-transformers' data loader and collator: speed, padding, balance, first start."""

import io
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.inputs import MINILM, QUICKSTART
from benchmarks.measure import Timed, interleave, markdown, require, seconds, unit
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data
from embedtrain.inspect.costs import batch_cost, count_computed_tokens
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch, pass_overhead

TITLE = "From files to chunks, all-MiniLM-L6-v2's tokenizer, against SentenceTransformerTrainer's data loader"
SHARED = QUICKSTART.parents[2] / "shared" / "data"
SETS = (
    QUICKSTART / "train-en.jsonl.gz",
    SHARED / "debian-pairs" / "train.jsonl.gz",
    SHARED / "pydocs-zh-en" / "train.jsonl.gz",
    SHARED / "zh-qa" / "train.jsonl.gz",
    SHARED / "nli-triples" / "snli-en.jsonl.gz",
)
BATCHES_OF, SMALL_BATCH = (256, 2048), 64  # rows of a global batch; the last for sets too small for the others
ROWS_A_ROUND = 4096  # about so many; of the cached, which would be over too soon to be timed, eight times as many
MAX_LENGTH = 256
CHUNK_TOKENS = 16384
PASS_TOKENS = {"GPU": pass_overhead(on_gpu=True, sharded=True), "CPU": pass_overhead(on_gpu=False, sharded=False)}
RANKS = 8

Round = Callable[[int], int]  # makes some batches; how many real tokens they had


def measure() -> str:
    speed, padding, starts, absent = [], [], [], []
    for path in SETS:
        if not path.is_file():
            absent.append(path.parent.name)
            continue
        with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
            one = Case(path, Path(folder))
            starts.append(_start(one))
            # Their loader is a batch ahead, and begins anew after an epoch: with few batches that is all one measures.
            for rows in [rows for rows in BATCHES_OF if one.num_rows >= 6 * rows] or [SMALL_BATCH]:
                speed.append(_speed(one, rows))
                padding.append(_padding(one, rows))
    per_s = f"real tokens / {unit()}"
    tables = [
        markdown(
            ["data set", "batch", *(f"ours, {way}, {per_s}" for way in ("1 rank", "1 of 8 ranks")),
             f"theirs, {per_s}", *(f"ratio, {way}" for way in ("1 rank", "1 of 8 ranks"))],
            speed,
        ),
        "Padding as a share of computed tokens, and what the busiest of 8 ranks computes over the mean. Ours is cut as "
        "on a GPU / on a CPU; theirs pads queries and documents each to the longest of a rank's share.",
        markdown(
            ["data set", "batch", "ours, 1 rank", "ours, 8 ranks", "theirs, 1 rank", "theirs, 8 ranks",
             "busiest, ours", "busiest, theirs (shares in a row)", "busiest, theirs (every 8th)"],
            padding,
        ),
        f"The first start, and the second, from the cache ({unit()}):",
        markdown(
            ["data set", "rows", "tokens", f"rows read and checked / {unit()}", f"tokens made / {unit()}",
             f"first start, {unit()}", f"second start, {unit()}"],
            starts,
        ),
    ]  # fmt: skip
    return "\n\n".join([*tables, *(f"{name} is not there and was left out." for name in absent)])


@dataclass
class Case:
    """A file of pairs, and folders for what is made of it."""

    path: Path
    folder: Path

    @property
    def name(self) -> str:
        """For the tables."""
        return self.path.name.split(".")[0] if self.path.parent == QUICKSTART else self.path.parent.name

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The model's."""
        return TextTokenizer(AutoTokenizer.from_pretrained(MINILM), MAX_LENGTH)

    @cached_property
    def num_rows(self) -> int:
        """Rows of the file."""
        return len(self.data(2))

    def data(self, batch: int, cache: Path | None = None) -> TrainData:
        """The rows, their hard negatives left out, and their tokens."""
        where = Cache(directory=cache or self.folder / "cache")
        source = TrainSource(path=str(self.path), negatives=0)
        data = load_train_data([source], seed=0, global_batch_size=batch, cache=where)
        data.prepare(self.tokenizer, where)
        return data


def _speed(one: Case, batch: int) -> list[object]:
    count = max(1, ROWS_A_ROUND // batch)
    cached = one.data(batch)
    theirs = Theirs(cached, one.folder, batch)
    theirs.compare(cached, one.tokenizer)

    def ours(data: TrainData, ranks: int, count: int) -> Round:
        def batches(number: int) -> int:
            made = (
                make_rank_batch(
                    data.batch(k),
                    0,
                    ranks,
                    one.tokenizer,
                    ChunkOptions(CHUNK_TOKENS, pass_overhead_tokens=PASS_TOKENS["GPU"]),
                )
                for k in range(number * count, number * count + count)
            )
            return sum(batch.real_tokens for batch in made)

        return batches

    ways = (ours(cached, 1, 8 * count), ours(cached, RANKS, 8 * count))
    *mine, other = interleave(*ways, lambda _: theirs.tokens(count))
    ratios = [[_rate(a) / _rate(b) for a, b in zip(way, other, strict=True)] for way in mine]
    told = [f"{statistics.median(r):.1f} ({min(r):.1f} to {max(r):.1f})" for r in ratios]
    return [one.name, batch, *(f"{statistics.median(map(_rate, way)):,.0f}" for way in [*mine, other]), *told]


def _rate(timed: Timed[int]) -> float:
    return timed.value / timed.seconds


class Theirs:
    """The data loader that sentence-transformers' trainer makes for the same rows, as columns anchor and positive."""

    def __init__(self, data: TrainData, folder: Path, batch: int) -> None:
        rows = [(example.query, example.positives[0]) for example in data.stores[0]]
        columns = {"anchor": [row[0] for row in rows], "positive": [row[1] for row in rows]}
        model = SentenceTransformer(MINILM, device="cpu")
        model.max_seq_length = MAX_LENGTH
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(folder / "theirs"), per_device_train_batch_size=batch, report_to="none", use_cpu=True
        )
        with redirect_stderr(io.StringIO()):  # bars of progress
            self._trainer = SentenceTransformerTrainer(
                model, arguments, train_dataset=Dataset.from_dict(columns), loss=MultipleNegativesRankingLoss(model)
            )
        self._loader = self._trainer.get_train_dataloader()
        self._batches = self._endless()

    def tokens(self, count: int) -> int:
        """Make so many batches; their real tokens."""
        return sum(_real(next(self._batches)) for _ in range(count))

    def compare(self, data: TrainData, tokenizer: TextTokenizer) -> None:
        """Require that their collator finds as many tokens in a batch as are in ours."""
        rows = data.batch(0).rows
        theirs = _real(self._trainer.data_collator([{"anchor": r.query, "positive": r.documents[0]} for r in rows]))
        ours = make_rank_batch(data.batch(0), 0, 1, tokenizer, ChunkOptions(CHUNK_TOKENS)).real_tokens
        require(ours == theirs, f"data: {ours} tokens of ours, {theirs} of theirs")

    def _endless(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from self._loader


def _real(features: dict[str, Tensor]) -> int:
    return sum(int(mask.sum()) for name, mask in features.items() if name.endswith("attention_mask"))


def _padding(one: Case, batch: int) -> list[object]:
    data = one.data(batch)
    batches = range(min(8, data.plan.steps_per_epoch))
    costs = [
        [batch_cost(data, batches, ranks, CHUNK_TOKENS, cost) for cost in PASS_TOKENS.values()] for ranks in (1, RANKS)
    ]
    alone, in_a_row, every = ([_theirs_cost(data, k, split) for k in batches] for split in (_whole, _blocks, _strides))
    return [
        one.name,
        batch,
        *(" / ".join(f"{cost.padding:.1%}" for cost in pair) for pair in costs),
        f"{_padded(alone):.1%}",
        f"{_padded(in_a_row):.1%}",
        " / ".join(f"{cost.imbalance:.3f}" for cost in costs[1]),
        *(f"{np.mean([max(ranks) / np.mean(ranks) for ranks, _ in split]):.3f}" for split in (in_a_row, every)),
    ]


Split = Callable[[NDArray[np.int64]], Sequence[NDArray[np.int64]]]


def _theirs_cost(data: TrainData, k: int, split: Split) -> tuple[list[int], int]:
    """Tokens that each rank computes of batch k if its rows are split so, and the real tokens of all."""
    tokens = data.batch(k).tokens
    assert tokens is not None
    count = len(tokens.num_documents)
    shares = [[part, part + count] for part in split(np.arange(count))]  # a query's document stands `count` after it
    return [count_computed_tokens(columns, tokens.lengths) for columns in shares], int(tokens.lengths.sum())


def _whole(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows]


def _blocks(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    bounds = [len(rows) * rank // RANKS for rank in range(RANKS + 1)]
    return [rows[start:stop] for start, stop in pairwise(bounds)]


def _strides(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows[rank::RANKS] for rank in range(RANKS)]


def _padded(found: Sequence[tuple[list[int], int]]) -> float:
    return 1 - sum(real for _, real in found) / sum(sum(ranks) for ranks, _ in found)


def _start(one: Case) -> list[object]:
    """Read and tokenise into an empty cache, then start again from it."""
    one.tokenizer.ids(["a text"])
    cache, source = Cache(directory=one.folder / "first"), TrainSource(path=str(one.path), negatives=0)
    began = seconds()
    data = load_train_data([source], seed=0, global_batch_size=256, cache=cache)
    read = seconds()
    data.prepare(one.tokenizer, cache)
    made = seconds()
    again = one.data(256, cache=one.folder / "first")
    over = seconds()
    assert data.tokens is not None
    assert again.tokens is not None
    tokens = len(data.tokens[0].values)
    require(len(again.tokens[0].values) == tokens, "data: the second start found other tokens")
    rates = (len(data) / (read - began), tokens / (made - read))
    return [
        one.name,
        f"{len(data):,}",
        f"{tokens:,}",
        *(f"{rate:,.0f}" for rate in rates),
        f"{made - began:.1f}",
        f"{over - made:.3f}",
    ]
