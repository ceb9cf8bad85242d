"""Texts to vectors over all ranks, with weights that may be sharded.

Shapes: n texts, n_r of them on rank r, W ranks, D dimensions.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embedtrain.data.tokens import TextTokenizer, cut_by_length
from embedtrain.distributed.collectives import gather_rows
from embedtrain.distributed.sharding import reshard
from embedtrain.distributed.world import World
from embedtrain.errors import TrainingError

# Texts tokenised at a time when only their lengths are wanted.
_BLOCK = 8192
# A set is cut into this many chunks where `chunk_tokens` alone would make fewer and larger ones: texts of a chunk are
# then of nearly one length, and there is enough to deal evenly. Below so many tokens a pass would only be slower.
_MANY = 64
_LEAST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """The vectors that lie on this rank.

    Attributes:
        vectors: float32 [n_r, D] on this rank's device.
        rows: for each vector, which of the n texts it is of. Every text is on exactly one rank.
    """

    vectors: Tensor
    rows: list[int]


class SentenceEncoder:
    """Encodes texts with the live model, all ranks together.

    Every forward pass of a sharded model is a collective. Texts are therefore cut into one list of chunks,
    the same on every rank, and chunk i is rank i % W's; who has run out of chunks runs dummies. A chunk's
    composition does not depend on W, and so neither does a single bit of any vector.

    All methods are collectives: every rank calls them with the same texts.

    Args:
        encoder: token ids and mask [N, L] to float32 [N, D]; it is called, never its `forward`.
        tokenizer: bound to the length that the model takes.
        world: the ranks.
        chunk_tokens: tokens, padding included, that one forward pass may hold.
        query_prompt: what the model wants before queries.
        document_prompt: what the model wants before documents.
    """

    def __init__(
        self,
        encoder: nn.Module,
        tokenizer: TextTokenizer,
        world: World,
        *,
        chunk_tokens: int,
        query_prompt: str = "",
        document_prompt: str = "",
    ) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.world = world
        self.chunk_tokens = chunk_tokens
        self.query_prompt = query_prompt
        self.document_prompt = document_prompt

    def encode_sharded(self, texts: Sequence[str], prompt: str = "") -> EncodedShard:
        """Encode n texts and leave each vector on the rank that made it.

        Equal texts are encoded once, so their vectors, and with them their scores, are equal to the bit.

        Raises:
            TrainingError: on every rank, if a vector is not finite on any.
        """
        copies: dict[str, list[int]] = {}
        for row, text in enumerate(texts):
            copies.setdefault(text, []).append(row)
        vectors, mine = self._encode_distinct(list(copies), prompt)
        places = list(copies.values())
        rows = [row for distinct in mine for row in places[distinct]]
        if len(rows) != len(mine):
            times = torch.tensor([len(places[distinct]) for distinct in mine], device=vectors.device)
            with torch.inference_mode(False), torch.no_grad():
                vectors = vectors.repeat_interleave(times, dim=0)
        return EncodedShard(vectors, rows)

    def encode_all(self, texts: Sequence[str], prompt: str = "") -> Tensor:
        """Encode n texts; every rank gets all vectors, float32 [n, D], in the order of the texts.

        Raises:
            TrainingError: on every rank, if a vector is not finite on any.
        """
        number: dict[str, int] = {}
        for text in texts:
            number.setdefault(text, len(number))
        vectors, mine = self._encode_distinct(list(number), prompt)
        with torch.inference_mode(False), torch.no_grad():
            everything = gather_rows(vectors)
            order = gather_rows(torch.tensor(mine, dtype=torch.int64, device=vectors.device))
            distinct = torch.empty_like(everything)
            distinct[order] = everything
            return distinct[torch.tensor([number[text] for text in texts], dtype=torch.int64, device=vectors.device)]

    def _encode_distinct(self, texts: list[str], prompt: str) -> tuple[Tensor, list[int]]:
        """The vectors of this rank's chunks, [n_r, D], and which texts they are of."""
        prompted = [prompt + text for text in texts] if prompt else texts
        lengths = self._lengths(prompted)
        chunks = cut_by_length(lengths, min(self.chunk_tokens, max(_LEAST_TOKENS, sum(lengths) // _MANY)))
        mine = chunks[self.world.rank :: self.world.size]
        # At least one pass even without texts: only a pass tells how many dimensions there are.
        turns = max(1, -(-len(chunks) // self.world.size))
        dummies: list[list[int]] = [[]] * (turns - len(mine))
        with _evaluating(self.encoder):
            vectors = torch.cat([self._forward([prompted[row] for row in chunk]) for chunk in mine + dummies])
        rows = [row for chunk in mine for row in chunk]
        self._require_finite(vectors, [prompted[row] for row in rows])
        return vectors, rows

    def _forward(self, texts: list[str]) -> Tensor:
        """One pass over one chunk; over a dummy whose vector is dropped where there are no texts."""
        ids = self.tokenizer.ids(texts)
        tokens = self.tokenizer.pad(ids, range(len(ids))) if ids else self.tokenizer.dummy()
        tokens = tokens.to(self.world.device)
        vectors: Tensor = self.encoder(tokens.ids, tokens.mask)
        return vectors.float()[: len(texts)]

    def _lengths(self, texts: list[str]) -> list[int]:
        """Every text's number of tokens, on every rank; each rank tokenises every W-th text only."""
        share = texts[self.world.rank :: self.world.size]
        mine: list[int] = []
        with self.world.together("tokenising"):
            for start in range(0, len(share), _BLOCK):
                mine += [len(ids) for ids in self.tokenizer.ids(share[start : start + _BLOCK])]
        counts = [len(range(rank, len(texts), self.world.size)) for rank in range(self.world.size)]
        gathered = gather_rows(torch.tensor(mine, dtype=torch.int64, device=self.world.device), counts)
        lengths = [0] * len(texts)
        for rank, part in enumerate(torch.split(gathered, counts)):
            lengths[rank :: self.world.size] = part.tolist()
        return lengths

    def _require_finite(self, vectors: Tensor, texts: list[str]) -> None:
        bad = (~torch.isfinite(vectors).all(dim=1)).nonzero().flatten().tolist()
        found = self.world.gather((len(bad), texts[bad[0]][:60]) if bad else None)
        failed = [(rank, *what) for rank, what in enumerate(found) if what is not None]
        if failed:
            rank, count, text = failed[0]
            raise TrainingError(
                f"{count} vectors on rank {rank} are not finite, the first of the text {text!r}: "
                f"the weights hold NaN or infinity, or overflow in this precision"
            )


@contextlib.contextmanager
def _evaluating(encoder: nn.Module) -> Iterator[None]:
    """Without gradient and dropout; afterwards every module's mode is as before and weights are sharded.

    Not under inference mode, and out of it where the caller is in it: what FSDP gathers weights into is made
    once, and made there it could never be trained with ("Inplace update to inference tensor").
    An error within a forward pass leaves FSDP in the midst of it; nothing here can mend that.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    try:
        with torch.inference_mode(False), torch.no_grad():
            encoder.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(encoder)
