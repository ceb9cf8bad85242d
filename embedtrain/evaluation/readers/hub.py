"""Evaluation sets as they lie on the Hugging Face Hub, or in a local copy of such a repository.

Retrieval sets have four layouts: MTEB's (configurations `corpus`, `queries`, and `default` or `qrels`); the same with a
language before or behind each (`de-corpus`, `queries-de`); that of C-MTEB and BEIR (`corpus` and `queries` as splits or
configurations, judgements in a second repository called `<path>-qrels`); each with `top_ranked` where candidates are
given, and `instruction`. Anything else is tables.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar

from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.data.cache.cache import Cache
from embedtrain.data.sources.kinds import Part, PartKind
from embedtrain.data.sources.problems import describe_error
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.readers.corpus import read_documents
from embedtrain.evaluation.readers.reranking import with_candidates
from embedtrain.evaluation.readers.retrieval import assemble, read_queries
from embedtrain.evaluation.readers.rows import Row, Table, field_of, id_field, id_of, no_progress_bars
from embedtrain.evaluation.readers.tables import Tables, choose_split
from embedtrain.evaluation.readers.trec import QUERY_ID
from embedtrain.evaluation.types import RetrievalSet

T = TypeVar("T")

_CANDIDATES = ("corpus-ids",)


class Repository:
    """A data set repository: its configurations and their splits.

    Args:
        path: Hub id, or a directory laid out like a repository.
        revision: commit, tag or branch, of one on the Hub.

    Raises:
        DataError: it cannot be loaded.
    """

    def __init__(self, path: str, revision: str | None = None) -> None:
        import datasets  # takes a second, and most sets are plain files

        self.path, self.revision = path, revision
        names, splits = datasets.get_dataset_config_names, datasets.get_dataset_split_names
        self.configs: list[str] = _ask(path, lambda: names(path, revision=revision))
        self.splits_of = cache(lambda config: _ask(path, lambda: splits(path, config, revision=revision)))

    def contents(self) -> str:
        """What is there, for messages."""
        told = f"{self.configs[0]}: {', '.join(self.splits_of(self.configs[0]))}"
        return f"the configurations {', '.join(self.configs)} ({told})"

    def plain(self) -> str | None:
        """The configuration that is meant where none is named."""
        return "default" if "default" in self.configs else self.configs[0] if len(self.configs) == 1 else None

    def named(self, part: str, language: str | None) -> str | None:
        """The configuration of one part of a retrieval set."""
        names = [part]
        if language is not None:
            names = [f"{language}-{part}", f"{part}-{language}", f"{language}_{part}", f"{part}_{language}"]
        return next((name for name in names if name in self.configs), None)

    def table(self, config: str, split: str) -> Table:
        """One split of a configuration."""
        part = Part(self.path, PartKind.hub, subset=config, split=split, revision=self.revision)
        return Table(f"{self.path} ({config}, {split})", part)

    def part(self, config: str, part: str, split: str) -> Table:
        """A table of a retrieval set: of the split called like it, of that which is measured, or the only one."""
        there = self.splits_of(config)
        chosen = part if part in there else split if split in there else there[0] if len(there) == 1 else None
        if chosen is None:
            raise DataError(
                f"{self.path} ({config}) holds the splits {', '.join(there)}, and neither {part} nor {split}"
            )
        return self.table(config, chosen)


def hub_retrieval(path: str, config: EvaluationSet, name: str, cache: Cache) -> tuple[RetrievalSet, list[str]] | None:
    """Read a retrieval or reranking set.

    Args:
        path: Hub id, or a directory laid out like a repository.
        config: what the recipe says of it: configuration, split, kind.
        name: the set's name.
        cache: where a large corpus is kept.

    Returns:
        The set, and notes on what is odd about it; None where it is laid out in another way.

    Raises:
        DataError: it cannot be loaded, or tables do not fit together.
    """
    repository = Repository(path, config.revision)
    language = None if config.config == "default" else config.config
    found = _texts(repository, language)
    if found is None:
        if config.kind is SetKind.retrieval:
            raise DataError(f"{path} holds no corpus and queries, only {repository.contents()}")
        return None
    corpus, queries = found
    judged, judged_config = _judged(repository, language, found, config.qrels_revision)
    split = choose_split(judged.splits_of(judged_config), config.split, f"{judged.path} ({judged_config})")
    # What is small is read first: its faults are told before a large corpus is gone through.
    instructions: Iterable[Row] = ()
    if (told := repository.named("instruction", language)) is not None:
        instructions = repository.part(told, "instruction", split).rows()
    sources = (f"{path}, corpus", f"{path}, queries", f"{judged.path}, judgements")
    texts = read_queries(repository.part(queries, "queries", split).rows(), sources[1], instructions)
    judgements = list(judged.table(judged_config, split).rows())
    documents = read_documents(repository.part(corpus, "corpus", split), cache)
    data, notes = assemble(name, documents, texts, judgements, sources)
    ranked = repository.named("top_ranked", language)
    if ranked is None or config.kind is SetKind.retrieval or config.candidates is not None:
        return data, notes
    candidates = _candidates(repository.part(ranked, "top_ranked", split).rows())
    data, more = with_candidates(data, candidates, f"{path}, {ranked}")
    return data, notes + more


def hub_tables(path: str, config: EvaluationSet) -> Tables:
    """The table that is measured, and the other splits of its configuration.

    Raises:
        DataError: it cannot be loaded, or there is no such configuration or split.
    """
    repository = Repository(path, config.revision)
    chosen, columns = config.config, None
    if chosen is None:
        chosen = repository.plain()
        if chosen is None:
            raise DataError(f"{path} holds the configurations {', '.join(repository.configs)}: say which with config=")
    elif chosen not in repository.configs:
        columns = _languages(repository, chosen)
        if columns is None:
            raise DataError(f"{path} holds no configuration {chosen!r}, only {', '.join(repository.configs)}")
        chosen = repository.plain() or repository.configs[0]
    splits = repository.splits_of(chosen)
    split = choose_split(splits, config.split, f"{path} ({chosen})")
    return Tables(
        repository.table(chosen, split), split, {one: repository.table(chosen, one) for one in splits}, columns
    )


def _texts(repository: Repository, language: str | None) -> tuple[str, str] | None:
    """The configurations with documents and queries; None where there are none.

    Raises:
        DataError: there are some of several languages, and none is asked for.
    """
    corpus = repository.named("corpus", language)
    queries = repository.named("queries", language) or ("query" if "query" in repository.configs else None)
    if corpus is not None and queries is not None:
        return corpus, queries
    whole = language if language in repository.configs else repository.plain() if language is None else None
    if whole is not None and {"corpus", "queries"} <= set(repository.splits_of(whole)):
        return whole, whole
    if whole is not None and (corpus or "corpus" in repository.splits_of(whole)) and queries:
        return corpus or whole, queries
    if language is None and (languages := _of_several(repository)):
        raise DataError(f"{repository.path} holds sets of {', '.join(languages)}: say which with config=")
    return None


def _of_several(repository: Repository) -> list[str]:
    """The languages of which a repository has a corpus each."""
    ends = ("-corpus", "_corpus"), ("corpus-", "corpus_")
    found = [name[: -len(end)] for name in repository.configs for end in ends[0] if name.endswith(end)]
    return found + [name[len(start) :] for name in repository.configs for start in ends[1] if name.startswith(start)]


def _judged(
    repository: Repository, language: str | None, texts: tuple[str, str], revision: str | None
) -> tuple[Repository, str]:
    """Where the judgements are: a configuration beside corpus and queries, else a repository of their own.

    Args:
        repository: the set's.
        language: that is asked for.
        texts: the configurations of corpus and queries.
        revision: of the repository of their own.

    Raises:
        ConfigError: such a revision, and there is no repository of their own.
        DataError: there are none.
    """
    names = [repository.named("qrels", language), "default" if language is None else language]
    for config in names:
        if config is not None and config in repository.configs and config not in texts:
            if revision is not None:
                raise ConfigError(
                    f"qrels_revision={revision} is of a repository that holds judgements alone, and {repository.path} "
                    "holds its own: leave it out, revision says which"
                )
            return repository, config
    second = f"{repository.path.rstrip('/')}-qrels"
    try:
        other = Repository(second, revision)
    except DataError as error:
        raise DataError(
            f"{repository.path} holds no judgements (a configuration called default or qrels), "
            f"and there is no {second} either: {error}"
        ) from None
    config = language if language in other.configs else other.plain()
    if config is None:
        raise DataError(f"{second} holds the configurations {', '.join(other.configs)}: say which with config=")
    return other, config


def _languages(repository: Repository, asked: str) -> tuple[str, str] | None:
    """Two columns `a` and `b` of a table of many languages, where the configuration `a-b` is asked for, as in MTEB."""
    config = repository.plain()
    if config is None or asked.count("-") != 1:
        return None
    splits = repository.splits_of(config)
    _, fields = repository.table(config, splits[0]).first()
    first, second = asked.split("-")
    return (first, second) if first in fields and second in fields else None


def _candidates(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Ids of documents by query id, of rows with `query-id` and `corpus-ids`."""
    ranked: dict[str, list[str]] = {}
    for where, fields in rows:
        documents = field_of(fields, _CANDIDATES, where)
        if not isinstance(documents, list):
            raise DataError(f"{where}: {_CANDIDATES[0]} must be a list of ids")
        ranked[id_field(fields, QUERY_ID, where)] = [id_of(document, _CANDIDATES, where) for document in documents]
    return ranked


def _ask(path: str, question: Callable[[], T]) -> T:
    """Put a question to `datasets`, quietly; whatever it raises becomes one sentence."""
    try:
        with no_progress_bars():
            return question()
    # The library raises dozens of types, of its own, of fsspec, of requests and of pyarrow.
    except Exception as error:
        raise DataError(f"{path} cannot be loaded as a data set: {describe_error(error)}") from error
