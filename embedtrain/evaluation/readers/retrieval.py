"""Retrieval sets from BEIR folders, the Hub and LlamaIndex's JSON files: documents, queries and judgements."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from embedtrain.config.columns import DEFAULT_MAX_PIXELS, DataPath
from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.config.row_requirements import RowRequirements
from embedtrain.data.cache.cache import Cache, build, cache_directory
from embedtrain.data.cache.document_store import MappedCorpus, documents_build
from embedtrain.data.images.item import chunks_of
from embedtrain.data.rows import Example
from embedtrain.data.sources import values
from embedtrain.data.sources.column_roles import QUERY_NAMES, find_column, normalized
from embedtrain.data.sources.files import file_size, read_lines
from embedtrain.data.sources.part_reader import PartPiece, PartReader, require_image_columns
from embedtrain.data.sources.parts import FOLDER_SUFFIXES, PartKind, SourcePart, files_in, part_of_file, suffix_of
from embedtrain.data.sources.pictures import SUFFIXES
from embedtrain.data.sources.reader import DocumentReader, SourceReader, parse_document
from embedtrain.data.sources.retrieval import (
    QUERY_IDS,
    Judgement,
    choose_split,
    find_hub_tables,
    find_retrieval_files,
    judgements_part,
    parse_query,
    read_judgements,
)
from embedtrain.data.sources.table_rows import HubRepository, no_progress_bars, open_dataset
from embedtrain.data.sources.text_rows import MAX_JSON_BYTES, read_json_text
from embedtrain.data.sources.values import BadRow, shorten
from embedtrain.errors import DataError
from embedtrain.evaluation.first_stage import with_candidates
from embedtrain.evaluation.readers.rows import Row, first_row, read_raw_rows, read_rows, table_name
from embedtrain.evaluation.types import Corpus, RetrievalSet, chunk_id
from embedtrain.utils.formatting import format_count

# Every process holds a smaller corpus in memory; a larger one is mapped from the cache.
MAPPED_BYTES = 1 << 26
_COMPRESSION_RATIO = 3  # of compressed files, roughly
# trec_eval's nDCG takes 1.6 seconds per query with a gain of 100,000, and time grows with the square of the gain.
_MAX_GAIN = 10_000
_LLAMA_INDEX_KEYS = ("queries", "corpus", "relevant_docs")

LocatedJudgement = tuple[str, Judgement]


# BEIR folders.


def is_beir_folder(folder: Path) -> bool:
    """Whether a folder has the layout of BEIR, perhaps incomplete.

    A copy of a Hub repository may also hold corpus.jsonl; its README names the judgements.
    """
    files = find_retrieval_files(_names_in(folder), folder)
    has_texts = bool(files.corpus or files.queries)
    has_text_judgements = any(
        judgements_part(name).kind is PartKind.tsv for names in files.judgements.values() for name in names
    )
    return has_texts and (has_text_judgements or not (folder / "README.md").is_file())


def read_beir_folder(folder: Path, name: str, config: EvaluationSet, cache: Cache) -> tuple[RetrievalSet, list[str]]:
    """Read a BEIR folder: the set, and notes on its irregularities.

    `split` of the options is a file of qrels/, in BEIR's or TREC's format; default: test, else dev, else the only one.
    A large corpus is kept in the cache. Raises DataError if a file is missing, or a line cannot be used.
    """
    files = find_retrieval_files(_names_in(folder), folder)
    corpus, queries = _require_file(files.corpus, folder, "corpus"), _require_file(files.queries, folder, "queries")
    corpus, queries = corpus.with_pictures(config), queries.with_pictures(config)
    require_image_columns(PartReader(), [corpus, queries])
    split = choose_split(sorted(files.judgements), config.split, f"{folder}/qrels")
    qrels = judgements_part(files.judgements[split][0])
    # The small tables first, so that their errors are reported before a large corpus is read.
    texts = _read_queries(queries)
    judgements = _read_judgements(qrels)
    return assemble(name, read_documents(corpus, cache), texts, judgements, [corpus.name, queries.name, qrels.name])


def read_corpus(path: Path, cache: Cache | None = None, pictures: DataPath | None = None) -> Corpus:
    """The documents of a BEIR folder, or of a file; `cache`, for a large corpus, defaults to that of data.cache_dir.

    `pictures` says where its pictures are.
    """
    if path.is_dir():
        part = _require_file(find_retrieval_files(_names_in(path), path).corpus, path, "corpus")
    elif path.is_file():
        part = part_of_file(str(path))
    else:
        raise DataError(f"{path}: no such file or folder")
    return read_documents(part.with_pictures(pictures), cache or Cache(directory=cache_directory(None)))


def _names_in(folder: Path) -> list[str]:
    """The files in a folder and in its `qrels/`."""
    return [str(path) for pattern in ("*", "qrels/*") for path in folder.glob(pattern) if path.is_file()]


def _require_file(names: Sequence[str], folder: Path, stem: str) -> SourcePart:
    if not names:
        raise DataError(f"{folder} holds no {stem}.jsonl or {stem}.jsonl.gz or {stem}.parquet")
    return part_of_file(names[0])


# The Hub.


def read_hub_retrieval(
    path: str, config: EvaluationSet, name: str, cache: Cache
) -> tuple[RetrievalSet, list[str]] | None:
    """Read a retrieval or reranking set of the Hub, or of a folder with the layout of a repository.

    Returns the set, and notes on its irregularities; None where the repository has another layout. Raises DataError if
    it cannot be loaded, or its tables do not match.
    """
    repository = HubRepository(path, config.revision)
    tables = find_hub_tables(
        repository,
        language=None if config.config == "default" else config.config,
        split=config.split,
        qrels_revision=config.qrels_revision,
    )
    if tables is None:
        return None
    sources = (f"{path}, corpus", f"{path}, queries", f"{tables.judgements.name}, judgements")
    queries = _read_queries(tables.queries.with_pictures(config), tables.instructions)
    judgements = _read_judgements(tables.judgements)
    data, notes = assemble(
        name, read_documents(tables.corpus.with_pictures(config), cache), queries, judgements, sources
    )
    if tables.candidates is None or config.kind is SetKind.retrieval or config.candidates is not None:
        return data, notes
    candidates = {_query_id(row): _candidate_ids(row) for row in read_rows(tables.candidates)}
    data, more = with_candidates(data, candidates, f"{path}, {tables.candidates.subset}")
    return data, notes + more


def _query_id(row: Row) -> str:
    return row.id(find_column(row.fields, QUERY_IDS) or "query-id")


def _candidate_ids(row: Row) -> list[str]:
    key = row.key(find_column(row.fields, ("corpusids", "docids", "documentids", "candidates")) or "corpus-ids")
    documents = row.fields[key]
    if not isinstance(documents, list):
        raise row.error(f"{key} must be a list of ids")
    return [row.check(values.identifier, document, key) for document in documents]


# LlamaIndex.


def read_llama_index(path: Path, name: str) -> tuple[RetrievalSet, list[str]] | None:
    """Read a JSON file that LlamaIndex's EmbeddingQAFinetuneDataset wrote.

    Its content is {"queries": {id: text}, "corpus": {id: text}, "relevant_docs": {query id: [document ids]}}. Returns
    the set, and notes on its irregularities; None where the file holds something else.
    """
    if path.suffix.lower() != ".json":
        return None
    first = next((line for _, line in read_lines(path, MAX_JSON_BYTES) if line.strip()), b"")
    # A line that is a whole row means JSONL, which may have millions of them.
    data = _parse_object(first)
    if data is None and first.lstrip().startswith(b"{"):
        data = _parse_object(read_json_text(str(path)).encode())
    if data is None or not all(key in data for key in _LLAMA_INDEX_KEYS):
        return None
    queries_name, corpus_name, judgements_name = (f"{path}: {key}" for key in _LLAMA_INDEX_KEYS)
    queries, corpus = _texts_by_id(data["queries"], queries_name), _texts_by_id(data["corpus"], corpus_name)
    judgements = _relevant_documents(data["relevant_docs"], judgements_name)
    return assemble(name, Corpus.from_dict(corpus), queries, judgements, [corpus_name, queries_name, judgements_name])


def _parse_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object that bytes hold, else None: the reader of rows reports what is wrong with them."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _texts_by_id(value: Any, location: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise DataError(f"{location} must be an object of texts by id, not {shorten(value)}")
    if not value:
        raise DataError(f"{location} is empty")
    row = Row(location, value)
    return {row.check(values.identifier, key, "an id"): row.text(key) for key in value}


def _relevant_documents(value: Any, location: str) -> Iterator[LocatedJudgement]:
    if not isinstance(value, dict):
        raise DataError(f"{location} must be an object of lists of ids, not {shorten(value)}")
    for query, documents in value.items():
        if not isinstance(documents, list):
            raise DataError(f"{location}: {query} must have a list of ids, not {shorten(documents)}")
        for document in documents:
            yield location, Judgement(query, Row(location, {query: document}).id(query), 1)


# Tables.


def read_documents(part: SourcePart, cache: Cache) -> Corpus:
    """The documents of a corpus, in order. An id that is repeated with the same text is one document.

    Raises DataError if a row cannot be used, an id has two texts, or there is no document.
    """
    with no_progress_bars() if part.kind is PartKind.hub else nullcontext():
        is_large = _num_bytes(part) >= MAPPED_BYTES
        corpus = _map_documents(part, cache) if is_large else _hold_documents(part)
    if not len(corpus):
        raise DataError(f"{table_name(part)} is empty")
    return corpus


def _map_documents(part: SourcePart, cache: Cache) -> Corpus:
    reader = DocumentReader([part], part.name)
    corpus_build = documents_build(reader, OnError.stop, cache)
    build([corpus_build])
    cache.verification.add(corpus_build.directory)
    return Corpus(*MappedCorpus(corpus_build.directory, reader).unique())


def _hold_documents(part: SourcePart) -> Corpus:
    texts: dict[str, str] = {}
    for line, document in DocumentReader([part], part.name).documents(PartPiece(part)):
        if isinstance(document, BadRow):
            raise DataError(f"{part.location(line)}: {document}")
        if texts.setdefault(document.id, document.full_text) != document.full_text:
            raise DataError(f"{part.location(line)}: the id {shorten(document.id)} has another text already")
    return Corpus.from_dict(texts)


def _num_bytes(part: SourcePart) -> int:
    if part.kind is PartKind.hub:
        return int(open_dataset(part, None, "train").data.nbytes)
    is_compressed = part.name.lower().endswith((".gz", ".zst", ".parquet"))
    return (file_size(part.name) or 0) * (_COMPRESSION_RATIO if is_compressed else 1)


def _read_queries(part: SourcePart, instructions: SourcePart | None = None) -> dict[str, str]:
    """Texts by id. The instruction of a query, in its own row or in `instructions`, follows its text, as in mteb."""
    by_query: dict[str, str] = {}
    if instructions is not None:
        by_query = {_query_id(row): row.text("instruction") for row in read_rows(instructions)}
    texts: dict[str, str] = {}
    for row in read_rows(part):
        key, text = row.check(lambda fields, _: parse_query(fields), row.fields, "")
        has_instruction = row.fields.get("instruction") is not None
        instruction = row.text("instruction") if has_instruction else by_query.get(key)
        text = text if instruction is None else f"{text} {instruction}"
        if texts.setdefault(key, text) != text:
            raise row.error(f"the id {shorten(key)} has another text already")
    if not texts:
        raise DataError(f"{table_name(part)} is empty")
    return texts


def _read_judgements(part: SourcePart) -> list[LocatedJudgement]:
    judgements: list[LocatedJudgement] = []
    name = table_name(part)
    for number, judgement in read_judgements(part, read_raw_rows):
        if isinstance(judgement, BadRow):
            raise DataError(f"{name}:{number}: {judgement}")
        judgements.append((f"{name}:{number}", judgement))
    return judgements


def assemble(
    name: str,
    documents: Corpus,
    queries: dict[str, str],
    located_judgements: Iterable[LocatedJudgement],
    sources: Sequence[object],
) -> tuple[RetrievalSet, list[str]]:
    """Join three tables to a set, and report in notes what does not match.

    `sources` names the three in messages: documents, queries, judgements. Raises DataError if a judgement cannot be
    used, or none can.
    """
    judgements: dict[str, dict[str, int]] = {}
    unknown_queries: set[str] = set()
    for location, (query, document, score) in located_judgements:
        if score != int(score):
            raise DataError(f"{location}: score must be a whole number, not {score}")
        if abs(score) > _MAX_GAIN:
            raise DataError(f"{location}: score must be between -{_MAX_GAIN} and {_MAX_GAIN}, not {score:g}")
        if query not in queries:
            unknown_queries.add(query)
            continue
        before = judgements.setdefault(query, {}).setdefault(document, int(score))
        if before != int(score):
            raise DataError(
                f"{location}: document {document} is judged {int(score)} for query {query}, before {before}"
            )
    judgements, of_chunks = _split_chunks(judgements, documents)
    judged = {document for gains in judgements.values() for document in gains}
    # One pass over the ids, of which there may be millions, without a table of them.
    known_documents = {document for document in documents.ids if document in judged}
    if not judgements:
        if unknown_queries:
            raise DataError(
                f"{sources[2]}: none of its {len(unknown_queries)} queries is in {sources[1]}; it has "
                f"{min(unknown_queries)!r} where the queries are called {next(iter(queries))!r}"
            )
        raise DataError(f"{sources[2]} holds no judgement")
    # Every model would score 0; mostly ids of another release or numbering.
    if not known_documents:
        first = next(document for gains in judgements.values() for document in gains)
        raise DataError(
            f"{sources[2]}: none of its {len(judged)} documents is in {sources[0]}; it has {first!r} "
            f"where the documents are called {documents.ids[0]!r}"
        )
    if not any(gain > 0 for gains in judgements.values() for gain in gains.values()):
        raise DataError(f"{sources[2]}: no judgement is above 0, so nothing is relevant")
    notes = _notes(name, judgements, known_documents, unknown_queries, sources)
    return RetrievalSet(name, queries, documents, judgements, chunk_judgements=of_chunks), notes


def _split_chunks(
    judgements: dict[str, dict[str, int]], documents: Corpus
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """The judgements of documents, and those of chunks, whose ids are `chunk_id`: a document has that of its best one.

    Without judgements of chunks, the second is empty.
    """
    named = {document for gains in judgements.values() for document in gains if "#" in document}
    if not named:
        return judgements, {}
    parents = {name.rpartition("#")[0] for name in named}
    known = {name for name in documents.ids if name in named}
    chunks = {
        chunk_id(name, number)
        for name, text in zip(documents.ids, documents.texts, strict=True)
        if name in parents
        for number in range(len(chunks_of(text)[0]))
    } & (named - known)
    if not chunks:
        return judgements, {}
    of_documents: dict[str, dict[str, int]] = {}
    for query, gains in judgements.items():
        best = of_documents.setdefault(query, {})
        for name, gain in gains.items():
            document = name.rpartition("#")[0] if name in chunks else name
            best[document] = max(gain, best.get(document, gain))
    of_chunks = {
        query: {name: gain for name, gain in gains.items() if name in chunks} for query, gains in judgements.items()
    }
    return of_documents, {query: gains for query, gains in of_chunks.items() if gains}


def _notes(
    name: str,
    judgements: Mapping[str, Mapping[str, int]],
    known_documents: Collection[str],
    unknown_queries: set[str],
    sources: Sequence[object],
) -> list[str]:
    notes = []
    if unknown_queries:
        notes.append(
            f"{name}: {len(unknown_queries)} judged queries are not in {sources[1]} and are left out "
            f"(the first: {min(unknown_queries)})"
        )
    missing = [document for gains in judgements.values() for document in gains if document not in known_documents]
    if missing:
        notes.append(
            f"{name}: {len(missing)} judgements are of documents that are not in {sources[0]}; they count as "
            f"relevant and never found, as in trec_eval (the first: {missing[0]})"
        )
    irrelevant = [query for query, gains in judgements.items() if not any(gain > 0 for gain in gains.values())]
    if irrelevant:
        notes.append(
            f"{name}: {len(irrelevant)} judged queries have no relevant document and count as 0, as in trec_eval; "
            f"mteb leaves them out (the first: {irrelevant[0]})"
        )
    return notes


_TEXTS_ALONE = RowRequirements(documents=False)


def read_any_corpus(path: Path, cache: Cache | None = None, pictures: DataPath | None = None) -> Corpus:
    """The documents of a BEIR folder or of a file of documents; else the distinct documents of training rows.

    A document without an id gets the number of its line, and `LINE-2`, `LINE-3`, ... for further ones of a row. The
    documents of a folder of pictures, without rows, are these, with their names as ids. Raises DataError if the file, a
    row or a picture cannot be read, or it is not clear which column holds the documents.
    """
    if path.is_dir() and find_retrieval_files([str(file) for file in path.glob("*") if file.is_file()], path).corpus:
        return read_corpus(path, cache, pictures)
    if path.is_file():
        part = part_of_file(str(path)).with_pictures(pictures)
        require_image_columns(PartReader(), [part])
        has_ids = has_document_ids(part)
        if has_ids:
            return read_corpus(path, cache, pictures)
        if has_ids is not None:
            return Corpus.from_dict(dict(_numbered_documents(part)))
    elif path.is_dir() and (names := _pictures_in(path)):
        return _read_pictures(path, names, DEFAULT_MAX_PIXELS if pictures is None else pictures.max_image_pixels)
    texts: dict[str, str] = {}
    known: set[str] = set()
    for name, text in _row_documents(path, cache, pictures):
        if text not in known:
            known.add(text)
            # Rows may give one id to several texts.
            texts[name if name not in texts else f"{name} ({len(texts) + 1})"] = text
    return Corpus.from_dict(texts)


def _pictures_in(folder: Path) -> list[str]:
    """The files of pictures below a folder; none where it has files with rows."""
    names = files_in(str(folder))
    if any(suffix_of(Path(name)) in FOLDER_SUFFIXES for name in names):
        return []
    return [name for name in names if Path(name).suffix.lower() in SUFFIXES]


def _read_pictures(folder: Path, names: Sequence[str], max_pixels: int) -> Corpus:
    from embedtrain.data.images.files import PICTURES, BadPicture, Place, read_picture

    pictures: dict[str, str] = {}
    refused: list[str] = []
    for name in names:
        place = Place(os.path.abspath(name))
        try:
            picture = read_picture(place, max_pixels=max_pixels)
        except BadPicture as bad:
            refused.append(f"{place}: {bad}")
            continue
        PICTURES.add(picture, place)
        pictures[os.path.relpath(name, folder)] = str(picture)
    if refused:
        raise DataError(
            f"{folder}: {len(refused):,} of its {format_count(len(names), 'picture')} cannot be used; move them out of "
            f"the folder, the first is {refused[0]}"
        )
    return Corpus.from_dict(pictures)


def has_document_ids(part: SourcePart) -> bool | None:
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


def _numbered_documents(part: SourcePart) -> Iterator[tuple[str, str]]:
    for line, document in DocumentReader([part], part.name, ids_required=False).documents(PartPiece(part)):
        if isinstance(document, BadRow):
            raise DataError(f"{part.location(line)}: {document}")
        yield str(line), document.full_text


def _row_documents(path: Path, cache: Cache | None, pictures: DataPath | None) -> Iterator[tuple[str, str]]:
    """Ids and texts of the positives and negatives of training rows; the text itself of a row of one text."""
    source = TrainSource(path=str(path))
    if pictures is not None:
        source = TrainSource(**asdict(replace(pictures, path=str(path))))
    for place, row in read_examples(source, cache):
        texts = row.texts[1:] or (row.query,)
        ids = (*row.positives.ids, *row.negatives.ids) if len(row.positives.ids) == len(row.positives) else ()
        for index, text in enumerate(texts):
            name = ids[index] if index < len(ids) and ids[index] else ""
            yield name or place + (f"-{index + 1}" if index else ""), text


def read_examples(source: TrainSource, cache: Cache | None = None) -> Iterator[tuple[str, Example]]:
    """Training rows without a cache of them, in order, each after its line number, or `PART:LINE` of several files.

    A corpus that rows refer to by id is cached. Raises DataError if a row cannot be read.
    """
    reader = SourceReader(source, Path(source.path).name, _TEXTS_ALONE, every_split=True)
    documents = None
    if reader.documents is not None:
        corpus = documents_build(reader.documents, OnError.stop, cache or Cache(directory=cache_directory(None)))
        build([corpus])
        documents = MappedCorpus(corpus.directory, reader.documents)
    try:
        layout = reader.detect_layout(OnError.stop)
    except DataError as error:
        reason = str(error).partition(", which loss=")[0]  # what follows is advice for training
        raise DataError(
            f"{reason}; a corpus is a BEIR folder, a file of documents with `text`, or rows of queries and documents"
        ) from None
    for number, part in enumerate(reader.parts, 1):
        prefix = f"{number}:" if reader.parts[1:] else ""
        for line, row in reader.rows(PartPiece(part), layout, documents):
            if isinstance(row, BadRow):
                raise DataError(f"{part.location(line)}: {row}")
            yield f"{prefix}{line}", row
