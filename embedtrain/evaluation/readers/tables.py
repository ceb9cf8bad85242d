"""Evaluation sets of one table: the table to measure, the kind of set its columns make, and sets of sentence pairs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.cache.cache import read_metadata
from embedtrain.data.sources.column_roles import (
    PAIR_NAMES,
    UnclearColumns,
    choose_text_columns,
    has_role,
    is_id,
    is_negative,
    is_score,
    normalized,
    written_columns,
)
from embedtrain.data.sources.hub import HubRepository
from embedtrain.data.sources.parts import (
    FOLDER_SUFFIXES,
    Part,
    PartKind,
    is_saved_dataset,
    part_of_file,
    stem_of,
    suffix_of,
)
from embedtrain.data.sources.retrieval_files import SPLITS, choose_split
from embedtrain.data.sources.values import describe_error, list_names, shorten
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.readers.classes import CLUSTER_LABELS, CLUSTER_TEXTS, read_classification, read_clustering
from embedtrain.evaluation.readers.reranking import read_questions, read_reranking
from embedtrain.evaluation.readers.rows import Row, first_row, first_rows, read_rows, table_name
from embedtrain.evaluation.types import Bitext, EvaluationData, LabelledPairs, ScoredPairs
from embedtrain.files import expand_user

FIRST = ("sentence1", "sent1")
SECOND = ("sentence2", "sent2")
SCORE = ("score",)
LABEL = ("label", "labels")
# en, zh-CN, zho_Hans, cmn
_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]{2,4})?")
_EXAMINED_ROWS = 20  # to see which columns hold texts


def read_scored(name: str, rows: Iterable[Row]) -> ScoredPairs:
    """Pairs with a gold similarity: `sentence1`, `sentence2`, `score`."""
    first, second, scores = [], [], []
    for row in _single_pairs(rows):
        first.append(row.text(*FIRST))
        second.append(row.text(*SECOND))
        scores.append(row.number(*SCORE))
    return ScoredPairs(name, first, second, scores)


def read_labelled(name: str, rows: Iterable[Row]) -> LabelledPairs:
    """Pairs with the same meaning (1) or not (0): `sentence1`, `sentence2`, `label` (older sets: `sent1`, `labels`)."""
    first, second, labels = [], [], []
    for row in _single_pairs(rows):
        first.append(row.text(*FIRST))
        second.append(row.text(*SECOND))
        key = row.key(*LABEL)
        value = row.fields[key]
        label = value if isinstance(value, bool) else row.number(key)
        if label not in (0, 1):
            raise row.error(f"{key} must be 0 or 1, not {shorten(value)}")
        labels.append(int(label))
    return LabelledPairs(name, first, second, labels)


def read_bitext(name: str, rows: Iterable[Row], languages: Sequence[str] | None) -> Bitext:
    """Sentences and translations: `sentence1` and `sentence2`, two columns of any names, or those of `languages`."""
    first, second = [], []
    for row in _single_pairs(rows):
        if languages is not None:
            columns: tuple[Sequence[str], Sequence[str]] = (languages[:1], languages[1:])
        elif len(row.fields) == 2 and not has_pair(row):
            names = list(row.fields)
            columns = (names[:1], names[1:])
        else:
            columns = (FIRST, SECOND)
        first.append(row.text(*columns[0]))
        second.append(row.text(*columns[1]))
    return Bitext(name, first, second)


def has_pair(row: Row) -> bool:
    """Whether a row holds two sentences under the usual names."""
    return row.has(*FIRST) and row.has(*SECOND)


def _single_pairs(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows of one pair each; older sets of MTEB have one row with a list in each column."""
    for row in rows:
        lists = {name: value for name, value in row.fields.items() if isinstance(value, list)}
        if not any(name in lists for name in (*FIRST, *SECOND)):
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

    measured: Part
    split: str  # of the measured table in `by_split`
    by_split: Mapping[str, Part] = field(default_factory=dict)
    languages: tuple[str, str] | None = None  # two columns of translations, where a table has one per language


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


def tables_in(folder: Path) -> dict[str, Part]:
    """The tables of a folder by name without suffix, or the splits that `save_to_disk` wrote there."""
    if is_saved_dataset(folder):
        listing = folder / "dataset_dict.json"
        try:
            splits = [str(split) for split in read_metadata(listing)["splits"]] if listing.is_file() else ["test"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(f"{listing} cannot be read as what save_to_disk writes: {describe_error(error)}") from error
        return {split: Part(str(folder), PartKind.hub, split=split) for split in sorted(splits)}
    files = sorted(path for path in folder.iterdir() if suffix_of(path) in FOLDER_SUFFIXES and path.is_file())
    tables: dict[str, Part] = {}
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
    table, rows, notes = tables.measured, read_rows(tables.measured), list[str]()
    kind, columns = config.kind, config.columns or tables.languages
    if kind is SetKind.auto:
        kind = SetKind.bitext if tables.languages is not None else detect_kind(table, config.columns)
    data: EvaluationData
    match kind:
        case SetKind.sts:
            data = read_scored(name, rows)
        case SetKind.pair_classification:
            data = read_labelled(name, rows)
        case SetKind.bitext:
            data = read_bitext(name, rows, columns)
            if config.kind is SetKind.auto:
                notes = [
                    f"{name}: the rows are translations (bitext mining); for queries and documents set kind: retrieval"
                ]
        case SetKind.reranking:
            data, notes = read_reranking(name, rows, table_name(table), tables.split)
        case SetKind.clustering:
            data = read_clustering(name, rows, config.experiments)
        case SetKind.classification:
            data, notes = read_classification(name, config, _train_table(config, tables), table)
        case _:
            columns = config.columns or _question_columns(table)
            data, notes = read_questions(name, rows, columns, table_name(table))
            if config.kind is SetKind.auto:
                notes = [_describe_columns(name, columns), *notes]
    return data, notes


def _describe_columns(name: str, columns: Sequence[str]) -> str:
    query, positive, *others = columns
    roles = (
        f"{query} = query, {positive} = relevant document{''.join(f', {other} = other documents' for other in others)}"
    )
    return f"{name}: retrieval, {roles}; for other columns set columns: [QUERY,DOCUMENT], for translations kind: bitext"


def _train_table(config: EvaluationSet, tables: Tables) -> Part:
    """The table to learn classes from."""
    if config.train is not None:
        path = expand_user(config.train)
        chosen = part_of_file(str(path)) if path.is_file() else tables.by_split.get(config.train)
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


def detect_kind(table: Part, chosen: Sequence[str] | None = None) -> SetKind:
    """The kind of set that the columns of the first row make, or those that are `chosen`.

    Raises DataError if they match no kind or several.
    """
    row = first_row(table)
    if chosen is not None:
        row = Row(row.location, {row.key(column): row.fields[column] for column in chosen})
    columns = list_names(row.fields)
    if has_pair(row):
        if row.has(*SCORE):
            return SetKind.sts
        return SetKind.pair_classification if row.has(*LABEL) else SetKind.bitext
    if row.has("query") and row.has("positive") and row.has("negative"):
        return SetKind.reranking
    if row.has(*CLUSTER_TEXTS) and row.has(*CLUSTER_LABELS):
        # Texts with labels are to be classified or clustered: MTEB's column names tell which.
        if row.has("sentences") or isinstance(row.fields["text"], list):
            return SetKind.clustering
        if row.has("label"):
            return SetKind.classification
        raise DataError(
            f"{table_name(table)}: the columns {columns} may be those of kind=classification or of kind=clustering: "
            "choose one"
        )
    names = list(row.fields)
    if _are_translations(names):
        return SetKind.bitext
    if not any(map(is_score, names)):
        if _knows_a_role(names):
            return SetKind.retrieval
        if len(names) == 2 and all(isinstance(value, str) for value in row.fields.values()):
            raise DataError(
                f"{table_name(table)}: the columns {columns} may be those of kind=retrieval (a query and its document) "
                f"or of kind=bitext (translations): choose one, such as {{path: {table.name}, kind: retrieval}}"
            )
    raise DataError(
        f"{table_name(table)}: the columns {columns} make no set: expected sentence1, sentence2 (and score or label), "
        "query, positive, negative, text and label, sentences and labels, a query and its documents (question, "
        "answer), or two columns of translations (en, de)"
    )


def _are_translations(names: Sequence[str]) -> bool:
    """Whether columns have the names of two languages, or those of sources and targets."""
    pair = [normalized(name) for name in names]
    if set(pair) in ({"source", "target"}, {"src", "tgt"}, {"src", "trg"}) or tuple(pair) in PAIR_NAMES:
        return True
    return len(names) == 2 and all(_LANGUAGE.fullmatch(name) and not has_role(name) for name in names)


def _knows_a_role(names: Sequence[str]) -> bool:
    """Whether a column has the name of a query or a document, and is no score or id."""
    return len(names) > 1 and any(has_role(name) and not is_id(name) and not is_negative(name) for name in names)


def _question_columns(table: Part) -> list[str]:
    """The columns of queries, relevant documents and other documents, as those of training rows."""
    rows = [row.fields for row in first_rows(table, _EXAMINED_ROWS)]
    is_cells = table.kind in (PartKind.csv, PartKind.tsv)
    scores = [name for name in rows[0] if is_score(name)]
    reason = f"the column {scores[0]} would be ignored" if scores else "there are no two columns of texts"
    try:
        columns = [] if scores else choose_text_columns(list(rows[0]), rows, is_cells=is_cells).names
        if len(columns) > 1:
            return columns
    except UnclearColumns as unclear:
        reason = f"{unclear}; an example is columns: {written_columns(unclear.example)}"
    raise DataError(
        f"{table_name(table)}: {reason}: name those of the query and the documents, "
        f"{{path: {table.name}, kind: retrieval, columns: [QUERY,DOCUMENT]}}"
    )
