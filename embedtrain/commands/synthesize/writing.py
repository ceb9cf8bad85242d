"""From documents to drafts: which queries are asked for each document, and what the answers say.

What is asked for a document is a function of the seed and its text alone, so that other documents, ranks and
interruptions change nothing.
"""

import collections
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64

from embedtrain.commands.synthesize.prompts import (
    QUERY_KINDS,
    Prompts,
    QueryKind,
    language_name,
    parse_answer,
    queries_schema,
    texts_in,
)
from embedtrain.commands.synthesize.types import Draft, Refusal, Reply, Request
from embedtrain.config.columns import DataPath
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.rows import text_key
from embedtrain.data.sources.part_reader import PartPiece
from embedtrain.data.sources.parts import SourcePart
from embedtrain.data.sources.reader import DocumentReader
from embedtrain.data.sources.values import BadRow, shorten
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError
from embedtrain.evaluation.first_stage import bm25_rankings
from embedtrain.evaluation.readers.retrieval import has_document_ids, read_examples
from embedtrain.evaluation.types import Corpus
from embedtrain.mining.pool import corpus_parts

if TYPE_CHECKING:
    from embedtrain.commands.synthesize import QueriesConfig, SynthesizeOptions, WindowConfig

# Documents whose queries are asked for together; the second document of multi_hop is one of them.
BLOCK_DOCUMENTS = 2048
_MAX_EXAMPLES = 10_000  # rows of the user's that examples are drawn from
_NEIGHBOUR_CHARACTERS = 2000  # of a document, by which BM25 looks for another one
# Words of text between spaces; of Chinese, Japanese, Korean and Thai, which have no spaces, two characters.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]{{1,2}}|[^\s{_UNSPACED}]{{1,40}}")
_SEEDS = 2**31  # servers take a 32-bit integer


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document that queries are written for; `key` is the hash of its text, `file` where it is from."""

    id: str
    text: str
    file: str
    key: int


def uniform(*names: object) -> float:
    """A number from 0 to below 1 that depends on the names alone; those of other names are independent of it."""
    digest = hashlib.blake2b(repr(names).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


class Documents:
    """The distinct documents of `corpus`, in order, read anew each time.

    Attributes:
        parts: the files, folders and data sets.
        counts: of the last complete reading: `documents`, `duplicates` (of an earlier text), `empty` and `skipped`
            ones (rows that cannot be used, with on_error=skip).
        digest: of their ids and texts, when the last one has been read.
        skipped: the first row that was skipped, and why.

    Raises DataError for a file, or a row, that cannot be used.
    """

    def __init__(
        self, corpus: Sequence[DataPath], on_error: OnError = OnError.stop, max_documents: int | None = None
    ) -> None:
        self.parts = corpus_parts(corpus)
        self.counts: collections.Counter[str] = collections.Counter()
        self.skipped, self.digest = "", ""
        self._on_error, self._limit = on_error, max_documents

    def __iter__(self) -> Iterator[SourceDocument]:
        self.counts.clear()
        known: set[int] = set()
        digest = xxh3_64()
        for document in self._all():
            if self._limit is not None and len(known) == self._limit:
                break
            if document.key in known:
                self.counts["duplicates"] += 1
                continue
            known.add(document.key)
            self.counts["documents"] += 1
            digest.update(f"{len(document.id)}:{document.id}{document.key}".encode("utf-8", "surrogatepass"))
            yield document
        self.digest = digest.hexdigest()
        if not known:
            names = ", ".join(part.name for part in self.parts)
            raise DataError(f"corpus: there is no document with a text in {shorten(names, 200)}")

    def blocks(self) -> Iterator[list[SourceDocument]]:
        """The documents, some thousand at a time."""
        block: list[SourceDocument] = []
        for document in self:
            block.append(document)
            if len(block) == BLOCK_DOCUMENTS:
                yield block
                block = []
        if block:
            yield block

    def _all(self) -> Iterator[SourceDocument]:
        for part in self.parts:
            read = self._documents if has_document_ids(part) is not None else self._documents_of_rows
            for name, text in read(part):
                if text.strip():
                    yield SourceDocument(name, text, part.name, text_key(text))
                else:
                    self.counts["empty"] += 1

    def _documents(self, part: SourcePart) -> Iterator[tuple[str, str]]:
        reader = DocumentReader([part], part.name, ids_required=False)
        for line, document in reader.documents(PartPiece(part)):
            problem: str | None = None
            if isinstance(document, BadRow):
                problem = str(document)
            elif document.pictures:
                problem = "has a picture, and queries are written for texts alone"
            else:
                # As mining compares it with texts of rows.
                yield document.id, document.full_text if document.title else document.text
                continue
            location = f"{part.location(line)}: {problem}"
            if self._on_error is OnError.stop:
                raise DataError(location)
            self.counts["skipped"] += 1
            self.skipped = self.skipped or location

    def _documents_of_rows(self, part: SourcePart) -> Iterator[tuple[str, str]]:
        for _, row in read_examples(TrainSource(path=part.name)):
            if not len(row.documents):
                yield "", row.query
            yield from zip(row.documents.all_ids, row.documents.texts, strict=True)


@dataclass(frozen=True, slots=True)
class ExampleQuery:
    """A query of the user's with a document, as prompts show it."""

    query: str
    document: str
    key: int  # of the whole document


def read_example_queries(sources: Sequence[TrainSource], words: int) -> list[ExampleQuery]:
    """The first rows of the user's, in order; documents have at most so many words."""
    examples: list[ExampleQuery] = []
    for source in sources:
        for place, row in read_examples(source):
            if not len(row.positives):
                raise DataError(f"queries.examples, {source.path}:{place}: a row needs a query and a positive")
            document = row.positives.texts[0]
            examples.append(ExampleQuery(row.query, windows_of(document, words, 0)[0], text_key(document)))
            if len(examples) == _MAX_EXAMPLES:
                return examples
    return examples


def windows_of(text: str, words: int, overlap: int) -> list[str]:
    """The windows of a text, each of at most so many words; one that repeats only words of the one before is left out.

    A text that is not longer is its own only window, unchanged.
    """
    places = [match.span() for match in _WORD.finditer(text)]
    if len(places) <= words:
        return [text]
    starts = range(0, len(places) - overlap, words - overlap)
    return [text[places[start][0] : places[min(start + words, len(places)) - 1][1]] for start in starts]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for queries, and what the drafts of its answer have."""

    request: Request
    kind: str
    count: int  # of queries
    language: str | None
    sources: tuple[str, ...]
    positives: tuple[str, ...]
    ids: tuple[str, ...]


# How many queries are asked for, by kind, language and number of the window.
Plan = dict[tuple[str, str | None, int], int]


class QueryWriter:
    """Decides which queries are asked for each document, and reads the answers.

    Attributes:
        prompts: the templates.
        kinds: of the queries that are asked for.
        counts: queries that became no draft, by why: see `LOSSES` of synthesis.py; and answers that were `repaired`.
        num_asked: queries that were asked for.
    """

    def __init__(self, options: "SynthesizeOptions", prompts: Prompts, examples: Sequence[ExampleQuery]) -> None:
        self.prompts = prompts
        self.counts: collections.Counter[str] = collections.Counter()
        self._queries: QueriesConfig = options.queries
        self._window: WindowConfig = options.window
        self._of_windows = options.window.positive.value == "window"
        self._seed, self._examples = options.seed, examples
        self._max_new_tokens, self._temperature = options.writer.max_new_tokens, options.writer.temperature
        total = sum(self._queries.kinds.values())
        self._shares = [(kind, share / total) for kind, share in self._queries.kinds.items()]
        self.kinds = [kind for kind, _ in self._shares]
        self.num_asked = 0
        unknown = [kind for kind in self.kinds if kind not in prompts.kinds]
        if unknown:
            raise ConfigError(
                f"queries.kinds.{unknown[0]}: there is no prompt of this name, only {', '.join(prompts.kinds)}; "
                f"prompts=DIR with a file {unknown[0]}.jinja adds one"
            )
        for kind in self.kinds:
            self._require_usable(kind)

    def _require_usable(self, kind: str) -> None:
        documents = ["A document."] * _kind(kind).num_documents
        example = {"query": "a query", "document": "A document."}
        values = {"documents": documents, "count": 2, "examples": [example], "language": "German"}
        self.prompts.require_usable(kind, values)

    def requests(self, block: Sequence[SourceDocument], world: World) -> list[Asked]:
        """What is asked for these documents, in their order. A collective: rank 0 looks for neighbours."""
        plans: list[Plan] = []
        with world.fail_together("choosing kinds of queries"):
            plans = [self._plan(document) for document in block]
        pairs = [index for index, plan in enumerate(plans) if any(_kind(kind).num_documents > 1 for kind, *_ in plan)]
        others = neighbours(block, pairs, world) if pairs else {}
        asked: list[Asked] = []
        with world.fail_together("writing prompts"):
            for index, plan in enumerate(plans):
                other = block[others[index]] if index in others else None
                asked += self._of_document(block[index], plan, other)
        return asked

    def _of_document(self, document: SourceDocument, plan: Plan, other: SourceDocument | None) -> Iterator[Asked]:
        windows = self._windows(document)
        self.num_asked += self._queries.per_document
        for (kind, language, window), count in plan.items():
            chosen = [(document, windows, window)]
            if _kind(kind).num_documents > 1:
                if other is None:
                    self.counts["alone"] += count
                    continue
                chosen.append((other, self._windows(other), 0))
            yield self._ask(kind, language, count, chosen)

    def _windows(self, document: SourceDocument) -> list[str]:
        return windows_of(document.text, self._window.words, self._window.overlap)

    def _plan(self, document: SourceDocument) -> Plan:
        """What is asked for a document: windows take turns, in an order of chance."""
        num_windows = len(self._windows(document))
        order = sorted(range(num_windows), key=lambda window: uniform(self._seed, document.key, "window", window))
        plan: Plan = {}
        for number in range(self._queries.per_document):
            kind = _choose(self._shares, uniform(self._seed, document.key, "kind", number))
            language = None
            if _kind(kind).has_language:
                languages = [(code, 1 / len(self._queries.languages)) for code in self._queries.languages]
                language = _choose(languages, uniform(self._seed, document.key, "language", number))
            key = kind, language, order[number % num_windows]
            plan[key] = plan.get(key, 0) + 1
        return plan

    def _ask(
        self, kind: str, language: str | None, count: int, chosen: Sequence[tuple[SourceDocument, list[str], int]]
    ) -> Asked:
        documents = [document for document, _, _ in chosen]
        sources = tuple(windows[window] for _, windows, window in chosen)
        keys = tuple(document.key for document in documents)
        place = (self._seed, *keys, kind, language, *(window for *_, window in chosen))
        messages = self.prompts.render(
            kind,
            documents=list(sources),
            count=count,
            examples=[{"query": each.query, "document": each.document} for each in self._choose_examples(place, keys)],
            language=None if language is None else language_name(language),
        )
        request = Request(
            messages=messages,
            purpose="queries",
            schema=queries_schema(count, has_instruction=_kind(kind).has_instruction),
            max_new_tokens=self._max_new_tokens,
            temperature=self._temperature,
            seed=int(uniform(*place, "seed") * _SEEDS),
        )
        is_window = [self._of_windows and len(windows) > 1 for _, windows, _ in chosen]
        return Asked(
            request=request,
            kind=kind,
            count=count,
            language=language,
            sources=sources,
            positives=tuple(
                source if cut else document.text
                for source, document, cut in zip(sources, documents, is_window, strict=True)
            ),
            ids=tuple(
                f"{document.id}#{window + 1}" if cut and document.id else document.id
                for (document, _, window), cut in zip(chosen, is_window, strict=True)
            ),
        )

    def _choose_examples(self, place: tuple[object, ...], keys: Sequence[int]) -> list[ExampleQuery]:
        """Rows of the user's, of other documents: the query of this one would be copied."""
        if not self._examples:
            return []
        chosen: dict[int, None] = {}
        for number in range(4 * self._queries.num_examples):
            index = int(uniform(*place, "example", number) * len(self._examples))
            if self._examples[index].key not in keys:
                chosen[index] = None
            if len(chosen) == self._queries.num_examples:
                break
        return [self._examples[index] for index in chosen]

    def drafts(self, asked: Sequence[Asked], replies: Sequence[Reply]) -> list[Draft]:
        """The queries of the answers, in order; what is thrown away is counted."""
        return [draft for each, reply in zip(asked, replies, strict=True) for draft in self._drafts(each, reply)]

    def _drafts(self, asked: Asked, reply: Reply) -> Iterator[Draft]:
        if isinstance(reply, Refusal):
            self.counts[f"no_answer_{reply.reason.name}"] += asked.count
            return
        parsed = parse_answer(reply.text)
        if parsed is None:
            self.counts["cut" if reply.finish == "length" else "unreadable"] += asked.count
            return
        self.counts["repaired"] += parsed.is_repaired
        found = [_query_of(item) for item in texts_in(parsed.value, "queries", "query", asked.kind)]
        usable = [query for query in found if query is not None]
        self.counts["no_text"] += len(found) - len(usable)
        self.counts["missing"] += max(0, asked.count - len(found))
        self.counts["too_many"] += max(0, len(usable) - asked.count)
        for query, instruction in usable[: asked.count]:
            yield Draft(
                query=query,
                kind=asked.kind,
                sources=asked.sources,
                positives=asked.positives,
                ids=asked.ids,
                prompt=self.prompts.digest(asked.kind),
                language=asked.language,
                instruction=instruction if _kind(asked.kind).has_instruction else None,
            )


def _kind(name: str) -> QueryKind:
    return QUERY_KINDS.get(name, QUERY_KINDS["question"])


def _choose(shares: Sequence[tuple[str, float]], number: float) -> str:
    """The name in whose share a number from 0 to 1 lies."""
    for name, share in shares:
        number -= share
        if number < 0:
            return name
    return shares[-1][0]


def _query_of(item: Any) -> tuple[str, str | None] | None:
    """The query and the instruction of an element of an answer; None if it has no text."""
    instruction = None
    if isinstance(item, Mapping):
        of_item = {str(name).casefold(): value for name, value in item.items()}
        instruction = of_item.get("instruction")
        names = ("query", "question", "text", *(name for name in of_item if name != "instruction"))
        item = next((of_item[name] for name in names if isinstance(of_item.get(name), str)), None)
    if not isinstance(item, str):
        return None
    query = " ".join(item.split()).strip("\"'\u201c\u201d\u201e ")
    text = " ".join(instruction.split()) if isinstance(instruction, str) else ""
    return (query, text or None) if query else None


def neighbours(block: Sequence[SourceDocument], indices: Sequence[int], world: World) -> dict[int, int]:
    """Another document of the block for each of these: the best of BM25, else one beside it in the same file.

    None for a document that is alone. A collective: rank 0 searches.
    """
    found: dict[int, int] = {}
    with world.fail_together("looking for documents of one neighbourhood"):
        if world.is_main:
            names = [f"{index:09}" for index in range(len(block))]
            texts = [document.text for document in block]
            rankings = bm25_rankings(
                [texts[index][:_NEIGHBOUR_CHARACTERS] for index in indices], Corpus(names, texts), 2
            )
            for index, ranking in zip(indices, rankings, strict=True):
                others = [other for other in ranking if other != index]
                beside = [
                    other
                    for other in (index + 1, index - 1)
                    if 0 <= other < len(block) and block[other].file == block[index].file
                ]
                if chosen := [*others, *beside]:
                    found[index] = chosen[0]
    return world.broadcast(found)
