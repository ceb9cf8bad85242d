"""Training models of real sizes on a GPU: fraction of the measured matmul rate, tokens per second, memory."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.comparison import OPTIM, make_step_context, prefetched
from benchmarks.gpu.models import RandomTexts, Sized, load, saved, sized_named
from benchmarks.measure import markdown
from embedtrain.config.losses import BCEConfig, InfoNCEConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import Attention, DataConfig, LoraConfig
from embedtrain.data.prefetch import Prefetcher
from embedtrain.distributed.world import World, joined_world
from embedtrain.errors import EmbedtrainError
from embedtrain.inference.loading.load import LoadedModel
from embedtrain.kinds.late_interaction.score import MaxSim
from embedtrain.kinds.sparse.score import WordScore
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.listwise import BCE
from embedtrain.losses.score import PairScore
from embedtrain.losses.types import Loss
from embedtrain.planning.flops import model_flops
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch, pass_overhead
from embedtrain.training.step import StepContext, train_step

TITLE = "Training with random weights in bf16, texts of about 100 tokens (log-normal, at most 512)"
WARM, STEPS, BATCHES = 5, 20, 4
MATMUL = 8192
# Maximal relative difference of the losses of two variants on the same batch, in bf16 with random weights.
LOSS_TOLERANCE = 0.02
MAX_CACHED = 0.75  # fraction of the tokens of a batch that is meant to need caching
USABLE = 0.92  # fraction of the memory; the rest is fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How to train a model.

    Attributes:
        options: of a recipe's `parallel`, such as compile=true.
        cached: the fraction of tokens whose graphs are cached; None: as many as memory allows.
        batch_factor: multiplies the number of pairs.
        lora: adapters are trained instead of the model.
        prepares: threads prepare each batch during the steps, as in a run; otherwise it is ready. They share the
            interpreter's lock with the launches of kernels.
    """

    name: str
    attention: Attention = Attention.packed
    options: tuple[str, ...] = ("compile=false",)
    cached: float | None = 1.0
    batch_factor: int = 1
    lora: LoraConfig | None = None
    prepares: bool = False
    optim: OptimConfig = field(default_factory=lambda: OPTIM)


COMPILED, SELECTIVE = "compile=true", "activation_checkpointing=selective"
PACKED = Variant(name="packed")
VARIANTS = (
    PACKED,
    Variant(name="padded", attention=Attention.padded),
    Variant(name="packed, compiled", options=(COMPILED,)),
    Variant(name="padded, compiled", attention=Attention.padded, options=(COMPILED,)),
    Variant(name="packed, compiled, selective recomputation", options=(COMPILED, SELECTIVE)),
    Variant(name="packed, no graphs cached", cached=0.0, batch_factor=2),
    Variant(name="packed, graphs cached as memory allows", cached=None, batch_factor=2),
)


@dataclass(slots=True)
class TrainCost:
    """Cost of the steps of a variant. Memory is in bytes, and zero on a CPU."""

    steps: int
    seconds: float
    real: int
    computed: int
    flops: float
    loss: float
    cached: float  # fraction of tokens
    loading: int
    peak: int
    bytes_per_token: float


@dataclass(slots=True)
class Model:
    """A model and the costs measured so far, by variant."""

    sized: Sized
    costs: dict[str, TrainCost] = field(default_factory=dict)


def measure(name: str, *, small: bool = False) -> str:
    """Measure the model `name`; `small`: a tiny one of its architecture, on any device."""
    return table([sized_named(name, small=small)], VARIANTS, 64 if small else MATMUL)


def table(models: Sequence[Sized], variants: Sequence[Variant], matmul: int = MATMUL) -> str:
    with joined_world() as world:
        rate, rows = matmul_rate(world.device, matmul), []
        for sized in models:
            model = Model(sized)
            with saved(sized, world.device) as folder:
                rows += [_row(model, variant, folder, world, rate) for variant in variants]
    matmul_line = f"A product of two {matmul:,} x {matmul:,} matrices in bf16: {rate / 1e12:,.0f} TFLOP/s."
    header = ["model", "variant", "tokens per step", "graphs cached", "computed / real tokens", "real tokens / s",
              "model TFLOP/s", "fraction of the matmul rate", "relative to packed", "loss",
              "max GiB while loading", "max GiB in training", "KiB per cached token"]  # fmt: skip
    return "\n\n".join([matmul_line, markdown(header, rows)])


def matmul_rate(device: torch.device, size: int = MATMUL) -> float:
    """Floating-point operations per second of a bf16 matrix product of random numbers; the median of three runs."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(STEPS):
            torch.mm(a, b, out=out)

    products()
    return STEPS * 2.0 * size**3 / statistics.median(timed(products, device) for _ in range(3))


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: between two events on a GPU, wall time elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize(device)
    return float(start_event.elapsed_time(end_event)) / 1000


def _row(model: Model, variant: Variant, folder: Path, world: World, rate: float) -> list[str]:
    names = [model.sized.name, variant.name]
    try:
        cost = train(model, variant, folder, world, warm=WARM, steps=STEPS)
    except (RuntimeError, EmbedtrainError) as error:  # out of memory, or a compiler error: continue with the next row
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        message = "out of memory" if out_of_memory else f"failed: {(str(error).splitlines() or [''])[0]}"
        return [*names, message, *["-"] * 10]
    finally:
        free_memory()
    packed = model.costs.get(PACKED.name)
    if (
        variant.batch_factor == 1
        and packed is not None
        and abs(cost.loss - packed.loss) > LOSS_TOLERANCE * abs(packed.loss)
    ):
        return [*names, f"wrong: its loss is {cost.loss:.4f}, that of {PACKED.name} {packed.loss:.4f}", *["-"] * 10]
    model.costs[variant.name] = cost
    utilization = cost.flops / cost.seconds / rate
    packed_utilization = None if packed is None else packed.flops / packed.seconds / rate
    return [
        *names,
        f"{cost.real / cost.steps:,.0f}",
        f"{cost.cached:.0%}",
        f"{cost.computed / cost.real:.2f}",
        f"{cost.real / cost.seconds:,.0f}",
        f"{cost.flops / cost.seconds / 1e12:,.2f}",
        f"{utilization:.1%}",
        "-" if packed_utilization is None or variant.batch_factor == 1 else f"{utilization / packed_utilization:.2f}",
        f"{cost.loss:.4f}",
        *(f"{value / 2**30:.1f}" if value else "-" for value in (cost.loading, cost.peak)),
        f"{cost.bytes_per_token / 1024:,.0f}" if cost.bytes_per_token else "-",
    ]


def free_memory() -> None:
    """Free the memory of a model, even of one that failed."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(model: Model, variant: Variant, folder: Path, world: World, *, warm: int, steps: int) -> TrainCost:
    """The cost of `steps` steps, after `warm` others.

    A ConfigError if a recipe does not have the variant's options, an EmbedtrainError if blocks cannot be compiled.
    """
    device, sized = world.device, model.sized
    free_memory()  # memory of the random initialization
    _peak(device)
    loaded = load(
        folder, world, attention=variant.attention, options=variant.options, kind=sized.kind, lora=variant.lora
    )
    loading = _peak(device)
    run = make_step_context(loaded, world, variant.optim, loss_of(sized.kind))
    texts = [RandomTexts(variant.batch_factor * sized.pairs, seed, sized.length) for seed in range(BATCHES)]
    num_cached = _num_cached_tokens(model, variant, sum(int(t.lengths.sum()) for t in texts) // BATCHES, device)
    batches = [rank_batch(t, run, loaded, sized.chunk_tokens, num_cached) for t in texts]
    loss = train_step(run, batches[0]).loss
    _run_steps(run, itertools.islice(itertools.cycle(batches), warm))
    if eager := run.backward.eager_blocks.name(world):  # the figures would be those of another variant
        raise EmbedtrainError("; ".join(eager))
    _peak(device)

    def prepare(step: int) -> RankBatch:
        return rank_batch(texts[step % BATCHES], run, loaded, sized.chunk_tokens, num_cached)

    ready = [batches[step % BATCHES] for step in range(steps)]
    source = Prefetcher(prepare, 0, steps, workers=DataConfig.workers) if variant.prepares else ready
    seconds = timed(lambda: _run_steps(run, source), device)
    peak = _peak(device)
    per_text = model_flops(loaded.encoder)
    flops = sum(per_text.of(batch.lengths) for batch in ready)
    real, computed = sum(b.real_tokens for b in ready), sum(b.computed_tokens for b in ready)
    cached = statistics.mean(_count_cached_tokens(b) / b.computed_tokens for b in batches)
    kept = _bytes_per_token(run, loaded, variant, sized)
    return TrainCost(steps, seconds, real, computed, flops, loss, cached, loading, peak, kept)


def loss_of(kind: str) -> Loss | None:
    """The loss of a kind of model; None: InfoNCE of vectors."""
    match kind:
        case "cross_encoder":
            return BCE(BCEConfig(), PairScore())
        case "late_interaction":
            return InfoNCE(InfoNCEConfig(), MaxSim(mean=False))
        case "sparse":
            return InfoNCE(InfoNCEConfig(temperature=1.0), WordScore())
        case _:
            return None


def rank_batch(
    texts: RandomTexts, run: StepContext, loaded: LoadedModel, chunk_tokens: int, activation_tokens: int
) -> RankBatch:
    overhead = pass_overhead(on_gpu=run.world.device.type == "cuda", sharded=loaded.layout.shard > 1)
    options = ChunkOptions(chunk_tokens, activation_tokens, overhead)
    return prefetched(make_rank_batch(texts.batch(), 0, 1, loaded.tokenizer, options), run, loaded)


def _run_steps(run: StepContext, batches: Iterable[RankBatch]) -> None:
    for batch in batches:
        train_step(run, batch)


def _count_cached_tokens(batch: RankBatch) -> int:
    return sum(chunk.ids.numel() for chunk in batch.chunks[: batch.num_cached_graphs])


def _num_cached_tokens(model: Model, variant: Variant, tokens: int, device: torch.device) -> int:
    """Number of tokens, in a batch of `tokens`, whose graphs are cached."""
    if variant.cached is not None:
        return int(variant.cached * 10**9)
    limit = int(MAX_CACHED * tokens)
    packed = model.costs.get(PACKED.name)
    if device.type != "cuda" or packed is None or not packed.bytes_per_token:
        return limit
    total = torch.cuda.get_device_properties(device).total_memory
    fixed = packed.peak - packed.bytes_per_token * packed.computed / packed.steps
    # One chunk is encoded again in the backward pass and needs its activations too.
    fitting = int((USABLE * total - fixed) / packed.bytes_per_token) - model.sized.chunk_tokens
    return max(0, min(limit, fitting))


def _bytes_per_token(run: StepContext, loaded: LoadedModel, variant: Variant, sized: Sized) -> float:
    """Memory of a token's graph: peak of a step minus the peak of a step on half the texts, all graphs cached."""
    device = run.world.device
    if device.type != "cuda" or variant.cached != 1.0:
        return 0.0
    peaks, tokens = [], []
    for pairs in (sized.pairs, sized.pairs // 2):
        batch = rank_batch(
            RandomTexts(pairs, 0, sized.length), run, loaded, sized.chunk_tokens, activation_tokens=10**9
        )
        _peak(device)
        train_step(run, batch)
        peaks.append(_peak(device))
        tokens.append(batch.computed_tokens)
    return max(0.0, (peaks[0] - peaks[1]) / (tokens[0] - tokens[1]))


def _peak(device: torch.device) -> int:
    """Peak of allocated bytes since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(peak)
