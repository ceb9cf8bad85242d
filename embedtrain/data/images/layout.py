"""How items with pictures become tokens and rows of a chunk."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from embedtrain.data.images.item import Picture, item_parts
from embedtrain.data.tokens import Layout
from embedtrain.data.types import Tokens

# What stands for a picture where there is none: its pixels are zeros, and no file is opened.
BLANK = Picture(0, 1, 1)


class PictureLayout(Layout):
    """Items of texts and pictures; what differs for a family of models is a subclass.

    Cached tokens have a slot for each picture, which `chunk` replaces by what the encoder gets of it.

    Args:
        tokenizer: as in `Layout`.
        processing_digest: what decides the pixels and the length of a picture.
    """

    reads_pictures: ClassVar[bool] = True
    flags_tokens: ClassVar[bool] = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, processing_digest: str, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self._processing_digest = processing_digest

    def parts(self, items: Sequence[str], limit: int) -> list[list[list[int] | Picture]]:
        """The parts of each item: pictures, and the ids of texts with the special tokens of each text."""
        split = [item_parts(item) for item in items]
        ids = iter(self.fast.ids([part for item in split for part in item if isinstance(part, str)], limit))
        return [[part if isinstance(part, Picture) else next(ids) for part in item] for item in split]

    def input_lengths(
        self,
        lengths: NDArray[np.int64],
        are_queries: NDArray[np.bool_],
        tokens: Callable[[NDArray[np.int64]], Tokens],
    ) -> NDArray[np.int64]:
        """`num_tokens` of the texts."""
        return self.num_tokens(tokens(np.arange(len(lengths))))

    @property
    def max_token_id(self) -> int:
        """The largest number among cached ids, of which those of pictures may be any."""
        return int(np.iinfo(np.int32).max)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What decides the length of a picture, besides what does for texts."""
        return (*super().identity, "pictures", self._processing_digest)
