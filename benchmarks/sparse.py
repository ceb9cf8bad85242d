"""Extra memory and time of the vocabulary head of learned sparse models, and of logits of all tokens."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import markdown, measure_call, require, unit
from benchmarks.ranks import on_ranks
from embedtrain.config.kind_settings import SparseActivation, SparsePooling
from embedtrain.models.sparse_head import TokenSpans, word_weights

TITLE = f"Vocabulary head of sparse models, forward and backward: MiB above inputs and gradients / {unit()}"
TEXTS, TOKENS, WORDS, HIDDEN = 32, 64, 30_522, 768
BIASES = (-3.5, -1.85)  # with which 0.1 % and 57 % of words are active
# The fraction of active words, memory, seconds, and the norms of the gradients of token vectors, weight and bias.
Measured = tuple[float, float, float, list[float]]


def measure(part: str = "", *, small: bool = False) -> str:
    """Measure all cases; `small`: a small one."""
    texts, tokens, words, hidden = (4, 8, 300, 32) if small else (TEXTS, TOKENS, WORDS, HIDDEN)
    rows = []
    for bias in (-1.0,) if small else BIASES:
        plain, ours = (
            on_ranks(1, partial(_on_rank, chunked=chunked, shape=(texts, tokens, words, hidden), bias=bias))[0]
            for chunked in (False, True)
        )
        require(
            all(abs(a / b - 1) < 1e-4 for a, b in zip(plain[3], ours[3], strict=True)), f"{plain} differs from {ours}"
        )
        cells = [f"{extra:,.1f} / {seconds:.1f}" for _, extra, seconds, _ in (plain, ours)]
        ratios = f"{plain[1] / max(ours[1], 0.1):.0f} / {plain[2] / max(ours[2], 1e-3):.1f}"
        rows.append([f"{texts} x {tokens}", f"{ours[0]:.1%}", *cells, ratios])
    return markdown(["texts x tokens", "active words", "logits of all tokens", "embedtrain", "ratio"], rows)


def _on_rank(rank: int, folder: Path, chunked: bool, shape: tuple[int, int, int, int], bias: float) -> Measured:
    return measure_here(chunked, shape, bias, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def measure_here(chunked: bool, shape: tuple[int, int, int, int], bias: float, device: torch.device) -> Measured:
    """Measure one call in this process, after a warm-up; `shape`: texts, tokens of each, words, hidden size."""
    _once((2, 8, 1000, 32), chunked, bias, device)
    return _once(shape, chunked, bias, device)


def _once(shape: tuple[int, int, int, int], chunked: bool, bias: float, device: torch.device) -> Measured:
    texts, tokens, words, size = shape
    generator = torch.Generator().manual_seed(0)
    hidden, weight, grads = (
        torch.randn(rows, columns, generator=generator)
        for rows, columns in ((texts * tokens, size), (words, size), (texts, words))
    )
    # With as many dimensions as the head of BERT base, logits have a deviation of 0.83.
    leaves = [hidden, 0.03 * (HIDDEN / size) ** 0.5 * weight, torch.full((words,), bias)]
    leaves = [leaf.to(device).requires_grad_() for leaf in leaves]
    spans = TokenSpans.of_padded(torch.ones(texts, tokens, dtype=torch.int64, device=device), has_padding=False)
    active = []

    def plain() -> Tensor:
        return (leaves[0] @ leaves[1].T + leaves[2]).relu().log1p().view(texts, tokens, words).amax(dim=1)

    def call() -> tuple[Tensor, ...]:
        own = word_weights(*leaves, spans, SparsePooling.max, SparseActivation.relu) if chunked else plain()
        active.append(own.detach().count_nonzero() / own.numel())
        return torch.autograd.grad(own, leaves, grads)

    grads = grads.to(device)
    results, extra, seconds = measure_call(call, device)
    extra -= sum(result.nbytes for result in results) / 2**20
    return float(active[0]), extra, seconds, [result.norm().item() for result in results]
