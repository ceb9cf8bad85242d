"""BEIR folders, and corpora on their own.

The layout is that of Thakur et al., "BEIR" (2021): corpus.jsonl (`_id`, `title`, `text`), queries.jsonl
(`_id`, `text`) and qrels/<split>.tsv (`query-id`, `corpus-id`, `score`, with a header).
"""

from collections.abc import Iterator
from pathlib import Path

from embedtrain.data.cache.cache import Cache, cache_directory
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.corpus import read_documents
from embedtrain.evaluation.readers.retrieval import assemble, read_queries
from embedtrain.evaluation.readers.rows import Row, table_of
from embedtrain.evaluation.readers.tables import choose_split
from embedtrain.evaluation.readers.trec import judgement_rows
from embedtrain.evaluation.types import Corpus, RetrievalSet

_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_TOLD = (".jsonl", ".jsonl.gz", ".parquet")
_JUDGED = (".tsv", ".qrels", ".trec", ".txt")
_JUDGED_TABLES = (".jsonl", ".parquet")
_PACKED = ".gz"


def is_beir_folder(folder: Path) -> bool:
    """Whether a folder claims to be a BEIR set, complete or not.

    A copy of a Hub repository may hold corpus.jsonl as well; its README says where the judgements are.
    """
    has_texts = any(_find(folder, name) for name in ("corpus", "queries"))
    return has_texts and (bool(_judged_files(folder, _JUDGED)) or not (folder / "README.md").is_file())


def read_beir_folder(folder: Path, name: str, split: str | None, cache: Cache) -> tuple[RetrievalSet, list[str]]:
    """Read a BEIR folder.

    Args:
        folder: where corpus, queries and qrels lie.
        name: the set's name.
        split: which file of qrels/, BEIR's or TREC's; default: test, else dev, else the only one there.
        cache: where a large corpus is kept.

    Returns:
        The set, and notes on what is odd about it.

    Raises:
        DataError: a file is missing, or a line cannot be used.
    """
    corpus, queries = _need(folder, "corpus"), _need(folder, "queries")
    files = _judged_files(folder, _JUDGED + _JUDGED_TABLES)
    qrels = files[choose_split(sorted(files), split, f"{folder}/qrels")]
    rows = _judgements(qrels)  # what is small is read first: its faults are told before a large corpus is gone through
    texts = read_queries(table_of(queries).rows(), queries)
    judged = list(rows)
    return assemble(name, read_documents(table_of(corpus), cache), texts, judged, [corpus, queries, qrels])


def read_corpus(path: Path, cache: Cache | None = None) -> Corpus:
    """The documents of a BEIR folder, or of a corpus file itself.

    Args:
        path: folder or file.
        cache: where a large corpus is kept; default: as data.cache_dir's.

    Raises:
        DataError: there is none, or a line cannot be used.
    """
    corpus = _need(path, "corpus") if path.is_dir() else path
    if not corpus.is_file():
        raise DataError(f"{path}: there is no such folder or file")
    return read_documents(table_of(corpus), cache or Cache(directory=cache_directory(None)))


def _judgements(path: Path) -> Iterator[Row]:
    is_table = path.name.lower().removesuffix(_PACKED).endswith(_JUDGED_TABLES)
    return table_of(path).rows() if is_table else judgement_rows(path)


def _judged_files(folder: Path, endings: tuple[str, ...]) -> dict[str, Path]:
    """The files of qrels/ by split; of two of one name the kind that comes first in `endings`."""
    found: dict[str, Path] = {}
    for ending in endings:
        for path in sorted([*folder.glob(f"qrels/*{ending}"), *folder.glob(f"qrels/*{ending}{_PACKED}")]):
            found.setdefault(path.name.removesuffix(_PACKED).removesuffix(ending), path)
    return found


def _find(folder: Path, name: str) -> Path | None:
    return next((path for ending in _ENDINGS if (path := folder / f"{name}{ending}").is_file()), None)


def _need(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        raise DataError(f"{folder} holds no {' or '.join(name + ending for ending in _TOLD)}")
    return path
