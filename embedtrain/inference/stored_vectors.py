"""A directory of a teacher's vectors, which `embedtrain vectors` writes and training reads instead of the teacher.

    DIR/vectors.json              model, prompts, number and digest of the vectors; a directory without it is unfinished
    DIR/keys.npy                  the key of each text and its prompt, 128 bits, ascending
    DIR/part-00000.safetensors    `vectors` of consecutive keys, and their `scales` if they are of int8

A text is found by the hash of the text and of the prompt that the teacher gives it: under another prompt it is missing.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.data.types import TextRole
from embedtrain.errors import DataError
from embedtrain.utils.files import expand_user

INDEX_FILE, KEYS_FILE = "vectors.json", "keys.npy"
FORMAT = 1
SIMILARITY = "similarity"  # in the identity of a model; left out for the cosine
KEY_BYTES = 16
KEY_TYPE = np.dtype(f"S{KEY_BYTES}")
# The numbers of a file as numpy maps them, which has no bfloat16.
_MAPPED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8, "I64": np.int64}

_DIGEST = re.compile(r"[0-9a-f]{32}")

Keys = NDArray[np.bytes_]


def is_stored_vectors(path: str) -> bool:
    """Whether a path is a directory of vectors instead of a model."""
    return (expand_user(path) / INDEX_FILE).is_file()


def vector_keys(prompt: str, texts: Iterable[str]) -> Keys:
    """The key of each text with this prompt: S16 [n]."""
    prefix = hashlib.blake2b(f"{len(prompt)} {prompt}".encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES)
    digests = []
    for text in texts:
        state = prefix.copy()
        state.update(text.encode("utf-8", "surrogatepass"))
        digests.append(state.digest())
    return np.frombuffer(b"".join(digests), dtype=KEY_TYPE)


def part_file(number: int) -> str:
    """The name of a part."""
    return f"part-{number:05}.safetensors"


def to_stored(vectors: Tensor, dtype: str) -> dict[str, Tensor]:
    """The tensors of a part for vectors float32 [n, T]; int8 has one scale for each vector."""
    if dtype == "int8":
        codes, scales = to_int8(vectors)
        return {"vectors": codes, "scales": scales}
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return {"vectors": vectors.to(kinds[dtype]).contiguous()}


def to_int8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [n, T], and the scale of each vector, float32 [n]: a vector is about its codes times its scale."""
    scales = vectors.abs().amax(dim=1).clamp(min=127 * torch.finfo(torch.float32).tiny) / 127
    return (vectors / scales.unsqueeze(1)).round().to(torch.int8), scales


@dataclass(frozen=True)
class StoredVectors:
    """Vectors on disk, memory-mapped."""

    directory: Path
    index: Mapping[str, Any]  # the content of vectors.json

    @classmethod
    def open(cls, path: str) -> Self:
        """Read the index and check the files; DataError if the directory is incomplete or of another format."""
        directory = expand_user(path)
        try:
            index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
            stored = cls(directory, index)
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']}, this version reads {FORMAT}")
            sizes = {str(name): int(size) for name, size in index["sizes"].items()}
            numbers = int(index["count"]), int(index["dimension"]), int(index["rows_per_part"])
            # A run names a folder by the digest, which this file could lead elsewhere.
            if min(numbers) < 1 or not _DIGEST.fullmatch(index["digest"]) or any("/" in name for name in sizes):
                raise ValueError("invalid numbers")
            for name, size in sizes.items():
                if (directory / name).stat().st_size != size:
                    raise ValueError(f"{name} does not have {size:,} bytes")
            if len(stored.keys) != numbers[0]:
                raise ValueError(f"{KEYS_FILE} does not have {numbers[0]:,} keys")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path}: not a directory of vectors ({error}): write it with embedtrain vectors"
            ) from error
        return stored

    @property
    def dimension(self) -> int:
        """The dimension of the vectors."""
        return int(self.index["dimension"])

    @property
    def digest(self) -> str:
        """Of the vectors, and of everything that they depend on."""
        return str(self.index["digest"])

    def prompt(self, role: TextRole) -> str:
        """What the teacher read before each query or each document."""
        return str(self.index["query_prompt" if role is TextRole.query else "document_prompt"])

    @property
    def similarity(self) -> str:
        """How the teacher compares its vectors, one of `VectorSimilarity`; earlier versions compared by cosine."""
        return str(self.index.get("identity", {}).get(SIMILARITY, VectorSimilarity.cosine.value))

    def describe(self) -> str:
        """One line for the user."""
        index = self.index
        return (
            f"{index['count']:,} vectors of {index['dimension']} dimensions ({index['dtype']}) of {index['model']}, "
            f"prompts {self.prompt(TextRole.query)!r} and {self.prompt(TextRole.document)!r}"
        )

    @cached_property
    def keys(self) -> Keys:
        """S16 [count], ascending."""
        keys: Keys = np.load(self.directory / KEYS_FILE, mmap_mode="r", allow_pickle=False)
        if keys.dtype != KEY_TYPE or keys.ndim != 1:
            raise ValueError(f"{KEYS_FILE} holds no keys")
        return keys

    def rows(self, role: TextRole, texts: Sequence[str]) -> NDArray[np.int64]:
        """The row of each text, int64 [n]; -1 for a text that is missing."""
        keys = vector_keys(self.prompt(role), texts)
        rows = self.keys.searchsorted(keys)
        at = np.minimum(rows, len(self.keys) - 1)
        return np.where(self.keys[at] == keys, at, -1).astype(np.int64)

    def vectors(self, rows: NDArray[np.int64]) -> Tensor:
        """Rows [n] to float32 [n, T]."""
        out = torch.empty(len(rows), self.dimension)
        parts = rows // int(self.index["rows_per_part"])
        for part in np.unique(parts):
            selected = np.flatnonzero(parts == part)
            local = rows[selected] - part * int(self.index["rows_per_part"])
            vectors, scales = self._part(int(part))
            values = torch.from_numpy(vectors[local])
            if vectors.dtype == np.uint16:
                values = values.view(torch.bfloat16)
            values = values.float()
            if scales is not None:
                values *= torch.from_numpy(scales[local]).unsqueeze(1)
            out[torch.from_numpy(selected)] = values
        return out

    def _part(self, number: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        parts: dict[int, tuple[NDArray[Any], NDArray[Any] | None]] = self._parts
        if number not in parts:
            path = self.directory / part_file(number)
            try:
                tensors = map_tensors(path)
                vectors = tensors["vectors"]
                if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
                    raise ValueError(f"its vectors are of shape {vectors.shape}")
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(f"{path}: stored vectors cannot be read ({error}): write them again") from error
            parts[number] = vectors, tensors.get("scales")
        return parts[number]

    @cached_property
    def _parts(self) -> dict[int, tuple[NDArray[Any], NDArray[Any] | None]]:
        return {}


def map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file, memory-mapped: its own reader copies all rows."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, 1 << 20):
            raise ValueError("no header")
        header = json.loads(file.read(length))
    tensors = dict[str, NDArray[Any]]()
    for name, entry in header.items():
        if name != "__metadata__":
            kind, shape = _MAPPED[entry["dtype"]], tuple(map(int, entry["shape"]))
            tensors[name] = np.memmap(path, kind, "r", 8 + length + int(entry["data_offsets"][0]), shape)
    return tensors
