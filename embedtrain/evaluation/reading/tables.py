"""Sets that are tables: the one that is measured, those beside it, and what kind of set its columns make."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.formats.kinds import Kind, Part, saved_to_disk
from embedtrain.data.formats.problems import first_line
from embedtrain.data.formats.sources import SUFFIXES_IN_FOLDERS, stem_of, suffix_of
from embedtrain.data.store.cache import read_facts
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.reading.classes import read_classification, read_clustering
from embedtrain.evaluation.reading.pairs import read_bitext, read_labelled, read_scored
from embedtrain.evaluation.reading.reranking import read_reranking
from embedtrain.evaluation.reading.rows import Table, table_of
from embedtrain.evaluation.reading.splits import SPLITS, choose_split
from embedtrain.evaluation.reading.tell import kind_of
from embedtrain.evaluation.types import EvaluationData

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
            splits = [str(split) for split in read_facts(listed)["splits"]] if listed.is_file() else ["test"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DataError(f"{listed} cannot be read as what save_to_disk writes: {first_line(error)}") from error
        return {
            split: Table(f"{folder} ({split})", Part(str(folder), Kind.hub, split=split)) for split in sorted(splits)
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
        kind = SetKind.bitext if tables.columns is not None else kind_of(table)
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
