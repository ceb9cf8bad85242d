"""Whether rows are what the loss needs: each by itself, those of a source, and those of all sources together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from embedtrain.config.recipe import TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources.values import BadRow
from embedtrain.data.types import Texts
from embedtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NegativeCounts:
    """How many hard negatives the rows of one source have."""

    source: str  # its name in messages
    fewest: int
    most: int
    one_text: bool  # its rows are one text each, without documents


def check_sources(sources: Sequence[TrainSource], needs: Sequence[RowRequirements]) -> None:
    """Refuse what no row can be, and options of sources that leave out what the loss needs.

    Args:
        sources: `data.train`.
        needs: for each source, what its loss asks.

    Raises:
        ConfigError: both of what a row can hold only one, no negatives for a loss of negatives, or a number of
            negatives below 0.
    """
    for one in dict.fromkeys(needs):
        _check_needs(one)
    for source, one in zip(sources, needs, strict=True):
        if source.negatives is not None and source.negatives < 0:
            raise ConfigError(f"{source.path}: negatives={source.negatives} must be a number from 0, or null for all")
        if one.negatives and source.negatives == 0:
            raise ConfigError(
                f"{source.path}: negatives=0, and loss={one.loss} needs a hard negative in every row: "
                "write 1 or more, or null for all"
            )


def _check_needs(needs: RowRequirements) -> None:
    asked = {
        "a class": needs.label,
        "scores of documents": needs.scores != ScoreRequirement.none,
        "a teacher's vectors": needs.vectors,
        "documents": needs.label and needs.documents and needs.scores == ScoreRequirement.none,
    }
    wanted = [what for what, is_asked in asked.items() if is_asked]
    if len(wanted) > 1:
        raise ConfigError(
            f"loss={needs.loss} asks of every row {' and '.join(wanted)}, and a row cannot hold all of them: "
            "leave one of these losses out"
        )


class RowCheck:
    """Checks rows one after the other, those of one piece of a source.

    Args:
        needs: what the loss asks of them.
    """

    def __init__(self, needs: RowRequirements) -> None:
        self._needs = needs
        self._width: int | None = None

    def __call__(self, texts: Texts) -> Texts:
        """The row, with scores where the loss wants some and it has none: 1 for a positive, 0 for a negative.

        Raises:
            BadRow: it lacks a negative, a score is out of range, or a vector has another width than those before.
        """
        if self._needs.negatives and not texts.negatives:
            dropped = " other than its positives" if texts.num_dropped else ""
            raise BadRow(f"loss={self._needs.loss} needs a hard negative in every row, and this one has none{dropped}")
        for score in (*texts.positive_scores, *texts.negative_scores):
            if score not in self._needs.range:
                hint = "" if self._needs.range.whole else "; `score_scale` of a source divides its scores"
                raise BadRow(f"loss={self._needs.loss} needs scores that are {self._needs.range}, not {score:g}{hint}")
        self._check_width(texts)
        if self._needs.scores == ScoreRequirement.pairs and not texts.positive_scores:
            ones, zeros = (1.0,) * len(texts.positives), (0.0,) * len(texts.negatives)
            return replace(texts, positive_scores=ones, negative_scores=zeros)
        return texts

    def _check_width(self, texts: Texts) -> None:
        width = self._width
        for vector in texts.vectors:
            width = width or len(vector)
            if len(vector) != width:
                raise BadRow(f"a vector of {len(vector)} numbers, where those before have {width}")
        self._width = width  # only now: a bad row that is passed over decides nothing


def check_equal_counts(needs: RowRequirements, counts: Sequence[NegativeCounts]) -> None:
    """Refuse rows of different numbers of documents, where the loss needs as many in every row.

    Args:
        needs: what the loss asks.
        counts: for each source, what a step uses of its rows.

    Raises:
        ConfigError: the rows of one source, or of two, differ; the text says what would make them equal.
    """
    if not needs.same_num_documents:
        return
    same = f"and loss={needs.loss} needs the same number in every row"
    for one in counts:
        if one.fewest < one.most:
            raise ConfigError(
                f"data.train: {one.source} has rows with {one.fewest} to {one.most} negatives, {same}: "
                f"write {{path: ..., negatives: {one.fewest}}} for it"
            )
    for first, other in pairwise(counts):
        if first.one_text != other.one_text:
            one, more = (first, other) if first.one_text else (other, first)
            raise ConfigError(
                f"data.train: {one.source} has rows of one text and {more.source} rows of query and document, "
                f"{same}: take one of them out"
            )
        if first.most != other.most:
            raise ConfigError(
                f"data.train: {first.source} has rows with {first.most} negatives and {other.source} with "
                f"{other.most}, {same}: write {{path: ..., negatives: {min(first.most, other.most)}}} for both"
            )
