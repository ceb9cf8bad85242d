"""The documents to search in any data file: of a corpus, or those that training rows contain."""

from collections.abc import Iterator
from pathlib import Path

from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import Cache, cache_directory
from embedtrain.data.cache.documents import DocumentStore, documents_build
from embedtrain.data.cache.shared_build import build
from embedtrain.data.sources.column_roles import QUERY_NAMES, normalized
from embedtrain.data.sources.documents import DocumentReader, parse_document
from embedtrain.data.sources.part_reader import Piece
from embedtrain.data.sources.parts import Part, part_of_file
from embedtrain.data.sources.reader import SourceReader
from embedtrain.data.sources.retrieval_files import find_retrieval_files
from embedtrain.data.sources.values import BadRow
from embedtrain.errors import DataError
from embedtrain.evaluation.readers.retrieval import read_corpus
from embedtrain.evaluation.readers.rows import first_row
from embedtrain.evaluation.types import Corpus

_TEXTS_ALONE = RowRequirements(documents=False)


def read_any_corpus(path: Path, cache: Cache | None = None) -> Corpus:
    """The documents of a BEIR folder or of a file of documents; else the distinct documents of training rows.

    A document without an id gets the number of its line, and `LINE-2`, `LINE-3`, ... for further ones of a row. Raises
    DataError if the file or a row cannot be read, or it is not clear which column holds the documents.
    """
    if path.is_dir() and find_retrieval_files([str(file) for file in path.glob("*") if file.is_file()], path).corpus:
        return read_corpus(path, cache)
    if path.is_file():
        part = part_of_file(str(path))
        has_ids = _document_ids(part)
        if has_ids:
            return read_corpus(path, cache)
        if has_ids is not None:
            return Corpus.from_dict(dict(_numbered_documents(part)))
    texts: dict[str, str] = {}
    known: set[str] = set()
    for name, text in _row_documents(path, cache):
        if text not in known:
            known.add(text)
            # Rows may give one id to several texts.
            texts[name if name not in texts else f"{name} ({len(texts) + 1})"] = text
    return Corpus.from_dict(texts)


def _document_ids(part: Part) -> bool | None:
    """Whether the documents of a file have ids; None where its rows are not documents."""
    row = first_row(part).fields
    if any(normalized(name) in QUERY_NAMES[0] for name in row):
        return None
    try:
        parse_document(dict(row), id_required=False)
    except BadRow:
        return None
    try:
        parse_document(dict(row))
    except BadRow:
        return False
    return True


def _numbered_documents(part: Part) -> Iterator[tuple[str, str]]:
    for line, document in DocumentReader([part], part.name, ids_required=False).documents(Piece(part)):
        if isinstance(document, BadRow):
            raise DataError(f"{part.location(line)}: {document}")
        yield str(line), document.full_text


def _row_documents(path: Path, cache: Cache | None) -> Iterator[tuple[str, str]]:
    """Ids and texts of the positives and negatives of training rows; the text itself of a row of one text."""
    reader = SourceReader(TrainSource(path=str(path)), path.name, _TEXTS_ALONE, every_split=True)
    documents = None
    if reader.documents is not None:
        corpus = documents_build(reader.documents, OnError.stop, cache or Cache(directory=cache_directory(None)))
        build([corpus])
        documents = DocumentStore(corpus.directory)
    try:
        layout = reader.detect_layout(OnError.stop)
    except DataError as error:
        reason = str(error).partition(", which loss=")[0]  # what follows is advice for training
        raise DataError(
            f"{reason}; a corpus is a BEIR folder, a file of documents with `text`, or rows of queries and documents"
        ) from None
    for number, part in enumerate(reader.parts, 1):
        prefix = f"{number}:" if reader.parts[1:] else ""
        for line, row in reader.rows(Piece(part), layout, documents):
            if isinstance(row, BadRow):
                raise DataError(f"{part.location(line)}: {row}")
            texts = (*row.positives, *row.negatives) or (row.query,)
            ids = (*row.positive_ids, *row.negative_ids) if len(row.positive_ids) == len(row.positives) else ()
            for index, text in enumerate(texts):
                name = ids[index] if index < len(ids) and ids[index] else ""
                yield name or f"{prefix}{line}" + (f"-{index + 1}" if index else ""), text
