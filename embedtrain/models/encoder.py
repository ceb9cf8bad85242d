"""The encoder: a backbone and a head, or several of them side by side, in one module with one public forward.

One module, because FSDP gathers weights around that module's `__call__`: a head outside of it would receive vectors of
another precision, and a loss could hold an unsharded copy.

N: texts; L: tokens of a padded text; T: tokens of all texts; H: hidden size; D: dimensions of the vectors.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from embedtrain.config.recipe import Pooling
from embedtrain.data.types import Chunk
from embedtrain.models.attention import known_padding, use_flash_attention
from embedtrain.models.blocks import EarlyExits
from embedtrain.models.pooling import POOLING, PooledTokens, at_least_float32, build_pooling
from embedtrain.models.vision_language import VisionFamily, embed_pictures

_BACKBONE = "backbone."
POOLING_MODULE = "pooling"  # the module of a user's pooling in the encoder


class Dense(nn.Module):
    """A linear head with an activation, as sentence-transformers' Dense: [N, in] -> [N, out]."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, activation: str, is_new: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out, bias=bias)
        self.activation = activation
        self.is_new = is_new  # whether it is in no files, so that it is trained beside adapters

    def forward(self, vectors: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        activated: Tensor = ACTIVATIONS[self.activation](self.linear(vectors.to(self.linear.weight.dtype)))
        return activated


# The names are those that sentence-transformers writes into a Dense module's config.json.
ACTIVATIONS: dict[str, nn.Module] = {
    "torch.nn.modules.activation.Tanh": nn.Tanh(),
    "torch.nn.modules.activation.ReLU": nn.ReLU(),
    "torch.nn.modules.activation.GELU": nn.GELU(),
    "torch.nn.modules.activation.SiLU": nn.SiLU(),
    "torch.nn.modules.linear.Identity": nn.Identity(),
}


class Head(ABC):
    """Maps the hidden states of a chunk's tokens to parts, such as a vector of each text.

    It is no module: its `modules` are modules of the encoder, under the names that they have in checkpoints.

    Attributes:
        modules: those with weights, by name.
        dimension: D, of the vectors; 1 for scores, V for weights of words.
        in_float32: the module that is an FSDP group of its own and computes in float32; None: there is none.
        ties_embeddings: whether it uses the table of token embeddings as well, which then stays in the root's group.
        reads_pairs: whether texts are pairs, whose second text may have a token type of its own.
        compares_tokens: whether `compared` has a row of each token that has a vector, instead of each text.
        has_vocabulary: whether it multiplies every token with a vocabulary.
    """

    modules: dict[str, nn.Module]
    dimension: int
    in_float32: nn.Module | None = None
    ties_embeddings = False
    reads_pairs = False
    compares_tokens = False
    has_vocabulary = False

    @abstractmethod
    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """Hidden states, [N, L, H] or [1, T, H] of packed texts, to float32 parts with rows of each text in order."""

    def stored_name(self, name: str) -> str:
        """The name of a weight or module of the encoder in the files of transformers and PEFT."""
        return name.removeprefix(_BACKBONE)

    def compared(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """The rows by which packed and padded texts are compared: the first part, unless its rows may be near 0."""
        return self(hidden, chunk)[0]

    def graph_outputs(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """What an ONNX graph computes besides hidden states [N, L, H], from these and the mask [N, L]."""
        raise NotImplementedError(f"{type(self).__name__} has no graph of its own")

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """The modules of the encoder that are trained in full beside adapters, by name: those that may be new."""
        return dict(self.modules)

    @property
    def merged_keys(self) -> Sequence[str]:
        """The keys in the files of an adapter that are merged when the head is read."""
        return ()

    @property
    def peft_modules(self) -> list[str]:
        """Those of them that PEFT stores with an adapter, by their names in transformers' class."""
        return []


class PooledHead(Head):
    """One vector of each text: pooling, dense heads, L2 normalisation.

    Args:
        size: H.
        pooling: a mode by name, or the path of a user's.
    """

    def __init__(self, size: int, pooling: Pooling | str, *, normalize: bool, dense: Sequence[Dense] = ()) -> None:
        self.pooling, self.normalize, self.dense = pooling, normalize, nn.ModuleList(dense)
        self.dimension = dense[-1].linear.out_features if dense else size
        own = build_pooling(pooling, size)
        self.own_pooling = own  # of the user
        self.modules = {"dense": self.dense} | ({} if own is None else {POOLING_MODULE: own})

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The vectors of texts, [N, D], or of the segments of a chunk."""
        if chunk.segments is None:
            return (self.vectors(hidden if chunk.packing is None else hidden[0], PooledTokens.of(chunk)),)
        tokens = hidden.flatten(0, 1)
        tokens = tokens if chunk.token_rows is None else tokens[chunk.token_rows]
        return (self.vectors(tokens, PooledTokens(None, chunk.segments)),)

    def vectors(self, hidden: Tensor, tokens: PooledTokens) -> Tensor:
        """Pooling, heads and normalisation of hidden states [N, L, H] or [T, H]: [N, D]."""
        pool = POOLING[self.pooling].pool if isinstance(self.pooling, Pooling) else self.own_pooling
        assert pool is not None
        return self.transformed(pool(hidden, tokens))

    def transformed(self, vectors: Tensor) -> Tensor:
        """Heads and normalisation of vectors [..., H]: [..., D]."""
        for head in self.dense:
            vectors = head(vectors)
        vectors = at_least_float32(vectors)
        return F.normalize(vectors, dim=-1) if self.normalize else vectors

    def graph_outputs(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """The vectors of texts, [N, D]."""
        return (self.vectors(hidden, PooledTokens(mask)),)

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """All but heads of the files: new ones would stay random."""
        has_new = any(head.is_new for head in self.dense)
        return {name: module for name, module in self.modules.items() if has_new or module is not self.dense}


class Encoder(nn.Module):
    """The items of a chunk to parts: a tower, which is a Hugging Face model without a head, and a head.

    Attributes:
        output: the head.
        exits: in training, the hidden states after these layers are mapped to further parts.
        has_layers: whether the backbone is a transformer; otherwise it has no blocks and no attention.
        packs: whether its items are texts that are packed if the code of the backbone supports it.
        max_tokens: of an item, if other towers read longer ones; None: as many as those of any tower.
        decoded_bytes: of what threads read for a token besides ids, such as the pixels of a patch.
        packed_kernel: of packed texts on a GPU, by the name of `choose_flash_attention`.
        vision: what computes the pictures of items; None: the model reads texts alone.
    """

    packs = True
    max_tokens: int | None = None
    decoded_bytes: float = 0.0
    packed_kernel: str | None = None
    vision: VisionFamily | None = None

    def __init__(
        self, backbone: PreTrainedModel, head: Head, *, has_layers: bool = True, vision: VisionFamily | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.vision = vision
        self.output, self.has_layers = head, has_layers
        for name, module in head.modules.items():
            self.add_module(name, module)
        self.exits: EarlyExits | None = None
        self._computes: Callable[[Chunk], Tensor] | None = None

    @property
    def towers(self) -> Mapping[str, "Encoder"]:
        """By the prefix of the names of their weights: the encoder itself, unless it has several."""
        return {"": self}

    @property
    def dimension(self) -> int:
        """D, the dimension of the vectors."""
        return self.output.dimension

    @property
    def float32_head(self) -> nn.Module | None:
        """The module that computes in float32, an FSDP group of its own."""
        return self.output.in_float32

    @property
    def tied(self) -> bool:
        """Whether the head uses the table of token embeddings as well."""
        return self.output.ties_embeddings

    def stored_name(self, name: str) -> str:
        """The name of a weight or module, `backbone.NAME`, in the files of transformers and PEFT."""
        return self.output.stored_name(name)

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """The parts of the N items of a chunk, float32, with rows of each item in order; those of `exits` follow.

        Attention covers all real tokens, also those that are not pooled. For packed texts the backbone has to be
        prepared by `enable_packing`.
        """
        use_flash_attention(self.packed_kernel)
        if self._computes is not None:
            return (self._computes(chunk),)
        states = [self.hidden_states(chunk)]
        if self.exits is not None and self.training:
            states += self.exits.pop()
        return tuple(part for hidden in states for part in self.output(hidden, chunk))

    def hidden_states(self, chunk: Chunk) -> Tensor:
        """The last hidden states of all tokens, [N, L, H], or [1, T, H] of packed texts; within a forward pass."""
        return hidden_states(self.backbone, chunk, self.vision)

    @property
    def token_model(self) -> nn.Module:
        """The module that computes tokens: the backbone, or the language model in it."""
        return self.backbone if self.vision is None else self.vision.language_model(self.backbone)

    @property
    def vision_modules(self) -> list[nn.Module]:
        """The modules that only passes with pictures compute."""
        return [] if self.vision is None else self.vision.vision_modules(self.backbone)

    @contextlib.contextmanager
    def computing(self, other: Callable[[Chunk], Tensor]) -> Iterator[None]:
        """Compute something else in forward passes within the block, for checks: weights are unsharded in them only."""
        self._computes = other
        try:
            yield
        finally:
            self._computes = None


class TowerEncoder(Encoder):
    """Encoders side by side, each of which takes the chunks of its number: a chunk has items of one tower.

    So a forward pass computes one tower; their parts have the same dimension. The names of a tower's weights begin with
    its own name, as in `query.backbone.NAME`.
    """

    def __init__(self, towers: Mapping[str, Encoder]) -> None:
        nn.Module.__init__(self)
        self._towers = tuple(towers)
        for name, tower in towers.items():
            self.add_module(name, tower)
        self.has_layers = any(tower.has_layers for tower in towers.values())
        self.exits = None

    @property
    def towers(self) -> Mapping[str, Encoder]:
        """In the order of their numbers."""
        return {f"{name}.": cast(Encoder, self.get_submodule(name)) for name in self._towers}

    @property
    def dimension(self) -> int:
        """D, the same of all towers."""
        return next(iter(self.towers.values())).dimension

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """What the tower of the chunk returns."""
        parts: tuple[Tensor, ...] = self.get_submodule(self._towers[chunk.tower])(chunk)
        return parts


def hidden_states(backbone: PreTrainedModel, chunk: Chunk, vision: VisionFamily | None = None) -> Tensor:
    """The last hidden states of all tokens, [N, L, H], or [1, T, H] of packed texts."""
    model: nn.Module = backbone
    inputs: dict[str, Any] = {"input_ids": chunk.ids}
    positions, first = None, first_position(backbone)
    if vision is not None:
        model, first = vision.language_model(backbone), vision.first_position
        if chunk.pictures is not None:
            inputs, positions = embed_pictures(backbone, vision, chunk), chunk.pictures.positions
    if chunk.types is not None:
        inputs["token_type_ids"] = chunk.types
    if chunk.packing is None:
        if positions is None and vision is not None and first:
            positions = torch.arange(first, first + chunk.ids.shape[1], device=chunk.ids.device)[None]
        if positions is not None:
            inputs["position_ids"] = positions
        # Without a mask some models fail (custom code), others search the position ids for packed texts.
        with known_padding(chunk.has_padding):
            hidden: Tensor = model(attention_mask=chunk.mask, **inputs).last_hidden_state
        return hidden
    # Transformers passes a mask of four dimensions on unchanged, so it creates none.
    return model(  # type: ignore[no-any-return]
        attention_mask=chunk.ids.new_ones((1, 1, 1, 1)),
        position_ids=chunk.packing.positions + first if positions is None else positions,
        packing=chunk.packing,
        **inputs,
    ).last_hidden_state


def prepare_backbone(backbone: PreTrainedModel) -> PreTrainedModel:
    """Disable, in place, what an embedding model does not use and what would break its training.

    The pooler gets no gradient, which breaks DDP and optimizer checkpoints; a key-value cache grows with every
    recomputed layer and causes IndexErrors.
    """
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = None
    for part in backbone.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PretrainedConfig):
            disable_unused(config)
    return backbone


def disable_unused(config: PretrainedConfig) -> None:
    """Switch off `use_cache` and ModernBERT's own compilation in this configuration."""
    if getattr(config, "use_cache", None):
        config.use_cache = False
    if getattr(config, "reference_compile", None) is not False and hasattr(config, "reference_compile"):
        config.reference_compile = False


def first_position(backbone: nn.Module) -> int:
    """The position id of a text's first token: RoBERTa and its derivatives count from after the padding id."""
    embeddings = getattr(backbone, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1  # type: ignore[union-attr]
    return 0


def has_token_types(encoder: Encoder) -> bool:
    """Whether the backbone distinguishes the two texts of a pair by token types."""
    return int(getattr(encoder.backbone.config.get_text_config(), "type_vocab_size", 0) or 0) > 1


def hidden_size(config: PretrainedConfig) -> int:
    """The size of a token vector."""
    return int(config.get_text_config().hidden_size)
