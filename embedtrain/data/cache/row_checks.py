"""Checks of training rows: of one row, of a source, and of all sources together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from embedtrain.config.recipe import TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources.values import BadRow
from embedtrain.data.texts import Texts
from embedtrain.errors import ConfigError
from embedtrain.utils.formatting import format_count

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NegativeCounts:
    """How many hard negatives the rows of one source have."""

    source: str  # its name in messages
    fewest: int
    most: int
    one_text: bool  # its rows are one text each, without documents


def check_sources(sources: Sequence[TrainSource], needs: Sequence[RowRequirements]) -> None:
    """Reject requirements that no row meets, and `negatives` of a source that do not fit the needs of its loss.

    Raises:
        ConfigError: the loss, or the source and its option.
    """
    for requirements in dict.fromkeys(needs):
        _check_needs(requirements)
    for source, requirements in zip(sources, needs, strict=True):
        if source.negatives is not None and source.negatives < 0:
            raise ConfigError(f"{source.path}: negatives={source.negatives} must be a number from 0, or null for all")
        if requirements.negatives and source.negatives == 0:
            raise ConfigError(
                f"{source.path}: negatives=0, and loss={requirements.loss} needs a hard negative in every row: "
                "write 1 or more, or null for all"
            )


def _check_needs(needs: RowRequirements) -> None:
    exclusive = {
        "a class": needs.label,
        "scores of documents": needs.scores != ScoreRequirement.none,
        "a teacher's vectors": needs.vectors,
        "documents": needs.label and needs.documents and needs.scores == ScoreRequirement.none,
    }
    required = [name for name, is_required in exclusive.items() if is_required]
    if len(required) > 1:
        raise ConfigError(
            f"loss={needs.loss} asks of every row {' and '.join(required)}, and a row cannot hold all of them: "
            "leave one of these losses out"
        )


class RowCheck:
    """Checks the rows of one piece of a source, in order, for what the loss needs."""

    def __init__(self, needs: RowRequirements) -> None:
        self._needs = needs
        self._width: int | None = None

    def __call__(self, texts: Texts) -> Texts:
        """The row; if the loss needs scores and it has none, with 1 for a positive and 0 for a negative.

        With `positive_above`, its positives are the documents with higher scores.

        Raises:
            BadRow: it lacks a positive or a negative, a score is out of range, all scores are equal and the loss ranks
                documents, or a vector has another dimension than those before.
        """
        if self._needs.scores == ScoreRequirement.pairs and not texts.positive_scores:
            ones, zeros = (1.0,) * len(texts.positives), (0.0,) * len(texts.negatives)
            texts = replace(texts, positive_scores=ones, negative_scores=zeros)
        if self._needs.positive_above is not None:
            texts = _split_by_score(texts, self._needs.positive_above, self._needs.loss)
        if self._needs.negatives and not texts.negatives:
            dropped = " other than its positives" if texts.num_dropped else ""
            hint = f"; {self._needs.without_negatives}" * bool(self._needs.without_negatives)
            raise BadRow(
                f"loss={self._needs.loss} needs a hard negative in every row, and this one has none{dropped}{hint}"
            )
        for score in (*texts.positive_scores, *texts.negative_scores):
            if score not in self._needs.range:
                hint = "" if self._needs.range.integers else "; `score_scale` of a source divides its scores"
                raise BadRow(f"loss={self._needs.loss} needs scores that are {self._needs.range}, not {score:g}{hint}")
        scores = {*texts.positive_scores, *texts.negative_scores, *[0.0] * (self._needs.batch_negatives > 0)}
        if self._needs.ranked and len(scores) < 2:
            documents = format_count(len(texts.positives) + len(texts.negatives), "document")
            raise BadRow(
                f"loss={self._needs.loss} ranks documents of different scores, and this row has {documents} with "
                f"the score {next(iter(scores)):g}"
            )
        self._check_width(texts)
        return texts

    def _check_width(self, texts: Texts) -> None:
        width = self._width
        for vector in texts.vectors:
            width = width or len(vector)
            if len(vector) != width:
                raise BadRow(f"a vector of {len(vector)} numbers, where those before have {width}")
        self._width = width  # only now, so that a skipped row does not set it


def _split_by_score(texts: Texts, threshold: float, loss: str) -> Texts:
    """The row with the documents of a score above the threshold as its positives and all others as its negatives."""
    scores = (*texts.positive_scores, *texts.negative_scores)
    documents = (*texts.positives, *texts.negatives)
    if max(scores) <= threshold:
        raise BadRow(
            f"loss={loss} needs a document with a score above positive_above={threshold:g}, and the highest score of "
            f"this row is {max(scores):g}"
        )
    num_positives = len(texts.positives)
    has_ids = texts.positive_ids or texts.negative_ids
    ids = (
        *(texts.positive_ids or [""] * num_positives),
        *(texts.negative_ids or [""] * len(texts.negatives)),
    )

    def select(values: Sequence[T], *, above: bool) -> tuple[T, ...]:
        return tuple(value for value, score in zip(values, scores, strict=True) if (score > threshold) == above)

    return replace(
        texts,
        positives=select(documents, above=True),
        negatives=select(documents, above=False),
        positive_scores=select(scores, above=True),
        negative_scores=select(scores, above=False),
        positive_ids=select(ids, above=True) if has_ids else (),
        negative_ids=select(ids, above=False) if has_ids else (),
    )


def check_equal_counts(needs: RowRequirements, counts: Sequence[NegativeCounts]) -> None:
    """Require the same number of documents in every row, if the loss does; `counts` are of what a step uses.

    Raises:
        ConfigError: the rows of one source, or of two, differ; the message says how to make them equal.
    """
    if not needs.same_num_documents:
        return
    same = f"and loss={needs.loss} needs the same number in every row"
    for count in counts:
        if count.fewest < count.most:
            raise ConfigError(
                f"data.train: {count.source} has rows with {count.fewest} to {count.most} negatives, {same}: "
                f"write {{path: ..., negatives: {count.fewest}}} for it"
            )
    for first, other in pairwise(counts):
        if first.one_text != other.one_text:
            texts, pairs = (first, other) if first.one_text else (other, first)
            raise ConfigError(
                f"data.train: {texts.source} has rows of one text and {pairs.source} rows of query and document, "
                f"{same}: remove one of them"
            )
        if first.most != other.most:
            raise ConfigError(
                f"data.train: {first.source} has rows with {first.most} negatives and {other.source} with "
                f"{other.most}, {same}: write {{path: ..., negatives: {min(first.most, other.most)}}} for both"
            )
