"""Vectors kept on disk while a large set of texts is encoded, so that encoding that was stopped goes on.

    DIR/<digest>/00000012-00000140-….safetensors     the vectors of some chunks, by the rank that made them

What is kept is named by a digest of all that decides about it: the model, the texts, the prompt, lengths, precision. A
file is whole or not there. It says which chunks it holds, so that any number of ranks can go on.
"""

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, from_numpy

from embedtrain.config.recipe import Precision
from embedtrain.data.keys import text_keys
from embedtrain.data.sources.files import file_digest
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.files import atomic_write
from embedtrain.models.source import ModelSource


@dataclass(frozen=True)
class VectorCache:
    """Where vectors are kept.

    Attributes:
        directory: seen by all ranks.
        identity: what decides about vectors besides the texts: model, precision, what is made of them.
    """

    directory: Path
    identity: Mapping[str, Any]

    def of(
        self,
        texts: Sequence[str],
        prompt: str,
        tokenizer: TextTokenizer,
        max_length: int | None,
        limit: int,
        existing_prompt: str | Sequence[str] = "",
    ) -> "VectorCache":
        """The place of one set of texts; `existing_prompt` is a prompt that they begin with already."""
        told = {
            **self.identity,
            "prompt": prompt,
            "tokenizer": tokenizer.fingerprint,
            "max_length": min(max_length or tokenizer.max_length, tokenizer.max_length),
            "limit": limit,
            "packed": tokenizer.packed,
        }
        if existing_prompt:
            told["prompt within"] = existing_prompt if isinstance(existing_prompt, str) else list(existing_prompt)
        digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16)
        digest.update(text_keys(texts).numpy().tobytes())
        return VectorCache(self.directory / digest.hexdigest(), told)

    def files(self, world: World) -> list[tuple[str, list[int]]]:
        """What is there: files, and which chunks each holds. A collective; the same on every rank.

        Raises:
            DataError: a file is not what was stored.
        """
        found: list[tuple[str, list[int]]] = []
        with world.fail_together("looking for stored vectors"):
            if world.is_main and self.directory.is_dir():
                seen: set[int] = set()
                for path in sorted(self.directory.glob("*.safetensors")):
                    chunks = _chunks_of(path)
                    if not seen & set(chunks):  # two runs side by side may have made the same
                        seen |= set(chunks)
                        found.append((path.name, chunks))
        return world.broadcast(found)

    def share(self, files: Sequence[tuple[str, list[int]]], world: World) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Of `files` this rank's share: vectors [m, D] on the CPU, and kinds of text. A collective.

        Every rank gets as many, the last of them perhaps empty.
        """
        for start in range(0, len(files), world.size):
            at = start + world.rank
            with world.fail_together("reading stored vectors"):
                # Who has none reads the last and takes no row: its width is all it needs.
                vectors, kinds = _read(self.directory / files[min(at, len(files) - 1)][0])
            yield (vectors, kinds) if at < len(files) else (vectors[:0], kinds[:0])

    def write(self, vectors: Tensor, kinds: NDArray[np.int64], chunks: Sequence[int], world: World) -> None:
        """Keep this rank's vectors of some chunks. A collective."""
        with world.fail_together("storing vectors"):
            if chunks:
                path = self.directory / f"{chunks[0]:08}-{chunks[-1]:08}-{uuid.uuid4().hex[:8]}.safetensors"
                tensors = {"vectors": vectors.cpu().contiguous(), "kinds": from_numpy(kinds)}
                try:
                    with atomic_write(path) as file:
                        save_file(tensors, file, metadata={"chunks": json.dumps(list(chunks))})
                except (SafetensorError, OSError) as error:
                    raise DataError(f"vectors cannot be stored in {self.directory}: {error}") from error


def _chunks_of(path: Path) -> list[int]:
    try:
        with safe_open(path, framework="pt") as file:
            return [int(chunk) for chunk in json.loads(file.metadata()["chunks"])]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not the vectors that were stored ({error}): delete {path.parent}") from error


def _read(path: Path) -> tuple[Tensor, NDArray[np.int64]]:
    try:
        with safe_open(path, framework="pt") as file:
            vectors, kinds = file.get_tensor("vectors"), file.get_tensor("kinds")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: stored vectors cannot be read ({error}): delete {path.parent}") from error
    if vectors.dim() != 2 or kinds.shape != vectors.shape[:1] or kinds.dtype != torch.int64:
        raise DataError(f"{path}: not the vectors that were stored: delete {path.parent}")
    return vectors, kinds.numpy()


# Weights, configuration, tokenizer, and the code of a model that brings its own.
_ENDINGS = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}


def model_identity(source: ModelSource, precision: Precision, world: World) -> dict[str, Any]:
    """Digests of the model's files by name, and how they are used; the same on every rank. A collective.

    Two models of one identity give the same vectors; what is kept under it can be used again.

    Raises:
        DataError: a file cannot be read.
    """
    files: dict[str, str] = {}
    with world.fail_together("reading the model's files"):
        if world.is_main:
            for number, directory in enumerate(_directories(source)):
                for path in sorted(directory.iterdir()):
                    if path.is_file() and path.suffix in _ENDINGS:
                        files[f"{number}/{path.name}"] = file_digest(str(path))
    told: dict[str, Any] = {} if source.include_prompt else {"include_prompt": False}
    return told | {
        "files": world.broadcast(files),
        "pooling": source.pooling.value,
        "normalize": source.normalize,
        "lowercase": source.tokenization.lowercase,
        "precision": precision.value,
    }


def _directories(source: ModelSource) -> list[Path]:
    return [path for path in (source.directory, *(dense.directory for dense in source.dense)) if path is not None]
