"""Which layout a source's rows have: the one asked for, or the one that its first row shows."""

from typing import Any

from embedtrain.config.recipe import DataFormat, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.sources.kinds import PartKind
from embedtrain.data.sources.layouts.columns import choose_columns
from embedtrain.data.sources.layouts.flagembedding import FlagEmbedding
from embedtrain.data.sources.layouts.judged import Judged
from embedtrain.data.sources.layouts.layout import TEXTS_ONLY, RowLayout, beside, losses_of_scores
from embedtrain.data.sources.layouts.messages import Messages
from embedtrain.data.sources.layouts.nemo import Nemo
from embedtrain.data.sources.layouts.tevatron import DocumentIds, Passages
from embedtrain.errors import ConfigError, DataError


def choose_layout(
    source: TrainSource, kind: PartKind, row: dict[str, Any], needs: RowRequirements = TEXTS_ONLY
) -> RowLayout:
    """The layout that the source asks for, or else the one that its first row shows.

    Args:
        source: an element of `data.train`.
        kind: how the row is stored.
        row: the source's first row.
        needs: what the loss asks of every row.

    Raises:
        ConfigError: `columns` is given for a format that has none, or names too few.
        DataError: the row's columns cannot be what the loss needs.
    """
    if source.columns is not None and source.format not in (DataFormat.auto, DataFormat.columns):
        raise ConfigError(f"{source.path}: columns has no use with format={source.format.value}: leave one of them out")
    layout = _asked_for(source, kind, row, needs)
    if layout is None:
        _refuse_unpaired(source, row)
        return choose_columns(source, kind, row, needs)
    if needs.label or needs.vectors:
        raise DataError(
            f"{source.path}: loss={needs.loss} needs {beside(needs)}, which {layout.told()} do not hold: "
            "give it as a column named label, beside columns of texts"
        )
    if needs.scores == ScoreRequirement.teacher and not isinstance(layout, FlagEmbedding | Messages):
        raise DataError(
            f"{source.path}: loss={needs.loss} needs {beside(needs)}, which {layout.told()} do not hold: "
            "give it as FlagEmbedding's pos_scores and neg_scores, or as a column named score"
        )
    if isinstance(layout, FlagEmbedding) and needs.scores == ScoreRequirement.none and row.get("scores") is not None:
        raise DataError(
            f'{source.path}: "scores" makes these scored pairs, which loss={needs.loss} has no use for: '
            'write columns=[query,pos] to take every text of "pos" as a positive, or take the source out; '
            f"losses that use scores: {losses_of_scores()}"
        )
    return layout


def _asked_for(source: TrainSource, kind: PartKind, row: dict[str, Any], needs: RowRequirements) -> RowLayout | None:
    """The layout, or None for columns by order."""
    if kind is PartKind.beir:
        return Judged(needs)
    match source.format:
        case DataFormat.flagembedding:
            return FlagEmbedding(needs)
        case DataFormat.tevatron:
            return Passages(needs) if "positive_passages" in row or "negative_passages" in row else DocumentIds(needs)
        case DataFormat.messages:
            return Messages(needs)
        case DataFormat.beir:
            raise ConfigError(
                f"{source.path}: format=beir is a folder's, with corpus, queries and qrels: write its path"
            )
        case DataFormat.auto if source.columns is None and kind not in (PartKind.csv, PartKind.tsv):
            return _shown(row, needs)
        case _:
            return None


def _shown(row: dict[str, Any], needs: RowRequirements) -> RowLayout | None:
    # One key of a pair is enough: a row that has lost its `pos`, taken as columns, would make its negatives positives.
    keys = row.keys()
    if {"positive_messages", "negative_messages"} & keys:
        return Messages(needs)
    if {"positive_passages", "negative_passages"} & keys:
        return Passages(needs)
    if {"positive_document_ids", "negative_document_ids"} & keys:
        return DocumentIds(needs)
    if {"pos_doc", "neg_doc"} & keys:
        return Nemo(needs)
    return FlagEmbedding(needs) if "query" in keys and {"pos", "neg"} & keys else None


def _refuse_unpaired(source: TrainSource, row: dict[str, Any]) -> None:
    """Refuse rows that are known, but are for training of another kind."""
    if source.columns is not None:
        return
    what = None
    if "input" in row and any(key.startswith("output_") for key in row):
        what = "LLARA's pretraining rows (input, output_...)"
    elif isinstance(row.get("text"), list) and "query" not in row:
        what = 'gritlm\'s generative rows ("text" alone)'
    elif "messages" in row and isinstance(row["messages"], list):
        what = 'conversations without "positive_messages"'
    if what is not None:
        raise DataError(
            f"{source.path}: these are {what}, which hold no pairs of query and document to train embeddings on: "
            "take the source out"
        )
