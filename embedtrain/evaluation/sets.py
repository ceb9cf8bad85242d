"""From `evaluation.sets` to sets in memory: which reader, which name, alike on every rank."""

from collections.abc import Sequence
from pathlib import Path

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.formats.sources import SUFFIXES_IN_FOLDERS, may_be_hub_id, stem_of, suffix_of
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.hub import read_hub_set
from embedtrain.evaluation.pairs import read_pairs
from embedtrain.evaluation.retrieval import is_beir_folder, read_beir_folder
from embedtrain.evaluation.rows import read_rows
from embedtrain.evaluation.types import LoadedSet, RetrievalSet, ScoredPairs


def load_sets(configs: Sequence[EvaluationSet], world: World) -> list[LoadedSet]:
    """Read all sets on every rank; what fails on one fails on all, with the same words.

    Raises:
        ConfigError: two sets have the same name.
        DataError: a set cannot be read.
    """
    with world.together("reading evaluation sets"):
        check_names(configs)
        return [read_set(config) for config in configs]


def check_names(configs: Sequence[EvaluationSet]) -> None:
    """Refuse two sets of the same name: their figures could not be told apart.

    Raises:
        ConfigError: with the two paths.
    """
    seen: dict[str, str] = {}
    for config in configs:
        name = set_name(config)
        if name in seen:
            raise ConfigError(
                f"evaluation.sets: {seen[name]} and {config.path} are both called {name!r}; "
                f"write {{path: {config.path}, name: ...}} for one of them"
            )
        seen[name] = config.path


def set_name(config: EvaluationSet) -> str:
    """The name given, else the end of the path: a folder's name, a table's without its ending."""
    if config.name:
        return config.name
    path = Path(config.path)
    end = stem_of(path)
    return end if end not in ("", "..") else path.resolve().name


def read_set(config: EvaluationSet) -> LoadedSet:
    """Read one set from a table, a BEIR folder, a directory laid out like a Hub repository, or the Hub.

    Raises:
        DataError: it is not there, is not of the kind said, or cannot be read.
    """
    data, notes = _read(config, set_name(config))
    return LoadedSet(data, config.query_prompt, config.document_prompt, notes=tuple(notes))


def _read(config: EvaluationSet, name: str) -> tuple[RetrievalSet | ScoredPairs, list[str]]:
    path = Path(config.path).expanduser()
    if path.is_file():
        if config.kind is SetKind.retrieval:
            raise DataError(f"{path} is one file; a retrieval set is a folder with corpus, queries and qrels")
        return read_pairs(name, read_rows(path), path), []
    if path.is_dir():
        return _read_folder(path, config, name)
    if not may_be_hub_id(config.path):
        raise DataError(f"{config.path} is not there")
    try:
        return read_hub_set(config.path, config.kind, name, config.split)
    except DataError as error:
        raise DataError(f"{error} (no file or folder is called {config.path} either)") from error


def _read_folder(path: Path, config: EvaluationSet, name: str) -> tuple[RetrievalSet | ScoredPairs, list[str]]:
    if is_beir_folder(path):
        if config.kind is SetKind.sts:
            raise DataError(f"{path} is a retrieval set (BEIR folder), but kind=sts was said")
        return read_beir_folder(path, name, config.split)
    tables = sorted(entry.name for entry in path.iterdir() if suffix_of(entry) in SUFFIXES_IN_FOLDERS)
    if (path / "README.md").is_file() or (path / "data").is_dir():
        return read_hub_set(str(path), config.kind, name, config.split)
    if tables:
        raise DataError(f"{path} is a folder of tables: give one of them, such as {path / tables[-1]}")
    raise DataError(
        f"{path} is no evaluation set: expected corpus.jsonl, queries.jsonl and qrels/test.tsv (BEIR), "
        f"or the README.md or data/ of a Hub repository"
    )
