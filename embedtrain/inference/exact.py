"""Inner products whose bits depend on the two vectors alone, and integer keys that sort by score, then by priority.

Shapes: n vectors, P pairs, D dimensions.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# Float64 numbers in one block of pair scores, of which a few exist at a time: on a CPU what fits its caches (four times
# as fast as 128 MiB), on a GPU enough to keep it busy.
_BLOCK_NUMEL_CPU, _BLOCK_NUMEL_GPU = 1 << 18, 1 << 24
# Less than the key of any document.
NO_DOCUMENT = torch.iinfo(torch.int64).min
_VECTOR_BATCH_SIZE = 16384


def unit_vectors(vectors: Tensor) -> Tensor:
    """Scale vectors [n, D] to unit length, float32; zero vectors stay zero. Bit-identical for any batching."""
    parts = torch.split(vectors, _VECTOR_BATCH_SIZE)
    return torch.cat([(part / norms(part).clamp(min=1e-12).unsqueeze(1)).float() for part in parts])


def cosines(first: Tensor, second: Tensor) -> Tensor:
    """Cosine of each pair of rows of two [P, D], float64 [P]; 0 for a zero vector."""
    batch_size = pair_batch_size(first)
    pairs = zip(torch.split(first, batch_size), torch.split(second, batch_size), strict=True)
    products = torch.cat([pairwise_dot(left, right) for left, right in pairs])
    return products / (norms(first) * norms(second)).clamp(min=1e-24)


def norms(vectors: Tensor) -> Tensor:
    """Length of each vector, float64 [n]."""
    parts = torch.split(vectors, pair_batch_size(vectors))
    return torch.cat([pairwise_dot(part, part).sqrt() for part in parts])


def pair_batch_size(vectors: Tensor) -> int:
    """The number of pairs of such vectors [n, D] to multiply at a time."""
    numel = _BLOCK_NUMEL_CPU if vectors.device.type == "cpu" else _BLOCK_NUMEL_GPU
    return max(1, numel // max(1, vectors.shape[1]))


def pairwise_dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner product of each pair of rows of two [P, D], float64 [P].

    The products of float32 are exact in float64, and halves are added to halves: a library's sum may add in another
    order for another P, on another device or with another number of threads.
    """
    return sum_of_halves(left.double() * right.double())


def sum_of_halves(terms: Tensor) -> Tensor:
    """Sum of each row of [P, n], n at least 1, in an order of additions that depends on n alone."""
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        odd = terms[:, 2 * half :]
        terms = torch.cat([terms[:, :half] + terms[:, half : 2 * half], odd], dim=1)
    return terms[:, 0]


def pack_keys(scores: Tensor, priorities: Tensor) -> Tensor:
    """Combine float32 or int32 scores and tie priorities into integers of the same order: one topk resolves ties."""
    if scores.dtype == torch.int32:
        return (scores.long() << 32) + priorities
    # Adding 0 turns -0.0 into 0.0. The bits of negative floats sort in reverse.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + priorities


def unpack_keys(keys: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The scores, of the type that was packed, and the priorities of keys."""
    ordered = (keys >> 32).int()
    if dtype == torch.int32:
        return ordered, keys & 0xFFFFFFFF
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), keys & 0xFFFFFFFF


def top_keys(keys: Tensor, k: int) -> Tensor:
    """The `k` largest keys of each row, largest first."""
    return keys.topk(min(k, keys.shape[1]), dim=1).values


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products in true fp32, without TF32 and autocast: bounds on their rounding errors do not cover them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
