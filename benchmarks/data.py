"""From files to chunks, compared with sentence-transformers' data loader: speed, padding, balance, first start."""

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
from embedtrain.commands.inspect.texts import batch_cost, count_computed_tokens
from embedtrain.config.recipe import TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data
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
BATCH_SIZES, SMALL_BATCH = (256, 2048), 64  # rows of a global batch; SMALL_BATCH is for small sets
ROWS_PER_ROUND = 4096  # about; eight times as many of our cached rows, whose rounds would be too short to time
MAX_LENGTH = 256
CHUNK_TOKENS = 16384
PASS_TOKENS = {"GPU": pass_overhead(on_gpu=True, sharded=True), "CPU": pass_overhead(on_gpu=False, sharded=False)}
RANKS = 8

Round = Callable[[int], int]  # builds the batches of a round; returns their number of real tokens


def measure() -> str:
    speed, padding, starts, missing = [], [], [], []
    for path in SETS:
        if not path.is_file():
            missing.append(path.parent.name)
            continue
        with tempfile.TemporaryDirectory(prefix="embedtrain-bench-") as folder:
            case = Case(path, Path(folder))
            starts.append(_start(case))
            # Their loader prefetches a batch and restarts after an epoch: with few batches this dominates the time.
            for rows in [rows for rows in BATCH_SIZES if case.num_rows >= 6 * rows] or [SMALL_BATCH]:
                speed.append(_speed(case, rows))
                padding.append(_padding(case, rows))
    per_s = f"real tokens / {unit()}"
    tables = [
        markdown(
            ["data set", "batch", *(f"ours, {ranks}, {per_s}" for ranks in ("1 rank", "1 of 8 ranks")),
             f"theirs, {per_s}", *(f"ratio, {ranks}" for ranks in ("1 rank", "1 of 8 ranks"))],
            speed,
        ),
        "Padding as a fraction of computed tokens, and the load of the busiest of 8 ranks relative to the mean. Our "
        "chunks are planned as on a GPU / as on a CPU; theirs pads queries and documents each to the longest text "
        "on the rank.",
        markdown(
            ["data set", "batch", "ours, 1 rank", "ours, 8 ranks", "theirs, 1 rank", "theirs, 8 ranks",
             "busiest, ours", "busiest, theirs (contiguous rows)", "busiest, theirs (every 8th)"],
            padding,
        ),
        f"The first start, and the second start from the cache ({unit()}):",
        markdown(
            ["data set", "rows", "tokens", f"rows read and checked / {unit()}", f"tokens created / {unit()}",
             f"first start, {unit()}", f"second start, {unit()}"],
            starts,
        ),
    ]  # fmt: skip
    return "\n\n".join([*tables, *(f"{name} does not exist and was skipped." for name in missing)])


@dataclass
class Case:
    """A file of pairs, and the folder of its caches."""

    path: Path
    folder: Path

    @property
    def name(self) -> str:
        """Name of the data set in the tables."""
        return self.path.name.split(".")[0] if self.path.parent == QUICKSTART else self.path.parent.name

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the model."""
        return TextTokenizer(AutoTokenizer.from_pretrained(MINILM), MAX_LENGTH)

    @cached_property
    def num_rows(self) -> int:
        """Number of rows in the file."""
        return len(self.data(2))

    def data(self, batch: int, cache: Path | None = None) -> TrainData:
        """The rows without hard negatives, and their tokens."""
        row_cache = Cache(directory=cache or self.folder / "cache")
        source = TrainSource(path=str(self.path), negatives=0)
        data = load_train_data([source], seed=0, global_batch_size=batch, cache=row_cache)
        data.prepare(self.tokenizer, row_cache)
        return data


def _speed(case: Case, batch: int) -> list[object]:
    count = max(1, ROWS_PER_ROUND // batch)
    cached = case.data(batch)
    theirs = Theirs(cached, case.folder, batch)
    theirs.compare(cached, case.tokenizer)

    def ours(data: TrainData, ranks: int, count: int) -> Round:
        def batches(round_number: int) -> int:
            rank_batches = (
                make_rank_batch(
                    data.batch(k),
                    0,
                    ranks,
                    case.tokenizer,
                    ChunkOptions(CHUNK_TOKENS, pass_overhead_tokens=PASS_TOKENS["GPU"]),
                )
                for k in range(round_number * count, (round_number + 1) * count)
            )
            return sum(batch.real_tokens for batch in rank_batches)

        return batches

    our_rounds = (ours(cached, 1, 8 * count), ours(cached, RANKS, 8 * count))
    *our_times, their_times = interleave(*our_rounds, lambda _: theirs.tokens(count))
    ratios = [[_rate(a) / _rate(b) for a, b in zip(times, their_times, strict=True)] for times in our_times]
    ratio_cells = [f"{statistics.median(r):.1f} ({min(r):.1f} to {max(r):.1f})" for r in ratios]
    speeds = [f"{statistics.median(map(_rate, times)):,.0f}" for times in [*our_times, their_times]]
    return [case.name, batch, *speeds, *ratio_cells]


def _rate(timed: Timed[int]) -> float:
    return timed.value / timed.seconds


class Theirs:
    """The data loader of sentence-transformers' trainer for the same rows, in the columns anchor and positive."""

    def __init__(self, data: TrainData, folder: Path, batch: int) -> None:
        rows = [(example.query, example.positives.texts[0]) for example in data.stores[0]]
        columns = {"anchor": [row[0] for row in rows], "positive": [row[1] for row in rows]}
        model = SentenceTransformer(MINILM, device="cpu")
        model.max_seq_length = MAX_LENGTH
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(folder / "theirs"), per_device_train_batch_size=batch, report_to="none", use_cpu=True
        )
        with redirect_stderr(io.StringIO()):  # progress bars
            self._trainer = SentenceTransformerTrainer(
                model, arguments, train_dataset=Dataset.from_dict(columns), loss=MultipleNegativesRankingLoss(model)
            )
        self._loader = self._trainer.get_train_dataloader()
        self._batches = self._cycle()

    def tokens(self, count: int) -> int:
        """Build `count` batches and return their number of real tokens."""
        return sum(_count_real_tokens(next(self._batches)) for _ in range(count))

    def compare(self, data: TrainData, tokenizer: TextTokenizer) -> None:
        """Require that their collator gives the same number of real tokens as our batch."""
        rows = data.batch(0).rows
        theirs = _count_real_tokens(
            self._trainer.data_collator([{"anchor": r.query, "positive": r.documents.texts[0]} for r in rows])
        )
        ours = make_rank_batch(data.batch(0), 0, 1, tokenizer, ChunkOptions(CHUNK_TOKENS)).real_tokens
        require(ours == theirs, f"data: our batch has {ours} real tokens, theirs has {theirs}")

    def _cycle(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from self._loader


def _count_real_tokens(features: dict[str, Tensor]) -> int:
    return sum(int(mask.sum()) for name, mask in features.items() if name.endswith("attention_mask"))


def _padding(case: Case, batch: int) -> list[object]:
    data = case.data(batch)
    batches = range(min(8, data.plan.steps_per_epoch))
    inputs = case.tokenizer.inputs
    our_costs = [
        [batch_cost(data, batches, ranks, CHUNK_TOKENS, cost, inputs=inputs) for cost in PASS_TOKENS.values()]
        for ranks in (1, RANKS)
    ]
    one_rank, contiguous, strided = (
        [_their_cost(data, k, split) for k in batches] for split in (_unsplit, _contiguous, _strided)
    )
    return [
        case.name,
        batch,
        *(" / ".join(f"{cost.padding:.1%}" for cost in pair) for pair in our_costs),
        f"{_padding_fraction(one_rank):.1%}",
        f"{_padding_fraction(contiguous):.1%}",
        " / ".join(f"{cost.imbalance:.3f}" for cost in our_costs[1]),
        *(f"{np.mean([max(ranks) / np.mean(ranks) for ranks, _ in costs]):.3f}" for costs in (contiguous, strided)),
    ]


Split = Callable[[NDArray[np.int64]], Sequence[NDArray[np.int64]]]


def _their_cost(data: TrainData, k: int, split: Split) -> tuple[list[int], int]:
    """Tokens of batch `k` that each rank computes if `split` distributes its rows, and the real tokens of all ranks."""
    tokens = data.batch(k).tokens
    assert tokens is not None
    count = len(tokens.num_documents)
    # The document of query i has index i + count.
    ranks = [[queries, queries + count] for queries in split(np.arange(count))]
    return [count_computed_tokens(columns, tokens.lengths) for columns in ranks], int(tokens.lengths.sum())


def _unsplit(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows]


def _contiguous(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    bounds = [len(rows) * rank // RANKS for rank in range(RANKS + 1)]
    return [rows[start:stop] for start, stop in pairwise(bounds)]


def _strided(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows[rank::RANKS] for rank in range(RANKS)]


def _padding_fraction(costs: Sequence[tuple[list[int], int]]) -> float:
    return 1 - sum(real for _, real in costs) / sum(sum(ranks) for ranks, _ in costs)


def _start(case: Case) -> list[object]:
    """Read and tokenize into an empty cache, then start again from that cache."""
    case.tokenizer.ids(["a text"])
    cache, source = Cache(directory=case.folder / "first"), TrainSource(path=str(case.path), negatives=0)
    start = seconds()
    data = load_train_data([source], seed=0, global_batch_size=256, cache=cache)
    rows_read = seconds()
    data.prepare(case.tokenizer, cache)
    tokens_ready = seconds()
    second = case.data(256, cache=case.folder / "first")
    end = seconds()
    assert data.tokens is not None
    assert second.tokens is not None
    tokens = len(data.tokens[0].values)
    require(len(second.tokens[0].values) == tokens, "data: the second start has a different number of tokens")
    rates = (len(data) / (rows_read - start), tokens / (tokens_ready - rows_read))
    return [
        case.name,
        f"{len(data):,}",
        f"{tokens:,}",
        *(f"{rate:,.0f}" for rate in rates),
        f"{tokens_ready - start:.1f}",
        f"{end - tokens_ready:.3f}",
    ]
