"""One number for each text, the same in every process: equal texts are found without comparing them."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch


def text_key(text: str) -> int:
    """A 63-bit hash of a text: BLAKE2b (RFC 7693) of its UTF-8 bytes, cut to 8 bytes and the sign left out."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def text_keys(texts: Sequence[str]) -> torch.Tensor:
    """The key of each text: int64 [N]."""
    # A Python list of millions of large integers would take five times the memory.
    return torch.from_numpy(np.fromiter(map(text_key, texts), dtype=np.int64, count=len(texts)))


def asked(query: str, instruction: str | None) -> str:
    """What the key of a query is made of: its text, and the instruction that its own row carries.

    One text under two instructions is two questions: what answers one may be a negative of the other. A source's
    prompt says nothing of a single row, so it is left out, as it is of documents.
    """
    return f"{instruction}\0{query}" if instruction else query
