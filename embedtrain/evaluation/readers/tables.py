"""Evaluation sets of one table: the one to measure, the kind of set its columns make, and sets of pairs and labels."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from embedtrain.config.columns import NamedColumns, parse_columns
from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.cache.cache import read_metadata
from embedtrain.data.sources import values
from embedtrain.data.sources.column_roles import (
    PAIR_NAMES,
    UnclearColumns,
    are_pair,
    choose_text_columns,
    has_role,
    is_id,
    is_label,
    is_negative,
    is_positive,
    is_query,
    is_score,
    normalized,
    unnamed_score,
    written_columns,
)
from embedtrain.data.sources.part_reader import PartReader, require_image_columns
from embedtrain.data.sources.parts import (
    FOLDER_SUFFIXES,
    PartKind,
    SourcePart,
    is_saved_dataset,
    part_of_file,
    stem_of,
    suffix_of,
)
from embedtrain.data.sources.retrieval import SPLITS, choose_split
from embedtrain.data.sources.table_rows import HubRepository
from embedtrain.data.sources.values import BadRow, describe_error, list_names, shorten
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.readers.rows import (
    Row,
    first_row,
    first_rows,
    read_questions,
    read_reranking,
    read_rows,
    table_name,
)
from embedtrain.evaluation.types import (
    Bitext,
    ClassificationSet,
    ClusteringSet,
    EvaluationData,
    LabelledPairs,
    ScoredPairs,
)
from embedtrain.utils.files import expand_user

# en, zh-CN, zho_Hans, cmn
_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]{2,4})?")
_EXAMINED_ROWS = 20  # to see which columns hold texts


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table by role."""

    texts: list[str]  # query, positive, negatives; two sentences; or one text
    score: str | None = None  # of scores or labels
    are_pairs: bool = False  # two sentences of equal rank


def read_scored(name: str, rows: Iterable[Row], columns: TableColumns) -> ScoredPairs:
    """Pairs with a gold similarity."""
    first, second, scores = [], [], []
    for row in _single_pairs(rows, columns):
        first.append(row.text(columns.texts[0]))
        second.append(row.text(columns.texts[1]))
        scores.append(row.number(columns.score or "score"))
    return ScoredPairs(name, first, second, scores)


def read_labelled(name: str, rows: Iterable[Row], columns: TableColumns) -> LabelledPairs:
    """Pairs with the same meaning (1) or not (0)."""
    first, second, labels = [], [], []
    key = columns.score or "label"
    for row in _single_pairs(rows, columns):
        first.append(row.text(columns.texts[0]))
        second.append(row.text(columns.texts[1]))
        label = row.number(key)
        if label not in (0, 1):
            raise row.error(f"{key} must be 0 or 1, not {shorten(row.fields[key])}; kind=sts reads any numbers")
        labels.append(int(label))
    return LabelledPairs(name, first, second, labels)


def read_bitext(name: str, rows: Iterable[Row], columns: TableColumns) -> Bitext:
    """Sentences and translations."""
    first, second = [], []
    for row in _single_pairs(rows, columns):
        first.append(row.text(columns.texts[0]))
        second.append(row.text(columns.texts[1]))
    return Bitext(name, first, second)


def _single_pairs(rows: Iterable[Row], columns: TableColumns) -> Iterator[Row]:
    """Rows of one pair each; older sets of MTEB have one row with a list in each column."""
    for row in rows:
        lists = {name: value for name, value in row.fields.items() if isinstance(value, list)}
        if not any(name in lists for name in columns.texts):
            yield row
            continue
        lengths = {len(value) for value in lists.values()}
        if len(lengths) > 1:
            shown = ", ".join(f"{name} {len(value)}" for name, value in lists.items())
            raise row.error(f"its lists must have one length, and they have {shown} elements")
        for number in range(lengths.pop()):
            fields = {name: value[number] for name, value in lists.items()}
            yield Row(f"{row.location}, element {number + 1}", fields)


@dataclass(frozen=True, slots=True)
class Tables:
    """A table that is measured, and the tables next to it."""

    measured: SourcePart
    split: str  # of the measured table in `by_split`
    by_split: Mapping[str, SourcePart] = field(default_factory=dict)
    languages: tuple[str, str] | None = None  # two columns of translations, where a table has one per language

    def with_pictures(self, options: EvaluationSet) -> "Tables":
        """The same tables, whose pictures are where the options say."""
        by_split = {name: table.with_pictures(options) for name, table in self.by_split.items()}
        return replace(self, measured=self.measured.with_pictures(options), by_split=by_split)


def tables_of_file(path: Path, config: EvaluationSet) -> Tables:
    """A file, and the tables in its folder. Raises ConfigError if a configuration or split of a file is asked for."""
    for option, value in (("config", config.config), ("split", config.split)):
        if value is not None:
            raise ConfigError(
                f"{option}={value} chooses a part of a folder or Hub data set, and {path} is one file: leave it out"
            )
    table = part_of_file(str(path), backslash_escapes=config.backslash_escapes)
    return Tables(table, stem_of(path), {**tables_in(path.parent), stem_of(path): table})


def tables_of_folder(folder: Path, config: EvaluationSet) -> Tables | None:
    """The tables of a folder, of which the split's name chooses the measured one; None where there is no table."""
    tables = tables_in(folder)
    if not tables:
        return None
    if config.config is not None:
        raise ConfigError(
            f"config={config.config} is of Hub data sets, and {folder} is a folder of tables: leave it out"
        )
    if config.split is None and len(tables) > 1 and not any(split in tables for split in SPLITS):
        example = next(reversed(tables.values()))
        raise DataError(f"{folder} is a folder of tables: give one of them, such as {table_name(example)}")
    split = choose_split(list(tables), config.split, str(folder))
    return Tables(tables[split], split, tables)


def tables_in(folder: Path) -> dict[str, SourcePart]:
    """The tables of a folder by name without suffix, or the splits that `save_to_disk` wrote there."""
    if is_saved_dataset(folder):
        listing = folder / "dataset_dict.json"
        try:
            splits = [str(split) for split in read_metadata(listing)["splits"]] if listing.is_file() else ["test"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(f"{listing} cannot be read as what save_to_disk writes: {describe_error(error)}") from error
        return {split: SourcePart(str(folder), PartKind.hub, split=split) for split in sorted(splits)}
    files = sorted(path for path in folder.iterdir() if suffix_of(path) in FOLDER_SUFFIXES and path.is_file())
    tables: dict[str, SourcePart] = {}
    for path in files:
        tables.setdefault(stem_of(path), part_of_file(str(path)))
    return tables


def tables_of_repository(path: str, config: EvaluationSet) -> Tables:
    """The splits of a configuration on the Hub. Raises DataError if there is no such configuration or split."""
    repository = HubRepository(path, config.revision)
    chosen, languages = config.config, None
    if chosen is None:
        chosen = repository.default_config
        if chosen is None:
            raise DataError(f"{path} holds the configurations {', '.join(repository.configs)}: choose one with config=")
    elif chosen not in repository.configs:
        languages = _language_columns(repository, chosen)
        if languages is None:
            raise DataError(f"{path} holds no configuration {chosen!r}, only {', '.join(repository.configs)}")
        chosen = repository.default_config or repository.configs[0]
    splits = repository.splits_of(chosen)
    split = choose_split(splits, config.split, f"{path} ({chosen})")
    by_split = {name: repository.part(chosen, name) for name in splits}
    return Tables(by_split[split], split, by_split, languages)


def _language_columns(repository: HubRepository, pair: str) -> tuple[str, str] | None:
    """The columns `a` and `b` of a table of many languages, where the configuration `a-b` is asked for, as in MTEB."""
    config = repository.default_config
    if config is None or pair.count("-") != 1:
        return None
    row = first_row(repository.part(config, repository.splits_of(config)[0]))
    first, second = pair.split("-")
    return (first, second) if row.has(first) and row.has(second) else None


def read_tables(name: str, config: EvaluationSet, tables: Tables) -> tuple[EvaluationData, list[str]]:
    """The set that the columns of a table, or the options, make, and notes. Raises DataError if they make none."""
    tables = tables.with_pictures(config)
    table, rows, notes = tables.measured, read_rows(tables.measured), list[str]()
    require_image_columns(PartReader(), [table])
    kind, columns = choose_columns(config, tables)
    data: EvaluationData
    match kind:
        case SetKind.sts:
            data = read_scored(name, rows, columns)
        case SetKind.pair_classification:
            data = read_labelled(name, rows, columns)
        case SetKind.bitext:
            data = read_bitext(name, rows, columns)
            if config.kind is SetKind.auto:
                notes = [
                    f"{name}: the rows are translations (bitext mining); for queries and documents set kind: retrieval"
                ]
        case SetKind.reranking:
            data, notes = read_reranking(name, rows, columns.texts, columns.score, table_name(table), tables.split)
        case SetKind.clustering:
            data = read_clustering(name, rows, columns.texts[0], columns.score or "label", config.experiments)
        case SetKind.classification:
            keys = columns.texts[0], columns.score or "label"
            data, notes = read_classification(name, config, _train_table(config, tables), table, keys)
        case _:
            data, notes = read_questions(name, rows, columns.texts, columns.score, table_name(table))
    if config.kind is SetKind.auto and (kind is SetKind.retrieval or (kind is SetKind.reranking and columns.score)):
        notes = [_describe_columns(name, kind, columns), *notes]
    return data, notes


def _describe_columns(name: str, kind: SetKind, columns: TableColumns) -> str:
    query, positive, *others = columns.texts
    documents = "relevant document" if columns.score is None else "documents"
    roles = f"{query} = query, {positive} = {documents}{''.join(f', {other} = other documents' for other in others)}"
    if columns.score is not None:
        roles += f", {columns.score} = relevance"
    other = "for translations kind: bitext" if kind is SetKind.retrieval else "to search all documents kind: retrieval"
    return f"{name}: {kind.value}, {roles}; for other columns set columns: [QUERY,DOCUMENT], {other}"


def _train_table(config: EvaluationSet, tables: Tables) -> SourcePart:
    """The table to learn classes from."""
    if config.train is not None:
        path = expand_user(config.train)
        chosen = tables.by_split.get(config.train)
        if path.is_file():
            chosen = part_of_file(str(path)).with_pictures(config)
        if chosen is None:
            raise DataError(
                f"train={config.train} is neither a file nor one of the splits {', '.join(sorted(tables.by_split))}"
            )
        return chosen
    train = tables.by_split.get("train")
    if train is None or tables.split == "train":
        raise DataError(
            f"{table_name(tables.measured)}: classes are learnt from other texts, and there is no table called train "
            f"next to this one: write {{path: {config.path}, train: FILE}}"
        )
    return train


def choose_columns(config: EvaluationSet, tables: Tables) -> tuple[SetKind, TableColumns]:
    """The kind of a set and the columns of its table: those of the options, or by the names of the columns.

    Raises DataError if they match no kind or several, or a column that is asked for is missing.
    """
    table, kind = tables.measured, config.kind
    rows = first_rows(table, _EXAMINED_ROWS)
    named = parse_columns(config.columns)
    if named is not None:
        columns = _named_columns(named, rows[0], kind)
    elif tables.languages is not None and kind in (SetKind.auto, SetKind.bitext):
        return SetKind.bitext, TableColumns(list(tables.languages), are_pairs=True)
    elif (found := _text_with_label(rows[0], kind)) is not None:
        columns = found
    else:
        columns = _columns_by_name(table, rows, kind)
    if kind is SetKind.auto:
        kind = _kind_of(table, rows, columns, is_named=named is not None)
    num_texts = len(columns.texts)
    needs_score = kind in (SetKind.sts, SetKind.pair_classification, SetKind.classification, SetKind.clustering)
    if needs_score and columns.score is None:
        raise rows[0].error(f"there is no score or label, only {list_names(rows[0].fields)}; {_example(columns)}")
    if num_texts < 2 and kind not in (SetKind.classification, SetKind.clustering):
        raise DataError(
            f"{table_name(table)}: there are no two columns of texts: name those of the query and the documents, "
            f"{{path: {table.name}, kind: {kind.value}, columns: [QUERY,DOCUMENT]}}"
        )
    return kind, columns


def _example(columns: TableColumns) -> str:
    texts = [*columns.texts, "QUERY", "DOCUMENT"][: max(2, len(columns.texts))]
    return f"name one, such as columns: {{query: {texts[0]}, positive: {texts[1]}, label: LABEL}}"


def _named_columns(named: NamedColumns, row: Row, kind: SetKind) -> TableColumns:
    """The columns that the user names; of a list, one that is named as a score holds the scores."""
    for name in named.names:
        row.key(name)
    scores = [] if named.by_role or kind is SetKind.bitext else [name for name in named.texts if is_score(name)]
    texts = [name for name in named.texts if name not in scores[:1]]
    return TableColumns(texts, named.score or next(iter(scores), None), named.are_sentences or are_pair(texts))


def _text_with_label(row: Row, kind: SetKind) -> TableColumns | None:
    """The text and the label of rows of one text, by MTEB's names; None for other rows."""
    if kind not in (SetKind.auto, SetKind.classification, SetKind.clustering):
        return None
    pictures = [name for name, value in row.fields.items() if any(values.picture_values(value))]
    text = next((name for name in (*CLUSTER_TEXTS, *pictures) if row.has(name)), None)
    label = next((name for name in CLUSTER_LABELS if row.has(name)), None)
    if kind is not SetKind.auto:  # the error about a missing one names it
        return TableColumns([text or row.key(*CLUSTER_TEXTS)], label or row.key(*CLUSTER_LABELS))
    others = [name for name in row.fields if name != text]
    if text is None or label is None or any(is_query(name) or is_positive(name) for name in others):
        return None
    return TableColumns([text], label)


def _columns_by_name(table: SourcePart, rows: Sequence[Row], kind: SetKind) -> TableColumns:
    """The columns of texts as those of training rows, and that of scores or labels."""
    fields = [dict(row.fields) for row in rows]
    names, is_cells = list(fields[0]), table.kind in (PartKind.csv, PartKind.tsv)
    scores = sorted(filter(is_score, names), key=is_label)  # a score takes precedence over a label of a pair
    try:
        chosen = choose_text_columns([name for name in names if name not in scores], fields, is_cells=is_cells)
    except UnclearColumns as unclear:
        if kind is SetKind.auto and not any(map(has_role, names)):
            return TableColumns([])
        raise DataError(
            f"{table_name(table)}: {unclear}; an example is columns: {written_columns(unclear.example)}: name those of "
            f"the query and the documents, {{path: {table.name}, kind: retrieval, columns: [QUERY,DOCUMENT]}}"
        ) from None
    if not chosen.are_pairs or kind is SetKind.pair_classification:
        scores.reverse()
    score = next(iter(scores), None)
    if score is None and len(chosen.names) > 1 and kind in (SetKind.auto, SetKind.retrieval, SetKind.reranking):
        label = unnamed_score(names, fields, chosen, is_cells=is_cells)
        if label is not None:
            query, positive, *_ = chosen.names
            raise DataError(
                f"{table_name(table)}: column {label} holds numbers that may be labels or scores: write {{path: "
                f"{table.name}, columns: {{query: {query}, positive: {positive}, label: {label}}}}}, or columns: "
                f"{written_columns(chosen.names)} to leave it out"
            )
    return TableColumns(chosen.names, score, chosen.are_pairs)


def _kind_of(table: SourcePart, rows: Sequence[Row], columns: TableColumns, *, is_named: bool) -> SetKind:
    """The kind of set that columns make. Raises DataError if they make none, or may make several."""
    fields = rows[0].fields
    names, texts = list(fields) if not is_named else columns.texts, columns.texts
    if columns.are_pairs:
        return SetKind.bitext if columns.score is None else _kind_of_pairs(table, columns.score)
    if len(texts) == 1 and columns.score is not None:
        # Texts with labels are to be classified or clustered: MTEB's column names tell which.
        if texts[0] == "sentences" or isinstance(fields[texts[0]], list):
            return SetKind.clustering
        if texts[0] == "text" and columns.score == "label":
            return SetKind.classification
        raise DataError(
            f"{table_name(table)}: the columns {list_names(names)} may be those of kind=classification or of "
            "kind=clustering: choose one"
        )
    if len(texts) > 1 and columns.score is not None:
        return SetKind.reranking if any(isinstance(row.fields[texts[1]], list) for row in rows) else SetKind.retrieval
    if texts == ["query", "positive", "negative"]:
        return SetKind.reranking
    if columns.score is None and _are_translations(names):
        return SetKind.bitext
    if len(texts) > 1 and _knows_a_role(names):
        return SetKind.retrieval
    if len(texts) == 2 and len(names) == 2 and all(isinstance(fields[name], str) for name in names):
        raise DataError(
            f"{table_name(table)}: the columns {list_names(names)} may be those of kind=retrieval (a query and its "
            f"document) or of kind=bitext (translations): choose one, such as {{path: {table.name}, kind: retrieval}}"
        )
    raise DataError(
        f"{table_name(table)}: the columns {list_names(names)} make no set: expected sentence1, sentence2 (and score "
        "or label), query, positive, negative, text and label, sentences and labels, a query and its documents "
        "(question, answer), or two columns of translations (en, de)"
    )


def _kind_of_pairs(table: SourcePart, score: str) -> SetKind:
    """What pairs of sentences with scores or labels make, by their values."""
    if is_score(score) and not is_label(score):
        return SetKind.sts
    found: set[float] = set()
    for row in read_rows(table):
        value = row.fields[row.key(score)]
        for element in value if isinstance(value, list) else [value]:
            number = values.parse_cell(element)
            if isinstance(number, str) or number is None:
                raise row.error(
                    f"{score} is {values.describe_value(element)}: pairs have a label 0 or 1 (the same meaning), or a "
                    "number that says how similar they are"
                )
            found.add(row.check(values.number, number, score))
    if found <= {0, 1}:
        return SetKind.pair_classification
    if all(number.is_integer() for number in found) and found <= {-1, 0, 1, 2}:
        raise DataError(
            f"{table_name(table)}: {score} holds {', '.join(f'{number:g}' for number in sorted(found))}, which may be "
            "classes, such as those of entailment, of which no set is made, or degrees of similarity: for these write "
            f"{{path: {table.name}, kind: sts}}"
        )
    return SetKind.sts


def _are_translations(names: Sequence[str]) -> bool:
    """Whether columns have the names of two languages, or those of sources and targets."""
    pair = [normalized(name) for name in names]
    if set(pair) in ({"source", "target"}, {"src", "tgt"}, {"src", "trg"}) or tuple(pair) in PAIR_NAMES:
        return True
    return len(names) == 2 and all(_LANGUAGE.fullmatch(name) and not has_role(name) for name in names)


def _knows_a_role(names: Sequence[str]) -> bool:
    """Whether a column has the name of a query or a document, and is no score or id."""
    return len(names) > 1 and any(has_role(name) and not is_id(name) and not is_negative(name) for name in names)


CLUSTER_TEXTS = ("sentences", "text")
CLUSTER_LABELS = ("labels", "label")

Label = int | str


def read_classification(
    name: str, config: EvaluationSet, train: SourcePart, test: SourcePart, keys: tuple[str, str]
) -> tuple[ClassificationSet, list[str]]:
    """A set of two tables, and notes on its irregularities. `keys` are the columns of the text and the label."""
    # Pictures may be classified by texts.
    train_texts, train_labels = _read_labelled_texts(train, (keys[0], *CLUSTER_TEXTS), keys[1])
    texts, labels = _read_labelled_texts(test, keys[:1], keys[1])
    unified = _unify_types([*train_labels, *labels])
    data = ClassificationSet(
        name,
        train_texts,
        unified[: len(train_labels)],
        texts,
        unified[len(train_labels) :],
        config.classifier,
        config.samples_per_label,
        config.experiments,
    )
    unknown = sorted(set(data.labels) - set(data.train_labels), key=str)
    notes = []
    if unknown:
        count = sum(label in unknown for label in data.labels)
        notes.append(
            f"{name}: {len(unknown)} classes of {table_name(test)} are not in {table_name(train)}, so {count} of its "
            f"{len(texts)} texts cannot be classified (the first: {unknown[0]})"
        )
    return data, notes


def read_clustering(name: str, rows: Iterable[Row], text_key: str, label_key: str, experiments: int) -> ClusteringSet:
    """A set of texts and their clusters, in two columns.

    A row is a text with its cluster, or with a list of nested ones, from the coarsest to the finest; or a list of texts
    with a list of their clusters, which is then clustered by itself. Raises DataError if rows differ in form.
    """
    texts: list[str] = []
    labels: list[tuple[Label, ...]] = []
    groups: list[range] = []
    for row in rows:
        text, label = row.fields[row.key(text_key)], row.fields[row.key(label_key)]
        if texts and isinstance(text, list) != bool(groups):
            form, before = ("a list", "single texts") if isinstance(text, list) else ("a single text", "lists")
            raise row.error(f"{text_key} holds {form}, and rows before hold {before}")
        if not isinstance(text, list):
            texts.append(row.text(text_key))
            nested = label if isinstance(label, list) else [label]
            if not nested:
                raise row.error(f"{label_key} is an empty list")
            labels.append(tuple(row.check(_check_label, element, label_key) for element in nested))
            continue
        if not isinstance(label, list) or len(label) != len(text):
            raise row.error(f"{len(text)} texts need a list of as many labels, and this is {shorten(label)}")
        groups.append(range(len(texts), len(texts) + len(text)))
        texts += [row.check(values.string, element, text_key) for element in text]
        labels += [(row.check(_check_label, element, label_key),) for element in label]
    return ClusteringSet(name, texts, _unify_nested_types(labels), groups or None, experiments)


def _read_labelled_texts(table: SourcePart, text_keys: Sequence[str], label_key: str) -> tuple[list[str], list[Label]]:
    texts: list[str] = []
    labels: list[Label] = []
    for row in read_rows(table):
        texts.append(row.text(*text_keys))
        labels.append(row.check(_check_label, row.fields[row.key(label_key)], label_key))
    if not texts:
        raise DataError(f"{table_name(table)} is empty")
    return texts, labels


def _check_label(value: object, name: str) -> Label:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str | int) or value == "":
        raise BadRow(f"{name} must be a whole number or a text, not {shorten(value)}")
    return int(value) if isinstance(value, bool) else value


def _unify_types(labels: Sequence[Label]) -> list[Label]:
    """Labels of one type: a CSV file has the text 7 where Parquet has the number 7."""
    if all(_is_whole_number(label) for label in labels):
        return [int(label) for label in labels]
    return [str(label) for label in labels]


def _unify_nested_types(labels: Sequence[tuple[Label, ...]]) -> list[tuple[Label, ...]]:
    """The same for each level of nested labels."""
    depth = max(map(len, labels), default=0)
    levels = [iter(_unify_types([label[level] for label in labels if len(label) > level])) for level in range(depth)]
    return [tuple(next(levels[level]) for level in range(len(label))) for label in labels]


def _is_whole_number(label: Label) -> bool:
    # 01 and 1 are two classes.
    # Python converts no more than 4300 digits.
    return isinstance(label, int) or (
        len(label) <= 100 and label.removeprefix("-").isdecimal() and str(int(label)) == label
    )
