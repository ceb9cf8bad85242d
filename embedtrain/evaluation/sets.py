"""From `evaluation.sets` to sets that can be measured: which reader, which name, which part, alike on every rank."""

from collections.abc import Sequence
from pathlib import Path

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.cache.cache import Cache, cache_directory
from embedtrain.data.sources.kinds import may_be_hub_id, saved_to_disk, stem_of
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.evaluator import check_metrics
from embedtrain.evaluation.readers.beir import is_beir_folder, read_beir_folder
from embedtrain.evaluation.readers.hub import hub_retrieval, hub_tables
from embedtrain.evaluation.readers.llama_index import read_llama_index
from embedtrain.evaluation.readers.reranking import with_candidates
from embedtrain.evaluation.readers.subset import take_subset
from embedtrain.evaluation.readers.tables import read_tables, tables_of_file, tables_of_folder
from embedtrain.evaluation.readers.trec import candidates_of, read_run
from embedtrain.evaluation.readers.usable import check_options, require_usable
from embedtrain.evaluation.types import EvaluationData, LoadedSet, RetrievalSet

Read = tuple[EvaluationData, list[str]]


def load_sets(
    configs: Sequence[EvaluationSet],
    world: World,
    *,
    subset: int | None = None,
    cache: Cache | None = None,
    option: str = "evaluation.sets",
) -> list[LoadedSet]:
    """Read all sets on every rank; what fails on one fails on all, with the same words.

    Args:
        configs: the sets.
        world: the ranks.
        subset: of sets that do not say their own.
        cache: where large corpora are kept; default: where data.cache_dir is by default.
        option: what the list is called where the user wrote it.

    Raises:
        ConfigError: two sets have the same name, or an option does not fit a set.
        DataError: a set cannot be read.
    """
    with world.fail_together("reading evaluation sets"):
        check_names(configs, option)
        return [read_set(config, subset=subset, cache=cache) for config in configs]


def check_names(configs: Sequence[EvaluationSet], option: str) -> None:
    """Refuse two sets of the same name, in the list called `option`: their figures could not be told apart.

    Raises:
        ConfigError: with the two paths.
    """
    seen: dict[str, str] = {}
    for config in configs:
        name = set_name(config)
        if name in seen:
            raise ConfigError(
                f"{option}: {seen[name]} and {config.path} are both called {name!r}; "
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


def read_set(config: EvaluationSet, *, subset: int | None = None, cache: Cache | None = None) -> LoadedSet:
    """Read one set from a table, a BEIR folder, a folder of tables, a copy of a Hub repository, or the Hub.

    Args:
        config: the set.
        subset: at most so many queries or rows, where it does not say so itself.
        cache: where a large corpus is kept; default: where data.cache_dir is by default.

    Raises:
        DataError: it is not there, is not of the kind said, or cannot be read.
        ConfigError: an option does not fit it.
    """
    name = set_name(config)
    data, notes = _read(config, name, cache or Cache(directory=cache_directory(None)))
    if isinstance(data, RetrievalSet):
        data, notes = _ranked(data, config, notes)
    notes += check_options(config, data)
    require_usable(data, config.path)
    count = subset if config.subset is None else config.subset
    data, kept = take_subset(data, count, config.subset_documents)
    if kept:
        require_usable(data, f"{config.path} with subset={count}")
    if config.metrics is not None:
        check_metrics(data, config.metrics, f"metrics of {name}")
    return LoadedSet(
        data,
        config.query_prompt,
        config.document_prompt,
        config.query_max_length,
        config.document_max_length,
        None if config.metrics is None else tuple(config.metrics),
        tuple(notes + kept),
    )


def _read(config: EvaluationSet, name: str, cache: Cache) -> Read:
    path = Path(config.path).expanduser()
    for option, value in (("revision", config.revision), ("qrels_revision", config.qrels_revision)):
        if value is not None and path.exists():
            raise ConfigError(
                f"{option}={value} chooses a version of a Hub data set, and {config.path} is not on the Hub: leave it "
                "out"
            )
    if path.is_file():
        return _read_file(path, config, name)
    if path.is_dir():
        return _read_folder(path, config, name, cache)
    if not may_be_hub_id(config.path):
        quoted = " (that is a text: quote the whole list, not the mapping in it)" if config.path.startswith("{") else ""
        raise DataError(f"{config.path} is not there{quoted}")
    try:
        return _read_repository(config.path, config, name, cache)
    except DataError as error:
        raise DataError(f"{error} (no file or folder is called {config.path} either)") from error


def _read_file(path: Path, config: EvaluationSet, name: str) -> Read:
    found = read_llama_index(path, name)
    if found is not None:
        _require_kind(config, path, "one file with corpus, queries and relevant_docs")
        return found
    if config.kind is SetKind.retrieval:
        raise DataError(f"{path} is one file; a retrieval set is a folder with corpus, queries and qrels")
    return read_tables(name, config, tables_of_file(path, config))


def _read_folder(path: Path, config: EvaluationSet, name: str, cache: Cache) -> Read:
    if is_beir_folder(path):
        _require_kind(config, path, "BEIR folder")
        if config.config is not None:
            raise ConfigError(f"config={config.config} is of Hub data sets, and {path} is a BEIR folder: leave it out")
        return read_beir_folder(path, name, config.split, cache)
    if not saved_to_disk(path) and ((path / "README.md").is_file() or (path / "data").is_dir()):
        return _read_repository(str(path), config, name, cache)
    tables = tables_of_folder(path, config)
    if tables is None or config.kind is SetKind.retrieval:
        raise DataError(
            f"{path} is no {'evaluation' if tables is None else 'retrieval'} set: expected corpus.jsonl, queries.jsonl "
            f"and qrels/test.tsv (BEIR), or the README.md or data/ of a Hub repository"
        )
    return read_tables(name, config, tables)


def _read_repository(path: str, config: EvaluationSet, name: str, cache: Cache) -> Read:
    if config.kind in (SetKind.auto, SetKind.retrieval, SetKind.reranking):
        found = hub_retrieval(path, config, name, cache)
        if found is not None:
            return found
    return read_tables(name, config, hub_tables(path, config))


def _ranked(data: RetrievalSet, config: EvaluationSet, notes: list[str]) -> tuple[RetrievalSet, list[str]]:
    """The set with what its options say of the documents that may be found."""
    if config.candidates is not None:
        if data.candidates is not None:
            raise ConfigError(
                f"candidates={config.candidates} has no use with {config.path}, whose rows hold their own"
            )
        path = Path(config.candidates).expanduser()
        data, more = with_candidates(data, candidates_of(read_run(path), data), str(path))
        notes = notes + more
    if config.kind is SetKind.reranking and data.candidates is None:
        raise DataError(
            f"{config.path} says of no query which documents are to be ranked, so kind=reranking needs a run file: "
            f"write {{path: {config.path}, kind: reranking, candidates: FILE}}"
        )
    if not config.ignore_identical_ids:
        return data, notes
    return RetrievalSet(data.name, data.queries, data.documents, data.judgements, data.candidates, True), notes


def _require_kind(config: EvaluationSet, path: Path, what: str) -> None:
    if config.kind not in (SetKind.auto, SetKind.retrieval, SetKind.reranking):
        raise DataError(f"{path} is a retrieval set ({what}), but kind={config.kind.value} was said")
