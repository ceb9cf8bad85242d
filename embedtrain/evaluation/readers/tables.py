"""Sets that are tables: the one that is measured, those beside it, and what kind of set its columns make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.cache.cache import read_metadata
from embedtrain.data.sources.kinds import SUFFIXES_IN_FOLDERS, Part, PartKind, saved_to_disk, stem_of, suffix_of
from embedtrain.data.sources.problems import describe_error
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.readers.classes import CLUSTERED, CLUSTERS, read_classification, read_clustering
from embedtrain.evaluation.readers.pairs import LABEL, SCORE, has_pair, read_bitext, read_labelled, read_scored
from embedtrain.evaluation.readers.reranking import NEGATIVE, POSITIVE, QUERY, read_reranking
from embedtrain.evaluation.readers.rows import Table, table_of
from embedtrain.evaluation.types import EvaluationData


def detect_kind(table: Table) -> SetKind:
    """The kind of set that a table is.

    Raises:
        DataError: it is empty, its columns are those of no kind, or of several.
    """
    _, fields = table.first()
    if has_pair(fields):
        if _has(fields, SCORE):
            return SetKind.sts
        return SetKind.pair_classification if _has(fields, LABEL) else SetKind.bitext
    if _has(fields, QUERY) and _has(fields, POSITIVE) and _has(fields, NEGATIVE):
        return SetKind.reranking
    if _has(fields, CLUSTERED) and _has(fields, CLUSTERS):
        return _of_texts(fields, table.name)
    if len(fields) == 2 and all(isinstance(value, str) for value in fields.values()):
        return SetKind.bitext
    raise DataError(
        f"{table.name}: the columns {', '.join(fields)} are those of no set: expected sentence1, sentence2 (and score "
        f"or label), query, positive, negative, text and label, sentences and labels, or two columns of translations"
    )


def _of_texts(fields: Mapping[str, Any], name: str) -> SetKind:
    """Texts with labels are to be classified, or clustered: MTEB's names of the columns say which."""
    if "sentences" in fields or isinstance(fields["text"], list):
        return SetKind.clustering
    if "label" in fields:
        return SetKind.classification
    raise DataError(
        f"{name}: the columns {', '.join(fields)} may be those of kind=classification or of kind=clustering: say which"
    )


def _has(fields: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(name in fields for name in names)


SPLITS = ("test", "dev", "validation")


def choose_split(there: Sequence[str], asked: str | None, where: str) -> str:
    """Which split to take: the one asked for, else test, dev or validation, else the only one.

    Raises:
        DataError: it is not there, or none was asked for and it could be several.
    """
    if not there:
        raise DataError(f"{where} holds no split: expected one such as {SPLITS[0]}")
    found = next((s for s in SPLITS if s in there), None if len(there) > 1 else there[0]) if asked is None else asked
    if found is None:
        raise DataError(f"{where} holds the splits {', '.join(there)}: say which with split=")
    if found not in there:
        raise DataError(f"{where} holds no split {found!r}, only {', '.join(there)}")
    return found


TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Tables:
    """A table that is measured, with its neighbours.

    Attributes:
        measured: the table.
        split: what it is called among them.
        beside: all of them, by split.
        columns: two columns of translations, where a table has one column for each language.
    """

    measured: Table
    split: str
    beside: Mapping[str, Table] = field(default_factory=dict)
    columns: tuple[str, str] | None = None


def tables_of_file(path: Path, config: EvaluationSet) -> Tables:
    """A file, and the tables in its folder.

    Raises:
        DataError: no table is called so.
        ConfigError: a configuration or a split of a file.
    """
    for option, value in (("config", config.config), ("split", config.split)):
        if value is not None:
            raise ConfigError(
                f"{option}={value} chooses a part of a folder or Hub data set, and {path} is one file: leave it out"
            )
    return Tables(table_of(path), stem_of(path), {**tables_in(path.parent), stem_of(path): table_of(path)})


def tables_of_folder(folder: Path, config: EvaluationSet) -> Tables | None:
    """The tables of a folder, the one that is measured chosen by name; None where there is none.

    Raises:
        DataError: none has the name asked for, or none was asked for and it could be several.
        ConfigError: a configuration of a folder that has none.
    """
    tables = tables_in(folder)
    if not tables:
        return None
    if config.config is not None:
        raise ConfigError(
            f"config={config.config} is of Hub data sets, and {folder} is a folder of tables: leave it out"
        )
    if config.split is None and len(tables) > 1 and not any(split in tables for split in SPLITS):
        some = next(reversed(tables.values()))
        raise DataError(f"{folder} is a folder of tables: give one of them, such as {some.name}")
    split = choose_split(list(tables), config.split, str(folder))
    return Tables(tables[split], split, tables)


def tables_in(folder: Path) -> dict[str, Table]:
    """The tables of a folder, or of what `save_to_disk` wrote, by name without ending."""
    if saved_to_disk(folder):
        listed = folder / "dataset_dict.json"
        try:
            splits = [str(split) for split in read_metadata(listed)["splits"]] if listed.is_file() else ["test"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(f"{listed} cannot be read as what save_to_disk writes: {describe_error(error)}") from error
        return {
            split: Table(f"{folder} ({split})", Part(str(folder), PartKind.hub, split=split))
            for split in sorted(splits)
        }
    files = sorted(path for path in folder.iterdir() if suffix_of(path) in SUFFIXES_IN_FOLDERS and path.is_file())
    tables: dict[str, Table] = {}
    for path in files:
        tables.setdefault(stem_of(path), table_of(path))
    return tables


def read_tables(name: str, config: EvaluationSet, tables: Tables) -> tuple[EvaluationData, list[str]]:
    """Make a set of what its columns, or its options, say it is.

    Raises:
        DataError: its columns are those of no kind, a row cannot be used, or classes have nothing to be learnt from.
    """
    table, notes = tables.measured, list[str]()
    kind = config.kind
    if kind is SetKind.auto:
        kind = SetKind.bitext if tables.columns is not None else detect_kind(table)
    data: EvaluationData
    match kind:
        case SetKind.sts:
            data = read_scored(name, table.rows())
        case SetKind.pair_classification:
            data = read_labelled(name, table.rows())
        case SetKind.bitext:
            data = read_bitext(name, table.rows(), tables.columns)
        case SetKind.reranking:
            data, notes = read_reranking(name, table.rows(), table.name, tables.split)
        case SetKind.clustering:
            data = read_clustering(name, table.rows(), config.experiments)
        case SetKind.classification:
            data, notes = read_classification(name, config, _train(config, tables), table)
        case _:
            raise DataError(f"{table.name} is one table; a retrieval set has three: corpus, queries and judgements")
    return data, notes


def _train(config: EvaluationSet, tables: Tables) -> Table:
    """The table that classes are learnt from.

    Raises:
        DataError: there is none, or it is the one that is measured.
    """
    if config.train is not None:
        path = Path(config.train).expanduser()
        found = table_of(path) if path.is_file() else tables.beside.get(config.train)
        if found is None:
            raise DataError(
                f"train={config.train} is neither a file nor one of the splits {', '.join(sorted(tables.beside))}"
            )
        return found
    found = tables.beside.get(TRAIN)
    if found is None or tables.split == TRAIN:
        raise DataError(
            f"{tables.measured.name}: classes are learnt from other texts, and there is no table called train beside "
            f"this one: write {{path: {config.path}, train: FILE}}"
        )
    return found
