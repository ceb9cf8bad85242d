"""A directory of a teacher's vectors, which `embedtrain vectors` writes and training reads instead of the teacher.

    DIR/vectors.json              model, prompts, number and digest of the vectors; a directory without it is unfinished
    DIR/keys.npy                  the key of each text and its prompt, 128 bits, ascending
    DIR/part-00000.safetensors    `vectors` of consecutive keys, and their `scales` if they are of int8

A text is found by the hash of the text and of the prompt that the teacher gives it: under another prompt it is missing.
Parts are written by any number of ranks beside the directory, to DIR.unfinished, which is renamed when it is complete.

n: texts of all rows, with repetitions; U: distinct texts, each with its prompt; T: dimensions.
"""

import contextlib
import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from embedtrain.checkpoint.run_directory import output_dir_lock
from embedtrain.config.evaluation import Unshard
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import LoraConfig, Precision
from embedtrain.config.validation import written
from embedtrain.data.cache.row_store import RowStore
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World, explain_lost_contact
from embedtrain.errors import ConfigError, DataError
from embedtrain.formats.source import CommandModel
from embedtrain.inference.encode import ProgressCallback, SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model
from embedtrain.inference.vector_cache import SIMILARITY, map_tensors, model_identity
from embedtrain.inference.vectors import to_int8
from embedtrain.models.types import ModelSource
from embedtrain.tracking.console import Console
from embedtrain.utils.files import atomic_write, expand_user, file_checksum, make_folder, remove_tree

INDEX_FILE, KEYS_FILE = "vectors.json", "keys.npy"
FORMAT = 1
KEY_BYTES = 16
KEY_TYPE = np.dtype(f"S{KEY_BYTES}")

_DIGEST = re.compile(r"[0-9a-f]{32}")
_INPUTS_FILE = "inputs.json"
_MODEL_OPTIONS = ("normalize", "max_length", "query_prompt", "document_prompt", "revision")

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


@dataclass(frozen=True)
class DistinctTexts:
    """Where each distinct text is: arrays of U entries, in the order of the keys."""

    stores: Sequence[RowStore]
    keys: Keys  # ascending
    sources: NDArray[np.int32]
    rows: NDArray[np.int64]
    positions: NDArray[np.int32]  # 0 for the query, then positives, then negatives

    def __len__(self) -> int:
        return len(self.keys)

    def without(self, keys: Keys) -> "DistinctTexts":
        """The texts whose keys are not among these, ascending ones."""
        is_present = keys[np.minimum(keys.searchsorted(self.keys), len(keys) - 1)] == self.keys
        arrays = (self.keys, self.sources, self.rows, self.positions)
        return DistinctTexts(self.stores, *(array[~is_present] for array in arrays))

    def read(self, start: int, end: int) -> tuple[list[str], NDArray[np.bool_]]:
        """The texts of these keys, and which of them are queries."""
        texts = [""] * (end - start)
        # Rows that lie beside each other are read one after the other.
        for index in np.lexsort((self.rows[start:end], self.sources[start:end])).tolist():
            source, row, position = (int(values[start + index]) for values in (self.sources, self.rows, self.positions))
            example = self.stores[source][row]
            texts[index] = example.texts[position]
        return texts, self.positions[start:end] == 0


def distinct_texts(stores: Sequence[RowStore], query_prompt: str, document_prompt: str) -> DistinctTexts:
    """All queries, positives and negatives of all rows with their prompts, each once.

    A text that has the same prompt as a query and as a document is one of them: a dense model encodes both alike.
    """
    keys: list[Keys] = []
    sources, rows, positions = array("i"), array("q"), array("i")
    for source, store in enumerate(stores):
        first = 0
        for number in range(len(store.rows.batch_starts) - 1):
            columns = store.rows.batch(number).columns[:3]
            queries, positives, negatives = (column.to_pylist() for column in columns)
            documents = [[*of_row, *more] for of_row, more in zip(positives, negatives, strict=True)]
            keys.append(vector_keys(query_prompt, queries))
            keys.append(vector_keys(document_prompt, (text for of_row in documents for text in of_row)))
            sources.extend([source] * (len(queries) + sum(map(len, documents))))
            rows.extend(range(first, first + len(queries)))
            positions.extend([0] * len(queries))
            for row, of_row in enumerate(documents, first):
                rows.extend([row] * len(of_row))
                positions.extend(range(1, len(of_row) + 1))
            first += len(queries)
    distinct, occurrences = np.unique(np.concatenate(keys), return_index=True)
    return DistinctTexts(
        stores,
        distinct,
        np.frombuffer(sources, dtype=np.int32)[occurrences],
        np.frombuffer(rows, dtype=np.int64)[occurrences],
        np.frombuffer(positions, dtype=np.int32)[occurrences],
    )


def describe_model(model: CommandModel) -> dict[str, Any]:
    """What a directory says about the teacher's model, as plain values."""
    pooling = None if model.pooling is None else written(model.pooling)
    similarity = None if model.similarity is None else model.similarity.value
    own = {name: getattr(model, name) for name in _MODEL_OPTIONS}
    return {"path": model.path, "adapter": model.lora.path, "pooling": pooling, "similarity": similarity, **own}


def model_of(stored: StoredVectors) -> CommandModel:
    """The model whose vectors a directory holds, whose code never runs, because only a file names it.

    Raises a DataError if an earlier version wrote the directory.
    """
    try:
        options = stored.index["options"]
        return CommandModel(
            path=options["path"],
            lora=LoraConfig(path=options["adapter"]),
            pooling=options["pooling"],
            similarity=None if (named := options.get("similarity")) is None else VectorSimilarity(named),
            **{name: options[name] for name in _MODEL_OPTIONS},
        )
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{stored.directory} does not say how its model was opened, as directories of earlier versions: write it "
            "again with embedtrain vectors, or leave out on_missing=encode"
        ) from None


def teacher_identity(
    source: ModelSource,
    precision: Precision,
    world: World,
    *,
    max_length: int | None,
    dims: int | None,
    dtype: str,
    rows_per_part: int,
) -> dict[str, Any]:
    """What vectors depend on besides their texts, and how they are stored. A collective."""
    return {
        **model_identity(source, precision, world),
        "query_prompt": source.prompts.get("query", ""),
        "document_prompt": source.prompts.get("document", ""),
        "max_length": max_length,
        "dims": dims,
        "dtype": dtype,
        # Not chunk_tokens, which only affects rounding: whoever lowers it after a lack of memory resumes.
        "rows_per_part": rows_per_part,
    }


class VectorDirectory:
    """A directory of vectors of these texts; all methods are collectives.

    Args:
        model: the teacher.
        identity: what the vectors depend on besides their texts: `teacher_identity`.
    """

    def __init__(
        self, directory: Path, model: CommandModel, identity: Mapping[str, Any], texts: DistinctTexts, world: World
    ) -> None:
        self.directory, self.model, self.identity, self.texts, self.world = directory, model, identity, texts, world
        self.unfinished = directory.with_name(f"{directory.name}.unfinished")
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16)
        digest.update(texts.keys.tobytes())
        self.inputs = digest.hexdigest()
        self.rows_per_part = int(identity["rows_per_part"])
        self.num_parts = -(-len(texts) // self.rows_per_part)

    def is_complete(self) -> bool:
        """Whether the directory holds the vectors of the same inputs; a ConfigError if it holds anything else."""
        complete = False
        with self.world.fail_together("looking for vectors"):
            if self.directory.exists():
                if not is_stored_vectors(str(self.directory)):
                    raise ConfigError(f"output_dir={self.directory} exists and holds no vectors: write another one")
                index = StoredVectors.open(str(self.directory)).index
                if index.get("inputs") != self.inputs:
                    raise ConfigError(
                        f"output_dir={self.directory} holds vectors of {index['model']} of other inputs (digest "
                        f"{index.get('inputs')}; this command has {self.inputs}): write another directory, or delete it"
                    )
                complete = True
        return complete

    @contextlib.contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Keep other commands from writing the directory; a ConfigError if another one does. A collective."""
        lock = self.directory.with_name(f".embedtrain-{self.directory.name}.lock")
        with self.world.fail_together("creating the folder of output_dir"):
            if self.world.is_main:
                make_folder(lock.parent)
        with output_dir_lock(lock, self.world, timeout, self.directory):
            try:
                yield
            finally:
                if self.world.is_main:
                    lock.unlink(missing_ok=True)

    def encode(self, *, chunk_tokens: int, unshard: Unshard, timeout: float, console: Console) -> StoredVectors:
        """The vectors of these inputs, which an earlier command may have written, also in part. A collective."""
        if not self.is_complete():
            with self.locked(timeout):
                if not self.is_complete():  # another command may just have ended
                    self._encode(chunk_tokens, unshard, console)
        with self.world.fail_together("opening the vectors"):
            return StoredVectors.open(str(self.directory))

    def _encode(self, chunk_tokens: int, unshard: Unshard, console: Console) -> None:
        """Load the model, and write what is missing of the directory."""
        world = self.world
        with console.phase("loading the teacher"):
            model = load_encoder_model(self.model, Precision(self.identity["precision"]), world)
        for note in model.notes:
            console.note(note)
        encoder = SentenceEncoder.from_model(model, world, chunk_tokens=chunk_tokens, unshard=unshard, truncate=False)
        encoder.truncate_dim = self.identity["dims"]
        console.note(f"{len(self.texts):,} distinct texts with their prompts")
        with console.progress() as progress:
            self.write(encoder, progress)
        with explain_lost_contact("writing the index"):
            self.finish()

    def write(self, encoder: SentenceEncoder, progress: ProgressCallback) -> None:
        """Encode and write the parts that an interrupted command has not written."""
        written = self._written_parts()
        for part in range(self.num_parts):
            if part not in written:
                self.write_part(part, encoder)
            progress("encoding texts", part + 1, self.num_parts)

    def _written_parts(self) -> set[int]:
        """The intact parts of a command with the same inputs; others are removed."""
        world, inputs_path = self.world, self.unfinished / _INPUTS_FILE
        written: set[int] = set()
        with world.fail_together("looking for an interrupted command"):
            if world.is_main:  # alone: the others must not read what it removes
                self._remove_other_parts(inputs_path)
        with world.fail_together("verifying written parts"):
            for part in range(world.rank, self.num_parts, world.size):
                path, checksum = self.unfinished / part_file(part), self._checksum_path(part)
                if (
                    path.is_file()
                    and checksum.is_file()
                    and checksum.read_text(encoding="ascii") == file_checksum(path)
                ):
                    written.add(part)
        return {part for of_rank in world.gather(sorted(written)) for part in of_rank}

    def _remove_other_parts(self, inputs_path: Path) -> None:
        """Begin anew unless the unfinished folder has these inputs; a ConfigError if it has files of others."""
        if self.unfinished.is_symlink():
            raise ConfigError(f"{self.unfinished} is a link, through which nothing is written: delete it")
        if self.unfinished.exists() and not inputs_path.is_file() and any(self.unfinished.iterdir()):
            raise ConfigError(
                f"{self.unfinished} is where vectors are written until they are complete, and has other files: "
                "move it away, or write another output_dir"
            )
        if not inputs_path.is_file() or inputs_path.read_text(encoding="ascii") != self.inputs:
            remove_tree(self.unfinished)
            make_folder(self.unfinished)
            inputs_path.write_text(self.inputs, encoding="ascii")

    def write_part(self, part: int, encoder: SentenceEncoder) -> None:
        """Encode the texts of one part on all ranks, and write it on one."""
        world, start = self.world, part * self.rows_per_part
        end = min(start + self.rows_per_part, len(self.texts))
        texts: list[str] = []
        is_query = np.zeros(0, dtype=np.bool_)
        with world.fail_together("reading texts"):
            texts, is_query = self.texts.read(start, end)
        vectors: Tensor | None = None
        for role, selected in ((TextRole.query, is_query), (TextRole.document, ~is_query)):
            indices = np.flatnonzero(selected)
            if not len(indices):
                continue
            prompt = self.identity[f"{role.value}_prompt"]
            encoded = encoder.encode_all(
                [texts[index] for index in indices],
                prompt,
                role=role,
                max_length=self.identity["max_length"],
                label="encoding texts",
            ).cpu()
            vectors = torch.empty(end - start, encoded.shape[1]) if vectors is None else vectors
            vectors[torch.from_numpy(indices)] = encoded
        assert vectors is not None
        with world.fail_together("storing vectors"):
            if part % world.size == world.rank:
                path = self.unfinished / part_file(part)
                try:
                    with atomic_write(path, durable=True) as unfinished:
                        unfinished.write_bytes(save(to_stored(vectors, self.identity["dtype"])))
                    self._checksum_path(part).write_text(file_checksum(path), encoding="ascii")
                except OSError as error:
                    raise DataError(f"vectors cannot be stored in {self.unfinished}: {error}") from error

    def _checksum_path(self, part: int) -> Path:
        return self.unfinished / f"{part_file(part)}.checksum"

    def finish(self) -> None:
        """Write keys and index, and rename the directory."""
        with self.world.fail_together("completing the vectors"):
            if self.world.is_main:
                self._finish()

    def _finish(self) -> None:
        parts = [part_file(part) for part in range(self.num_parts)]
        digest = hashlib.blake2b(self.inputs.encode(), digest_size=16)
        for part in range(self.num_parts):
            digest.update(self._checksum_path(part).read_bytes())
        np.save(self.unfinished / KEYS_FILE, self.texts.keys, allow_pickle=False)
        with safe_open(self.unfinished / parts[0], framework="pt") as file:
            dimension = file.get_slice("vectors").get_shape()[1]
        index = {
            "format": FORMAT,
            "model": self.model.path,
            "options": describe_model(self.model),
            "identity": dict(self.identity),
            **{name: self.identity[name] for name in ("query_prompt", "document_prompt", "max_length", "dtype")},
            "count": len(self.texts),
            "dimension": dimension,
            "rows_per_part": self.rows_per_part,
            "inputs": self.inputs,
            "digest": digest.hexdigest(),
            "sizes": {name: (self.unfinished / name).stat().st_size for name in (*parts, KEYS_FILE)},
        }
        with atomic_write(self.unfinished / INDEX_FILE, durable=True) as path:
            path.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for part in range(self.num_parts):
            self._checksum_path(part).unlink()
        (self.unfinished / _INPUTS_FILE).unlink()
        os.replace(self.unfinished, self.directory)
