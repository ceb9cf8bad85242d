"""The texts that a report compares before and after training, and their vectors: `sample/` in a run directory.

n texts, D dimensions.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from embedtrain.errors import DataError
from embedtrain.utils.files import atomic_write, checksum, checksum_of, make_folder
from embedtrain.utils.records import is_count, read_record

TEXTS_FILE = "sample.json"
BEFORE, AFTER = "before", "after"
_FORMAT = 1


class Role(str, Enum):
    """What a text is to the model; `text` is neither query nor document, as in pairs of sentences."""

    query = "query"
    document = "document"
    text = "text"


class PairRelation(str, Enum):
    """The label of a pair of texts."""

    positive = "positive"
    negative = "negative"  # a hard negative, or judged not relevant
    high = "high"  # scored pairs: in the upper third of the scores
    middle = "middle"
    low = "low"
    same = "same"  # labelled pairs
    different = "different"


@dataclass(frozen=True, slots=True)
class SampleText:
    """A text without prompts, and how the model encodes it."""

    text: str  # truncated, which limits the cost of encoding it
    role: Role
    origin: str  # the evaluation set or the training source
    held_out: bool  # whether that is an evaluation set
    before: str = ""  # text inserted before it, such as a prompt
    after: str = ""  # text appended to it
    max_length: int | None = None  # in tokens; None: the model's
    label: str | None = None  # its class or cluster


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, by index, and their relation; in a pair of a query and a document the query comes first."""

    first: int
    second: int
    relation: PairRelation


@dataclass(frozen=True, slots=True)
class Sample:
    """Texts, and the labels of some pairs of them."""

    texts: Sequence[SampleText]
    pairs: Sequence[Pair]


SAMPLE_TYPES = (Sample, SampleText, Role, Pair, PairRelation)  # that a sample consists of


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of all texts of a sample: float32 [n, D], of unit length, with the weights of `step`."""

    values: NDArray[np.float32]
    step: int


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample with its vectors before training and those of the exported weights, if they exist."""

    sample: Sample
    before: Vectors | None = None
    after: Vectors | None = None


def write_texts(directory: Path, sample: Sample) -> None:
    """Write a sample without vectors, and delete the vectors of an earlier one."""
    make_folder(directory)
    for which in (BEFORE, AFTER):
        _vectors_file(directory, which).unlink(missing_ok=True)
    content = {
        "format": _FORMAT,
        "texts": [asdict(text) for text in sample.texts],
        "pairs": [[pair.first, pair.second, pair.relation.value] for pair in sample.pairs],
    }
    # ASCII, because lone surrogates, which a tokenizer may accept, have no UTF-8: they are written as escapes.
    with atomic_write(directory / TEXTS_FILE) as temporary:
        temporary.write_text(json.dumps(content | {"checksum": checksum_of(content)}), encoding="ascii")


def write_vectors(directory: Path, which: str, vectors: NDArray[np.float32], step: int) -> None:
    """Write the vectors of all texts, [n, D] of any length, `before` or `after`."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    with atomic_write(_vectors_file(directory, which)) as temporary:
        metadata = {"step": str(step), "checksum": _vectors_checksum(unit, step)}
        temporary.write_bytes(save({"vectors": unit}, metadata=metadata))


def read_texts(directory: Path) -> Sample | None:
    """The sample of a run; None if there is none. DataError if the file is invalid."""
    path = directory / TEXTS_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        if content.pop("checksum", None) not in (None, checksum_of(content)):  # earlier versions wrote none
            raise ValueError("its checksum does not match")
        if content["format"] != _FORMAT:
            raise DataError(f"{path} was written by another version of embedtrain (format {content['format']})")
        texts = [read_record(SampleText, values) for values in content["texts"]]
        pairs = [Pair(first, second, PairRelation(relation)) for first, second, relation in content["pairs"]]
        if any(not is_count(index) or index >= len(texts) for pair in pairs for index in (pair.first, pair.second)):
            raise ValueError("a pair refers to a text that does not exist")
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as the sample of a run: {error}") from error
    return Sample(texts, pairs)


def read_vectors(directory: Path, which: str, sample: Sample) -> Vectors | None:
    """The vectors `before` or `after`; None if there are none. DataError if they are not finite, or of other texts."""
    path = _vectors_file(directory, which)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            values = np.asarray(file.get_tensor("vectors"), dtype=np.float32)
            metadata = file.metadata() or {}
            step = int(metadata["step"])
        if metadata.get("checksum") not in (None, _vectors_checksum(values, step)):
            raise ValueError("its checksum does not match")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as vectors of the sample: {error}") from error
    if values.ndim != 2 or len(values) != len(sample.texts) or not np.isfinite(values).all():
        raise DataError(f"{path} does not hold one finite vector for each of the {len(sample.texts)} texts")
    return Vectors(values, step)


def _vectors_checksum(vectors: NDArray[np.float32], step: int) -> str:
    return checksum(np.ascontiguousarray(vectors).tobytes() + str(step).encode())


def _vectors_file(directory: Path, which: str) -> Path:
    return directory / f"{which}.safetensors"
