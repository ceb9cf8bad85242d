"""What a step has to do, and the machines it is done on."""

from dataclasses import dataclass, field

from embedtrain.config.losses import InfoNCEConfig, LossConfig
from embedtrain.config.recipe import Recipe, TrainConfig

# Of an H100 with NVLink and a 400 Gb/s adapter each: GB/s that one sends, and TFLOP/s that published trainers reach in
# bf16 (llm-foundry: 399 to 459).
BANDWIDTH_NODE = 300.0
BANDWIDTH_NETWORK = 50.0
TFLOPS = 400.0
# Of a rank's memory this share is planned with: the rest is the driver's, the communication library's, and lost between
# blocks of the allocator.
USABLE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The ranks and what links them.

    Attributes:
        ranks: all of them.
        per_node: those that share a node.
        memory: bytes of one rank.
        gpu: whether they are GPUs.
        bandwidth_node: bytes a second that a rank sends within its node.
        bandwidth_network: and between nodes.
        flops: floating point operations a second that a rank reaches.
    """

    ranks: int
    per_node: int
    memory: int
    gpu: bool = True
    bandwidth_node: float = BANDWIDTH_NODE * 1e9
    bandwidth_network: float = BANDWIDTH_NETWORK * 1e9
    flops: float = TFLOPS * 1e12

    @property
    def usable(self) -> int:
        """Bytes of one rank that are planned with."""
        return int(USABLE * self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """A step.

    Attributes:
        rows: of a global batch.
        texts_per_row: a query, its positive, and hard negatives.
        tokens_per_text: in the mean, padding included.
        chunk_tokens: that one pass may hold on one rank.
        activation_tokens: whose graphs are kept; None: `chunk_tokens`.
        gradient_accumulation_steps: global batches a step.
        loss: what is minimised.
    """

    rows: int = TrainConfig.global_batch_size
    texts_per_row: int = 2
    tokens_per_text: int = 512
    chunk_tokens: int = TrainConfig.chunk_tokens
    activation_tokens: int | None = None
    gradient_accumulation_steps: int = 1
    loss: LossConfig = field(default_factory=InfoNCEConfig)

    @classmethod
    def of(cls, recipe: Recipe, *, tokens_per_text: int = 512, texts_per_row: int = 2) -> "StepWorkload":
        """What the recipe says."""
        train = recipe.train
        return cls(
            rows=train.global_batch_size,
            texts_per_row=texts_per_row,
            tokens_per_text=tokens_per_text,
            chunk_tokens=train.chunk_tokens,
            activation_tokens=train.activation_tokens,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            loss=recipe.loss,
        )

    def passes(self, ranks: int) -> "RankWorkload":
        """One rank's part of a global batch, cut into chunks."""
        texts = -(-self.rows * self.texts_per_row // ranks)
        a_chunk = max(1, self.chunk_tokens // self.tokens_per_text)
        chunks = max(1, -(-texts // a_chunk))
        # A text longer than a chunk is a chunk of its own.
        tokens = min(texts, a_chunk) * self.tokens_per_text
        keep = self.chunk_tokens if self.activation_tokens is None else self.activation_tokens
        kept = min(texts * self.tokens_per_text, keep) // tokens if tokens else 0
        return RankWorkload(texts=texts, chunks=chunks, kept=min(chunks, kept), tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWorkload:
    """One rank's part of a global batch.

    Attributes:
        texts: that it encodes.
        chunks: that it cuts them into, a forward and a backward pass each.
        kept: of how many chunks the graphs are kept; the others are encoded twice.
        tokens: of the largest chunk.
    """

    texts: int
    chunks: int
    kept: int
    tokens: int
