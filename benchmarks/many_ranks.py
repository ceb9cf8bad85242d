"""What one of many ranks computes and holds besides the model: simulated without the other ranks."""

import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from benchmarks.data_memory import write_rows
from benchmarks.inputs import MINILM
from benchmarks.measure import markdown
from embedtrain.checkpoint.snapshot import OPTIMIZER, WEIGHTS
from embedtrain.checkpoint.step_directory import FORMAT, commit_checkpoint, open_checkpoint
from embedtrain.checkpoint.tensor_files import (
    LocalShard,
    ShardPosition,
    TensorFiles,
    TensorSpec,
    describe_tensors,
    tensor_files,
    write_local_shards,
)
from embedtrain.commands.plan import compose_plan
from embedtrain.commands.plan.compute import plan
from embedtrain.config.recipe import CheckpointContents, CheckpointLayout, Pooling, TrainSource
from embedtrain.data.cache.cache import Cache
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import load_train_data
from embedtrain.distributed.messages import decode, encode
from embedtrain.formats.source import open_model_source
from embedtrain.kinds.dense.options import DenseOptions
from embedtrain.models.build import build_encoder
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch

T = TypeVar("T")
_CHECKPOINT_HEADER = (
    "ranks",
    "tensors of a rank, MB",
    "layout and writing",
    "checksums of all ranks, MB",
    "decoding them",
    "manifest, on rank 0",
    "its size, MB",
    "opening it, on each rank",
)
RANKS = tuple(int(size) for size in os.environ.get("RANKS", "8,64,512").split(","))
ROWS = 32  # of a batch, on each rank
BATCHES = 5
TITLE = "One of many ranks: CPU time and memory of Python and NumPy"
_SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 24}
_MODEL = {"model_type": "xlm-roberta", "vocab_size": 16000, "max_position_embeddings": 514, **_SHAPE}
_XLMR = {"model_type": "xlm-roberta", "vocab_size": 250002, "max_position_embeddings": 514, "num_hidden_layers": 24}
_XLMR |= {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}


def measure() -> str:
    return f"{_batches()}\n\n{_plans()}\n\n{_checkpoints()}"


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds, and the peak of what Python and NumPy allocated, in MiB."""

    seconds: float
    peak: float

    def __str__(self) -> str:
        return f"{1000 * self.seconds:,.1f} ms, {self.peak:,.1f} MiB"


def _cost(call: Callable[[], T], repeat: int = 1) -> tuple[T, Cost]:
    """The result of a call, its time (the mean of calls after the first) and its memory, in a call of its own."""
    call()
    start = time.process_time()
    for _ in range(repeat):
        call()
    seconds = (time.process_time() - start) / repeat
    tracemalloc.start()
    result = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, Cost(seconds, peak / 2**20)


def _batches() -> str:
    """Batches that grow with the ranks, and one global batch that all share."""
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(MINILM), 256)
    rows: dict[int, list[object]] = {size: [size] for size in RANKS}
    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder) / "rows.jsonl", Cache(directory=Path(folder) / "cache")
        write_rows(file, 2 * ROWS * max(RANKS))
        for global_batch in (None, ROWS * max(RANKS)):
            for size in RANKS:
                batch_size = global_batch or ROWS * size
                data = load_train_data([TrainSource(path=str(file))], seed=0, global_batch_size=batch_size, cache=cache)
                data.prepare(tokenizer, cache)
                options = ChunkOptions(16384, pass_overhead_tokens=1024)
                made, cost = _cost(
                    lambda data=data, size=size, options=options: make_rank_batch(  # type: ignore[misc]
                        data.batch(0), size - 1, size, tokenizer, options
                    ),
                    BATCHES,
                )
                rows[size] += [f"{batch_size:,}", f"{made.real_tokens:,}", cost]
    header = ["ranks", "rows of a batch", "tokens of a rank", "planning and reading it"]
    return markdown([*header, *header[1:]], list(rows.values()))


def _plans() -> str:
    rows = []
    shape = "{" + ", ".join(f"{name}: {value}" for name, value in _XLMR.items()) + "}"
    for size in RANKS:
        arguments = [f"model.config={shape}", "model.pooling=cls", f"gpus={size}"]
        arguments.append(f"train.global_batch_size={64 * size}")
        result, cost = _cost(lambda arguments=arguments: plan(*compose_plan(arguments)))  # type: ignore[misc]
        rows.append([size, result.best.name, cost])
    return markdown(["ranks", "layout of XLM-R large", "planning it"], rows)


@dataclass(frozen=True, slots=True)
class _Sharded:
    """The tensors of a model and of AdamW, divided as FSDP2 divides them."""

    specs: Mapping[str, Mapping[str, TensorSpec]]  # kind -> name -> spec

    def local(self, shard: int, num_shards: int) -> dict[str, dict[str, LocalShard]]:
        """The rows of a shard, without content."""
        return {
            kind: {name: self._rows(spec, shard, num_shards) for name, spec in specs.items()}
            for kind, specs in self.specs.items()
        }

    @staticmethod
    def _rows(spec: TensorSpec, shard: int, num_shards: int) -> LocalShard:
        if not spec.shape:
            return LocalShard(spec, torch.zeros((), dtype=spec.dtype), 0, sharded=False)
        size = -(-spec.num_rows // num_shards)
        first = min(size * shard, spec.num_rows)
        count = min(size, spec.num_rows - first)
        return LocalShard(spec, torch.zeros((count, *spec.shape[1:]), dtype=spec.dtype), first, sharded=True)


def _tensors() -> _Sharded:
    encoder = build_encoder(open_model_source(DenseOptions(config=_MODEL, pooling=Pooling.mean)))
    weights = {f"encoder.{name}": TensorSpec.of(tensor) for name, tensor in encoder.state_dict().items()}
    state = {
        f"state.{name}.{part}": TensorSpec(torch.float32, spec.shape if part != "step" else ())
        for name, spec in weights.items()
        for part in ("exp_avg", "exp_avg_sq", "step")
    }
    return _Sharded({WEIGHTS: weights, OPTIMIZER: state})


def _checkpoints() -> str:
    """A save and a resume of the rank in the middle; the files of other ranks have their sizes, but no content."""
    return markdown(_CHECKPOINT_HEADER, [_checkpoint_row(_tensors(), size) for size in RANKS])


def _checkpoint_row(tensors: _Sharded, size: int) -> list[object]:
    position, local = ShardPosition(0, size // 2, size), tensors.local(size // 2, size)
    with tempfile.TemporaryDirectory() as name:
        folder, final = Path(name) / "unfinished", Path(name) / "step-00000001"
        folder.mkdir()

        def write() -> tuple[dict[str, TensorFiles], dict[str, Any]]:
            files = {kind: tensor_files(kind, shards, CheckpointLayout.sharded, size) for kind, shards in local.items()}
            written = {
                kind: write_local_shards(folder, files[kind], position, shards) for kind, shards in local.items()
            }
            return files, written

        (files, checksums), writing = _cost(write)
        message = encode((position, checksums), (ShardPosition,))
        gathered, decoding = _cost(lambda: [decode(message, (ShardPosition,)) for _ in range(size)])
        described, describing = _cost(
            lambda: {
                kind: describe_tensors(of_kind, [sums[kind] for _, sums in gathered]) for kind, of_kind in files.items()
            }
        )
        for file, layout in ((file, layout) for of_kind in files.values() for file, layout in of_kind.files.items()):
            with (folder / file).open("ab") as out:
                out.truncate(layout.size)
        commit_checkpoint(folder, final, _manifest(size, described))
        _, opening = _cost(lambda: open_checkpoint(final))
        manifest = (final / "checkpoint.json").stat().st_size
    rows = sum(shard.rows.nbytes for shards in local.values() for shard in shards.values())
    sizes = [f"{value / 1e6:,.1f}" for value in (rows, len(message) * size, manifest)]
    return [size, sizes[0], writing, sizes[1], decoding, describing, sizes[2], opening]


def _manifest(shards: int, tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": 1,
        "contents": CheckpointContents.all.value,
        "layout": CheckpointLayout.sharded.value,
        "world_size": shards,
        "shards": shards,
        "tensors": tensors,
    }
