"""The choice of a source's layout, and the layout of columns: query, positive, negatives, perhaps a score."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embedtrain.config.columns import parse_columns, parse_condition
from embedtrain.config.recipe import DataFormat, TrainSource
from embedtrain.config.row_requirements import RowRequirements, ScoreRequirement
from embedtrain.data.rows import ORIGIN_KEYS, Documents, Example
from embedtrain.data.sources import values
from embedtrain.data.sources.column_roles import (
    Content,
    UnclearColumns,
    choose_text_columns,
    content_of,
    is_document,
    is_label,
    is_positive,
    is_query,
    is_score,
    normalized,
    unnamed_score,
    written_columns,
)
from embedtrain.data.sources.layouts import (
    OWN_KEYS,
    TEXTS_ONLY,
    BeirQueries,
    DocumentLookup,
    FlagEmbedding,
    MsSwiftMessages,
    NemoRows,
    RowLayout,
    TevatronIds,
    TevatronPassages,
    losses_with_scores,
    needs_besides_texts,
)
from embedtrain.data.sources.parts import PartKind
from embedtrain.data.sources.values import BadRow, list_names
from embedtrain.errors import ConfigError, DataError

_INSTRUCTION_NAMES = ("prompt", "promptforquery", "queryprompt", "instruction")  # normalized


def choose_layout(
    source: TrainSource,
    kind: PartKind,
    row: dict[str, Any],
    needs: RowRequirements = TEXTS_ONLY,
    first_rows: Sequence[dict[str, Any]] = (),
) -> RowLayout:
    """The layout that the source names, else the one that its first row has.

    `first_rows` are rows after `row`, which show which columns of a table hold texts.

    Raises ConfigError if `columns` has no use or names too few, and DataError if the row lacks what the loss needs, or
    the roles of its columns are not clear.
    """
    if source.columns is not None and source.format not in (DataFormat.auto, DataFormat.columns):
        raise ConfigError(f"{source.path}: columns has no use with format={source.format.value}: leave one of them out")
    if source.text_as_positive:
        return _choose_text(source, kind, [row, *first_rows], needs)
    layout = _keyed_layout(source, kind, row, needs)
    if layout is None:
        _reject_unpaired(source, row)
        is_cells = kind in (PartKind.csv, PartKind.tsv)
        return _choose_columns(source, [row, *first_rows], needs, is_cells=is_cells)
    if needs.label or needs.vectors:
        raise DataError(
            f"{source.path}: loss={needs.loss} needs {needs_besides_texts(needs)}, which {layout.describe()} do not "
            "hold: give it as a column named label, beside columns of texts"
        )
    if needs.scores == ScoreRequirement.teacher and not isinstance(layout, FlagEmbedding | MsSwiftMessages):
        raise DataError(
            f"{source.path}: loss={needs.loss} needs {needs_besides_texts(needs)}, which {layout.describe()} do not "
            "hold: give it as FlagEmbedding's pos_scores and neg_scores, or as a column named score"
        )
    if isinstance(layout, FlagEmbedding):
        _reject_scores(source, row, needs)
    return layout


def _choose_text(
    source: TrainSource, kind: PartKind, first_rows: Sequence[dict[str, Any]], needs: RowRequirements
) -> "Columns":
    """The column of texts that are their own positives."""
    if kind is PartKind.beir:
        raise ConfigError(
            f"{source.path}: text_as_positive=true reads one file of texts, and this is a BEIR folder: write the path "
            "of its corpus and its column, such as {path: .../corpus.jsonl, text_as_positive: true, columns: "
            "{text: text}}"
        )
    is_cells = kind in (PartKind.csv, PartKind.tsv)
    layout = _choose_columns(source, first_rows, RowRequirements(documents=False, loss=needs.loss), is_cells=is_cells)
    if len(layout.names) > 1 or layout.score is not None:
        raise DataError(
            f"{source.path}: text_as_positive=true takes one column of texts, and there are: "
            f"{list_names(first_rows[0])}; name it, such as columns={{text: {layout.names[0]}}}"
        )
    return replace(layout, needs=needs, is_own_positive=True)


def _reject_scores(source: TrainSource, row: dict[str, Any], needs: RowRequirements) -> None:
    """Reject `scores` of FlagEmbedding's rows that the loss does not use, and labels, which they do not have.

    A column `score` is no label: `filter annotate=true` writes one, a list. A single number under such a name is the
    score of a pair, which a loss of scores would otherwise miss.
    """
    has_scores = bool({"scores", "pos_scores"} & row.keys())
    compared = [] if source.where is None else [comparison.column for comparison in parse_condition(source.where)]
    if row.get("synthetic"):  # `grade` is that of the query
        compared += ORIGIN_KEYS
    for name, value in row.items():
        is_single = is_score(name) and isinstance(value, int | float) and not has_scores
        is_meant = name == "scores" or is_label(name) or (is_single and needs.scores != ScoreRequirement.none)
        if value is None or name in compared or not is_meant:
            continue
        if needs.scores == ScoreRequirement.none:
            raise DataError(
                f'{source.path}: "{name}" makes these scored pairs, which loss={needs.loss} does not use: '
                'write columns=[query,pos] to take every text of "pos" as a positive, or remove the source; '
                f"losses that use scores: {losses_with_scores()}"
            )
        if name != "scores":
            raise DataError(
                f'{source.path}: "{name}" is not what scores of rows with "pos" and "neg" are called: rename it to '
                '"scores" (of the positives, then the negatives) or "pos_scores" and "neg_scores", or name columns, '
                f"such as columns={{query: query, positive: pos, score: {name}}}"
            )


def _keyed_layout(source: TrainSource, kind: PartKind, row: dict[str, Any], needs: RowRequirements) -> RowLayout | None:
    """The layout, or None for columns by order."""
    if kind is PartKind.beir:
        return BeirQueries(needs)
    match source.format:
        case DataFormat.flagembedding:
            return FlagEmbedding(needs)
        case DataFormat.tevatron:
            has_passages = "positive_passages" in row or "negative_passages" in row
            return TevatronPassages(needs) if has_passages else TevatronIds(needs)
        case DataFormat.messages:
            return MsSwiftMessages(needs)
        case DataFormat.beir:
            raise ConfigError(
                f"{source.path}: format=beir is a folder's, with corpus, queries and qrels: write its path"
            )
        case DataFormat.auto if source.columns is None and kind not in (PartKind.csv, PartKind.tsv):
            return _layout_of_keys(row, needs)
        case _:
            return None


def _layout_of_keys(row: dict[str, Any], needs: RowRequirements) -> RowLayout | None:
    # One key of a pair is enough: as columns, a row that lacks its `pos` would make its negatives positives.
    keys = row.keys()
    if {"positive_messages", "negative_messages"} & keys:
        return MsSwiftMessages(needs)
    if {"positive_passages", "negative_passages"} & keys:
        return TevatronPassages(needs)
    if {"positive_document_ids", "negative_document_ids"} & keys:
        return TevatronIds(needs)
    if {"pos_doc", "neg_doc"} & keys:
        return NemoRows(needs)
    is_flag = bool(OWN_KEYS & keys) and any(map(is_query, keys))
    single = [name for name in ("pos", "neg") if isinstance(row.get(name), str)]
    # Texts instead of lists are columns, but for FlagEmbedding's own keys, of which one that is no list is a mistake.
    has_positives = "pos" in keys or any(map(is_positive, keys))
    has_other_names = "query" not in keys or (has_positives and "pos" not in keys)
    is_answer = not has_positives and OWN_KEYS & keys == {"neg"} and any(map(is_document, keys))  # {"answer", "neg"}
    return None if not is_flag or is_answer or (single and has_other_names) else FlagEmbedding(needs)


def _reject_unpaired(source: TrainSource, row: dict[str, Any]) -> None:
    """Reject known rows for other kinds of training."""
    if source.columns is not None:
        return
    kind = None
    if "input" in row and any(key.startswith("output_") for key in row):
        kind = "LLARA's pretraining rows (input, output_...)"
    elif isinstance(row.get("text"), list) and "query" not in row:
        kind = 'gritlm\'s generative rows ("text" alone)'
    elif "messages" in row and isinstance(row["messages"], list):
        kind = 'conversations without "positive_messages"'
    if kind is not None:
        raise DataError(
            f"{source.path}: these are {kind}, which hold no pairs of query and document to train embeddings on: "
            "remove the source"
        )


BY_ORDER = "(by order"  # in the description of such columns
_BEGINS_LIST = "[ \t\n"  # characters with which a cell begins that may hold a list


@dataclass(kw_only=True)
class Columns(RowLayout):
    """Columns of query, positive and negatives. A value may be a text or a list of texts.

    The column `score` holds what the loss needs besides texts: scores, a class, or a teacher's vectors. For a loss
    without such needs it marks the positives of a list of documents, as `mine_hard_negatives` of sentence-transformers
    writes them (labeled-list).
    """

    names: list[str]  # of the columns of texts
    score: str | None = None
    prompt: str | None = None  # the column of the queries' instructions
    is_cells: bool = False  # of CSV or TSV, in which numbers are texts
    is_chosen: bool = False  # from the columns of the file, and not named by the source
    by_name: bool = False  # chosen by their names, not by their order
    is_own_positive: bool = False  # rows are single texts, see `text_as_positive`
    unused: tuple[str, ...] = ()  # of the first rows, in which they have no role beside the others

    @property
    def unused_prompt(self) -> str | None:
        """An unused column with the name of an instruction; None for none."""
        return next((name for name in self.unused if normalized(name) in _INSTRUCTION_NAMES), None)

    def describe(self) -> str:
        """What each column is used as."""
        first, *others = self.names
        if self.is_own_positive:
            return f"column {first} = query and positive{f', {self.prompt} = instruction' if self.prompt else ''}"
        parts = [f"columns {first} = query" if others else f"column {first} = query"]
        if others:
            parts.append(f"{others[0]} = positive")
        if others[1:]:
            parts.append(f"{' + '.join(others[1:])} = negatives")
        if self.score is not None:
            use = "score" if self.needs.scores != ScoreRequirement.none else "1 for positives, 0 for negatives"
            use = "class" if self.needs.label else "vectors" if self.needs.vectors else use
            parts.append(f"{self.score} = {use}")
        if self.prompt is not None:
            parts.append(f"{self.prompt} = instruction")
        how = f" {'(by name' if self.by_name else BY_ORDER}; override: columns=[QUERY,POSITIVE,...]"
        if self.unused_prompt is not None:  # it may be the prompt that wrote the query
            roles = f"query: {first}, positive: {next(iter(others), '')}, prompt: {self.unused_prompt}"
            how += f"; if {self.unused_prompt} is an instruction for the query: columns={{{roles}}}"
        how += ")"
        return ", ".join(parts) + (how if self.is_chosen and others else "")

    def _parse(self, row: dict[str, Any], documents: DocumentLookup | None) -> Example:
        texts = self._texts(row)
        if self.prompt is None:
            return texts
        return replace(texts, instruction=values.instruction(row.get(self.prompt), f'column "{self.prompt}"'))

    def _texts(self, row: dict[str, Any]) -> Example:
        required = self.names[:2] if self.score is None else [*self.names[:2], self.score]
        others = [name for name in (self.score, self.prompt) if name is not None]
        if len(row) > len(self.names) + len(others):
            self._ignore_except(row, *self.names, *others)
        for name in required:
            if name not in row:
                raise BadRow(f'no "{name}" in this row, which has: {list_names(row)}')
        query = values.text(row[self.names[0]], f'column "{self.names[0]}"')
        if self.is_own_positive:
            return Example(query, Documents((query,)))
        positives: list[str] = []
        negatives: list[str] = []
        for name in self.names[1:2]:
            positives, negatives = self._documents(row[name], f'column "{name}"')
            if not positives and (not negatives or self.needs.scores == ScoreRequirement.none):
                lacking = "marks no document as a positive" if negatives else "is empty"
                raise BadRow(f'column "{name}" {lacking}: a row needs at least one positive')
        for name in self.names[2:]:
            value = row.get(name)
            if value is not None:  # a row of a table with fewer negatives than others
                if self.is_cells and isinstance(value, str) and value[0] in _BEGINS_LIST:
                    value = values.list_in_cell(value)
                negatives += values.texts(value, f'column "{name}"')
        if self.score is None:
            return Example(query, Documents(tuple(positives)), Documents(tuple(negatives)))
        return self._with_score(row[self.score], query, positives, negatives)

    def _documents(self, value: Any, name: str) -> tuple[list[str], list[str]]:
        """Positives, and the documents that are marked as none, if objects have marks."""
        if self.is_cells and value and isinstance(value, str) and value[0] in _BEGINS_LIST:
            value = values.list_in_cell(value)
        if isinstance(value, str):
            return [values.text(value, name)], []
        texts, marks = values.texts(value, name), values.marks_of(value, name)
        if marks is None:
            return texts, []
        return (
            [text for text, mark in zip(texts, marks, strict=True) if mark],
            [text for text, mark in zip(texts, marks, strict=True) if not mark],
        )

    def _require_no_role(self, name: str, value: object) -> None:
        if self.is_chosen and name not in self.unused:
            super()._require_no_role(name, value)

    def _with_score(self, value: object, query: str, positives: list[str], negatives: list[str]) -> Example:
        name = f'column "{self.score}"'
        if self.is_cells:
            value = values.parse_cell(value)
        if self.needs.scores == ScoreRequirement.none and not self.needs.label and not self.needs.vectors:
            marks = values.positive_marks(value, name, len(positives))
            marked = [text for text, mark in zip(positives, marks, strict=True) if mark]
            if not marked:
                raise BadRow(f"{name} marks no document as a positive (1): a row needs at least one")
            unmarked = [text for text, mark in zip(positives, marks, strict=True) if not mark]
            return Example(query, Documents(tuple(marked)), Documents((*unmarked, *negatives)))
        documents = (Documents(tuple(positives)), Documents(tuple(negatives)))
        if self.needs.label:
            return Example(query, *documents, label=values.class_label(value, name))
        num_positives, num_negatives = len(positives), len(negatives)
        if self.needs.vectors:
            vectors = values.vectors(value, name, 1 + num_positives + num_negatives)
            return Example(query, *documents, vectors=tuple(vectors))
        scores = values.scores(value, name, num_positives, num_negatives, len(self.names))
        of_positives, of_negatives = tuple(scores[:num_positives]), tuple(scores[num_positives:])
        return Example(query, replace(documents[0], scores=of_positives), replace(documents[1], scores=of_negatives))


def _choose_columns(
    source: TrainSource, first_rows: Sequence[dict[str, Any]], needs: RowRequirements, *, is_cells: bool
) -> "Columns":
    """The columns of texts, and the one of scores, labels or vectors."""
    # Rows after the first may have more columns, such as negatives; one of other columns is of another kind.
    alike = [row for row in first_rows if first_rows[0].keys() <= row.keys()]
    present = list(dict.fromkeys(name for row in alike for name in row))
    needs_score = needs.scores != ScoreRequirement.none or needs.label or needs.vectors
    columns = parse_columns(source.columns)
    named = present if columns is None else columns.names
    if columns is not None and columns.by_role:
        texts, scores, by_name = columns.texts, [] if columns.score is None else [columns.score], False
    else:
        # Columns that the user names are texts, whatever their names, where the loss needs only texts.
        scores = [name for name in named if is_score(name)] if needs_score or columns is None else []
        if columns is None and not needs_score and source.where is not None:  # which has chosen the rows by them
            compared = {comparison.column for comparison in parse_condition(source.where)}
            scores = [name for name in scores if name not in compared]
        texts, by_name = [name for name in named if name not in scores], False
    min_texts = 2 if needs.documents or needs.scores != ScoreRequirement.none else 1
    if columns is not None and len(texts) < min_texts:
        expected = "at least two, query and positive" if min_texts == 2 else "at least one of texts"
        raise ConfigError(f"{source.path}: columns={source.columns}: name {expected}")
    missing = [name for name in named if name not in present]
    if missing:
        raise DataError(f"{source.path}: no column {missing[0]!r}; there are: {list_names(present)}")
    if columns is None:
        texts, by_name = _text_columns(source, texts, scores, first_rows, needs, is_cells=is_cells)
    prompt = None if columns is None else columns.prompt
    layout = Columns(
        names=texts, needs=needs, prompt=prompt, is_cells=is_cells, is_chosen=columns is None, by_name=by_name
    )
    layout.unused = tuple(name for name in present if name not in (*texts, prompt))
    if len(scores) == 1 and not needs_score and _marks_documents(first_rows[0], texts, scores[0], is_cells=is_cells):
        return replace(layout, score=scores[0])
    if scores and not needs_score:
        condition = f"{scores[0]} {'== 1' if is_label(scores[0]) else '> 0.5'}"
        raise DataError(
            f"{source.path}: column {scores[0]!r} makes these scored pairs, which loss={needs.loss} does not use: "
            f"name the columns to train on, such as columns={written_columns(texts[:2])}, choose rows, such as "
            f'where="{condition}", or remove the source; losses that use scores: {losses_with_scores()}'
        )
    if len(scores) > 1:
        raise DataError(
            f"{source.path}: columns {scores[0]!r} and {scores[1]!r} may both be what loss={needs.loss} needs besides "
            f"texts: name the columns to train on, such as columns={written_columns([*texts, scores[0]])}"
        )
    if needs.label and len(texts) > 1:
        raise DataError(
            f"{source.path}: loss={needs.loss} takes one text and its class, and there are the columns of texts "
            f"{list_names(texts)}: name one of them and that of the class, such as "
            f"columns={{text: {texts[0]}, label: {scores[0] if scores else 'label'}}}"
        )
    if len(texts) < min_texts:
        pair = 'a query and a positive, as two columns or as FlagEmbedding\'s "query" and "pos"'
        expected = pair if min_texts == 2 else "a text"
        raise DataError(f"{source.path}: rows need {expected}; there is: {list_names(present)}")
    if needs_score and needs.scores != ScoreRequirement.pairs and not scores:
        example = "{text: TEXT, label: CLASS}" if needs.label else "{query: QUERY, positive: POSITIVE, score: SCORE}"
        raise DataError(
            f"{source.path}: loss={needs.loss} needs {needs_besides_texts(needs)}, and no column is named score, "
            f"scores, label or labels; there {'is' if columns is None else 'is, in columns'}: {list_names(named)}; "
            f"columns={example} names one"
        )
    return replace(layout, score=scores[0] if scores else None)


def _text_columns(
    source: TrainSource,
    names: Sequence[str],
    scores: Sequence[str],
    first_rows: Sequence[dict[str, Any]],
    needs: RowRequirements,
    *,
    is_cells: bool,
) -> tuple[list[str], bool]:
    """The columns of query, positive and negatives, and whether names say so. Raises DataError if that is unclear."""
    try:
        chosen = choose_text_columns(names, first_rows, is_cells=is_cells)
    except UnclearColumns as unclear:
        if needs.label or source.text_as_positive:  # takes one text, and the message about that names them all
            return [name for name in names if content_of(name, first_rows, is_cells=is_cells) is Content.text], False
        raise DataError(
            f"{source.path}: {unclear}; there are: {list_names(first_rows[0])}: write "
            f"data.train=[{{path: {source.path}, columns: {written_columns(unclear.example)}}}] (query, positive, "
            "negatives in this order)"
        ) from None
    compared = [] if source.where is None else [comparison.column for comparison in parse_condition(source.where)]
    others = [name for name in names if name not in compared]
    label = None if scores or len(chosen.names) < 2 else unnamed_score(others, first_rows, chosen, is_cells=is_cells)
    if label is not None:
        query, positive, *_ = chosen.names
        raise ConfigError(
            f"{source.path}: column {label!r} holds numbers that may be labels or scores of the pairs: write "
            f"data.train=[{{path: {source.path}, columns: {{query: {query}, positive: {positive}, label: {label}}}}}], "
            f"or columns: {written_columns(chosen.names)} to leave it out"
        )
    return chosen.names, chosen.by_name


def _marks_documents(row: dict[str, Any], texts: list[str], score: str, *, is_cells: bool) -> bool:
    """Whether a column holds a 1 or 0 for each document of a list."""
    documents, marks = row.get(texts[1]) if len(texts) == 2 else None, row.get(score)
    if is_cells and isinstance(documents, str):
        documents, marks = values.list_in_cell(documents), values.parse_cell(marks)
    return isinstance(documents, list) and isinstance(marks, list) and all(mark in (0, 1) for mark in marks)
