"""Training models of real sizes on a GPU: share of its own matmul rate, tokens a second, memory."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_models import MODELS, RandomTexts, Sized, load, saved
from benchmarks.measure import markdown
from benchmarks.sides import trainable
from embedtrain.config.recipe import Attention
from embedtrain.distributed.world import World, joined_world
from embedtrain.errors import EmbedtrainError
from embedtrain.loading.load import LoadedModel
from embedtrain.planning.flops import model_flops
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch, pass_overhead
from embedtrain.training.step import StepContext, train_step

LEFT_OUT = "There is no CUDA device here, so this was left out."
TITLE = "On a GPU: training with random weights in bf16, texts of about 100 tokens (log-normal, at most 512)"
WARM, STEPS, BATCHES = 5, 20, 4
MATMUL = 8192
# Of two ways on the same batch, in bf16 and with random weights.
LOSS_APART = 0.02
MOST_KEPT = 0.75  # of a batch that is planned to need caching
FREE = 0.92  # of the memory: the rest is the allocator's gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How it is trained. `keep`: the share of tokens whose graphs are kept, None: as memory allows; `times`: pairs."""

    name: str
    attention: Attention = Attention.packed
    compiled: bool = False
    keep: float | None = 1.0
    times: int = 1


PACKED = Way(name="packed")
WAYS = (
    PACKED,
    Way(name="padded", attention=Attention.padded),
    Way(name="packed, compiled", compiled=True),
    Way(name="padded, compiled", attention=Attention.padded, compiled=True),
    Way(name="packed, cached, none kept", keep=0.0, times=2),
    Way(name="packed, cached, kept as memory allows", keep=None, times=2),
)


@dataclass(slots=True)
class Found:
    """What a way took. Bytes; zero where they are not told."""

    seconds: float
    real: int
    computed: int
    flops: float
    loss: float
    kept: float  # share of tokens
    loading: int
    peak: int
    bytes_a_token: float


@dataclass(slots=True)
class Model:
    """What was found of a model so far."""

    sized: Sized
    found: dict[str, Found] = field(default_factory=dict)


def measure(part: str = "", models: Sequence[Sized] = MODELS, ways: Sequence[Way] = WAYS) -> str:
    """All models, or the one that is named."""
    if not torch.cuda.is_available():
        return LEFT_OUT
    return table([model for model in models if part in ("", model.name)], ways)


def table(models: Sequence[Sized], ways: Sequence[Way], matmul: int = MATMUL) -> str:
    """The same on any device."""
    with joined_world() as world:
        rate, rows = matmul_rate(world.device, matmul), []
        for sized in models:
            model = Model(sized)
            with saved(sized, world.device) as folder:
                rows += [_row(model, way, folder, world, rate) for way in ways]
    told = f"A product of two {matmul:,} x {matmul:,} matrices in bf16: {rate / 1e12:,.0f} TFLOP/s."
    header = ["model", "way", "tokens a step", "graphs kept", "computed a real token", "real tokens / s",
              "model TFLOP/s", "share of the matmul rate", "of it without caching", "loss",
              "most GiB while loading", "most GiB in training", "KiB a token kept"]  # fmt: skip
    return "\n\n".join([told, markdown(header, rows)])


def matmul_rate(device: torch.device, size: int = MATMUL) -> float:
    """Floating-point operations a second of a bf16 matrix product of random numbers; the median of three tries."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(STEPS):
            torch.mm(a, b, out=out)

    products()
    return STEPS * 2.0 * size**3 / statistics.median(timed(products, device) for _ in range(3))


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds: between two events on a GPU, by the wall elsewhere."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1000


def _row(model: Model, way: Way, folder: Path, world: World, rate: float) -> list[str]:
    told = [model.sized.name, way.name]
    try:
        found = _train(model, way, folder, world)
    except (RuntimeError, EmbedtrainError) as error:  # out of memory is one, and what a compiler says: others go on
        short = isinstance(error, torch.OutOfMemoryError)
        kind = "out of memory" if short else f"failed: {(str(error).splitlines() or [''])[0]}"
        return [*told, kind, *["-"] * 10]
    finally:
        _forget()
    first = model.found.get(PACKED.name)
    if way.times == 1 and first is not None and abs(found.loss - first.loss) > LOSS_APART * abs(first.loss):
        return [*told, f"wrong: its loss is {found.loss:.4f}, {PACKED.name} {first.loss:.4f}", *["-"] * 10]
    model.found[way.name] = found
    share = found.flops / found.seconds / rate
    whole = None if first is None else first.flops / first.seconds / rate
    return [
        *told,
        f"{found.real / STEPS:,.0f}",
        f"{found.kept:.0%}",
        f"{found.computed / found.real:.2f}",
        f"{found.real / found.seconds:,.0f}",
        f"{found.flops / found.seconds / 1e12:,.2f}",
        f"{share:.1%}",
        "-" if whole is None or way.times == 1 else f"{share / whole:.2f}",
        f"{found.loss:.4f}",
        *(f"{value / 2**30:.1f}" if value else "-" for value in (found.loading, found.peak)),
        f"{found.bytes_a_token / 1024:,.0f}" if found.bytes_a_token else "-",
    ]


def _forget() -> None:
    """Give back what a model held, one that failed as well."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _train(model: Model, way: Way, folder: Path, world: World) -> Found:
    device, sized = world.device, model.sized
    _forget()  # what made the random weights
    _peak(device)
    loaded = load(folder, world, attention=way.attention, compiled=way.compiled)
    loading = _peak(device)
    run = trainable(loaded, world)
    texts = [RandomTexts(way.times * sized.pairs, seed) for seed in range(BATCHES)]
    keep = _keep(model, way, sum(int(one.lengths.sum()) for one in texts) // BATCHES, device)
    batches = [_cut(one, loaded, sized.chunk_tokens, keep) for one in texts]
    loss = train_step(run, batches[0]).loss
    _steps(run, batches, WARM)
    _peak(device)
    seconds = timed(lambda: _steps(run, batches, STEPS), device)
    peak = _peak(device)
    done = [batches[step % BATCHES] for step in range(STEPS)]
    asked = model_flops(loaded.encoder)
    flops = sum(asked.of(torch.from_numpy(texts[step % BATCHES].lengths)) for step in range(STEPS))
    real, computed = sum(one.real_tokens for one in done), sum(one.computed_tokens for one in done)
    kept = statistics.mean(_kept(one) / one.computed_tokens for one in batches)
    return Found(seconds, real, computed, flops, loss, kept, loading, peak, _bytes_a_token(run, loaded, way, sized))


def _cut(texts: RandomTexts, loaded: LoadedModel, chunk_tokens: int, activation_tokens: int) -> RankBatch:
    on_gpu = torch.cuda.is_available()
    cost = pass_overhead(on_gpu=on_gpu, sharded=loaded.layout.shard > 1)
    found = make_rank_batch(texts.batch(), 0, 1, loaded.tokenizer, ChunkOptions(chunk_tokens, activation_tokens, cost))
    return found.pinned() if on_gpu else found


def _steps(run: StepContext, batches: Sequence[RankBatch], count: int) -> None:
    for step in range(count):
        train_step(run, batches[step % len(batches)])


def _kept(batch: RankBatch) -> int:
    return sum(chunk.ids.numel() for chunk in batch.chunks[: batch.num_cached_graphs])


def _keep(model: Model, way: Way, tokens: int, device: torch.device) -> int:
    """Tokens whose graphs are kept of a batch of `tokens`."""
    if way.keep is not None:
        return int(way.keep * 10**9)
    most = int(MOST_KEPT * tokens)
    whole = model.found.get(PACKED.name)
    if device.type != "cuda" or whole is None or not whole.bytes_a_token:
        return most
    total = torch.cuda.get_device_properties(device).total_memory
    besides = whole.peak - whole.bytes_a_token * whole.computed / STEPS
    fit = int((FREE * total - besides) / whole.bytes_a_token) - model.sized.chunk_tokens  # of what is encoded again
    return max(0, min(most, fit))


def _bytes_a_token(run: StepContext, loaded: LoadedModel, way: Way, sized: Sized) -> float:
    """What a token's graph takes: the peak of a step over that of one on half the texts, all graphs kept."""
    device = run.world.device
    if device.type != "cuda" or way.keep != 1.0:
        return 0.0
    peaks, tokens = [], []
    for pairs in (sized.pairs, sized.pairs // 2):
        batch = _cut(RandomTexts(pairs, seed=0), loaded, sized.chunk_tokens, activation_tokens=10**9)
        _peak(device)
        train_step(run, batch)
        peaks.append(_peak(device))
        tokens.append(batch.computed_tokens)
    return max(0.0, (peaks[0] - peaks[1]) / (tokens[0] - tokens[1]))


def _peak(device: torch.device) -> int:
    """Most bytes that were allocated since it was asked last; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(most)
