"""Retrieval sets in one JSON file, as LlamaIndex's EmbeddingQAFinetuneDataset writes them.

{"queries": {id: text}, "corpus": {id: text}, "relevant_docs": {query id: [document ids]}}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embedtrain.data.sources.problems import shorten
from embedtrain.data.sources.streams import lines_of
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.retrieval import assemble
from embedtrain.evaluation.readers.rows import Row, text_of
from embedtrain.evaluation.readers.trec import DOCUMENT_ID, GAIN, QUERY_ID
from embedtrain.evaluation.types import Corpus, RetrievalSet

_KEYS = ("queries", "corpus", "relevant_docs")


def read_llama_index(path: Path, name: str) -> tuple[RetrievalSet, list[str]] | None:
    """Read a file, if it is one of these.

    Args:
        path: a .json file.
        name: the set's name.

    Returns:
        The set and notes on what is odd about it; None where the file holds something else.

    Raises:
        DataError: the file cannot be read, or what it holds cannot be used.
    """
    if path.suffix.lower() != ".json":
        return None
    first = next((line for _, line in lines_of(path) if line.strip()), b"")
    # A line that is a row of its own is JSONL's, of which there may be millions.
    whole = _object(first)
    if whole is None and first.lstrip().startswith(b"{"):
        whole = _object(b"".join(line for _, line in lines_of(path)))
    if whole is None or not all(key in whole for key in _KEYS):
        return None
    places = [f"{path}: {key}" for key in _KEYS]
    queries, corpus = (_texts(whole[key], where) for key, where in zip(_KEYS[:2], places[:2], strict=True))
    qrels = _judgements(whole["relevant_docs"], places[2])
    return assemble(name, Corpus.of(corpus), queries, qrels, [places[1], places[0], places[2]])


def _object(data: bytes) -> dict[str, Any] | None:
    """The JSON object that bytes hold; None where they hold none: who reads them as rows says what is wrong."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _texts(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object of texts by id, not {shorten(value)}")
    if not value:
        raise DataError(f"{where} is empty")
    return {key: text_of(text, (key,), where) for key, text in value.items()}


def _judgements(value: Any, where: str) -> Iterator[Row]:
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object of lists of ids, not {shorten(value)}")
    for query, documents in value.items():
        if not isinstance(documents, list):
            raise DataError(f"{where}: {query} must have a list of ids, not {shorten(documents)}")
        for document in documents:
            yield where, {QUERY_ID[0]: query, DOCUMENT_ID[0]: document, GAIN[0]: 1}
