"""Encoding beside SentenceTransformer.encode, and exact search beside a product of matrices with torch.topk."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor

from benchmarks.gpu.models import load, saved, sized_named
from benchmarks.gpu.training import free_memory
from benchmarks.measure import interleave, markdown, ratio, speed, unit
from benchmarks.workloads import descriptions
from embedtrain.config.evaluation import IndexConfig, ScanDtype, VectorPlacement
from embedtrain.distributed.world import World, joined_world
from embedtrain.inference.encode import EncodedShard, SentenceEncoder
from embedtrain.inference.index import ShardedIndex
from embedtrain.losses.encoded import Part

TITLE = "Encoding in bf16 with random weights, and exact search over random vectors in fp32"
MODELS = ("XLM-R-large", "Qwen3-0.6B", "Qwen3-4B")
NUM_TEXTS, CHUNK_TOKENS, BATCH_SIZE = 8192, 65536, 128
# Documents, queries, results and dimensions of a search.
SEARCHES = ((100_000, 1000, 100, 1024), (1_000_000, 1000, 100, 1024), (5_000_000, 1000, 100, 1024))
SMALL_SEARCH = (500, 20, 10, 16)
SEARCH_HEADER = ("documents x queries, results", "kept on", "add, s", "ours, queries / s", "torch.topk, queries / s",
                 "equal results")  # fmt: skip


def measure(part: str, *, small: bool = False) -> str:
    with joined_world() as world:
        if part == "search":
            searches = (SMALL_SEARCH,) if small else SEARCHES
            rows = [search_row(world, place, *sizes) for sizes in searches for place in ("device", "host")]
            return markdown(SEARCH_HEADER, rows)
        rows = [encoding_row(world, name, small=small) for name in MODELS]
    return markdown(encoding_header(), rows)


def encoding_header() -> list[str]:
    """Titles of the cells of `encoding_row`."""
    per_s = f"real tokens / {unit()}"
    return ["model", f"ours, {per_s}", f"theirs, {per_s}", "ratio", "mean cosine of ours with theirs"]


def encoding_row(world: World, name: str, *, small: bool) -> list[str]:
    """Encode descriptions with a model of `MODELS` and with sentence-transformers."""
    free_memory()  # of the previous model
    sized = sized_named(name, small=small)
    texts = [text for _, text in descriptions()[: 16 if small else NUM_TEXTS]]
    with saved(sized, world.device) as folder:
        loaded = load(folder, world)
        encoder = SentenceEncoder(loaded.encoder, loaded.tokenizer, world, chunk_tokens=CHUNK_TOKENS)
        model = SentenceTransformer(str(folder), device=str(world.device), model_kwargs={"dtype": torch.bfloat16})

        def ours(round_number: int) -> Tensor:
            return encoder.encode_all(texts if round_number else texts[:64])

        def theirs(round_number: int) -> Tensor:
            some = texts if round_number else texts[:64]
            vectors: Any = model.encode(some, batch_size=BATCH_SIZE, convert_to_tensor=True, show_progress_bar=False)
            return vectors.float()  # type: ignore[no-any-return]

        our_rounds, their_rounds = interleave(ours, theirs)
        num_tokens = [sum(len(ids) for ids in loaded.tokenizer.ids(texts))] * len(our_rounds)
    cosine = float(F.cosine_similarity(our_rounds[0].value, their_rounds[0].value).mean())
    speeds = [f"{speed(rounds, num_tokens):,.0f}" for rounds in (our_rounds, their_rounds)]
    return [name, *speeds, ratio(our_rounds, their_rounds), f"{cosine:.4f}"]


def search_row(
    world: World,
    place: str,
    num_documents: int,
    num_queries: int,
    k: int,
    dimension: int,
    scan: ScanDtype | None = None,
) -> list[str]:
    """Search with vectors kept on the device or the host, which a copy of the type `scan` may precede."""
    free_memory()
    device = world.device
    random = torch.Generator(device).manual_seed(0)
    queries = F.normalize(torch.randn(num_queries, dimension, device=device, generator=random), dim=1)
    blocks = [
        F.normalize(torch.randn(len(part), dimension, device=device, generator=random), dim=1)
        for part in torch.arange(num_documents).split(50_000)
    ]
    index = ShardedIndex(torch.arange(num_documents), world, IndexConfig(place=VectorPlacement(place), scan_dtype=scan))

    def add() -> None:
        for block, rows in zip(blocks, torch.arange(num_documents).split(50_000), strict=True):
            index.add(EncodedShard(Part(block), rows))

    def topk() -> Tensor:
        scores, documents = (torch.empty(num_queries, 0, device=device) for _ in range(2))
        for number, block in enumerate(blocks):
            best = (queries @ block.T).topk(min(k, len(block)))
            scores = torch.cat([scores, best.values], dim=1)
            documents = torch.cat([documents.long(), best.indices + 50_000 * number], dim=1)
        best = scores.topk(k)
        return documents.gather(1, best.indices).cpu()

    add_seconds = _seconds(add, device)
    index.search(queries[:8], k)  # warms up
    topk()
    ranking: list[Tensor] = []
    search_seconds = _seconds(lambda: ranking.append(index.search(queries, k).documents.cpu()), device)
    plain: list[Tensor] = []
    topk_seconds = _seconds(lambda: plain.append(topk()), device)
    equal = (ranking[0].sort().values == plain[0].sort().values).float().mean()
    return [
        f"{num_documents:,} x {num_queries:,}, {k}",
        place if scan is None else f"{place}, scanned in {scan.value}",
        f"{add_seconds:.2f}",
        f"{num_queries / search_seconds:,.0f}",
        f"{num_queries / topk_seconds:,.0f}",
        f"{float(equal):.3%}",
    ]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall seconds until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
