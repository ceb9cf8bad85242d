"""A cache on disk for the vectors of a large set of texts, so that interrupted encoding resumes.

    DIR/<digest>/00000012-00000140-<checksum>.safetensors     vectors of several chunks, written by one rank

The digest covers everything that the vectors depend on: model, texts, prompt, maximum length, precision. Files appear
atomically, and each lists its chunks, so that any number of ranks can resume. Their names have the checksum of their
content: what is damaged is removed, and encoded again. Vectors that are mostly zero, as those of learned sparse models,
are stored as compressed sparse rows.
"""

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, from_numpy

from embedtrain.config.code import is_own_code, load_named_code
from embedtrain.config.losses import VectorSimilarity
from embedtrain.config.recipe import Pooling, Precision
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.formats.export_record import DESCRIPTIONS
from embedtrain.inference.encoding_plan import PromptedTexts
from embedtrain.losses.encoded import Part
from embedtrain.models.pooling import pooling_name
from embedtrain.models.types import ModelSource
from embedtrain.utils.files import Checksums, atomic_write, checksum, file_checksum, reading

# Part of the file format: the tensors with the numbers of the distinct texts and, if a text has several vectors, with
# their number, and with the ids of their tokens; and parts of the digest.
_VECTORS = "vectors"
_DISTINCT_TEXTS = "distinct_texts"
_SIZES = "sizes"
_IDS = "ids"
# Compressed rows: entries of row i are those from `_STARTS`[i] to `_STARTS`[i + 1].
_STARTS, _COLUMNS, _ENTRIES, _WIDTH = "starts", "columns", "entries", "width"
# An entry takes twice the bytes of a number of a dense row.
_MAX_DENSITY = 1 / 4
_CHUNK_TOKENS = "chunk_tokens"
_EXISTING_PROMPT = "existing_prompt"
# The numbers of a file as numpy maps them, which has no bfloat16.
_MAPPED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8, "I64": np.int64}
SIMILARITY = "similarity"  # in the identity of a model; left out for the cosine


@dataclass(frozen=True)
class VectorCache:
    """Vectors in a directory that all ranks share."""

    directory: Path  # for all sets of texts, or that of one set (from `for_texts`)
    identity: Mapping[str, Any]  # what the vectors depend on besides the texts: model, precision, data type

    def for_texts(
        self,
        texts: PromptedTexts,
        text_keys: NDArray[np.int64],
        tokenizer: TextTokenizer,
        max_length: int | None,
        chunk_tokens: int,
    ) -> "VectorCache":
        """The cache of one set of texts with these keys, cut into chunks of at most `chunk_tokens` tokens."""
        identity = {
            **self.identity,
            "prompt": texts.prompt,
            "tokenizer": tokenizer.fingerprint,
            "max_length": min(max_length or tokenizer.max_length, tokenizer.max_length),
            _CHUNK_TOKENS: chunk_tokens,
            "packed": tokenizer.packed,
        }
        if texts.existing_prompt:
            existing = texts.existing_prompt
            identity[_EXISTING_PROMPT] = existing if isinstance(existing, str) else list(existing)
        if texts.role is not TextRole.document:
            identity["role"] = texts.role.value
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16)
        digest.update(text_keys.tobytes())
        return VectorCache(self.directory / digest.hexdigest(), identity)

    def list_files(self, world: World) -> list[tuple[str, list[int]]]:
        """The names of the intact files and the chunks in each, the same on every rank. A collective.

        Damaged files are removed.
        """
        names: list[str] = []
        with world.fail_together("looking for stored vectors"):
            if world.is_main and self.directory.is_dir():
                names = sorted(path.name for path in self.directory.glob("*.safetensors"))
        names = world.broadcast(names)
        intact: list[tuple[str, list[int]]] = []
        damaged: list[str] = []
        with world.fail_together("verifying stored vectors"):
            for name in names[world.rank :: world.size]:
                path = self.directory / name
                if _is_intact(path):
                    intact.append((name, _read_chunk_numbers(path)))
                else:
                    damaged.append(name)
        gathered = world.gather((intact, damaged))
        with world.fail_together("removing damaged vectors"):
            if world.is_main:
                self._remove([name for _, names in gathered for name in names])
        files: list[tuple[str, list[int]]] = []
        listed: set[int] = set()
        for name, chunks in sorted(file for files_of_rank, _ in gathered for file in files_of_rank):
            if not listed & set(chunks):  # two concurrent runs may have encoded the same chunks
                listed |= set(chunks)
                files.append((name, chunks))
        return files

    def _remove(self, damaged: Sequence[str]) -> None:
        for name in damaged:
            (self.directory / name).unlink(missing_ok=True)
        if damaged:
            more = f" and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
            text = f"{self.directory / damaged[0]}{more}: stored vectors were damaged, and are computed again"
            print(text, file=sys.stderr, flush=True)

    def read_local(
        self, files: Sequence[tuple[str, list[int]]], world: World, *, mapped: bool = False
    ) -> Iterator[tuple[Part, NDArray[np.int64]]]:
        """Yield the vectors of every W-th file, on the CPU, and the numbers of their distinct texts. A collective.

        The number of items is the same on every rank; the last may be empty. If they are `mapped`, vectors stay in the
        files, and must not be written to.
        """
        for start in range(0, len(files), world.size):
            index = start + world.rank
            with world.fail_together("reading stored vectors"):
                # Ranks without a file read the last one and drop its rows: they only need the width.
                vectors, distinct = _read(self.directory / files[min(index, len(files) - 1)][0], mapped=mapped)
            yield (vectors, distinct) if index < len(files) else (vectors.slice(0, 0), distinct[:0])

    def write(
        self, vectors: Part, distinct: NDArray[np.int64], chunks: Sequence[int], world: World, *, mapped: bool = False
    ) -> Part:
        """Store this rank's vectors of `chunks`; returns them, in their file if they are `mapped`. A collective."""
        with world.fail_together("storing vectors"):
            if chunks:
                tensors = {**_compressed(vectors.values.cpu()), _DISTINCT_TEXTS: from_numpy(distinct)}
                if vectors.sizes is not None:
                    tensors[_SIZES] = from_numpy(vectors.sizes)
                if vectors.ids is not None:
                    tensors[_IDS] = vectors.ids.cpu()
                content = save(tensors, metadata={"chunks": json.dumps(list(chunks))})
                path = self.directory / f"{chunks[0]:08}-{chunks[-1]:08}-{checksum(content)}.safetensors"
                try:
                    with atomic_write(path) as unfinished:
                        unfinished.write_bytes(content)
                except (SafetensorError, OSError) as error:
                    raise DataError(f"vectors cannot be stored in {self.directory}: {error}") from error
                if mapped:
                    vectors, _ = _read(path, mapped=True)
        return vectors


def _is_intact(path: Path) -> bool:
    """Whether the name of a file has the checksum of its content; those of earlier versions have none."""
    try:
        with reading(path):
            return path.stem.rpartition("-")[2] == file_checksum(path)
    except OSError:
        return False


def _read_chunk_numbers(path: Path) -> list[int]:
    try:
        with safe_open(path, framework="pt") as file:
            return [int(chunk) for chunk in json.loads(file.metadata()["chunks"])]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a file of stored vectors ({error}): delete {path.parent}") from error


def _compressed(values: Tensor) -> dict[str, Tensor]:
    """Rows [R, D] as the tensors of a file."""
    if int(values.count_nonzero()) > _MAX_DENSITY * values.numel():
        return {_VECTORS: values.contiguous()}
    rows, columns = values.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(values))
    return {
        _STARTS: torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        _COLUMNS: columns.int(),
        _ENTRIES: values[rows, columns],
        _WIDTH: torch.tensor(values.shape[1]),
    }


def _read_values(file: Any) -> Tensor:
    """What `_compressed` wrote. A RuntimeError or IndexError if it is something else."""
    if _VECTORS in file.keys():  # noqa: SIM118 (not a dict)
        vectors: Tensor = file.get_tensor(_VECTORS)
        return vectors
    starts, columns, entries, width = (file.get_tensor(name) for name in (_STARTS, _COLUMNS, _ENTRIES, _WIDTH))
    rows = torch.repeat_interleave(starts.diff(), output_size=len(columns))
    values: Tensor = entries.new_zeros((len(starts) - 1, int(width)))
    values[rows, columns.long()] = entries
    return values


def _read(path: Path, *, mapped: bool = False) -> tuple[Part, NDArray[np.int64]]:
    """The vectors of a file and the numbers of their texts; `mapped` vectors stay in the file unless compressed."""
    try:
        with safe_open(path, framework="pt") as file:
            if mapped and _VECTORS in file.keys():  # noqa: SIM118 (not a dict)
                return _mapped(path), file.get_tensor(_DISTINCT_TEXTS).numpy()
            vectors, distinct = _read_values(file), file.get_tensor(_DISTINCT_TEXTS)
            sizes, ids = (
                file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 (not a dict)
                for name in (_SIZES, _IDS)
            )
    except (SafetensorError, OSError, RuntimeError, IndexError) as error:
        raise DataError(f"{path}: stored vectors cannot be read ({error}): delete {path.parent}") from error
    counted = torch.tensor([len(distinct)]) if sizes is None else sizes
    if (
        vectors.dim() != 2
        or distinct.dim() != 1
        or distinct.dtype != torch.int64
        or (sizes is not None and (sizes.dtype != torch.int64 or sizes.shape != distinct.shape))
        or len(vectors) != int(counted.sum())
        or (ids is not None and (ids.dtype != torch.int64 or ids.shape != vectors.shape[:1]))
    ):
        raise DataError(f"{path}: not a file of stored vectors: delete {path.parent}")
    return Part(vectors, None if sizes is None else sizes.numpy(), ids), distinct.numpy()


def _mapped(path: Path) -> Part:
    values = map_tensors(path)[_VECTORS]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        vectors = from_numpy(values)
    return Part(vectors.view(torch.bfloat16) if values.dtype == np.uint16 else vectors)


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


# Raised when the vectors of the same files change by more than rounding.
_VERSION = 1
# Files beside a model that none of its loaders reads: cards, weights of other libraries, and states of a training.
_NOT_READ = {".md", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".png", ".jpg", ".pdf", ".log"}
_NOT_READ_NAMES = {*DESCRIPTIONS, "training_args.bin", "optimizer.pt", "scheduler.pt", "trainer_state.json"}


def model_identity(
    source: ModelSource, precision: Precision, world: World, graph: Path | None = None
) -> dict[str, Any]:
    """What a model's vectors depend on: checksums of its files, and how they are used. A collective.

    Two models with the same identity give the same vectors, wherever their files are. `graph` is the file that computes
    them instead of the model's own code.
    """
    found: list[tuple[str, str]] = []
    with world.fail_together("listing the model's files"):
        if world.is_main:
            found = [(name, str(path)) for name, path in sorted(_files(source, graph).items())]
    files: dict[str, list[str]] = {}
    found = world.broadcast(found)
    with world.fail_together("reading the model's files"):
        for name, path in found[world.rank :: world.size]:
            files[name] = Checksums.of(Path(path)).files["."][1]
    # In the order of their names, which does not depend on the number of ranks: folders hold these bytes.
    contents = dict(sorted((name, blocks) for of_rank in world.gather(files) for name, blocks in of_rank.items()))
    options: dict[str, Any] = {} if source.vectors.include_prompt else {"include_prompt": False}
    if source.vectors.truncate_dim is not None:
        options["truncate_dim"] = source.vectors.truncate_dim
    if source.vectors.similarity is not VectorSimilarity.cosine:
        options[SIMILARITY] = source.vectors.similarity.value
    return (
        options
        | source.kind.identity(source)
        | {
            "files": contents,
            "version": _VERSION,
            # Models are computed by its code, which minor versions correct.
            "transformers": ".".join(transformers.__version__.split(".")[:2]),
            "kind": source.kind.name,
            "pooling": pooling_name(source.vectors.pooling),
            "normalize": source.vectors.normalize,
            "lowercase": source.tokenization.lowercase,
            "precision": precision.value,
        }
    )


def _files(source: ModelSource, graph: Path | None) -> dict[str, Path]:
    """The files that are read, by the part of the model that they belong to and their names."""
    files = dict(source.kind.weight_files(source)) | _own_code(source)
    for part, directory in ({"0": source.directory, "adapter": source.adapter} | source.module_folders).items():
        if directory is not None:
            files |= {f"{part}/{path.name}": path for path in directory.iterdir() if _is_read(path)}
    if source.directory is not None and source.trust_remote_code:
        code = (path for path in source.directory.rglob("*.py") if path.is_file())
        files |= {f"0/{path.relative_to(source.directory).as_posix()}": path for path in code}
    if graph is not None:  # its external data are beside it
        beside = (path for path in graph.parent.iterdir() if path.is_file() and path.name.startswith(graph.stem))
        files |= {f"graph/{path.name}": path for path in beside}
    for name, tower in source.towers.items():
        files |= {f"{name}/{part}": path for part, path in _files(tower, None).items()}
    return files


def _own_code(source: ModelSource) -> dict[str, Path]:
    """The files of a user's kind and pooling, whose code computes the vectors; a notebook has none."""
    pooling, classes = source.vectors.pooling, {"kind": type(source.kind)}
    if not isinstance(pooling, Pooling):
        classes["pooling"] = load_named_code(pooling, "pooling")
    paths = {
        name: getattr(sys.modules.get(kind.__module__), "__file__", None)
        for name, kind in classes.items()
        if is_own_code(kind)
    }
    return {f"code/{name}": Path(path) for name, path in paths.items() if path is not None}


def _is_read(path: Path) -> bool:
    return (
        path.suffix not in _NOT_READ
        and path.name not in _NOT_READ_NAMES
        and not path.name.startswith(".")
        and path.is_file()
    )
