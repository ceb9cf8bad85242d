"""Where the corpus, the queries and the judgements of a retrieval set are: in a folder, or in a repository of the Hub.

A BEIR folder (Thakur et al., "BEIR", 2021) has corpus.jsonl (`_id`, `title`, `text`), queries.jsonl (`_id`, `text`) and
qrels/<split>.tsv (`query-id`, `corpus-id`, `score`, with a header). On the Hub these are configurations or splits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embedtrain.data.sources.hub import HubRepository
from embedtrain.data.sources.parts import FOLDER_SUFFIXES, Part, PartKind, part_of_file, path_of, stem_of, suffix_of
from embedtrain.errors import ConfigError, DataError

SPLITS = ("test", "dev", "validation")


def choose_split(splits: Sequence[str], split: str | None, name: str) -> str:
    """The split that is asked for, else test, dev or validation, or the only one. Raises DataError if it is missing."""
    if not splits:
        raise DataError(f"{name} holds no split: expected one such as {SPLITS[0]}")
    if split is None:
        split = next((default for default in SPLITS if default in splits), splits[0] if len(splits) == 1 else None)
        if split is None:
            raise DataError(f"{name} holds the splits {', '.join(splits)}: choose one with split=")
    if split not in splits:
        raise DataError(f"{name} holds no split {split!r}, only {', '.join(splits)}")
    return split


@dataclass(frozen=True)
class RetrievalFiles:
    """The files of a BEIR folder by role; several where their names differ only in the suffix."""

    corpus: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    judgements: dict[str, list[str]] = field(default_factory=dict)  # files of `qrels/` by split


def find_retrieval_files(names: Iterable[str], folder: Path) -> RetrievalFiles:
    """The corpus, queries and judgements among the files in a folder and in its `qrels/`."""
    files = RetrievalFiles()
    for name in sorted(names):
        path = path_of(name)
        suffix = suffix_of(path)
        if path.parent == folder and suffix in FOLDER_SUFFIXES and stem_of(path) in ("corpus", "queries"):
            (files.corpus if stem_of(path) == "corpus" else files.queries).append(name)
        elif path.parent == folder / "qrels" and (suffix in FOLDER_SUFFIXES or _is_trec(path)):
            stem = Path(path.name.removesuffix(".gz")).stem if _is_trec(path) else stem_of(path)
            files.judgements.setdefault(stem, []).append(name)
    for judgements in files.judgements.values():
        judgements.sort(key=lambda name: (not path_of(name).name.removesuffix(".gz").endswith(".tsv"), name))
    return files


def judgements_part(name: str) -> Part:
    """The part of a file of judgements, in TREC's format or a table."""
    return Part(name, PartKind.tsv) if _is_trec(path_of(name)) else part_of_file(name)


def _is_trec(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith((".qrels", ".trec", ".txt"))


@dataclass(frozen=True)
class RetrievalTables:
    """The tables of a retrieval set on the Hub."""

    corpus: Part
    queries: Part
    judgements: Part
    instructions: Part | None = None
    candidates: Part | None = None  # the documents to rank for each query (reranking)


def find_hub_tables(
    repository: HubRepository, *, language: str | None = None, split: str | None, qrels_revision: str | None = None
) -> RetrievalTables | None:
    """Locate a retrieval set in a repository; None where it holds no corpus and queries.

    There are four layouts: MTEB's (configurations `corpus`, `queries`, and `default` or `qrels`); the same with a
    language before or after each (`de-corpus`, `queries-de`); that of C-MTEB and BEIR (`corpus` and `queries` as splits
    or configurations, judgements in a second repository `<path>-qrels`, of which `qrels_revision` is the version); each
    with `top_ranked` where candidates are given, and `instruction`.

    Raises ConfigError for `qrels_revision` without a second repository, and DataError if the set is incomplete or the
    language or split cannot be chosen.
    """
    configs = _text_configs(repository, language)
    if configs is None:
        return None
    judged, config = _judgements_config(repository, language, configs, qrels_revision)
    split = choose_split(judged.splits_of(config), split, f"{judged.path} ({config})")

    def optional(name: str) -> Part | None:
        named = _config_of(repository, name, language)
        return None if named is None else repository.table(named, name, split)

    return RetrievalTables(
        repository.table(configs[0], "corpus", split),
        repository.table(configs[1], "queries", split),
        judged.part(config, split),
        optional("instruction"),
        optional("top_ranked"),
    )


def _config_of(repository: HubRepository, name: str, language: str | None) -> str | None:
    """The configuration that holds one table of a retrieval set."""
    names = [name]
    if language is not None:
        names = [f"{language}-{name}", f"{name}-{language}", f"{language}_{name}", f"{name}_{language}"]
    return next((name for name in names if name in repository.configs), None)


def _text_configs(repository: HubRepository, language: str | None) -> tuple[str, str] | None:
    """The configurations of corpus and queries; None where there are none."""
    corpus = _config_of(repository, "corpus", language)
    queries = _config_of(repository, "queries", language) or ("query" if "query" in repository.configs else None)
    if corpus is not None and queries is not None:
        return corpus, queries
    whole = language if language in repository.configs else repository.default_config if language is None else None
    if whole is not None:
        splits = repository.splits_of(whole)
        if {"corpus", "queries"} <= set(splits):
            return whole, whole
        if (corpus or "corpus" in splits) and queries:
            return corpus or whole, queries
    if language is None:
        before = [name[: -len("-corpus")] for name in repository.configs if name.endswith(("-corpus", "_corpus"))]
        after = [name[len("corpus-") :] for name in repository.configs if name.startswith(("corpus-", "corpus_"))]
        if before or after:
            raise DataError(f"{repository.path} holds sets of {', '.join(before + after)}: choose one with config=")
    return None


def _judgements_config(
    repository: HubRepository, language: str | None, text_configs: tuple[str, str], revision: str | None
) -> tuple[HubRepository, str]:
    """The repository and configuration of the judgements."""
    for config in (_config_of(repository, "qrels", language), "default" if language is None else language):
        if config is not None and config in repository.configs and config not in text_configs:
            if revision is not None:
                raise ConfigError(
                    f"qrels_revision={revision} is of a repository that only holds judgements, and {repository.path} "
                    "holds its own: leave it out; revision applies to them"
                )
            return repository, config
    second = f"{repository.path.rstrip('/')}-qrels"
    try:
        judged = HubRepository(second, revision)
    except DataError as error:
        raise DataError(
            f"{repository.path} holds no judgements (a configuration called default or qrels), "
            f"and there is no {second} either: {error}"
        ) from None
    config = language if language in judged.configs else judged.default_config
    if config is None:
        raise DataError(f"{second} holds the configurations {', '.join(judged.configs)}: choose one with config=")
    return judged, config
