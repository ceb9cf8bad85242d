"""Pooling: how the hidden states of a text's tokens become one vector. A mode is one function, or a module of the user.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size; ...: any dimensions.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from embedtrain.config.code import is_code_path, load_named_code
from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import model_option
from embedtrain.data.types import Chunk, Packing
from embedtrain.errors import ConfigError

_LOWEST = -1e9  # of tokens that are not pooled, in a maximum; as in sentence-transformers


class PooledTokens:
    """The tokens of a chunk that are pooled, and what is computed over those of each text: padded or packed alike.

    Values of tokens are [N, L, ...] of padded texts, and [T, ...] of packed ones; values of texts are [N, ...].

    Args:
        pooled: int64 [N, L] or [T], 1 for the tokens that count; None: all of a packed chunk.
        packing: offsets of packed texts; None: the texts are padded.
    """

    def __init__(self, pooled: Tensor | None, packing: Packing | None = None) -> None:
        self.pooled, self.packing = pooled, packing

    @classmethod
    def of(cls, chunk: Chunk) -> "PooledTokens":
        """Those of a chunk: of padded texts the real tokens, unless the chunk says which."""
        if chunk.packing is not None:
            return cls(None if chunk.pooled is None else chunk.pooled[0], chunk.packing)
        return cls(chunk.mask if chunk.pooled is None else chunk.pooled)

    def weights(self) -> Tensor:
        """1 for tokens that count, else 0: float32."""
        if self.pooled is None:
            assert self.packing is not None
            return torch.ones_like(self.packing.positions[0], dtype=torch.float32)
        return self.pooled.float()

    def numbers(self) -> Tensor:
        """1, 2, 3, ... for the tokens of a text that count, else 0: int64."""
        if self.packing is None:
            assert self.pooled is not None
            return self.pooled * self.pooled.cumsum(dim=1)
        if self.pooled is None:
            return self.packing.positions[0] + 1
        starts = self.packing.starts.long()
        before = nn.functional.pad(self.pooled.cumsum(0), (1, 0))
        return self.pooled * (before[1:] - self.of_tokens(before[starts[:-1]]))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the tokens of each text, deterministic; values of tokens that do not count have to be 0."""
        return values.sum(dim=1) if self.packing is None else _sums(values, self.packing)

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """The float32 mean over the tokens that count, with weights [N, L] or [T] that are 0 for others.

        None: all equal. The order of these operators is that of the graphs of earlier exports.
        """
        weights = self.pooled if weights is None else weights
        if weights is None:
            assert self.packing is not None
            counts: Tensor = self.packing.starts.long().diff()
            return self.sum(at_least_float32(values)) / _like(counts.float(), values)
        weights = _like(weights, values).float()
        return self.sum(at_least_float32(values) * weights) / self.sum(weights).clamp(min=1.0)

    def max(self, values: Tensor) -> Tensor:
        """The maximum over the tokens that count."""
        if self.pooled is not None:
            values = values.masked_fill(_like(self.pooled, values) == 0, _LOWEST)
        return values.amax(dim=1) if self.packing is None else _maxima(values, self.packing)

    def softmax(self, scores: Tensor) -> Tensor:
        """Weights of tokens whose sum over each text is 1, from their scores; 0 for tokens that do not count."""
        if self.pooled is not None:
            scores = scores.masked_fill(_like(self.pooled, scores) == 0, _LOWEST)
        exponentials = (scores - self.of_tokens(self.max(scores.detach()))).exp()
        return exponentials / self.of_tokens(self.sum(exponentials))

    def of_tokens(self, values: Tensor) -> Tensor:
        """The values of each text for each of its tokens."""
        if self.packing is None:
            return values.unsqueeze(1)
        num_tokens = self.packing.positions.shape[1]  # known, so that the host waits for no device
        return values.repeat_interleave(self.packing.starts.long().diff(), dim=0, output_size=num_tokens)

    def first(self, hidden: Tensor) -> Tensor:
        """The first token that counts: its index instead of 0, because padding may be on the left."""
        if self.packing is None:
            assert self.pooled is not None
            return _take(hidden, self.pooled.argmax(dim=1))
        starts = self.packing.starts.long()
        if self.pooled is None:
            return hidden[starts[:-1]]
        skipped = starts.diff() - _sums(self.pooled[:, None].float(), self.packing)[:, 0].long()
        return hidden[starts[:-1] + skipped]

    def last(self, hidden: Tensor) -> Tensor:
        """The last token that counts."""
        if self.packing is not None:
            return hidden[self.packing.starts.long()[1:] - 1]
        assert self.pooled is not None
        positions = torch.arange(1, self.pooled.shape[1] + 1, device=self.pooled.device)
        return _take(hidden, (self.pooled * positions).argmax(dim=1))


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32; float64 stays."""
    return values if values.dtype is torch.float64 else values.float()


PoolingFunction: TypeAlias = Callable[[Tensor, PooledTokens], Tensor]


@dataclass(frozen=True)
class PoolingMode:
    """A pooling mode without weights.

    Attributes:
        pool: hidden states of tokens, [N, L, H] or [T, H], to [N, H] of at least float32.
        summary: for the user.
        stored: its name in sentence-transformers' config.json.
        flag: the same, true in files of its older versions.
    """

    pool: PoolingFunction
    summary: str
    stored: str
    flag: str


POOLING = {
    Pooling.cls: PoolingMode(
        lambda hidden, tokens: at_least_float32(tokens.first(hidden)), "first token", "cls", "pooling_mode_cls_token"
    ),
    Pooling.mean: PoolingMode(
        lambda hidden, tokens: tokens.mean(hidden), "mean of the tokens", "mean", "pooling_mode_mean_tokens"
    ),
    Pooling.last: PoolingMode(
        lambda hidden, tokens: at_least_float32(tokens.last(hidden)),
        "last token",
        "lasttoken",
        "pooling_mode_lasttoken",
    ),
    Pooling.max: PoolingMode(
        lambda hidden, tokens: tokens.max(at_least_float32(hidden)),
        "maximum of the tokens",
        "max",
        "pooling_mode_max_tokens",
    ),
    Pooling.weighted_mean: PoolingMode(
        lambda hidden, tokens: tokens.mean(hidden, tokens.numbers()),
        "weighted mean of the tokens",
        "weightedmean",
        "pooling_mode_weightedmean_tokens",
    ),
}


def build_pooling(pooling: Pooling | str, size: int) -> nn.Module | None:
    """The module of a mode of the user, `module:Class`, for hidden states of this size; None for a mode of the table.

    Raises ConfigError for what is no class of modules, and for a class that only a file names.
    """
    if isinstance(pooling, Pooling):
        return None
    option = model_option("pooling")
    kind: Any = load_named_code(pooling, option)
    if not inspect.isclass(kind) or not issubclass(kind, nn.Module):
        raise ConfigError(f"{option}={pooling}: expected a subclass of torch.nn.Module, which takes the hidden size")
    try:
        module: nn.Module = kind(size)
    except Exception as error:  # the code of the user
        raise ConfigError(f"{option}={pooling}: {kind.__name__}({size}): {type(error).__name__}: {error}") from error
    return module


def has_weights(pooling: Pooling | str, config: PretrainedConfig) -> bool:
    """Whether a pooling of a backbone with this configuration is a user's module with weights."""
    if isinstance(pooling, Pooling):
        return False
    with torch.random.fork_rng(devices=[]):
        module = build_pooling(pooling, int(config.get_text_config().hidden_size))
    return module is not None and bool(module.state_dict())


def pooling_of(value: str) -> Pooling | str:
    """A mode by its name, or the path of a user's; a ConfigError for anything else."""
    if value in Pooling.__members__:
        return Pooling(value)
    if is_code_path(value):
        return value
    raise ConfigError(
        f"{model_option('pooling')}={value}: expected one of {', '.join(Pooling.__members__)}, or module:Class for "
        "your own"
    )


def pooling_name(pooling: Pooling | str) -> str:
    """The value of `model.pooling`."""
    return pooling.value if isinstance(pooling, Pooling) else pooling


def describe_pooling(pooling: Pooling | str) -> str:
    """What a mode computes, for the user."""
    return POOLING[pooling].summary if isinstance(pooling, Pooling) else pooling


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sums(rows: Tensor, packing: Packing) -> Tensor:
    """The sum of each text's rows, [T, ...] to [N, ...], deterministic."""
    if rows.is_cuda:
        return torch.segment_reduce(rows, "sum", lengths=packing.starts.diff().long(), axis=0, unsafe=True)
    return torch.cat([text.sum(1) for text in _by_length(rows, packing)])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _maxima(rows: Tensor, packing: Packing) -> Tensor:
    """The maximum of each text's rows, [T, ...] to [N, ...]."""
    if rows.is_cuda:
        return torch.segment_reduce(rows, "max", lengths=packing.starts.diff().long(), axis=0, unsafe=True)
    return torch.cat([text.amax(1) for text in _by_length(rows, packing)])


def _by_length(rows: Tensor, packing: Packing) -> list[Tensor]:
    """The rows [T, ...] of consecutive texts of one length L, [n, L, ...]."""
    runs = packing.runs
    parts = rows.split([texts * length for texts, length in runs])
    return [part.view(n, length, *part.shape[1:]) for part, (n, length) in zip(parts, runs, strict=True)]


def _take(hidden: Tensor, indices: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), indices]


def _like(values: Tensor, others: Tensor) -> Tensor:
    """With as many dimensions as `others`."""
    while values.dim() < others.dim():  # a view of its shape would be traced as operators of a graph
        values = values.unsqueeze(-1)
    return values
