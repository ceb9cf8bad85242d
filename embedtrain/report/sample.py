"""The texts that a report compares before and after training, and their vectors: `sample/` in a run directory.

n texts, D dimensions. A text may have pictures, of which the folder has small copies, so that a page can show them
wherever it is written.
"""

import base64
import contextlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from embedtrain.data.images.item import Picture
from embedtrain.errors import DataError
from embedtrain.utils.files import atomic_write, checksum, checksum_of, make_folder
from embedtrain.utils.records import is_count, read_record

TEXTS_FILE = "sample.json"
BEFORE, AFTER = "before", "after"
THUMBNAILS_FILE = "thumbnails.json"
_FORMAT = 1
# A page has at most 128 copies of 8 KiB as text.
MAX_THUMBNAILS, _THUMBNAIL_SIDE, _THUMBNAIL_BYTES = 128, 96, 6144
_DATA_URI = "data:image/jpeg;base64,"


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
    thumbnails: Mapping[str, str] = field(default_factory=dict)  # data URIs of pictures, by their references


def write_texts(directory: Path, sample: Sample) -> None:
    """Write a sample without vectors, and delete the vectors of an earlier one."""
    make_folder(directory)
    for path in (_vectors_file(directory, BEFORE), _vectors_file(directory, AFTER), directory / THUMBNAILS_FILE):
        path.unlink(missing_ok=True)
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


def write_thumbnails(directory: Path, pictures: Iterable[Picture]) -> None:
    """Write small copies of the first MAX_THUMBNAILS pictures; without pictures no file is written.

    A picture that can no longer be read, or whose copy would be large, has none.
    """
    thumbnails: dict[str, str] = {}
    for picture in list(dict.fromkeys(pictures))[:MAX_THUMBNAILS]:
        with contextlib.suppress(DataError):
            thumbnails[str(picture)] = thumbnail(picture)
    if thumbnails:
        with atomic_write(directory / THUMBNAILS_FILE) as temporary:
            temporary.write_text(json.dumps(thumbnails), encoding="ascii")


def thumbnail(picture: Picture, side: int = _THUMBNAIL_SIDE) -> str:
    """A copy of a picture of at most `side` x `side` pixels, as a data URI.

    Raises DataError if the picture can no longer be read, or its copy would be large.
    """
    from embedtrain.data.images.files import PICTURES, decode_picture  # torch is imported with it

    image = decode_picture(PICTURES.place(picture), picture)
    image.thumbnail((side, side))
    max_bytes = _THUMBNAIL_BYTES * side**2 // _THUMBNAIL_SIDE**2
    for quality in (75, 40):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if buffer.tell() <= max_bytes:
            return _DATA_URI + base64.b64encode(buffer.getvalue()).decode()
    raise DataError(f"picture {picture.key:016x}: its small copy has more than {max_bytes:,} bytes")


def read_thumbnails(directory: Path) -> dict[str, str]:
    """Data URIs by the references of pictures. DataError if the file is invalid."""
    path = directory / THUMBNAILS_FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        items = list(content.items())
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as small copies of pictures: {error}") from error
    is_valid = all(isinstance(uri, str) and uri.startswith(_DATA_URI) for _, uri in items)
    if not is_valid or sum(len(uri) for _, uri in items) > MAX_THUMBNAILS * (4 * _THUMBNAIL_BYTES // 3 + 100):
        raise DataError(f"{path} does not hold small copies of pictures alone")
    return dict(items)


def _vectors_checksum(vectors: NDArray[np.float32], step: int) -> str:
    return checksum(np.ascontiguousarray(vectors).tobytes() + str(step).encode())


def _vectors_file(directory: Path, which: str) -> Path:
    return directory / f"{which}.safetensors"
