"""The encoder of texts and pictures: two towers of one class of transformers, and how items become chunks of each.

N: items; L: tokens of a padded text; P: patches of the largest picture; H: hidden size; D: dimensions of the vectors.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import MethodType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from embedtrain.data.images.files import PICTURES, BadPicture, decode_picture
from embedtrain.data.images.item import Picture, has_pictures, item_parts
from embedtrain.data.images.layout import BLANK, PictureLayout
from embedtrain.data.images.processing import ImageProcessing, NaFlex
from embedtrain.data.types import PICTURE, Chunk, Pair, TextRole, Tokens
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.kinds.image_text.options import TOWERS
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.sigmoid import SigLIP
from embedtrain.losses.similarity import at_least_float32
from embedtrain.losses.types import Loss
from embedtrain.models.attention import known_padding
from embedtrain.models.encoder import Encoder, Head, TowerEncoder, disable_unused
from embedtrain.models.pooling import PooledTokens
from embedtrain.models.rope import num_positions

TEXT, IMAGE = range(2)  # numbers of the towers
# The names of the parts of an encoder in the classes of transformers, longest first.
STORED_NAMES = {
    "text.backbone.": "text_model.",
    "text.projection.": "text_projection.",
    "image.backbone.": "vision_model.",
    "image.projection.": "visual_projection.",
}
PIXELS = "pixels"  # in `Chunk.decoded`
# Models of texts whose vector is that of the last of `max_position_embeddings` positions, be it padding, and of those
# whose vector is that of the end-of-text token, to which later tokens are unknown.
_PADDED_TEXTS = ("siglip_text_model", "siglip2_text_model")
_CAUSAL_TEXTS = ("clip_text_model",)
_LARGEST = 2  # an `eos_token_id` that means the largest id of a text, in configurations of before 2023
# Of a model of random weights: the temperature and the bias of Zhai et al. (2023).
_LOGIT_SCALE, _LOGIT_BIAS = math.log(10), -10.0


class Pooled(Enum):
    """Where the class of a tower takes the vector of an item from."""

    padded = "padded"  # the last of all positions, be it padding, through the linear layer `head`
    last = "last"  # the last token, which ends the text
    pooler = "pooler"  # the first token, through the class's pooler
    picture = "picture"  # the class has pooled it


class ProjectedHead(Head):
    """What a tower has pooled, projected and normalised: [N, H] to [N, D].

    Args:
        pooled: how.
        own: the part of the backbone that pools.
        projection: None: D is `size`.
        is_new: whether the projection is in no files, so that it is trained beside adapters and in a frozen tower.
    """

    def __init__(
        self,
        pooled: Pooled,
        own: nn.Module | None,
        size: int,
        projection: nn.Linear | None,
        *,
        normalize: bool,
        is_new: bool,
    ) -> None:
        self.pooled, self.own, self.projection = pooled, own, projection
        self.normalize, self.is_new = normalize, is_new
        self.modules = {} if projection is None else {"projection": projection}
        self.dimension = size if projection is None else projection.out_features

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The vectors of items, at least float32."""
        pooled = self._pool(hidden, chunk)
        if self.projection is not None:
            pooled = self.projection(pooled.to(self.projection.weight.dtype))
        vectors = at_least_float32(pooled)
        return (F.normalize(vectors, dim=-1) if self.normalize else vectors,)

    def _pool(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        if self.pooled is Pooled.picture:
            return hidden
        tokens = PooledTokens.of(chunk)
        states = hidden if chunk.packing is None else hidden[0]
        match self.pooled:
            case Pooled.padded:
                assert self.own is not None
                return self.own(hidden[:, -1])  # type: ignore[no-any-return]
            case Pooled.last:
                return tokens.last(states)
            case _:
                assert self.own is not None
                return self.own(tokens.first(states)[:, None])  # type: ignore[no-any-return]

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """A new projection."""
        return dict(self.modules) if self.is_new else {}


class ImageTower(Encoder):
    """The tower of pictures: pixels in fixed batches, or patches with padding.

    Args:
        processing: what makes pixels numbers, and how many patches a picture has.
    """

    packs = False

    def __init__(self, backbone: PreTrainedModel, head: Head, processing: ImageProcessing) -> None:
        super().__init__(backbone, head)
        self.decoded_bytes = processing.bytes_per_patch
        self.max_tokens = int(processing.most_patches)
        self.processing = processing
        if isinstance(processing, NaFlex):
            _use_known_grids(backbone)

    def forward(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """The vectors of pictures; without pixels, in checks of a backbone, of as many as have the chunk's tokens."""
        return self.output(self._pooled(chunk), chunk)

    def _pooled(self, chunk: Chunk) -> Tensor:
        if PIXELS not in chunk.decoded:
            chunk = _blank_chunk(self.processing, chunk.ids)
        pixels, dtype = chunk.decoded[PIXELS], next(self.backbone.parameters()).dtype
        options: dict[str, Any] = {}
        if isinstance(self.processing, NaFlex):
            values = self.processing.patches(pixels.flatten(0, 1), dtype).unflatten(0, pixels.shape[:2])
            options = {"pixel_attention_mask": chunk.mask, "spatial_shapes": chunk.grids}
        else:
            values = self.processing.normalised(pixels, dtype)
        with known_padding(chunk.has_padding):
            pooled: Tensor | None = self.backbone(pixel_values=values, **options).pooler_output
        if pooled is None:
            raise ModelError(f"{type(self.backbone).__name__} has no pooler, and so no vector of a picture")
        return pooled.flatten(1)


class ImageTextEncoder(TowerEncoder):
    """Towers of texts and of pictures, and the temperature and bias of the loss that the class of transformers keeps.

    Attributes:
        logit_scale: the logarithm of one over the temperature, [] or [1] as in the class.
        logit_bias: the bias, [1]; None: the class has none.
    """

    logit_scale: Tensor
    logit_bias: Tensor | None

    def __init__(self, text: Encoder, image: Encoder, logit_scale: Tensor, logit_bias: Tensor | None) -> None:
        super().__init__(dict(zip(TOWERS, (text, image), strict=True)))
        self.register_buffer("logit_scale", logit_scale)
        self.register_buffer("logit_bias", logit_bias)

    def share(self, loss: Loss, bounds: Sequence[float]) -> None:
        """Let the loss and this encoder have one temperature, and one bias, which a checkpoint and an export hold.

        The model's values start the losses whose options name none. Of several losses with a temperature, the first one
        is kept in the model. `bounds` are those of a trained temperature if the options name none.
        """
        sharing = [part for part in loss.modules() if isinstance(part, InfoNCE | SigLIP)]
        for number, part in enumerate(sharing):
            temperature, value = part.temperature, part.config.temperature
            if part.config.temperature_bounds is None:
                temperature.lowest, temperature.highest = (-math.log(bound) for bound in reversed(bounds))
            if temperature.log_scale is None and value is None:
                temperature.follow(self.logit_scale)  # also the one that a checkpoint holds
            own = _shared(temperature.log_scale, self.logit_scale, None if value is None else -math.log(value))
            self.logit_scale = own if number == 0 else self.logit_scale
            if not isinstance(part, SigLIP) or self.logit_bias is None:
                continue
            if part.bias is None and part.config.bias is None:
                part.followed_bias = self.logit_bias
            own = _shared(part.bias, self.logit_bias, part.config.bias)
            self.logit_bias = own if number == 0 else self.logit_bias


def _shared(trained: nn.Parameter | None, own: Tensor, chosen: float | None) -> Tensor:
    """A number that starts from the one that an option has `chosen`, or else from that of the model.

    The trained one, [1], gets the value; what is returned is the model's, in the memory of the trained one.
    """
    if trained is None:
        return own if chosen is None else torch.full_like(own, chosen)
    if chosen is None:
        trained.data.copy_(own.reshape(1))
    return trained.detach().view(own.shape)


def text_tower(backbone: PreTrainedModel, projection: nn.Linear | None, *, normalize: bool, is_new: bool) -> Encoder:
    """The tower of texts; a ModelError for a model whose class pools in a way that is not known."""
    kind, pooler = backbone.config.model_type, getattr(backbone, "pooler", None)
    size = int(backbone.config.hidden_size)
    if kind in _PADDED_TEXTS:
        pooled, own, size = Pooled.padded, backbone.head, backbone.head.out_features
    elif kind in _CAUSAL_TEXTS:
        pooled, own = Pooled.last, None
        backbone.embeddings.forward = MethodType(_embedded, backbone.embeddings)
    elif isinstance(pooler, nn.Module):
        pooled, own = Pooled.pooler, pooler
    else:
        raise ModelError(
            f"{type(backbone).__name__} has no pooler, which transformers' VisionTextDualEncoderModel takes the vector "
            "of a text from; choose another model of texts, such as BERT, RoBERTa or XLM-R"
        )
    tower = Encoder(backbone, ProjectedHead(pooled, own, size, projection, normalize=normalize, is_new=is_new))
    tower.max_tokens = num_positions(backbone.config) or None
    return tower


def image_tower(
    backbone: PreTrainedModel,
    projection: nn.Linear | None,
    processing: ImageProcessing,
    *,
    normalize: bool,
    is_new: bool,
) -> Encoder:
    """The tower of pictures."""
    size = int(backbone.config.hidden_size)
    head = ProjectedHead(Pooled.picture, None, size, projection, normalize=normalize, is_new=is_new)
    return ImageTower(backbone, head, processing)


def image_text_encoder(
    model: PreTrainedModel, processing: ImageProcessing, *, normalize: bool, frozen: Sequence[str], is_new: bool
) -> ImageTextEncoder:
    """The encoder of a model of transformers; `frozen` names towers whose weights are not trained, unless new."""
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PretrainedConfig):
            disable_unused(config)
    text_projection, visual_projection = (getattr(model, f"{name}_projection", None) for name in ("text", "visual"))
    text = text_tower(model.text_model, text_projection, normalize=normalize, is_new=is_new)
    image = image_tower(model.vision_model, visual_projection, processing, normalize=normalize, is_new=is_new)
    if text.dimension != image.dimension:
        raise ModelError(
            f"{type(model).__name__} has vectors of {text.dimension} dimensions of texts and of {image.dimension} of "
            "pictures, which cannot be compared"
        )
    for name, tower in zip(TOWERS, (text, image), strict=True):
        if name in frozen:
            kept = {id(weight) for module in tower.output.beside_adapters.values() for weight in module.parameters()}
            for weight in tower.parameters():
                weight.requires_grad_(id(weight) in kept)
    scale, bias = (getattr(model, name, None) for name in ("logit_scale", "logit_bias"))
    start = _LOGIT_SCALE if bias is not None else model.config.logit_scale_init_value
    return ImageTextEncoder(
        text,
        image,
        torch.full(() if scale is None else scale.shape, start, dtype=torch.float32),
        None if bias is None else torch.full(bias.shape, _LOGIT_BIAS, dtype=torch.float32),
    )


def stored_name(name: str) -> str:
    """The name of a weight of the encoder in the class of transformers."""
    for prefix, stored in STORED_NAMES.items():
        if name.startswith(prefix):
            return stored + name.removeprefix(prefix)
    return name


class ImageTextLayout(PictureLayout):
    """Items of one text or of one picture, each for its tower.

    Args:
        processing: what makes pixels of a picture.
        config: of the text tower.
    """

    num_towers: ClassVar[int] = 2

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, processing: ImageProcessing, config: PretrainedConfig
    ) -> None:
        super().__init__(tokenizer, processing.digest)
        self.processing = processing
        kind = config.model_type
        # Texts have all positions, of which padding is computed as other tokens are.
        self.padded_length = int(config.max_position_embeddings) if kind in _PADDED_TEXTS else None
        self._ends, self._end = kind in _CAUSAL_TEXTS, int(config.eos_token_id or 0)
        if self._ends and self._end == _LARGEST and tokenizer.eos_token_id != len(tokenizer) - 1:
            raise ModelError(
                f"eos_token_id={_LARGEST} of {kind}: its class ends a text at the largest of its token ids, and "
                f"{tokenizer.eos_token} is token {tokenizer.eos_token_id} of {len(tokenizer)}; write another "
                "model.tokenizer, or a model_type such as siglip where the vocabulary is trained on the data"
            )

    def check(self, max_length: int) -> None:
        """A ConfigError for texts of another length than the positions that a text is padded to."""
        if self.padded_length not in (None, max_length):
            raise ConfigError(
                f"model.max_length={max_length}: the texts of this model are padded to {self.padded_length} tokens, "
                "the last of which is the vector; leave it out"
            )

    def tokenize(
        self,
        texts: Sequence[str],
        limit: int,
        prompts: str | Sequence[str] = "",
        role: TextRole = TextRole.document,
    ) -> Tokens:
        """The tokens of texts, and the slots of pictures, which have no prompt.

        A ModelError for an item that has a text and a picture, or several pictures: each has a vector of its own. A
        DataError for a picture of a size that the model cannot read.
        """
        prompts_of_texts = [prompts] * len(texts) if isinstance(prompts, str) else prompts
        pictures = [
            _only_picture(text, prompt) if has_pictures(text) else None
            for text, prompt in zip(texts, prompts_of_texts, strict=True)
        ]
        for picture in pictures:
            self._check(picture)
        plain = [text for text, picture in zip(texts, pictures, strict=True) if picture is None]
        ids = iter(self.fast.ids(plain, limit) if plain else [])
        return Tokens.of_parts([[picture or self._ended(next(ids))] for picture in pictures])

    def _check(self, picture: Picture | None) -> None:
        if picture is None or picture == BLANK:
            return
        try:
            self.processing.check(picture.width, picture.height)
        except BadPicture as bad:
            raise DataError(f"{PICTURES.place(picture)}: {bad}") from None

    def _ended(self, ids: list[int]) -> list[int]:
        """The tokens up to the one whose vector is that of the text: the first end of text where there are several."""
        if self._ends and ids:
            end = max(ids) if self._end == _LARGEST else self._end
            ids = ids[: ids.index(end) + 1] if end in ids else ids
        return ids or [self.nothing]

    def are_pictures(self, tokens: Tokens) -> NDArray[np.bool_]:
        """Whether each item is a picture: bool [N]."""
        firsts = np.cumsum(tokens.lengths) - tokens.lengths
        are_pictures: NDArray[np.bool_] = tokens.flags[firsts] & PICTURE != 0
        return are_pictures

    def num_tokens(self, tokens: Tokens) -> NDArray[np.int64]:
        """The tokens of texts, with padding if it is computed, and the patches of pictures."""
        counts = tokens.lengths if self.padded_length is None else np.full_like(tokens.lengths, self.padded_length)
        slots = tokens.slots()
        counts = counts.copy()
        counts[slots.owners] = [self.processing.num_patches(*size) for size in slots.sizes.tolist()]
        return counts

    def towers(
        self, are_queries: NDArray[np.bool_], tokens: Callable[[NDArray[np.int64]], Tokens]
    ) -> NDArray[np.int64]:
        """That of texts or that of pictures."""
        if not len(are_queries):
            return np.zeros(0, dtype=np.int64)
        return np.where(self.are_pictures(tokens(np.arange(len(are_queries)))), IMAGE, TEXT)

    @property
    def dummies(self) -> Sequence[tuple[str | Pair, TextRole]]:
        """A text, and a picture without content."""
        return [(self.dummy, TextRole.document), (str(BLANK), TextRole.document)]

    def longest_text(self, max_length: int) -> int:
        """The longer of a text and of a picture."""
        return max(super().longest_text(max_length), self.processing.most_patches)

    def chunk(self, tokens: Tokens, rows: Sequence[int], *, packed: bool) -> Chunk:
        """Texts alone, or pictures alone, whose files are read now."""
        slots = tokens.slots()
        if len(slots):
            pictures = slots.pictures()
            grids = [self.processing.grid(picture.width, picture.height) for picture in pictures]
            return picture_chunk(self.processing, map(self.pixels, pictures), grids, rows)
        if self.padded_length is None:
            return super().chunk(tokens, rows, packed=packed)
        ids = np.full((len(tokens), self.padded_length), int(self.tokenizer.pad_token_id or 0), dtype=np.int64)
        is_token = np.arange(self.padded_length) < tokens.lengths[:, None]
        # On the side of the tokenizer, because padding is read as other tokens are.
        ids[is_token if self.tokenizer.padding_side == "right" else is_token[:, ::-1]] = tokens.ids
        return Chunk(torch.from_numpy(ids), torch.ones(ids.shape, dtype=torch.int64), tuple(rows), has_padding=False)

    def pixels(self, picture: Picture) -> Tensor:
        """The bytes that the model gets of a picture, uint8; a DataError if its file cannot be read."""
        if picture == BLANK:
            return torch.zeros(self.processing.pixel_shape(BLANK.width, BLANK.height), dtype=torch.uint8)
        image = decode_picture(PICTURES.place(picture), picture)
        return self.processing.pixels(image, picture.width, picture.height)


def _only_picture(item: str, prompt: str) -> Picture:
    """The picture of an item, without its prompt."""
    parts = item_parts(item.removeprefix(prompt))
    if len(parts) != 1 or not isinstance(parts[0], Picture):
        found = "a text and a picture" if any(isinstance(part, str) for part in parts) else "several pictures"
        raise ModelError(
            f"an item has {found}, and a model of model.kind=image_text encodes one text or one picture at a time; "
            "split it into several documents, or train a vision-language model"
        )
    return parts[0]


def picture_chunk(
    processing: ImageProcessing, pixels: Iterable[Tensor], grids: Sequence[tuple[int, int]], rows: Sequence[int]
) -> Chunk:
    """Pictures as a chunk for their tower: the bytes of each, and its rows and columns of patches.

    `pixels` are read one by one into memory that is allocated once: those of a chunk may be gigabytes.
    """
    counts = torch.tensor([height * width for height, width in grids])
    mask = (torch.arange(int(counts.max())) < counts[:, None]).long()
    chunk = Chunk(torch.zeros_like(mask), mask, tuple(rows), has_padding=bool((mask == 0).any()), tower=IMAGE)
    shape = processing.pixel_shape(1, 1)
    if not isinstance(processing, NaFlex):
        pictures = torch.empty((len(grids), *shape), dtype=torch.uint8)
        for picture, own in zip(pictures, pixels, strict=True):
            picture.copy_(own)
        return chunk.replaced(decoded={PIXELS: pictures})
    patches = torch.zeros((*mask.shape, *shape[1:]), dtype=torch.uint8)
    for padded, own in zip(patches, pixels, strict=True):
        padded[: len(own)] = own
    return chunk.replaced(decoded={PIXELS: patches}, grids=np.array(grids, dtype=np.int64))


def _blank_chunk(processing: ImageProcessing, ids: Tensor) -> Chunk:
    """Pictures without content, as many as have about the tokens of `ids`, on its device."""
    shape, grid = processing.pixel_shape(1, 1), processing.grid(1, 1)
    one = picture_chunk(processing, [torch.zeros(shape, dtype=torch.uint8)], [grid], [0])
    number = max(1, ids.numel() // one.ids.numel())
    repeated = one.map_tensors(lambda tensor: tensor.to(ids.device).expand(number, *tensor.shape[1:]))
    return repeated.replaced(grids=None if one.grids is None else one.grids.repeat(number, axis=0))


def _embedded(embeddings: Any, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> Tensor:
    """Tokens and positions of a row of packed texts, which may be longer than a text: CLIP's class refuses one.

    Private name of transformers' CLIP (checked on 5.23).
    """
    if position_ids is None:
        embedded: Tensor = type(embeddings).forward(embeddings, input_ids, position_ids, **options)
    else:
        embedded = embeddings.token_embedding(input_ids) + embeddings.position_embedding(position_ids)
    return embedded


def _use_known_grids(backbone: PreTrainedModel) -> None:
    """Let the class resize its positions to grids that the host knows, each distinct one once.

    It reads the size of every picture from the device. Private name of transformers' Siglip2 (checked on 5.23).
    """
    backbone.embeddings.resize_positional_embeddings = _resized_positions


def _resized_positions(positions: Tensor, spatial_shapes: NDArray[np.int64], max_length: int) -> Tensor:
    """Positions [h, w, H] resized to grids [N, 2] and padded with the first: [N, P, H]."""
    channels = at_least_float32(positions).permute(2, 0, 1)[None]
    resized: dict[tuple[int, int], Tensor] = {}
    for height, width in map(tuple, spatial_shapes.tolist()):
        if (height, width) not in resized:
            rows = F.interpolate(channels, size=(height, width), mode="bilinear", align_corners=False, antialias=True)
            rows = rows[0].flatten(1).T.to(positions.dtype)
            resized[height, width] = torch.cat([rows, rows[:1].expand(max_length - len(rows), -1)])
    return torch.stack([resized[height, width] for height, width in map(tuple, spatial_shapes.tolist())])
