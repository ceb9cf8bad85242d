"""The forms of vectors that an evaluation measures besides the whole float vectors, and what documents take in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from embedtrain.config.compressed import VectorFormat, stored_bytes
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.evaluation.types import LoadedSet, RetrievalSet
from embedtrain.inference.index import ShardedIndex
from embedtrain.inference.quantised import CompressedIndex, sample_ranges
from embedtrain.losses.quantisation import Ranges
from embedtrain.tracking.metrics import VectorSize

# A row of a set: its first dimensions, a view of its comparison, a form of its vectors, or None for all of it.
Row = int | str | VectorFormat | None


@dataclass(frozen=True, slots=True)
class CompressedVectors:
    """Forms to measure, and where the ranges of int8 and uint8 are from."""

    formats: Sequence[VectorFormat] = ()
    calibration: int = 10000  # documents of a set whose vectors give the ranges
    ranges: Mapping[int, Ranges] = field(default_factory=dict)  # of the model's files instead, by dimension

    def besides(self, truncate_dims: Sequence[int]) -> list[VectorFormat]:
        """The forms that are not just vectors of these dimensions."""
        return [form for form in self.formats if form.label not in map(str, truncate_dims)]

    def index(
        self, whole: ShardedIndex, form: VectorFormat, dimension: int, sampled: dict[int, Ranges]
    ) -> CompressedIndex:
        """The documents of an index in one form; `dimension` is that of their vectors. A collective.

        Ranges are the model's, else those of a sample of the documents, which `sampled` keeps for further forms.
        """

        def ranges_of(dimension: int) -> Ranges:
            if dimension not in self.ranges and dimension not in sampled:
                sampled[dimension] = sample_ranges(whole, dimension, self.calibration)
            return self.ranges.get(dimension) or sampled[dimension]

        return CompressedIndex(whole, form, dimension, ranges_of)


def has_row(loaded: LoadedSet, row: Row) -> bool:
    """Whether a set is measured in this form; compressed vectors are for searches of all documents."""
    is_search = isinstance(loaded.data, RetrievalSet) and loaded.data.candidates is None
    return is_search or not isinstance(row, VectorFormat)


def vector_size(row: Row, dimension: int) -> VectorSize:
    """Bytes of a document of vectors that have so many dimensions."""
    if isinstance(row, VectorFormat):
        return VectorSize(row.label, row.bytes_per_document(dimension), row.rescore_bytes(dimension))
    dims = row if isinstance(row, int) else dimension
    return VectorSize(str(dims), stored_bytes(dims, VectorPrecision.float), 0)
