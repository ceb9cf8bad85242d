"""The vocabulary head of a learned sparse model, computed without the logits of all tokens (SPLADE).

The weight of word v in a text is the maximum over its tokens t of f(h_t . E_v + b_v), with f(x) = log(1 + max(x, 0))
(Formal et al., 2021, "SPLADE v2"), or their sum. f increases, so it is applied after the maximum: of the logits, only
those of a block of words exist at a time, and of the T x V cells, one per text and word has a gradient.

T: tokens of all texts, with padding; N: texts; H: hidden size; V: words; v: words of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedtrain.config.kind_settings import SparseActivation, SparsePooling
from embedtrain.data.types import Packing, QueryWords

# The name of the weights in the encoder, and in the file.
QUERY_WEIGHTS, STORED_WEIGHT = "query_weights.weight", "weight"
# Peak learning rate of numbers of 1 to 10, for which that of a model is far too small.
QUERY_WEIGHTS_LR = 1e-3
# Logits of one block of words: 4 MiB of float32 on a CPU, whose caches are small; a GPU needs larger products.
_CPU_CELLS, _GPU_CELLS = 1 << 20, 1 << 26
# Below this fraction of active words, the gradient is computed cell by cell. On a GPU, counting them would make the
# host wait for it.
_SPARSE_FRACTION = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpans:
    """Which rows of [T, H] are the tokens of which text."""

    runs: Sequence[tuple[int, int]]  # consecutive texts of equal length: (number of texts, rows of each)
    lengths: Tensor  # int64 [N], the rows of each text
    texts: Tensor  # int64 [T], the text of each row
    real: Tensor | None = None  # bool [T], false for padding; None: there is none

    @classmethod
    def of_packed(cls, packing: Packing) -> "TokenSpans":
        """Of concatenated texts."""
        lengths, count = packing.starts.diff().long(), len(packing.lengths)
        texts = torch.arange(count, device=lengths.device)
        texts = texts.repeat_interleave(lengths, output_size=sum(packing.lengths))
        return cls(runs=packing.runs, lengths=lengths, texts=texts)

    @classmethod
    def of_padded(cls, mask: Tensor, *, has_padding: bool = True) -> "TokenSpans":
        """Of texts with the mask [N, L] (1 = real), which all are without padding."""
        count, length = mask.shape
        texts = torch.arange(count, device=mask.device).repeat_interleave(length, output_size=count * length)
        return cls(
            runs=((count, length),),
            lengths=torch.full((count,), length, device=mask.device),
            texts=texts,
            real=mask.bool().flatten() if has_padding else None,
        )

    @property
    def num_texts(self) -> int:
        """N."""
        return sum(number for number, _ in self.runs)


def word_weights(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: TokenSpans,
    pooling: SparsePooling,
    activation: SparseActivation,
) -> Tensor:
    """The weight of every word in every text, [N, V], in float32 or better; differentiable.

    Args:
        hidden: [T, H], what the vocabulary head takes.
        weight: [V, H] of the vocabulary head, which may be the table of token embeddings.
        bias: [V], or None.
    """
    function = _MaxOverTokens if pooling is SparsePooling.max else _SumOverTokens
    return function.apply(hidden, weight, bias, spans, activation)  # type: ignore[no-any-return,no-untyped-call]


def activate(logits: Tensor, activation: SparseActivation) -> Tensor:
    """The weights of words from logits, in place."""
    weights = logits.relu_().log1p_()
    return weights.log1p_() if activation is SparseActivation.log1p_relu else weights


class _MaxOverTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, spans: TokenSpans, activation: SparseActivation
    ) -> Tensor:
        shape = spans.num_texts, len(weight)
        weights = torch.empty(shape, dtype=_result_dtype(hidden), device=hidden.device)
        best = torch.empty(shape, dtype=torch.int32, device=hidden.device)
        logits = _Buffer(hidden)
        for words in _word_blocks(hidden, weight):
            block = torch.mm(hidden, weight[words].T, out=logits.block(words))
            largest, best[:, words] = _max_over_tokens(block, spans)
            # The same for all tokens of a text, so it is added once per text.
            weights[:, words] = largest if bias is None else largest + bias[words]
        ctx.activation = activation
        ctx.save_for_backward(hidden, weight, activate(weights, activation), best)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, weights, best = ctx.saved_tensors
        compute = _dense_grads
        if hidden.device.type == "cpu" and int(weights.count_nonzero()) < _SPARSE_FRACTION * weights.numel():
            compute = _sparse_grads
        need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        hidden_grad, weight_grad, bias_grad = compute(
            hidden, weight, best, _LogitGrads(weights, grads[0], ctx.activation), need_weight=need_weight
        )
        return (
            hidden_grad.to(hidden.dtype) if need_hidden else None,
            weight_grad,
            bias_grad.to(weight.dtype) if need_bias else None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True)
class _LogitGrads:
    """The gradient of the largest logits, from that of the weights of words [N, V]."""

    weights: Tensor
    grads: Tensor
    activation: SparseActivation

    def of(self, words: slice) -> Tensor:
        """[N, v]."""
        weights = self.weights[:, words]
        logit_grads = weights.neg().exp_()
        if self.activation is SparseActivation.log1p_relu:
            logit_grads *= weights.expm1().neg_().exp_()
        return logit_grads.mul_(self.grads[:, words]).masked_fill_(weights == 0, 0.0)


def _dense_grads(
    hidden: Tensor, weight: Tensor, best: Tensor, logit_grads: _LogitGrads, *, need_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of hidden, weight and bias, by products with blocks of the gradient of all logits."""
    hidden_grad = torch.zeros(hidden.shape, dtype=_result_dtype(hidden), device=hidden.device)
    weight_grad = torch.empty_like(weight) if need_weight else None
    bias_grad = torch.empty(len(weight), dtype=hidden_grad.dtype, device=hidden.device)
    buffer = _Buffer(hidden)
    for words in _word_blocks(hidden, weight):
        grads = logit_grads.of(words)
        bias_grad[words] = grads.sum(dim=0)
        cells = buffer.block(words).zero_().scatter_(0, best[:, words].long(), grads.to(hidden.dtype))
        if cells.dtype == hidden_grad.dtype:
            hidden_grad.addmm_(cells, weight[words])
        else:
            hidden_grad += cells @ weight[words]
        if weight_grad is not None:
            torch.mm(cells.T, hidden, out=weight_grad[words])
    return hidden_grad, weight_grad, bias_grad


def _sparse_grads(
    hidden: Tensor, weight: Tensor, best: Tensor, logit_grads: _LogitGrads, *, need_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same as sums of one row per active word of a text."""
    rows, columns, values = [], [], []
    bias_grad = torch.empty(len(weight), dtype=_result_dtype(hidden), device=hidden.device)
    for words in _word_blocks(hidden, weight):
        grads = logit_grads.of(words)
        bias_grad[words] = grads.sum(dim=0)
        texts, word = grads.nonzero(as_tuple=True)
        values.append(grads[texts, word])
        rows.append(best[:, words][texts, word].long())
        columns.append(word + words.start)
    row, column, value = torch.cat(rows), torch.cat(columns), torch.cat(values).to(hidden.dtype)
    hidden_grad = _weighted_sums(row, torch.arange(len(hidden)), weight, column, value)
    weight_grad = None
    if need_weight:
        active = column.unique()
        sums = _weighted_sums(column, active, hidden, row, value)
        weight_grad = torch.zeros_like(weight).index_copy_(0, active, sums)
    return hidden_grad, weight_grad, bias_grad


def _weighted_sums(keys: Tensor, groups: Tensor, table: Tensor, indices: Tensor, factors: Tensor) -> Tensor:
    """For each of the ascending `groups` [n], the sum of factors * table[indices] where `keys` equals it: [n, H]."""
    order = keys.argsort(stable=True)
    if not len(order):  # torch rejects bags without content
        return table.new_zeros(len(groups), table.shape[1])
    starts = torch.searchsorted(keys[order], groups)
    return F.embedding_bag(indices[order], table, starts, mode="sum", per_sample_weights=factors[order])


class _SumOverTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, spans: TokenSpans, activation: SparseActivation
    ) -> Tensor:
        weights = torch.empty((spans.num_texts, len(weight)), dtype=_result_dtype(hidden), device=hidden.device)
        for words in _word_blocks(hidden, weight):
            values = activate(_logits(hidden, weight, bias, words, spans), activation)
            weights[:, words] = _sum_over_tokens(values, spans)
        ctx.spans, ctx.activation = spans, activation
        ctx.save_for_backward(hidden, weight, bias)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        hidden_grad = torch.zeros(hidden.shape, dtype=_result_dtype(hidden), device=hidden.device)
        weight_grad = torch.empty_like(weight) if need_weight else None
        bias_grad = torch.empty_like(bias) if need_bias else None
        for words in _word_blocks(hidden, weight):
            logits = _logits(hidden, weight, bias, words, ctx.spans)
            logit_grads = grads[0][:, words].index_select(0, ctx.spans.texts).masked_fill_(logits <= 0, 0.0)
            logits.relu_()
            logit_grads /= 1.0 + logits
            if ctx.activation is SparseActivation.log1p_relu:
                logit_grads /= 1.0 + logits.log1p_()
            if bias_grad is not None:
                bias_grad[words] = logit_grads.sum(dim=0)
            logit_grads = logit_grads.to(hidden.dtype)
            hidden_grad += logit_grads @ weight[words]
            if weight_grad is not None:
                weight_grad[words] = logit_grads.T @ hidden
        return hidden_grad.to(hidden.dtype) if need_hidden else None, weight_grad, bias_grad, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, words: slice, spans: TokenSpans) -> Tensor:
    """[T, v], in float32 or better; -inf for padding."""
    logits = (hidden @ weight[words].T).to(_result_dtype(hidden))
    if bias is not None:
        logits += bias[words]
    return logits if spans.real is None else logits.masked_fill_(~spans.real.unsqueeze(1), -torch.inf)


class _Buffer:
    """Memory for a block of words of all T tokens; memory of its own for each block would fragment the heap."""

    def __init__(self, hidden: Tensor) -> None:
        self._num_rows, self._cells = len(hidden), hidden.new_empty(0)

    def block(self, words: slice) -> Tensor:
        """[T, v], with any content. The first block is the largest."""
        width = words.stop - words.start
        if not self._cells.numel():
            self._cells = self._cells.new_empty(self._num_rows * width)
        return self._cells[: self._num_rows * width].view(self._num_rows, width)


def words_per_block(num_tokens: int, num_words: int, device_type: str) -> int:
    """v, the words of a block."""
    cells = _CPU_CELLS if device_type == "cpu" else _GPU_CELLS
    return min(num_words, max(1, cells // max(1, num_tokens)))


def _word_blocks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    width = words_per_block(len(hidden), len(weight), hidden.device.type)
    return (slice(start, min(start + width, len(weight))) for start in range(0, len(weight), width))


def _max_over_tokens(logits: Tensor, spans: TokenSpans) -> tuple[Tensor, Tensor]:
    """The largest logit of each text, [T, v] to [N, v], and the first row that has it."""
    if spans.real is not None:
        logits = logits.masked_fill_(~spans.real.unsqueeze(1), -torch.inf)
    if logits.is_cuda and len(spans.runs) > 1:
        return _scattered_max(logits, spans)
    largest, rows, first = [], [], 0
    for number, length in spans.runs:
        block, row = logits[first : first + number * length].view(number, length, -1).max(dim=1)
        starts = torch.arange(first, first + number * length, length, device=logits.device)
        largest.append(block)
        rows.append(row + starts.unsqueeze(1))
        first += number * length
    return torch.cat(largest).to(_result_dtype(logits)), torch.cat(rows)


def _scattered_max(logits: Tensor, spans: TokenSpans) -> tuple[Tensor, Tensor]:
    """The same without a loop over lengths, which would launch many small kernels. Deterministic."""
    texts = spans.texts.unsqueeze(1).expand_as(logits)
    largest = logits.new_full((spans.num_texts, logits.shape[1]), -torch.inf).scatter_reduce_(0, texts, logits, "amax")
    rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
    is_largest = logits == largest.index_select(0, spans.texts)
    last = torch.full(largest.shape, len(logits) - 1, device=logits.device)
    first = last.scatter_reduce_(0, texts, torch.where(is_largest, rows, len(logits) - 1), "amin")
    return largest.to(_result_dtype(logits)), first


def _sum_over_tokens(values: Tensor, spans: TokenSpans) -> Tensor:
    """[T, v] to [N, v], deterministic."""
    if values.is_cuda:
        return torch.segment_reduce(values, "sum", lengths=spans.lengths, axis=0, unsafe=True)
    parts = values.split([number * length for number, length in spans.runs])
    return torch.cat([p.view(n, length, -1).sum(1) for p, (n, length) in zip(parts, spans.runs, strict=True)])


def _result_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class QueryWeights(nn.Module):
    """The weight of each token in queries, [V], in float32 as an FSDP group of its own."""

    def __init__(self, num_words: int, *, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_words), requires_grad=trained)

    def forward(self, queries: QueryWords | None) -> tuple[Tensor, Tensor]:
        """The weights of all words in each query, [Q, V], and a zero that depends on all weights.

        With the zero in its graph, a chunk without queries has a gradient as well: FSDP reduces it on all ranks.
        """
        weight, zero = self.weight, 0.0 * self.weight.sum()
        if queries is None:
            return weight.new_zeros((0, len(weight))), zero
        empty = weight.new_zeros((queries.count, len(weight)))
        return empty.index_put((queries.queries, queries.words), weight[queries.words]), zero
