"""The work of a training step, and the hardware on which it runs."""

from dataclasses import dataclass, field
from typing import Any, Self

from embedtrain.config.losses import InfoNCEConfig, LossConfig
from embedtrain.config.matryoshka import matryoshka_layers_of
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import Recipe, TrainConfig, TrainSource

# Fraction of a rank's memory that a plan may use: the rest is for the driver, the communication library and
# fragmentation of the allocator.
USABLE = 0.9
# Orders of magnitude for ranks without a GPU: gloo, and a few cores. With the rates of a GPU, the estimate would see
# nothing but communication.
_CPU_RATES: dict[str, Any] = {"bandwidth_node": 2e9, "bandwidth_network": 1e9, "flops": 1e11}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The ranks and their links."""

    ranks: int
    per_node: int  # ranks
    memory: int  # bytes per rank
    gpu: bool = True
    # Defaults: an H100 with NVLink and a 400 Gb/s network adapter, and what published trainers reach in bf16
    # (llm-foundry: 399 to 459 TFLOP/s).
    bandwidth_node: float = 300e9  # bytes per second that a rank sends within its node
    bandwidth_network: float = 50e9  # bytes per second that a rank sends to other nodes
    flops: float = 400e12  # operations per second that a rank reaches

    @classmethod
    def of_ranks(cls, ranks: int, per_node: int, memory: int, *, gpu: bool) -> Self:
        """Ranks with the default rates of their kind of device."""
        return cls(ranks=ranks, per_node=per_node, memory=memory, gpu=gpu, **({} if gpu else _CPU_RATES))

    @property
    def usable(self) -> int:
        """Bytes per rank that a plan may use."""
        return int(USABLE * self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """The work of an optimizer step."""

    rows: int = TrainConfig.global_batch_size  # of a global batch
    texts_per_row: int = 2  # query, positive and hard negatives
    tokens_per_text: int = 512  # mean, padding included
    chunk_tokens: int = TrainConfig.chunk_tokens  # maximum of a forward pass on one rank
    activation_tokens: int | None = None  # maximum with cached graphs; None: `chunk_tokens`
    gradient_accumulation_steps: int = 1  # global batches per step
    loss: LossConfig = field(default_factory=InfoNCEConfig)
    state_bytes: tuple[int, int] = OptimConfig().state_bytes  # of the optimizer, as there

    @property
    def num_layers(self) -> int:
        """Layers of the encoder whose vectors are computed: the last, and `loss.matryoshka_layers`."""
        return 1 + len(matryoshka_layers_of(self.loss))

    @property
    def trained_layers(self) -> int:
        """Those of a batch, each with a loss of its own, and a divergence from the last one with `loss.layer_kl`."""
        exits = self.loss.layers_per_step or self.num_layers - 1
        return 1 + exits * (1 + (self.loss.layer_kl > 0))

    @classmethod
    def of(cls, recipe: Recipe, *, tokens_per_text: int = 512, texts_per_row: int | None = None) -> "StepWorkload":
        """The workload of a recipe. A cross-encoder's texts are pairs, one for each document of a row.

        `texts_per_row`: query and documents; default, where the rows are not known: a query, a positive, and the
        negatives that sources of `data.train` ask for. The default of `negatives` counts for a cross-encoder only: it
        trains on rows with negatives, and most other rows have none.
        """
        train, pairs = recipe.train, recipe.model.kind == "cross_encoder"
        if texts_per_row is None:
            default = int(TrainSource.negatives or 0)
            written = [source.negatives or 0 for source in recipe.data.train]
            texts_per_row = 2 + max((count for count in written if pairs or count != default), default=pairs * default)
        return cls(
            rows=train.global_batch_size,
            texts_per_row=max(1, texts_per_row - pairs) + recipe.data.batch_negatives,
            tokens_per_text=tokens_per_text,
            chunk_tokens=train.chunk_tokens,
            activation_tokens=train.activation_tokens,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            loss=recipe.loss,
            state_bytes=recipe.optim.state_bytes,
        )

    def per_rank(self, ranks: int) -> "RankWorkload":
        """One rank's part of a global batch."""
        texts = -(-self.rows * self.texts_per_row // ranks)
        texts_per_chunk = max(1, self.chunk_tokens // self.tokens_per_text)
        chunks = max(1, -(-texts // texts_per_chunk))
        # A text longer than a chunk is a chunk of its own.
        tokens = min(texts, texts_per_chunk) * self.tokens_per_text
        activation_tokens = self.chunk_tokens if self.activation_tokens is None else self.activation_tokens
        cached = min(texts * self.tokens_per_text, activation_tokens) // tokens if tokens else 0
        return RankWorkload(texts=texts, chunks=chunks, num_cached_graphs=min(chunks, cached), tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWorkload:
    """One rank's part of a global batch."""

    texts: int
    chunks: int  # each with one forward and backward pass
    num_cached_graphs: int  # chunks whose graphs are cached; the remaining ones are encoded twice
    tokens: int  # of the largest chunk
