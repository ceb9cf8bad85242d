"""Hashes of texts, the same in every process, to find equal texts."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch


def text_key(text: str) -> int:
    """A 63-bit hash of a text: BLAKE2b (RFC 7693) of its UTF-8 bytes, truncated, without the sign bit."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def text_keys(texts: Sequence[str]) -> torch.Tensor:
    """The key of each text: int64 [N]."""
    # A Python list of millions of large integers would take five times the memory.
    return torch.from_numpy(np.fromiter(map(text_key, texts), dtype=np.int64, count=len(texts)))


def instructed_query(query: str, instruction: str | None) -> str:
    """The text that the key of a query is computed from: the query with the instruction of its own row.

    One text with two instructions is two queries: a positive of one may be a negative of the other. The prompt of a
    source is not part of the key, nor is that of documents.
    """
    return f"{instruction}\0{query}" if instruction else query
